"""Exponential moving averages of the variables, moved once per commit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from telic import tree
from telic.types import Array, Key, PyTree


@dataclass(frozen=True)
class EMASpec:
    """Which leaves to average, how fast, and how to store the average.

    Args:
      decay: A number in [0, 1], or a function of the number of updates before the commit, int32 scalar. 1 keeps the
        start exactly, which is what a frozen reference is.
      select: Filter over leaf names; None averages the trainable leaves. Leaves that are not floating-point are never
        averaged.
      storage: "float32" keeps at least float32, so that a bfloat16 leaf's average moves; "leaf" stores in the leaf's
        own dtype with stochastic rounding, which moves in expectation and costs no extra memory.
    """

    decay: float | Callable[[Array], Any]
    select: tree.PathFilter | None = None
    storage: Literal["float32", "leaf"] = "float32"

    def __post_init__(self) -> None:
        if not callable(self.decay) and not 0 <= self.decay <= 1:
            raise ValueError(f"EMASpec.decay must be in [0, 1] or a function of the update count, got {self.decay!r}")
        if self.storage not in ("float32", "leaf"):
            raise ValueError(f"EMASpec.storage must be 'float32' or 'leaf', got {self.storage!r}")

    def start(self, variables: PyTree, trainable: PyTree) -> PyTree:
        """Give the average's first value: copies of the selected leaves, None elsewhere.

        Args:
          variables: The whole tree.
          trainable: The same tree with None at each leaf that is not trainable.
        """
        if self.select is not None:
            tree.check_selects(variables, self.select, what="EMASpec.select")
            chosen, _ = tree.partition(variables, self.select)
        else:
            chosen = trainable
        average = jax.tree.map(self._stored, chosen)
        if not jax.tree.leaves(average):
            raise ValueError(
                f"EMASpec.select={self.select!r} selects no floating-point leaf, so there is nothing to average; "
                "select some, or leave select out to average the trainable parameters"
            )
        return average

    def _stored(self, leaf: Any) -> Any:
        if not tree.is_float(leaf):
            return None
        dtype = jnp.promote_types(leaf.dtype, jnp.float32) if self.storage == "float32" else leaf.dtype
        return jnp.array(leaf, dtype, copy=True)

    def move(self, average: PyTree, variables: PyTree, updates: Array, key: Key) -> PyTree:
        """Move the average towards the variables by one commit.

        Args:
          average: Tree as given by `start`.
          variables: The whole tree after the optimizer's update.
          updates: Number of updates before this commit, int32.
          key: Drives stochastic rounding under storage="leaf".
        """
        decay = self.decay(updates) if callable(self.decay) else self.decay
        if not callable(self.decay) and decay == 1:
            return average
        flat, structure = jax.tree.flatten(average, is_leaf=lambda x: x is None)
        live = structure.flatten_up_to(variables)
        moved = [
            None if old is None else _move(old, new, decay, jax.random.fold_in(key, i))
            for i, (old, new) in enumerate(zip(flat, live, strict=True))
        ]
        return structure.unflatten(moved)


def _move(old: Array, new: Array, decay: Any, key: Key) -> Array:
    work = jnp.promote_types(jnp.promote_types(old.dtype, new.dtype), jnp.float32)
    d = jnp.asarray(decay, work)
    mixed = old.astype(work) * d + new.astype(work) * (1 - d)
    stored = mixed.astype(old.dtype) if old.dtype == work else _round_stochastically(mixed, old.dtype, key)
    # On bits, not by value: at decay 1 the average stays exactly as it was, NaN payloads included.
    return tree.select(d < 1, stored, old)


def _round_stochastically(x: Array, dtype: Any, key: Key) -> Array:
    """Round to a narrower dtype, up or down with probability in proportion to the distance."""
    near = x.astype(dtype)
    back = near.astype(x.dtype)
    toward = jnp.where(x > back, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(near, toward)
    gap = jnp.abs(other.astype(x.dtype) - back)
    chance = jnp.where(gap > 0, jnp.abs(x - back) / jnp.where(gap > 0, gap, 1), 0)
    return jnp.where(jax.random.uniform(key, x.shape, x.dtype) < chance, other, near)


def averaged(variables: PyTree, average: PyTree | None) -> PyTree | None:
    """Lay an average over the live variables, in the variables' dtypes; None without an average."""
    if average is None:
        return None
    cast = jax.tree.map(
        lambda live, mean: None if mean is None else mean.astype(live.dtype),
        variables,
        average,
        is_leaf=lambda x: x is None,
    )
    return tree.combine(variables, cast)
