"""Reading a source one batch at a time: what a loop does when nobody feeds it faster."""

from dataclasses import dataclass
from typing import Any

from telic.loop.ports import Position, Source, View
from telic.types import Batch


@dataclass(frozen=True)
class Single:
    """One batch, with the position after it."""

    batch: Batch
    position: Position

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Batch:
        if index not in (0, -1):
            raise IndexError(index)
        return self.batch

    def split(self, count: int) -> "tuple[Single, None]":
        """Give itself: one batch cannot be split."""
        del count
        return self, None

    def join(self, other: Any) -> bool:
        """Say that it takes no other."""
        del other
        return False

    def release(self) -> None:
        """Let go."""


class OneByOne:
    """A feed that reads when it is asked, one batch at a time."""

    waited = 0.0

    def __init__(self, source: Source):
        self._source = source

    def begin(self, epoch: int, *, continuous: bool, back_to: Position | None, keep: bool, unused: bool) -> None:
        """Start an epoch."""
        if unused and not keep and back_to is not None:
            self._source.set_state(back_to)
        self._source.begin(epoch, continuous=continuous)

    def next(self, view: View, most: int | None) -> Single | None:
        """Give the next batch, or None at the epoch's end."""
        del most
        try:
            return Single(*self._source.next(view))
        except StopIteration:
            return None

    def grow(self, batches: Any, count: int, view: View) -> None:
        """Leave one batch as it is."""

    def close(self) -> None:
        """Do nothing."""
