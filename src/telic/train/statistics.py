"""Pooling the statistics of several microbatches and reducing them once."""

import jax
import jax.numpy as jnp

from telic.contract import Objective, owns_statistics, reduce_statistics, summable
from telic.mean import Mean, Rows, Terms, wide
from telic.types import Array, PyTree


def canonical(statistics: PyTree, *, own: bool = False) -> PyTree:
    """Give statistics in a form whose leaves add up, in at least float32.

    A scalar becomes one term of mass one. The weight of each of `Terms` goes into its total, since it may change
    from one microbatch to the next. Integers stay integers; `Rows` stay rows.

    Args:
      statistics: What a loss returned.
      own: Whether the objective reduces them itself: then they keep their form whatever they are.
    """
    if own:
        return summable(statistics)
    match statistics:
        case Mean():
            return Mean(wide(statistics.total), wide(statistics.mass))
        case Terms():
            return {n: Mean(wide(m.total) * wide(w), wide(m.mass)) for n, (w, m) in statistics.terms.items()}
        case _ if is_scalar(statistics):
            value = wide(statistics)
            return Mean(value, jnp.ones((), value.dtype))
        case _:
            return summable(statistics)


def reduce(objective: Objective, pooled: PyTree) -> tuple[Array, Array]:
    """Give (value, has_data) of pooled canonical statistics."""
    if owns_statistics(objective):
        return reduce_statistics(objective, pooled)
    means = [pooled] if isinstance(pooled, Mean) else list(pooled.values())
    value = sum((m.value() for m in means[1:]), start=means[0].value())
    return value, jnp.stack([m.has_data() for m in means]).any()


def masses(statistics: PyTree) -> dict[str, Array]:
    """Give the masses in statistics of the forms that have them, by term; a lone `Mean` has the name ""."""
    match statistics:
        case Mean():
            return {"": jnp.asarray(statistics.mass)}
        case Terms():
            return {name: jnp.asarray(mean.mass) for name, mean in statistics.means().items()}
        case _:
            return {}


def is_scalar(statistics: PyTree) -> bool:
    """Say whether statistics are a bare scalar."""
    return jax.tree.structure(statistics) == jax.tree.structure(0.0) and jnp.ndim(statistics) == 0


def is_shared(objective: Objective, statistics: PyTree) -> bool:
    """Say whether statistics (or their shapes) have one denominator, by which the objective divides."""
    return not owns_statistics(objective) and (isinstance(statistics, Mean) or is_scalar(statistics))


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
