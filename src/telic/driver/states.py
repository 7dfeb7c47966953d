"""States that a run starts with or a handler gives: settled dtypes, arrays of their own, one structure."""

from typing import Any

import jax
import jax.numpy as jnp

from telic import tree
from telic.errors import ContractError
from telic.types import PyTree


def settle(state: PyTree, after: PyTree) -> PyTree:
    """Give a first state in the dtypes the step produces, where Python scalars left them open."""
    check_structure(state, after)
    leaves, structure = jax.tree.flatten(state)
    is_open = [not tree.is_array(leaf) or getattr(leaf, "weak_type", False) for leaf in leaves]
    if not any(is_open):
        return state
    new = [
        jnp.asarray(leaf, like.dtype) if loose else leaf
        for leaf, like, loose in zip(leaves, structure.flatten_up_to(after), is_open, strict=True)
    ]
    return structure.unflatten(new)


def owned(value: PyTree, current: PyTree) -> PyTree:
    """Give a state whose arrays may be donated: those of the current state as they are, each once, the rest copied."""
    free = {id(leaf) for leaf in jax.tree.leaves(current) if isinstance(leaf, jax.Array)}

    def own(leaf: Any) -> Any:
        if id(leaf) in free:
            free.remove(id(leaf))
            return leaf
        # The dtype is given so that a Python number does not stay weakly typed, which would compile again.
        return jnp.array(leaf, jnp.result_type(leaf), copy=True)

    return jax.tree.map(own, value)


def check_structure(before: PyTree, after: PyTree) -> None:
    """Raise unless a step gives a state of the structure it was given.

    Raises:
      ContractError: Leaves are missing or new; they are named.
    """
    if after is None and before is not None:
        raise ContractError(
            "the step must return the new state, or a telic.Result, got None: end it with `return state`"
        )
    if jax.tree.structure(before) != jax.tree.structure(after):
        a, b = set(tree.leaf_names(before)), set(tree.leaf_names(after))
        detail = (
            f"missing: {sorted(a - b) or 'nothing'}, new: {sorted(b - a) or 'nothing'}"
            if a != b
            else f"{jax.tree.structure(before)} became {jax.tree.structure(after)}"
        )
        raise ContractError(f"the step must return a state of the structure it was given; {detail}")


def check_same(before: PyTree, after: PyTree, what: str) -> None:
    """Raise unless a state keeps structure, shapes and dtypes.

    Raises:
      ContractError: A leaf changes; it is named, and so is `what` changes it.
    """
    check_structure(before, after)
    new = tree.named_leaves(after)
    for name, old in tree.named_leaves(before).items():
        a, b = (jnp.shape(old), old.dtype), (jnp.shape(new[name]), jnp.result_type(new[name]))
        if a != b:
            raise ContractError(
                f"{what} changes leaf {name or 'state'!r} from {a[1]}{list(a[0])} to {b[1]}{list(b[0])}: a state must "
                "keep its shapes and dtypes; start it in the dtype the step gives, or cast inside the step"
            )
