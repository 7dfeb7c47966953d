"""Pooling the statistics of several microbatches and reducing them once."""

from typing import Any

import jax
import jax.numpy as jnp

from telic.contract import Objective
from telic.mean import Mean, Rows, Terms, wide
from telic.types import Array, PyTree


def canonical(statistics: PyTree) -> PyTree:
    """Give statistics in a form whose leaves add up, in at least float32.

    A scalar becomes one term of mass one. The weight of each of `Terms` goes into its total, since it may change
    from one microbatch to the next. Integers stay integers; `Rows` stay rows.
    """
    match statistics:
        case Mean():
            return Mean(wide(statistics.total), wide(statistics.mass))
        case Terms():
            return {n: Mean(wide(m.total) * wide(w), wide(m.mass)) for n, (w, m) in statistics.terms.items()}
        case _ if is_scalar(statistics):
            value = wide(statistics)
            return Mean(value, jnp.ones((), value.dtype))
        case _:
            return jax.tree.map(_summable, statistics)


def _summable(leaf: Any) -> Array:
    leaf = jnp.asarray(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.int32)
    return wide(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def reduce(objective: Objective, original: PyTree, pooled: PyTree) -> tuple[Array, Array]:
    """Give (value, has_data) of pooled canonical statistics.

    Args:
      objective: Whose `reduce_loss` serves statistics of its own.
      original: Statistics (or their shapes) as the objective returned them: they tell the form.
      pooled: The pooled canonical statistics.
    """
    match original:
        case Mean():
            return pooled.value(), pooled.has_data()
        case Terms():
            means = list(pooled.values())
            value = sum((m.value() for m in means[1:]), start=means[0].value())
            return value, jnp.stack([m.has_data() for m in means]).any()
        case _ if is_scalar(original):
            return pooled.value(), pooled.has_data()
        case _:
            value, has_data = objective.reduce_loss(pooled)
            return wide(value), jnp.asarray(has_data)


def is_scalar(statistics: PyTree) -> bool:
    """Say whether statistics are a bare scalar."""
    return jax.tree.structure(statistics) == jax.tree.structure(0.0) and jnp.ndim(statistics) == 0


def has_rows(statistics: PyTree) -> bool:
    """Say whether statistics hold `Rows`, which pool by concatenation."""
    leaves = jax.tree.leaves(statistics, is_leaf=lambda x: isinstance(x, Rows))
    return any(isinstance(x, Rows) for x in leaves)


def zeros(statistics: PyTree) -> PyTree:
    """Give empty sums for canonical statistics of these shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), statistics)


def add(a: PyTree, b: PyTree) -> PyTree:
    """Add canonical statistics, in the dtypes of the first."""
    return jax.tree.map(lambda x, y: x + jnp.asarray(y, x.dtype), a, b)
