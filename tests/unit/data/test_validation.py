"""`as_validation`: read whole, as often as asked, never for ever."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import pytest

import telic.data.validation
from telic.data import DataPartition, Dataset, as_validation, columns
from telic.errors import DataError

BATCHES = [np.full(2, i) for i in range(4)]


def read(data: Any, **options: Any) -> list[list[int]]:
    """Read two passes, which must be the same."""
    validation = as_validation(data, **options)
    first, second = ([int(np.asarray(b).flat[0]) for b in validation] for _ in range(2))
    assert first == second
    return [first]


class Endless:
    """A re-iterable without a length that never ends."""

    def __iter__(self) -> Iterator[np.ndarray]:
        return itertools.repeat(np.zeros(2))


@pytest.mark.parametrize(
    "data",
    [
        BATCHES,
        tuple([b] for b in BATCHES),
        lambda: BATCHES,
        lambda: iter(BATCHES),
        lambda n=4: BATCHES[:n],
        Dataset(train=lambda p: iter([]), val=BATCHES),
        Dataset(train=lambda p: iter([]), val=lambda partition: iter(BATCHES)),
        grain.MapDataset.source(BATCHES),
        grain.MapDataset.source(BATCHES).to_iter_dataset(),
        grain.MapDataset.source(BATCHES).repeat()[:4],
        grain.experimental.LimitIterDataset(grain.MapDataset.source(BATCHES).repeat().to_iter_dataset(), 4),
    ],
)
def test_every_batch_in_every_pass(data: Any) -> None:
    """Catches a second validation that is empty, or starts where the first stopped."""
    assert read(data) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("data", [BATCHES, lambda: iter(BATCHES), columns((np.arange(9),), batch=1, held_out=5)])
def test_limit_is_obeyed(data: Any) -> None:
    """Catches a limit that is ignored for data with a length (XS096)."""
    assert [len(passed) for passed in read(data, limit=3)] == [3]


@pytest.mark.parametrize(
    "data",
    [
        itertools.repeat(np.zeros(2)),
        itertools.cycle([np.zeros(2)]),
        itertools.count(),
        Dataset(train=lambda p: iter([]), val=itertools.repeat(np.zeros(2))),
        grain.MapDataset.source(BATCHES).repeat(),
        grain.MapDataset.source(BATCHES).repeat().batch(3),
        grain.MapDataset.source(BATCHES).repeat().to_iter_dataset(),
        grain.experimental.RepeatIterDataset(grain.MapDataset.source(BATCHES).to_iter_dataset()),
    ],
)
def test_infinite_data_asks_for_a_limit_at_the_start(data: Any) -> None:
    """Catches a run that freezes at the end of its first epoch (S29)."""
    with pytest.raises(DataError, match=r"is infinite .*; give limit="):
        as_validation(data)


@pytest.mark.parametrize("data", [itertools.repeat(np.zeros(2)), Endless(), lambda: itertools.cycle(BATCHES)])
def test_infinite_data_with_a_limit(data: Any) -> None:
    """Catches a limit that does not help."""
    assert len(read(data, limit=5)[0]) == 5


def test_infinite_data_made_by_a_function_is_found_when_opened() -> None:
    """Catches 100,000 batches read before a known endless iterator is refused."""
    with pytest.raises(DataError, match="is infinite"):
        next(iter(as_validation(lambda: itertools.repeat(np.zeros(2)))))


def test_data_without_a_length_stops_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a validation that hangs without a word, and one that refuses exactly as many as are allowed."""

    def endless() -> Iterator[np.ndarray]:
        while True:
            yield np.zeros(2)

    assert telic.data.validation.MOST_BATCHES == 100_000
    monkeypatch.setattr(telic.data.validation, "MOST_BATCHES", 50)
    with pytest.raises(DataError, match=r"gave 50 batches in one pass, so it is taken to be infinite; give limit="):
        list(as_validation(endless))
    assert len(list(as_validation(lambda: itertools.islice(endless(), 50)))) == 50
    assert len(list(as_validation(endless, limit=60))) == 60
    assert len(list(as_validation([np.zeros(2)] * 60))) == 60


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter(BATCHES),
        lambda: (b for b in BATCHES),
        lambda: map(np.asarray, BATCHES),
        lambda: itertools.repeat(np.zeros(2), 3),
        lambda: iter(grain.MapDataset.source(BATCHES)),
        lambda: Dataset(train=lambda p: iter([]), val=iter(BATCHES)),
    ],
)
def test_what_is_read_once_is_refused(make: Callable[[], Any]) -> None:
    """Catches validation on nothing from the second epoch on (B36)."""
    with pytest.raises(TypeError, match="readable many times, got an iterator"):
        as_validation(make())


def test_dataset_without_val_is_an_error() -> None:
    """Catches validation on the training data when there is no other (XS101)."""
    with pytest.raises(DataError, match=r"Dataset has no val; pass val= or held_out="):
        as_validation(columns((np.zeros(4),), batch=2))


def test_val_gets_the_partition() -> None:
    """Catches every process validating on the first one's share."""
    data = Dataset(train=lambda p: iter([]), val=lambda p: [np.full(2, p.index)])
    assert [int(b[0]) for b in as_validation(data, partition=DataPartition(2, 3))] == [2]


@pytest.mark.parametrize("data", [[], lambda: [], Dataset(train=lambda p: iter([]), val=lambda p: [])])
def test_empty_pass_raises(data: Any) -> None:
    """Catches a validation of nothing that reports a loss of zero."""
    with pytest.raises(DataError, match="gave no batches"):
        list(as_validation(data))


def test_function_that_hands_out_one_iterator_raises_in_the_second_pass() -> None:
    """Catches the one-shot iterator hidden behind a function."""
    stream = iter(BATCHES)
    validation = as_validation(lambda: stream)
    assert len(list(validation)) == 4
    with pytest.raises(DataError, match="must give its batches anew each time it is read"):
        list(validation)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "got None"),
        ({"inputs": np.zeros((4, 2))}, r"got a mapping with the names 'inputs'.*columns\("),
        (np.zeros((4, 2)), r"got one array float64\[4, 2\].*columns\("),
        ((np.zeros((4, 2)), np.zeros(4)), "got one tuple of arrays"),
        ("validation", "got 'validation'"),
        (lambda epoch: BATCHES, r"must be \(\) -> iterable of batches, got the required parameters \(epoch\)"),
        (object(), "cannot be iterated"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, message: str) -> None:
    """Catches one batch, or columns, iterated row by row as if they were batches."""
    with pytest.raises(TypeError, match=message):
        as_validation(data)


@pytest.mark.parametrize("limit", [0, -1, 2.5])
def test_limit_is_a_count(limit: Any) -> None:
    """Catches limit=0 read as no limit, or as no validation."""
    with pytest.raises(ValueError, match="limit must be an integer of at least 1"):
        as_validation(BATCHES, limit=limit)


def test_bad_batch_is_named() -> None:
    """Catches text that reaches JAX, whose message does not say which batch."""
    with pytest.raises(DataError, match="validation batch 1: leaf text must be an array of numbers, got dtype <U1"):
        list(as_validation([{"x": np.zeros(2)}, {"x": np.zeros(2), "text": np.array(["a"])}]))
