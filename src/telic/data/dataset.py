"""A data set as a value: how to open its training stream and its validation pass, and how long an epoch is."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from telic.errors import check_call


def _set(value: Any, name: str, content: object) -> None:
    """Set a field of a frozen dataclass while it is being built."""
    object.__setattr__(value, name, content)


def as_count(what: str, value: object, *, minimum: int) -> int:
    """Give an integer of at least `minimum` as a plain int; raise ValueError for anything else."""
    try:
        count = None if isinstance(value, bool) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        count = None
    if count is None or count < minimum:
        raise ValueError(f"{what} must be an integer of at least {minimum}, got {value!r}")
    return count


@dataclass(frozen=True)
class DataPartition:
    """The share of the data one process reads.

    Attributes:
      index: This process, from 0.
      count: Number of processes.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        _set(self, "count", as_count("DataPartition count", self.count, minimum=1))
        _set(self, "index", as_count("DataPartition index", self.index, minimum=0))
        if self.index >= self.count:
            raise ValueError(
                f"DataPartition index must be below count={self.count}, got {self.index}; processes count from 0"
            )

    def rows(self, batch: int) -> slice:
        """Give this process's rows of a global batch.

        Raises:
          ValueError: The batch does not divide over the processes.
        """
        if batch % self.count:
            raise ValueError(
                f"a batch of {batch} records does not divide over {self.count} processes; "
                f"give a multiple of {self.count}, such as {max(1, round(batch / self.count)) * self.count}"
            )
        share = batch // self.count
        return slice(self.index * share, (self.index + 1) * share)

    def even_rows(self, batch: int) -> slice:
        """Give this process's rows of a global batch of any size; shares differ by one record at most."""
        return slice(self.index * batch // self.count, (self.index + 1) * batch // self.count)


WHOLE = DataPartition()
"""All of the data: the share of a run on one process."""


@dataclass(frozen=True)
class Dataset:
    """Training batches, validation batches and the length of an epoch.

    The training stream is opened once per run. With `records` an epoch is ``records // batch`` batches of it; a stream
    that ends at the border of an epoch is opened again. Without `records` an epoch ends when the stream ends, and the
    next one opens it again.

    A stream whose iterator has ``get_state()`` and ``set_state(state)`` resumes from its state. Any other is opened
    again on resume and read up to its position, so opening it twice must give the same batches.

    Attributes:
      train: Opens the training stream of one process: ``(partition) -> iterator of batches``.
      val: Validation batches: ``(partition) -> iterable of batches``, an iterable that can be read many times, or None.
      records: Training records per epoch over all processes.
      batch: Records per batch over all processes.
      held_out: Records only `val` reads; information for reports. It needs a `val`.
    Raises:
      TypeError: `train` is not callable.
      ValueError: A count is not a positive integer, `records` comes without `batch` or is less than one batch, or
        `held_out` comes without `val`.
    Example:
      >>> data = Dataset(train=lambda partition: iter([[1.0, 2.0], [3.0, 4.0]]), records=4, batch=2)
      >>> data.batches_per_epoch
      2
    """

    train: Callable[[DataPartition], Iterable[Any]]
    val: Callable[[DataPartition], Iterable[Any]] | Iterable[Any] | None = None
    records: int | None = None
    batch: int | None = None
    held_out: int = 0

    def __post_init__(self) -> None:
        if not callable(self.train):
            raise TypeError(
                f"Dataset train must be a function (partition) -> iterator of batches, got "
                f"{type(self.train).__name__}; write train=lambda partition: ..., or pass the batches to the loop as "
                "they are"
            )
        check_call("Dataset train", self.train, ("partition",))
        if callable(self.val) and not isinstance(self.val, Iterable):
            check_call("Dataset val", self.val, ("partition",))
        if self.records is not None:
            _set(self, "records", as_count("Dataset records", self.records, minimum=1))
        if self.batch is not None:
            _set(self, "batch", as_count("Dataset batch", self.batch, minimum=1))
        _set(self, "held_out", as_count("Dataset held_out", self.held_out, minimum=0))
        if self.records is not None and self.batch is None:
            raise ValueError(
                f"Dataset records={self.records} needs batch=, the records per batch: an epoch is records // batch "
                "batches"
            )
        if self.records is not None and self.batch is not None and self.batch > self.records:
            raise ValueError(
                f"Dataset batch must be at most records={self.records}, got {self.batch}: an epoch would have no batch"
            )
        if self.held_out and self.val is None:
            raise ValueError(
                f"Dataset held_out={self.held_out} needs val=, the batches of those records; telic.data.columns makes "
                "them from held_out alone"
            )

    @property
    def batches_per_epoch(self) -> int | None:
        """Training batches of one epoch; None when the epoch ends with the stream."""
        if self.records is None or self.batch is None:
            return None
        return self.records // self.batch
