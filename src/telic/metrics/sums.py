"""Sums that stay exact when an epoch is long.

A plain float32 sum stops counting at 2**24: adding 1 to 16,777,216 gives 16,777,216. Evaluations over tokens get there.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic.mean import wide
from telic.types import Array, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum:
    """A sum kept as two numbers, the second holding what the first rounded away.

    In float32 it counts exactly to 2**48, so it serves integer counts and fractional weights alike, whether or not
    weights are given. Only its value, one float, is rounded.

    Attributes:
      high: The sum, rounded, at least float32.
      low: What is missing from it, same shape and dtype.
    """

    high: Any
    low: Any

    @staticmethod
    def zero(like: Any) -> "Sum":
        """Give the empty sum of values with this shape and dtype."""
        dtype = jax.eval_shape(wide, like).dtype
        return Sum(jnp.zeros(jnp.shape(like), dtype), jnp.zeros(jnp.shape(like), dtype))

    def add(self, value: Any) -> "Sum":
        """Give the sum with a value added, in this sum's dtype."""
        value = jnp.asarray(value).astype(self.high.dtype)
        return self.merge(Sum(value, jnp.zeros_like(value)))

    def merge(self, other: "Sum") -> "Sum":
        """Give the sum of both."""
        total, lost = _two_sum(self.high, other.high)
        high, low = _two_sum(total, _finite(total, lost + self.low + other.low))
        return Sum(high, _finite(high, low))

    def value(self) -> Array:
        """Give the sum, rounded once."""
        return self.high + self.low


def _finite(total: Array, lost: Array) -> Array:
    """Give the rounding error of a sum, 0 where the sum is infinite: there it is infinity minus infinity, NaN."""
    return jnp.where(jnp.isfinite(total), lost, 0)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Give a + b and the rounding error of that sum, exactly (Knuth, TAOCP volume 2, section 4.2.2, theorem B)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _is_sum(node: Any) -> bool:
    return isinstance(node, Sum)


def zero_sums(statistics: PyTree) -> PyTree:
    """Put an empty `Sum` at each leaf of a tree of arrays or shape structs."""
    return jax.tree.map(Sum.zero, statistics)


def add_sums(sums: PyTree, statistics: PyTree) -> PyTree:
    """Add a tree of arrays to a tree of `Sum`."""
    return jax.tree.map(lambda s, x: s.add(x), sums, statistics, is_leaf=_is_sum)


def merge_sums(a: PyTree, b: PyTree) -> PyTree:
    """Merge two trees of `Sum`."""
    return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=_is_sum)


def sum_values(sums: PyTree) -> PyTree:
    """Give the tree of arrays that a tree of `Sum` stands for."""
    return jax.tree.map(lambda s: s.value(), sums, is_leaf=_is_sum)
