"""Evaluation batches of several processes: here one of them, which hears what the others are made to say."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from telic.errors import DataError
from telic.loop.ports import View
from telic.placement.joining import JoinedBatches, JoinedSource

NOTHING = [0, None]


class Others:
    """Two processes of one share each; this is process 0, and process 1 says what it is made to, in turn."""

    index, count, post = 0, 2, None

    def __init__(self, says: Sequence[Any]):
        self._says = list(says)

    def agree(self, value: Any) -> Any:
        return value

    def exchange(self, what: str, value: Any) -> list[Any]:
        return [value, self._says.pop(0)]

    def stops(self) -> bool:
        return False


class Shares:
    """A placement over four devices of two processes, which notes the batches whose rows are put together."""

    partition = (0, 2)
    divides = 4

    def __init__(self, *says: Any):
        self.processes = Others(says)
        self.together_of: list[list[int]] = []

    def together(self, batch: Any, like: Any, rows: Sequence[int]) -> Any:
        self.together_of.append(list(rows))
        assert like is not None
        return "together"


class Source:
    """Batches of one epoch, then of the next."""

    read_ahead, fresh = True, True

    def __init__(self, batches: list[Any]):
        self.batches = batches
        self.at = 0

    def begin(self, epoch: int, *, continuous: bool = False) -> None:
        self.at = 0

    def next(self, view: View) -> Any:
        if self.at == len(self.batches):
            raise StopIteration
        self.at += 1
        return self.batches[self.at - 1], self.at

    def get_state(self) -> Any:
        return self.at

    def set_state(self, position: Any) -> None:
        self.at = position

    def close(self) -> None:
        self.at = -1


def rows(count: int) -> Any:
    return {"x": np.ones((count, 3), np.float32)}


def said(count: int) -> Any:
    return [count, [[3]]]


def test_equal_shares_that_divide_stay_and_all_others_are_put_together() -> None:
    """Catches a gather for every batch, and a rest that one process evaluates by itself."""
    shares = Shares(said(2), said(1), NOTHING, NOTHING)
    batches = [rows(2), rows(1), rows(1)]
    assert list(JoinedBatches(shares, batches)) == [batches[0], "together", "together"]
    assert shares.together_of == [[1, 1], [1, 0]]


def test_a_share_without_rows_counts_none() -> None:
    """Catches a record that one process has alone and that is counted twice, the second time as a row of zeros."""
    shares = Shares(said(1), NOTHING)
    assert list(JoinedBatches(shares, [rows(0)])) == ["together"]
    assert shares.together_of == [[0, 1]]


def test_a_batch_without_rows_anywhere_is_no_end() -> None:
    """Catches an evaluation that stops at an empty batch and leaves those after it out."""
    batches = [rows(0), rows(2)]
    assert list(JoinedBatches(Shares(said(0), said(2), NOTHING), batches)) == [batches[1]]


def test_the_process_with_fewer_batches_waits_for_the_others() -> None:
    """Catches an epoch that ends in one process while another still has batches (XS138)."""
    shares = Shares(said(2), said(2), NOTHING, said(2), said(2), NOTHING)
    source = JoinedSource(shares, Source([rows(2)]))
    view = View(None, 0, 0)
    for epoch in (0, 1):
        source.begin(epoch)
        found = [source.next(view)[0], source.next(view)[0]]
        with pytest.raises(StopIteration):
            source.next(view)
        assert found[1] == "together"
    assert shares.together_of == [[0, 2], [0, 2]]


@pytest.mark.parametrize("says", [[2, [[4]]], [2, [[3], [1]]]])
def test_shares_of_other_shapes_are_refused(says: Any) -> None:
    """Catches a hang in a program that the processes compile for different shapes."""
    with pytest.raises(DataError, match="2 shapes"):
        list(JoinedBatches(Shares(says), [rows(2)]))


def test_a_process_that_never_had_a_batch_is_told_so() -> None:
    """Catches a process that cannot take part, and a message that does not say why."""
    with pytest.raises(DataError, match="one at least"):
        list(JoinedBatches(Shares(said(2)), []))
