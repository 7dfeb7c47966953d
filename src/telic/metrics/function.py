"""Metrics made from plain functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from telic.errors import ContractError, ShapeError, check_call, unknown_name
from telic.mean import Mean, wide
from telic.metrics.base import TARGETS_AND_PREDICTION, Metric, Mode, Reads, check_name
from telic.metrics.sums import add_sums, merge_sums, sum_values, zero_sums
from telic.tree import leading_dimension
from telic.types import Array, PyTree

Reduce: TypeAlias = Literal["mean", "running_average", "running_sum", "last"] | tuple[Callable[..., Any], Any]
"""How values of batches become one: by name, or a pair ``(fold, initial)``."""

REDUCTIONS = ("mean", "running_average", "running_sum", "last")
"""The reductions that have a name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Last:
    """The last value seen.

    Attributes:
      value: Tree of arrays; zeros before the first.
      seen: Whether there was one, bool scalar.
    """

    value: Any
    seen: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Folded:
    """What a user's fold has made of the batches so far.

    Attributes:
      value: Tree of arrays.
      count: Batches folded, int32.
    """

    value: Any
    count: Any


@dataclass(frozen=True)
class FunctionMetric:
    """A metric made from a plain function and a rule that joins batches.

    Args:
      fn: ``fn(*args)`` gives one value per example (an array whose first dimension is that of the first argument), one
        number for the batch, or a `Mean`. Under "last" and a fold it may give any tree.
      name: Under which the value is reported.
      reads: Where the arguments come from.
      mode: Which direction is better, None when unknown.
      reduce: How batches are joined.

        - "mean": by mass. A per-example value weighs 1, or its weight. One number for the batch has as mass the
          leading dimension of the first argument (the sum of the weights when there are any; 1 when that argument
          has no dimension). A `Mean` keeps its own mass, and weights given beside it are not used.
        - "running_average": each batch with data counts alike, whatever its size.
        - "running_sum": the values, times their weights, are summed over everything; a `Mean` gives its total.
        - "last": the last batch's value, of any shape and structure.
        - ``(fold, initial)``: ``fold(acc, value, count)`` gives the next accumulator from the batch's value and the
          number of batches before it. Weights are not used: read them as an argument. It cannot be merged.
      of_metric: Whether `fn` takes ``weights=`` and gives the value of the whole batch, as `batch_value` makes it.
    Raises:
      ValueError: `reduce` is no known reduction.
      TypeError: `fn` is not callable, or the name is no string.
    Example:
      >>> error = FunctionMetric(lambda targets, prediction: abs(targets - prediction), "error", mode="min")
      >>> acc = error.init(jnp.zeros(3), jnp.zeros(3))
      >>> acc = error.update(acc, jnp.zeros(3), jnp.zeros(3))
      >>> acc = error.update(acc, jnp.zeros(1), jnp.full(1, 4.0))
      >>> float(error.compute(acc))
      1.0
    """

    fn: Callable[..., Any]
    name: str
    reads: Reads = TARGETS_AND_PREDICTION
    mode: Mode = None
    reduce: Reduce = "mean"
    of_metric: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        if not callable(self.fn):
            raise TypeError(f"metric {self.name!r} needs a function, got {self.fn!r}")
        match self.reduce:
            case "mean" | "running_average" | "running_sum" | "last":
                pass
            case (fold, _) if callable(fold):
                check_call(f"metric {self.name!r}: a fold", fold, ("acc", "value", "count"))
            case tuple():
                raise TypeError(
                    f"reduce={self.reduce!r} must be a pair (fold, initial), fold(acc, value, count) -> acc"
                )
            case _:
                raise unknown_name("reduce", self.reduce, REDUCTIONS)

    def init(self, *args: Any) -> PyTree:
        """Give the empty accumulator for such arguments.

        Raises:
          ContractError: The fold does not give back what it is given: another structure, shape or dtype.
        """
        match self.reduce:
            case "last":
                value = jax.eval_shape(lambda *a: self._value(a, None), *args)
                return Last(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), value), jnp.zeros((), bool))
            case (fold, initial):
                value = jax.eval_shape(lambda *a: self._value(a, None), *args)
                return Folded(_fixed_point(self.name, fold, initial, value), jnp.zeros((), jnp.int32))
            case _:
                return zero_sums(jax.eval_shape(lambda *a: self._statistics(a, None), *args))

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Add a batch.

        Raises:
          ShapeError: Values that are not one per example, or weights that do not fit them.
          TypeError: The function returned something the reduction cannot take.
        """
        match self.reduce:
            case "last":
                value = self._value(args, weights)
                return Last(jax.tree.map(_cast, value, acc.value), jnp.ones((), bool))
            case (fold, _):
                value = fold(acc.value, self._value(args, weights), acc.count)
                return Folded(jax.tree.map(_cast, value, acc.value), acc.count + 1)
            case _:
                return add_sums(acc, self._statistics(args, weights))

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Give the accumulator of both.

        Raises:
          TypeError: The metric is a fold, which says nothing about merging.
        """
        match self.reduce:
            case "last":
                value = jax.tree.map(lambda x, y: jnp.where(b.seen, y, x), a.value, b.value)
                return Last(value, jnp.logical_or(a.seen, b.seen))
            case (_, _):
                raise TypeError(
                    f"metric {self.name!r} is a fold (fold, initial), which cannot be merged; to merge, use "
                    "reduce='mean' or 'running_sum', or a Metric with a merge of its own"
                )
            case _:
                return merge_sums(a, b)

    def compute(self, acc: PyTree) -> Any:
        """Give the value; a mean without mass is NaN, a sum of nothing is 0."""
        match self.reduce:
            case "last" | (_, _):
                return acc.value
            case "running_sum":
                return sum_values(acc)
            case _:
                return sum_values(acc).measured()

    def _value(self, args: tuple[Any, ...], weights: Any) -> PyTree:
        return self.fn(*args, weights=weights) if self.of_metric else self.fn(*args)

    def _statistics(self, args: tuple[Any, ...], weights: Any) -> Any:
        value = self._value(args, weights)
        if isinstance(value, Mean):
            mean = value
        elif jax.tree.structure(value).num_leaves != 1 or not jax.tree_util.all_leaves([value]):
            raise TypeError(
                f"metric {self.name!r} with reduce={self.reduce!r} must return one value per example, one number, or "
                f"Mean(total, mass), got {type(value).__name__}; reduce='last' keeps any tree"
            )
        else:
            mean = self._mean_of(value, args, weights)
        match self.reduce:
            case "running_average":
                has_data = wide(mean.has_data())
                return Mean(jnp.where(has_data != 0, mean.value(), 0), has_data)
            case "running_sum":
                is_number = not isinstance(value, Mean) and (self.of_metric or jnp.ndim(value) == 0)
                return wide(value) if is_number else mean.total
            case _:
                return mean

    def _mean_of(self, value: Any, args: tuple[Any, ...], weights: Any) -> Mean:
        rows = leading_dimension(args[0]) if args and jnp.ndim(_first_leaf(args[0])) > 0 else None
        if self.of_metric or jnp.ndim(value) == 0:
            number = wide(value)
            if rows is None:
                mass = jnp.ones((), number.dtype)
            else:
                mass = wide(rows if weights is None else weights).sum()
            return Mean(jnp.where(mass != 0, number, 0) * mass, mass)
        if rows is not None and jnp.shape(value)[0] != rows:
            raise ShapeError(
                f"metric {self.name!r} returned values of shape {jnp.shape(value)} for {rows} examples; return one "
                "value per example, one number for the batch, or Mean(total, mass)"
            )
        return Mean.of(value, weights)


def _first_leaf(tree: PyTree) -> Any:
    leaves = jax.tree.leaves(tree)
    return leaves[0] if leaves else 0


def _cast(new: Any, old: Array) -> Array:
    return jnp.asarray(new).astype(old.dtype)


def _strong(x: Any) -> Array:
    """Give an array of its own dtype, not a weak one, widened when it is a narrow float."""
    x = jnp.asarray(x)
    return wide(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jax.lax.convert_element_type(x, x.dtype)


def _fixed_point(name: str, fold: Callable[..., Any], initial: PyTree, value: PyTree) -> PyTree:
    """Give the initial accumulator in the dtypes the fold settles on; check that it settles."""
    start = jax.tree.map(_strong, initial)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    for _ in range(2):
        after = jax.eval_shape(fold, start, value, count)
        given, got = jax.tree.structure(start), jax.tree.structure(after)
        if given != got or [jnp.shape(x) for x in jax.tree.leaves(start)] != [x.shape for x in jax.tree.leaves(after)]:
            raise ContractError(
                f"metric {name!r}: fold(acc, value, count) must return what it was given, {_shapes(start)}, got "
                f"{_shapes(after)}; give an initial value of the accumulator's final structure and shapes"
            )
        start = jax.tree.map(lambda x, y: x.astype(jnp.promote_types(x.dtype, y.dtype)), start, after)
    return start


def _shapes(tree: PyTree) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


def batch_value(metric: Metric) -> Callable[..., Any]:
    """Make a function of one batch from a metric: ``fn(*args, weights=None)`` gives the metric of that batch alone."""

    def value(*args: Any, weights: Any = None) -> Any:
        return metric.compute(metric.update(metric.init(*args), *args, weights=weights))

    return value


def mean(name: str = "mean", *, reads: Reads, mode: Mode = None) -> FunctionMetric:
    """Make the mean by mass of one array, scalar or `Mean`.

    A scalar weighs 1 in each batch: to weigh a batch's loss by its examples, read a `Mean` or the examples' losses.
    """
    return FunctionMetric(_identity, name, reads, mode)


def sum(name: str = "sum", *, reads: Reads, mode: Mode = None) -> FunctionMetric:
    """Make the sum of one array's elements, times their weights when there are any."""
    return FunctionMetric(_identity, name, reads, mode, "running_sum")


def last(name: str = "last", *, reads: Reads, mode: Mode = None) -> FunctionMetric:
    """Make a metric that keeps what it read last: one tree, or a tuple of them when it reads several."""
    return FunctionMetric(_identity_of_all, name, reads, mode, "last")


def _identity(value: Any) -> Any:
    return value


def _identity_of_all(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values
