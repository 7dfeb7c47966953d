"""Trees as named arrays on the host, and back into the structure of an example."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.errors import CheckpointError, MismatchError
from telic.types import PyTree


@dataclass(frozen=True)
class Leaf:
    """An array on the host.

    Attributes:
      data: Its values; those of a PRNG key are its words. Of a leaf in parts what reads them (`parts.Parted`).
      key: Name of the key's implementation, or None for an array of numbers.
    """

    data: Any
    key: str | None = None


@dataclass(frozen=True)
class Spec:
    """What a leaf must be to be restored into another.

    Attributes:
      shape: Shape; a key's is that of the keys, not of their words.
      dtype: Name of the dtype; a key's is ``key<implementation>``.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def named(prefix: str, value: PyTree) -> dict[str, Any]:
    """Give a tree's leaves by name, below a prefix.

    Raises:
      CheckpointError: Two leaves have one name, so one of them would be lost.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        name = f"{prefix}/{tree.path_name(path)}" if path else prefix
        if name in found:
            raise CheckpointError(
                f"two leaves are called {name!r}, so a checkpoint could not tell them apart; rename one of them (a "
                "name with a slash reads like a nested one)"
            )
        found[name] = leaf
    return found


def to_host(leaves: Mapping[str, Any]) -> dict[str, Leaf]:
    """Fetch leaves; waits for the device."""
    words = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()}
    fetched: dict[str, Any] = jax.device_get(words)
    return {
        name: Leaf(np.asarray(data), str(jax.random.key_impl(leaves[name])) if _is_key(leaves[name]) else None)
        for name, data in fetched.items()
    }


def as_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Give an array's bytes in C order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def spec(leaf: Any) -> Spec:
    """Give what an array, a key or a shape struct must be matched by."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        array = np.asarray(leaf)
        return Spec(array.shape, str(array.dtype))
    return Spec(tuple(np.shape(leaf)), str(dtype))


def stored_spec(leaf: Leaf) -> Spec:
    """Give the spec of a stored leaf."""
    if leaf.key is None:
        return Spec(leaf.data.shape, str(leaf.data.dtype))
    return Spec(leaf.data.shape[:-1], f"key<{_SHORT.get(leaf.key, leaf.key)}>")


_SHORT = {"threefry2x32": "fry", "rbg": "rbg", "unsafe_rbg": "urbg"}
KEY_IMPLEMENTATIONS = tuple(_SHORT)
"""The PRNGs of JAX: the only names a checkpoint may give."""


def fill(prefix: str, like: PyTree, stored: Mapping[str, Leaf], *, what: str) -> PyTree:
    """Give a tree of the structure of `like` with the stored leaves, names, shapes and dtypes being exactly its.

    Args:
      prefix: Where the tree lies among the stored leaves.
      like: Arrays or shape structs.
      stored: Leaves by name; those of other prefixes are not looked at.
      what: What is restored, for the error.
    Raises:
      MismatchError: A leaf is missing, unexpected, or has another shape or dtype; all are listed.
    """
    wanted = named(prefix, like)
    lines = differences(
        {name: spec(leaf) for name, leaf in wanted.items()},
        {name: stored_spec(leaf) for name, leaf in stored.items() if name == prefix or name.startswith(prefix + "/")},
        prefix,
    )
    if lines:
        raise MismatchError(f"{what} is not the one that was saved:\n" + "\n".join(lines), lines=tuple(lines))
    leaves = [_place(stored[name], example) for name, example in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def differences(wanted: Mapping[str, Spec], stored: Mapping[str, Spec], prefix: str, limit: int = 12) -> list[str]:
    """Say how two tables of leaves differ, one line a leaf."""
    lines: list[str] = []
    for name in sorted({*wanted, *stored}):
        new, old = wanted.get(name), stored.get(name)
        shown = name.removeprefix(prefix + "/")
        if new is None:
            lines.append(f"  {shown}: {old} in the checkpoint, not in this run")
        elif old is None:
            lines.append(f"  {shown}: {new} in this run, not in the checkpoint")
        elif new != old:
            lines.append(f"  {shown}: {old} in the checkpoint, {new} in this run")
    if len(lines) > limit:
        lines = [*lines[:limit], f"  and {len(lines) - limit} more"]
    return lines


def _place(leaf: Leaf, example: Any) -> Any:
    """Give a stored leaf as an array of its own, where the example lies if that is known."""
    sharding = getattr(example, "sharding", None)
    if leaf.key is None and sharding is not None and not sharding.is_fully_addressable:
        return jax.make_array_from_callback(leaf.data.shape, sharding, lambda index: leaf.data[index])
    array = jax.device_put(np.asarray(leaf.data), sharding if leaf.key is None else None, may_alias=False)
    return array if leaf.key is None else jax.random.wrap_key_data(array, impl=leaf.key)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
