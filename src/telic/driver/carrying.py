"""What a dispatch carries: a state in and out of the program, and its scalars through the loop in it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from telic.types import PyTree


class Parts:
    """A state in two parts: the leaves that a step writes, and those it hands on as they are.

    Only what is written goes out of a dispatch again, since each leaf in and out of one costs the host microseconds.
    Keys that stay go in as their numbers: a program with typed keys is not started by JAX's fast path.

    Args:
      state: The state.
      stays: For each leaf whether it is handed on; None for a state of which nothing is written.
    """

    def __init__(self, state: PyTree, stays: Sequence[bool] | None):
        leaves, self._structure = jax.tree.flatten(state)
        self._stays = [True] * len(leaves) if stays is None else list(stays)
        kept = [leaf for leaf, still in zip(leaves, self._stays, strict=True) if still]
        self._kinds = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in kept]
        self._numbers: dict[int, tuple[Any, Any]] = {}

    def split(self, state: PyTree) -> tuple[list[Any], list[Any]]:
        """Give (leaves that are written, leaves that stay)."""
        leaves = jax.tree.leaves(state)
        moving = [leaf for leaf, still in zip(leaves, self._stays, strict=True) if not still]
        kept = (leaf for leaf, still in zip(leaves, self._stays, strict=True) if still)
        return moving, [self._number(i, leaf) for i, leaf in enumerate(kept)]

    def _number(self, index: int, leaf: Any) -> Any:
        if self._kinds[index] is None:
            return leaf
        if isinstance(leaf, Tracer):
            return jax.random.key_data(leaf)
        if index not in self._numbers or self._numbers[index][0] is not leaf:
            self._numbers[index] = (leaf, jax.random.key_data(leaf))
        return self._numbers[index][1]

    def state(self, moving: list[Any], kept: list[Any]) -> PyTree:
        """Give the state again, from inside a program."""
        pairs = zip(self._kinds, kept, strict=True)
        stays = iter([x if kind is None else jax.random.wrap_key_data(x, impl=kind) for kind, x in pairs])
        moves = iter(moving)
        return self._structure.unflatten([next(stays) if still else next(moves) for still in self._stays])

    def join(self, moving: list[Any], before: PyTree) -> PyTree:
        """Give the state with its written leaves replaced."""
        moves = iter(moving)
        pairs = zip(jax.tree.leaves(before), self._stays, strict=True)
        return self._structure.unflatten([leaf if still else next(moves) for leaf, still in pairs])


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key)


class Packing:
    """How the scalars of a tree are carried by a loop: those of one dtype in vectors of up to 16.

    On the CPU each value that a loop carries is an operation of its own, and more than eight that could run at once are
    spread over threads, which costs a small step more than it gains. A vector that is put together by selects is one
    operation; one that is concatenated would be as many as it has parts.
    """

    _MOST = 16

    def __init__(self, like: PyTree):
        leaves, self._structure = jax.tree.flatten(like)
        by_dtype: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            if jnp.ndim(leaf) == 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                by_dtype.setdefault(leaf.dtype, []).append(i)
        cuts = range(0, len(leaves), self._MOST)
        self._groups = [g[at : at + self._MOST] for g in by_dtype.values() for at in cuts if len(g) > at + 1]
        packed = {i for group in self._groups for i in group}
        self._rest = [i for i in range(len(leaves)) if i not in packed]

    def pack(self, value: PyTree) -> tuple[list[Any], list[Any]]:
        """Give (vectors of scalars, the other leaves)."""
        leaves = self._structure.flatten_up_to(value)
        vectors: list[Any] = []
        for group in self._groups:
            # Operations of `lax`: those of `jnp` are functions in the program, which take longer to trace and lower.
            vector, place = jax.lax.broadcast(leaves[group[0]], (len(group),)), np.arange(len(group))
            for at, i in enumerate(group[1:], start=1):
                vector = jax.lax.select(place == at, jax.lax.broadcast(leaves[i], (len(group),)), vector)
            vectors.append(vector)
        return vectors, [leaves[i] for i in self._rest]

    def unpack(self, packed: tuple[list[Any], list[Any]]) -> PyTree:
        """Give the tree again."""
        vectors, rest = packed
        leaves: dict[int, Any] = dict(zip(self._rest, rest, strict=True))
        for vector, group in zip(vectors, self._groups, strict=True):
            leaves |= {i: jax.lax.index_in_dim(vector, at, keepdims=False) for at, i in enumerate(group)}
        return self._structure.unflatten([leaves[i] for i in range(len(leaves))])
