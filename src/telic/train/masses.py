"""What the masses of a loss read: whether they come from the batch alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.interpreters import partial_eval

from telic import tree
from telic.contract import Objective, Step, owns_statistics
from telic.errors import ContractError
from telic.precision import Policy
from telic.train.attempt import loss_in
from telic.train.statistics import masses
from telic.types import Batch, PyTree, Variables


@dataclass(frozen=True)
class MassReads:
    """What the masses of a loss may depend on beside the batch and the attempt's key.

    Attributes:
      trained: Names of trainable parameters. Through while loops and custom derivatives the trace can name one that
        does not matter.
      moving: Names of layer state that the loss rewrites, and of the count of microbatches: what changes from one
        attempt of a window to the next.
    """

    trained: tuple[str, ...] = ()
    moving: tuple[str, ...] = ()


def mass_reads(
    objective: Objective,
    variables: Variables,
    trained: PyTree,
    batch: Batch,
    moment: Callable[[], Step],
    *,
    policy: Policy,
) -> MassReads:
    """Trace a loss and say what its masses read.

    Args:
      objective: Whose loss it is. Statistics of its own have no masses that can be told.
      variables: The whole tree, or its shapes.
      trained: ``variables["params"]`` with None at each leaf that is not trained.
      batch: A microbatch, or its shapes.
      moment: Gives the moment, which is computed only where its values are needed.
      policy: Dtypes to compute in.
    Raises:
      ContractError: A mass changes when the trainable parameters change. Known only where there are values.
    """
    if owns_statistics(objective):
        return MassReads()
    written: set[str] = set()

    def masses_of(arguments: dict[str, Any]) -> list[Any]:
        whole = arguments["variables"]
        view = {**whole, "params": tree.combine(whole["params"], arguments["trained"])}
        statistics, aux = loss_in(policy, objective, view, arguments["batch"], arguments["step"])
        written.update(aux.variables or {})
        return list(masses(statistics).values())

    arguments = {"batch": batch, "step": jax.eval_shape(moment), "trained": trained, "variables": variables}
    closed = jax.make_jaxpr(masses_of)(arguments)
    if not closed.out_avals:
        return MassReads()
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, True)
    names = tree.leaf_names(arguments)
    read = [name for name, is_read in zip(names, used, strict=True) if is_read]
    moving = tuple(n for n in read if n == "step/step" or n.startswith(tuple(f"variables/{w}/" for w in written)))
    found = tuple(n.replace("trained/", "params/", 1) for n in read if n.startswith("trained/"))
    if found and not any(isinstance(x, Tracer | jax.ShapeDtypeStruct) for x in jax.tree.leaves((batch, variables))):
        leaves = jax.tree.leaves({**arguments, "step": moment()})
        kept = [(name, leaf) for name, leaf, is_read in zip(names, leaves, used, strict=True) if is_read]
        _refuse_dependence(objective, lambda values: eval_jaxpr(jaxpr, closed.consts, *values), kept, found)
    return MassReads(found, moving)


def _refuse_dependence(
    objective: Objective, evaluate: Any, kept: list[tuple[str, Any]], found: tuple[str, ...]
) -> None:
    """Raise when other parameters give other masses."""
    before = evaluate([leaf for _, leaf in kept])
    for changed in _changed(kept):
        after = evaluate(changed)
        if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True)):
            continue
        raise ContractError(
            f"{type(objective).__name__}: a mass depends on the trainable parameters ({', '.join(found)}). A mass "
            "counts data and is a constant to the gradient, so it must come from the batch: compute the mask or "
            "the weights from it. stop_gradient does not help, since other parameters would still give another mass"
        )


def _changed(kept: list[tuple[str, Any]]) -> Iterator[list[Any]]:
    """Give the arguments with other parameters, three times."""
    key = jax.random.key(0)
    for change in (
        lambda x, k: jnp.zeros_like(x),
        lambda x, k: -2 * x + 1,
        lambda x, k: 4 * jax.random.normal(k, jnp.shape(x)).astype(x.dtype),
    ):
        yield [
            change(jnp.asarray(leaf), jax.random.fold_in(key, i)) if name.startswith("trained/") else leaf
            for i, (name, leaf) in enumerate(kept)
        ]
