"""A batch in slices, and their outputs put together again, as if the batch had been one attempt."""

from typing import Any

import jax
import jax.numpy as jnp

from telic.axes import BATCH_AXES, constrain
from telic.mean import Mean, Terms
from telic.types import Array


def of_rows(rows: Array, count: int) -> Array:
    """Give the rows of a batch as a number of slices, stacked.

    On a mesh every device has rows of each slice. As they lie, a slice would be one device's, and all would compute it.

    Args:
      rows: [slices · rows of each, ...].
      count: Slices.
    """
    stacked = rows.reshape(count, -1, *rows.shape[1:])
    return constrain(stacked, *(None, BATCH_AXES, "sequence")[: stacked.ndim])


def joined(outputs: Any, accepted: Array, tail: Any, size: int, rest: int) -> tuple[Any, Array]:
    """Give the outputs of a sliced batch, and whether any slice was accepted.

    Per-row values (leading dimension = rows of a slice) are concatenated; sums are added; scalars are averaged over
    accepted slices. Rows of rejected slices weigh nothing.

    Args:
      outputs: Outputs of the whole slices, stacked.
      accepted: Whether each was accepted, bool [slices].
      tail: (outputs, accepted) of the smaller last slice, or None.
      size: Rows of a whole slice.
      rest: Rows of the last one.
    """
    flags = accepted if tail is None else jnp.concatenate([accepted, tail[1][None]])

    rest_accepted = jnp.asarray(False) if tail is None else tail[1]

    def pool(stacked: Any, last: Any) -> Any:
        if isinstance(stacked, Mean):
            totals = _kept(stacked.total, accepted).sum(0), _kept(stacked.mass, accepted).sum(0)
            mean = Mean(*totals)
            if last is not None:
                mean = mean.merge(Mean(_kept(last.total, rest_accepted), _kept(last.mass, rest_accepted)))
            return mean
        if isinstance(stacked, Terms):
            means = {
                name: (w[-1], pool(m, None if last is None else last.terms[name][1]))
                for name, (w, m) in stacked.terms.items()
            }
            return Terms(means)
        if stacked.ndim >= 2 and stacked.shape[1] == size:
            rows = constrain(stacked.reshape(-1, *stacked.shape[2:]), BATCH_AXES)
            return rows if last is None else jnp.concatenate([rows, last])
        if not jnp.issubdtype(stacked.dtype, jnp.inexact):
            total = _kept(stacked, accepted).sum(0)
            return total if last is None else total + _kept(last, rest_accepted)
        masses = jnp.full(accepted.shape, size, stacked.dtype) * accepted.astype(stacked.dtype)
        total = (_kept(stacked, accepted) * masses.reshape(-1, *(1,) * (stacked.ndim - 1))).sum(0)
        mass = masses.sum()
        if last is not None:
            own = jnp.asarray(rest, stacked.dtype) * rest_accepted.astype(stacked.dtype)
            total, mass = total + _kept(last, rest_accepted) * own, mass + own
        return total / jnp.where(mass > 0, mass, 1)

    is_statistic = lambda x: isinstance(x, Mean | Terms)  # noqa: E731
    lasts = jax.tree.map(lambda _: None, outputs, is_leaf=is_statistic) if tail is None else tail[0]
    pooled = jax.tree.map(lambda s, t: pool(s, t), outputs, lasts, is_leaf=lambda x: is_statistic(x) or x is None)
    weights = jnp.repeat(flags[: accepted.shape[0]], size, total_repeat_length=accepted.shape[0] * size)
    if tail is not None:
        weights = jnp.concatenate([weights, jnp.repeat(flags[-1:], rest, total_repeat_length=rest)])
    given = pooled.get("weights")
    ones = weights.astype(jnp.float32)
    pooled["weights"] = ones if given is None else given * ones.reshape(-1, *(1,) * (given.ndim - 1))
    return pooled, flags.any()


def _kept(values: Array, accepted: Array) -> Array:
    """Give values with those of rejected slices zero."""
    shape = accepted.shape + (1,) * (values.ndim - accepted.ndim)
    return jnp.where(accepted.reshape(shape), values, 0)
