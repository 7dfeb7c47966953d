"""Evaluation batches of several processes, each a share: as many in every process, rows that are left over included."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from telic import tree
from telic.errors import DataError
from telic.loop.ports import Position, Processes, Source, View
from telic.types import Batch


class Shares(Protocol):
    """The part of a placement that joining needs."""

    @property
    def processes(self) -> Processes: ...

    @property
    def partition(self) -> tuple[int, int]: ...

    @property
    def divides(self) -> int: ...

    def together(self, batch: Batch | None, like: Batch, rows: Sequence[int]) -> Batch: ...


class Meeting:
    """Where the processes come with their shares, batch by batch.

    A batch of which the processes have equal shares that divide over the devices stays as it is. Of any other, every
    process gets the rows of all, placed on the mesh.
    """

    def __init__(self, placement: Shares):
        self._placement = placement
        self._like: Batch | None = None

    def batch(self, read: Callable[[], Batch | None]) -> Batch | None:
        """Give the next batch that has rows; None once no process has one.

        Args:
          read: Gives this process's next share; None where it has no more.
        Raises:
          DataError: The shares are of other shapes, or a process has had none at all.
        """
        while True:
            batch = read()
            shapes = None if batch is None else [list(np.shape(x)[1:]) for x in jax.tree.leaves(batch)]
            told = self._placement.processes.exchange("an evaluation batch", [_rows(batch), shapes])
            if all(kind is None for _, kind in told):
                return None
            self._like = self._like if batch is None else batch
            rows = [row for row, _ in told]
            kinds = {str(kind) for _, kind in told if kind is not None}
            if self._like is None or len(kinds) > 1:
                raise DataError(
                    f"the processes read evaluation batches of {rows} rows and {len(kinds)} shapes: each must read its "
                    "share of the same batches, and one at least; give a Dataset, whose val takes the partition"
                )
            if not any(rows):
                continue
            total = rows[0] * self._placement.partition[1]
            if len(set(rows)) == 1 and total % self._placement.divides == 0 and batch is not None:
                return batch
            return self._placement.together(batch, self._like, rows)


def _rows(batch: Batch | None) -> int:
    found = None if batch is None else tree.leading_dimension(batch)
    return int(batch is not None) if found is None else found


class JoinedBatches:
    """Batches of a validation, read any number of times."""

    def __init__(self, placement: Shares, batches: Iterable[Any]):
        self._batches = batches
        self._meeting = Meeting(placement)

    def __iter__(self) -> Iterator[Batch]:
        """Give the batches of one pass."""
        iterator = iter(self._batches)
        while (batch := self._meeting.batch(lambda: next(iterator, None))) is not None:
            yield batch


class JoinedSource:
    """The batches of a loop that evaluates."""

    read_ahead = True
    fresh = False

    def __init__(self, placement: Shares, source: Source):
        self._source = source
        self._meeting = Meeting(placement)
        self._has_more = True

    def begin(self, epoch: int, *, continuous: bool = False) -> None:
        """Start an epoch."""
        self._has_more = True
        self._source.begin(epoch, continuous=continuous)

    def next(self, view: View) -> tuple[Batch, Position]:
        """Give the next batch and this process's position after it; raise StopIteration when no process has one."""
        batch = self._meeting.batch(lambda: self._share(view))
        if batch is None:
            raise StopIteration
        return batch, self._source.get_state()

    def _share(self, view: View) -> Batch | None:
        if self._has_more:
            try:
                return self._source.next(view)[0]
            except StopIteration:
                self._has_more = False
        return None

    def get_state(self) -> Position:
        """Give the position of the next batch."""
        return self._source.get_state()

    def set_state(self, position: Position) -> None:
        """Go to a position."""
        self._has_more = True
        self._source.set_state(position)

    def close(self) -> None:
        """Release what the source holds."""
        self._source.close()
