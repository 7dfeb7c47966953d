"""Errors of numbers: MAE, MSE, RMSE, and the share of variance explained.

They read ``("targets", "prediction")`` of one shape; ``(n,)`` against ``(n, 1)`` is an error. Each element weighs 1, or
its weight: one per element, or one per example.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic.mean import Mean, wide
from telic.metrics.base import TARGETS_AND_PREDICTION, Mode, Reads, StatisticsMetric, check_name
from telic.metrics.labels import check_same_shape, masses, safe_ratio
from telic.metrics.sums import Sum
from telic.types import Array


def _errors(name: str, of: Callable[[Array], Array]) -> Callable[..., Mean]:
    def statistics(targets: Any, prediction: Any, *, weights: Any = None) -> Mean:
        check_same_shape(name, targets, prediction)
        return Mean.of(of(wide(prediction) - wide(targets)), weights)

    return statistics


def mean_absolute_error(
    name: str = "mean_absolute_error", *, reads: Reads = TARGETS_AND_PREDICTION
) -> StatisticsMetric:
    """Make the mean of |prediction - target| over all elements."""
    return StatisticsMetric(name=name, statistics=_errors(name, jnp.abs), finish=Mean.measured, reads=reads, mode="min")


def mean_squared_error(name: str = "mean_squared_error", *, reads: Reads = TARGETS_AND_PREDICTION) -> StatisticsMetric:
    """Make the mean of (prediction - target)² over all elements."""
    return StatisticsMetric(
        name=name, statistics=_errors(name, jnp.square), finish=Mean.measured, reads=reads, mode="min"
    )


def root_mean_squared_error(
    name: str = "root_mean_squared_error", *, reads: Reads = TARGETS_AND_PREDICTION
) -> StatisticsMetric:
    """Make the root of the mean squared error over all elements: one root, of the whole, not a mean of roots."""
    statistics = _errors(name, jnp.square)
    return StatisticsMetric(
        name=name, statistics=statistics, finish=lambda mean: jnp.sqrt(mean.measured()), reads=reads, mode="min"
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Spread:
    """What the share of variance explained is made of, for each output [...].

    Squares are taken around the mean and not around 0, so that targets near 1,000 keep their digits.

    Attributes:
      mass: `Sum` of the weights.
      mean: Weighted mean of the targets, as a `Sum`: rounded to one float32, it would cost the squares their digits.
      squares: `Sum` of weighted squared distances of the targets from that mean.
      residual: `Sum` of weighted squared errors.
    """

    mass: Sum
    mean: Sum
    squares: Sum
    residual: Sum

    def merge(self, other: "Spread") -> "Spread":
        """Give the Spread of both sets of examples (Chan, Golub, LeVeque 1983)."""
        mass = self.mass.merge(other.mass)
        gap = (other.mean.high - self.mean.high) + (other.mean.low - self.mean.low)
        share = safe_ratio(other.mass.value(), mass.value())
        between = gap * gap * share * self.mass.value()
        squares = self.squares.merge(other.squares).add(between)
        return Spread(mass, self.mean.add(gap * share), squares, self.residual.merge(other.residual))


@dataclass(frozen=True)
class R2:
    """The share of the targets' variance that a prediction explains: 1 - residual / spread.

    With several outputs, [examples, ...], it is the mean over outputs of each one's value. An output whose targets are
    all equal gives 1 when it is predicted exactly, else 0. Without data it is 0.

    Args:
      name: Under which the value is reported.
      reads: Where targets and prediction come from.
    """

    name: str = "r2"
    reads: Reads = TARGETS_AND_PREDICTION
    mode: Mode = "max"

    def __post_init__(self) -> None:
        check_name(self.name)

    def init(self, *args: Any) -> Spread:
        """Give the empty accumulator."""
        like = jax.eval_shape(lambda *a: self._batch(*a, weights=None), *args).mass.high
        return Spread(Sum.zero(like), Sum.zero(like), Sum.zero(like), Sum.zero(like))

    def update(self, acc: Spread, *args: Any, weights: Any = None) -> Spread:
        """Add a batch."""
        batch = self._batch(*args, weights=weights)
        return acc.merge(jax.tree.map(lambda new, old: new.astype(old.dtype), batch, acc))

    def merge(self, a: Spread, b: Spread) -> Spread:
        """Give the accumulator of both."""
        return a.merge(b)

    def compute(self, acc: Spread) -> Array:
        """Give the value, a scalar."""
        residual, squares = acc.residual.value(), acc.squares.value()
        constant = jnp.where(residual == 0, 1, 0).astype(residual.dtype)
        explained = jnp.where(squares != 0, 1 - safe_ratio(residual, squares), constant)
        return jnp.where(acc.mass.value() > 0, explained, 0).mean()

    def _batch(self, targets: Any, prediction: Any, *, weights: Any) -> Spread:
        check_same_shape(self.name, targets, prediction)
        targets, prediction = jnp.atleast_1d(wide(targets)), jnp.atleast_1d(wide(prediction))
        dtype = jnp.promote_types(targets.dtype, prediction.dtype)
        w = masses(weights, targets).astype(dtype)
        targets, prediction = (jnp.where(w != 0, x, 0).astype(dtype) for x in (targets, prediction))
        mass = w.sum(axis=0)
        mean = safe_ratio((w * targets).sum(axis=0), mass)
        rest = safe_ratio((w * (targets - mean)).sum(axis=0), mass)
        squares = (w * (targets - mean - rest) ** 2).sum(axis=0)
        residual = (w * (targets - prediction) ** 2).sum(axis=0)
        none = jnp.zeros_like(mass)
        return Spread(Sum(mass, none), Sum(mean, rest), Sum(squares, none), Sum(residual, none))


def r2(name: str = "r2", *, reads: Reads = TARGETS_AND_PREDICTION) -> R2:
    """Make the share of variance explained; see `R2`."""
    return R2(name, reads)
