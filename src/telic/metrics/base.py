"""What a metric is: empty, update, merge, compute, over trees of arrays.

A metric of an epoch equals the metric over all its examples, whatever the batch sizes, because what is carried from
batch to batch is additive: sums with their mass, counts, never means or ratios of batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import jax

from telic.metrics.sums import add_sums, merge_sums, sum_values, zero_sums
from telic.types import Array, PyTree

Reads: TypeAlias = tuple[str, ...] | Callable[[Any], tuple[Any, ...]] | type
"""Where the arguments come from: names such as ``targets``, ``prediction``, ``batch.mask``; a function of the outputs
that returns them as a tuple; or an artifact type."""

Mode: TypeAlias = Literal["min", "max"] | None
"""Which direction is better; None when unknown."""

TARGETS_AND_PREDICTION = ("targets", "prediction")
"""What most metrics read, in this order."""


@runtime_checkable
class Metric(Protocol):
    """A value over examples that may arrive in any batches.

    All methods but `init` are traced. Merging is associative and the empty accumulator is neutral.

    Attributes:
      name: Under which the value is reported.
      reads: Where the arguments of `init` and `update` come from.
      mode: Which direction is better, None when unknown.
    """

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> Reads: ...

    @property
    def mode(self) -> Mode: ...

    def init(self, *args: Any) -> PyTree:
        """Give the empty accumulator: arrays, at least float32.

        Args:
          *args: Arrays, or shape structs, like those `update` will be given.
        """
        ...

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Add a batch; shapes and dtypes of the accumulator stay what they are.

        Args:
          acc: Accumulator.
          *args: What the metric reads.
          weights: Mass of each example or value, of the values' shape or its leading part; 0 drops it.
        """
        ...

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Give the accumulator of the examples of `a` followed by those of `b`."""
        ...

    def compute(self, acc: PyTree) -> Any:
        """Give the value: a scalar, or an array for metrics such as one value per class."""
        ...


@runtime_checkable
class HostMetric(Metric, Protocol):
    """A metric that works on the host, on process 0, with NumPy arrays: it is not traced, and may keep every row.

    Evaluations compute it (`Loop.validate`, `Trainer.evaluate`); a training step does not wait for the host.

    Attributes:
      host: True.
    """

    @property
    def host(self) -> bool: ...


def is_host(metric: Metric) -> bool:
    """Say whether a metric works on the host."""
    inner = metric.metric if isinstance(metric, Renamed) else metric
    return isinstance(inner, HostMetric) and inner.host


@dataclass(frozen=True, kw_only=True)
class StatisticsMetric:
    """A metric made of statistics that add up, and a function of their sums.

    Ratios belong here: precision is a function of summed counts, not a mean of the batches' precisions.

    Args:
      name: Under which the value is reported.
      statistics: ``statistics(*args, weights=...)`` gives a tree of arrays for a batch; two batches' add up.
      finish: Gives the value from the summed tree.
      reads: Where the arguments come from.
      mode: Which direction is better.
    Example:
      >>> import jax.numpy as jnp
      >>> share = StatisticsMetric(
      ...     name="share",
      ...     statistics=lambda x, weights=None: {"hits": (x > 0).sum(), "all": jnp.asarray(x.size)},
      ...     finish=lambda sums: sums["hits"] / sums["all"],
      ...     reads=("prediction",),
      ... )
      >>> acc = share.update(share.init(jnp.ones(3)), jnp.array([1.0, -1.0, 2.0]))
      >>> float(share.compute(share.update(acc, jnp.array([-1.0]))))
      0.5
    """

    name: str
    statistics: Callable[..., PyTree]
    finish: Callable[[Any], Array]
    reads: Reads = TARGETS_AND_PREDICTION
    mode: Mode = None

    def __post_init__(self) -> None:
        check_name(self.name)

    def init(self, *args: Any) -> PyTree:
        """Give empty sums for the statistics of such arguments."""
        return zero_sums(jax.eval_shape(lambda *a: self.statistics(*a, weights=None), *args))

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Add a batch's statistics."""
        return add_sums(acc, self.statistics(*args, weights=weights))

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Add two accumulators."""
        return merge_sums(a, b)

    def compute(self, acc: PyTree) -> Array:
        """Give the value of the summed statistics."""
        return self.finish(sum_values(acc))


@dataclass(frozen=True)
class Renamed:
    """A metric under another name or with other sources.

    Attributes:
      metric: The metric itself.
      name: Under which its value is reported.
      reads: Where its arguments come from.
    """

    metric: Metric
    name: str
    reads: Reads

    def __post_init__(self) -> None:
        check_name(self.name)

    @property
    def mode(self) -> Mode:
        """The metric's own mode."""
        return self.metric.mode

    def init(self, *args: Any) -> PyTree:
        """As the metric."""
        return self.metric.init(*args)

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """As the metric."""
        return self.metric.update(acc, *args, weights=weights)

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """As the metric."""
        return self.metric.merge(a, b)

    def compute(self, acc: PyTree) -> Any:
        """As the metric."""
        return self.metric.compute(acc)


def check_name(name: object) -> str:
    """Give a metric's name, or raise TypeError when it is no string and ValueError when it is empty."""
    if not isinstance(name, str):
        raise TypeError(f"a metric's name must be a string, got {name!r} ({type(name).__name__})")
    if not name:
        raise ValueError("a metric's name must not be empty")
    return name


def as_reads(reads: Reads | str | Sequence[str]) -> Reads:
    """Give the sources of a metric's arguments in their normal form; one name may stand alone.

    Raises:
      TypeError: It is neither names nor a function nor a type.
    """
    match reads:
        case str():
            return (reads,)
        case tuple() | list() if reads and {type(r) for r in reads} == {str}:
            return tuple(reads)
        case _ if callable(reads):
            return reads
        case _:
            raise TypeError(
                "reads must be names such as ('targets', 'prediction') or 'batch.mask', or a function of the outputs "
                f"that returns a tuple of arguments, got {reads!r}"
            )
