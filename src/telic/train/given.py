"""What a run starts from, checked before anything is traced: variables of an initializer, states that are given."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from telic import tree
from telic.contract import Objective
from telic.errors import ContractError
from telic.train.state import TrainState
from telic.types import Key


def checked_variables(objective: Objective, variables: Any) -> dict[str, Any]:
    """Check what an initializer returned, and give it as plain nested dictionaries.

    Raises:
      ContractError: It is no mapping, or has no ``params``.
    """
    who = type(objective).__name__
    if not isinstance(variables, Mapping):
        raise ContractError(f"{who}.init must return a mapping of collections, got {type(variables).__name__}")
    if "params" not in variables:
        raise ContractError(
            f"{who}.init must return a 'params' collection, got {sorted(map(str, variables)) or 'nothing'}; "
            "write {'params': ..., ...}"
        )
    return tree.as_plain(variables)


def given_variables(variables: Any, key: Key) -> Any:
    """Initializer that gives the variables it holds."""
    del key
    return variables


def check_same_kind(given: TrainState, expected: TrainState) -> None:
    """Raise unless a state has the leaves that this model, optimizer and average give.

    Raises:
      ContractError: A leaf is missing, unknown, or of another shape or dtype; it is named.
    """
    what = {
        "variables": "the model",
        "opt_state": "the optimizer or trainable=",
        "ema": "objective.ema",
        "loss_scale": "loss_scale=",
    }
    for part, cause in what.items():
        old, new = getattr(given, part), getattr(expected, part)
        before, after = tree.named_leaves(old), tree.named_leaves(new)
        wrong = [f"{n} is missing" for n in after if n not in before]
        wrong += [f"{n} is unknown" for n in before if n not in after]
        wrong += [
            f"{n} is {jnp.result_type(before[n])}{list(jnp.shape(before[n]))}, expected {leaf.dtype}{list(leaf.shape)}"
            for n, leaf in after.items()
            if n in before and (jnp.shape(before[n]), jnp.result_type(before[n])) != (leaf.shape, leaf.dtype)
        ]
        if not wrong and jax.tree.structure(old) != jax.tree.structure(new):
            wrong = [f"{jax.tree.structure(old)} is not {jax.tree.structure(new)}"]
        if wrong:
            raise ContractError(
                f"state= was made with another {part}: {'; '.join(wrong[:6])}. Use {cause} it was made with, or pass "
                "state.variables to start from its weights alone"
            )
