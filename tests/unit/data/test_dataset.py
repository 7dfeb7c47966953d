"""`Dataset` and `DataPartition`: what may be constructed, and how epochs follow from the stream."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

from telic.data import DataPartition, Dataset, as_source
from telic.errors import DataError
from telic.loop.ports import Source, View


def numbers(start: int, stop: int) -> list[np.ndarray]:
    return [np.full(2, i) for i in range(start, stop)]


def epoch_of(source: Source, epoch: int, *, most: int = 1000, continuous: bool = False) -> list[int]:
    """Read an epoch as the loop does; each batch is named by its first element."""
    source.begin(epoch, continuous=continuous)
    out: list[int] = []
    while len(out) < most:
        try:
            batch, _ = source.next(View(None, epoch, len(out)))
        except StopIteration:
            break
        out.append(int(np.asarray(batch).flat[0]))
    return out


class Opened:
    """Counts how often a stream is opened, and what it gives each time."""

    def __init__(self, *openings: list[np.ndarray]):
        self.openings = openings
        self.times = 0

    def __call__(self, partition: DataPartition) -> Iterator[np.ndarray]:
        self.times += 1
        return iter(self.openings[min(self.times, len(self.openings)) - 1])


def test_stream_is_opened_once_and_cut_into_epochs() -> None:
    """Catches an epoch that reopens the stream and so repeats its beginning."""
    opened = Opened(numbers(0, 100))
    source = as_source(Dataset(train=opened, records=7, batch=2))
    assert [epoch_of(source, e) for e in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert opened.times == 1


def test_stream_that_ends_at_an_epoch_border_is_opened_again() -> None:
    """Catches a finite stream that raises in epoch 1 although it kept its promise."""
    opened = Opened(numbers(0, 3), numbers(10, 13))
    source = as_source(Dataset(train=opened, records=6, batch=2))
    assert [epoch_of(source, e) for e in range(2)] == [[0, 1, 2], [10, 11, 12]]
    assert opened.times == 2


def test_stream_that_ends_early_says_how_many_came() -> None:
    """Catches a short epoch that goes by in silence."""
    source = as_source(Dataset(train=Opened(numbers(0, 3)), records=8, batch=2))
    with pytest.raises(DataError, match=r"ended after 3 batches, but records // batch promises 4"):
        epoch_of(source, 0)


def test_stream_that_ends_early_in_a_later_epoch_says_so() -> None:
    """Catches the border check being made against the epoch's count instead of the stream's."""
    source = as_source(Dataset(train=Opened(numbers(0, 5)), records=8, batch=2))
    assert epoch_of(source, 0) == [0, 1, 2, 3]
    with pytest.raises(DataError, match="ended after 5 batches"):
        epoch_of(source, 1)


def test_after_a_halted_epoch_the_stream_goes_on() -> None:
    """Catches a halted epoch that shifts the border at which a finite stream may end."""
    opened = Opened(numbers(0, 4), numbers(10, 14))
    source = as_source(Dataset(train=opened, records=8, batch=2))
    assert epoch_of(source, 0, most=1) == [0]
    assert epoch_of(source, 1) == [1, 2, 3, 10]


def test_without_records_the_stream_ends_the_epoch_and_is_opened_again() -> None:
    """Catches a second epoch of a finite stream that is empty."""
    opened = Opened(numbers(0, 2), numbers(10, 13))
    source = as_source(Dataset(train=opened))
    assert [epoch_of(source, e) for e in range(2)] == [[0, 1], [10, 11, 12]]


@pytest.mark.parametrize("records", [None, 4])
def test_empty_opening_raises(records: int | None) -> None:
    """Catches training that runs zero iterations and completes."""
    data = Dataset(train=lambda partition: iter([]), records=records, batch=2)
    with pytest.raises(DataError, match=r"data is empty: Dataset.train\(partition\) gave no batches"):
        epoch_of(as_source(data), 0)


def test_empty_second_opening_raises() -> None:
    """Catches a factory that hands out one exhausted iterator for ever."""
    stream = iter(numbers(0, 2))
    source = as_source(Dataset(train=lambda partition: stream))
    assert epoch_of(source, 0) == [0, 1]
    with pytest.raises(DataError, match="no batches"):
        epoch_of(source, 1)


def test_continuous_stream_passes_every_border() -> None:
    """Catches `fit(steps=...)` ending with the first epoch."""
    source = as_source(Dataset(train=Opened(numbers(0, 4)), records=4, batch=2))
    assert epoch_of(source, 0, most=10, continuous=True) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    source = as_source(Dataset(train=Opened(numbers(0, 3))))
    assert epoch_of(source, 0, most=7, continuous=True) == [0, 1, 2, 0, 1, 2, 0]


def test_partition_reaches_the_factory() -> None:
    """Catches every process reading the first one's share."""
    data = Dataset(train=lambda partition: iter([np.full(2, 10 * partition.index + partition.count)]))
    assert epoch_of(as_source(data, partition=DataPartition(1, 3)), 0) == [13]


@pytest.mark.parametrize("records", [None, 8])
def test_any_position_restores_the_rest(records: int | None) -> None:
    """Catches a resume that repeats or drops batches, at the start, inside and at the end of each epoch."""

    def fresh() -> Source:
        return as_source(Dataset(train=lambda partition: iter(numbers(0, 4)), records=records, batch=2))

    source = fresh()
    positions = [source.get_state()]
    for epoch in range(2):
        source.begin(epoch)
        for i in range(4):
            positions.append(source.next(View(None, epoch, i))[1])
        with pytest.raises(StopIteration):
            source.next(View(None, epoch, 4))
    for position in positions:
        again = fresh()
        again.set_state(json.loads(json.dumps(position)))
        epoch = position["epoch"]
        assert epoch_of(again, epoch) == list(range(position["batch"], 4))
        assert epoch_of(again, epoch + 1) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"records": 10}, "needs batch="),
        ({"records": 0, "batch": 2}, "records must be an integer of at least 1, got 0"),
        ({"records": -4, "batch": 2}, "records must be an integer of at least 1, got -4"),
        ({"records": 10, "batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"records": 10, "batch": 11}, "batch must be at most records=10, got 11"),
        ({"records": 10.0, "batch": 2}, "records must be an integer"),
        ({"records": True, "batch": 1}, "records must be an integer"),
        ({"held_out": -1}, "held_out must be an integer of at least 0"),
        ({"held_out": 3}, "held_out=3 needs val="),
    ],
)
def test_counts_are_checked_at_construction(arguments: dict[str, int], message: str) -> None:
    """Catches an epoch of no batches that shows only when training starts."""
    with pytest.raises(ValueError, match=message):
        Dataset(train=lambda partition: iter([]), **arguments)


def test_train_must_be_a_function() -> None:
    """Catches a list given as train, which could not be opened for a partition."""
    with pytest.raises(TypeError, match="train must be a function"):
        Dataset(train=[np.zeros(2)])  # type: ignore[arg-type]


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_partition_is_one_of_the_processes(index: int, count: int) -> None:
    """Catches processes numbered from 1, of which the last would read beyond each batch."""
    with pytest.raises(ValueError, match="DataPartition"):
        DataPartition(index, count)


@pytest.mark.parametrize(("batch", "count"), [(65, 8), (7, 8)])
def test_batch_must_divide_over_processes(batch: int, count: int) -> None:
    """Catches batch // process_count, which trains on 64 records where 65 were asked for, and on none of 7 (XS102)."""
    with pytest.raises(ValueError, match=f"a batch of {batch} records does not divide over {count} processes"):
        DataPartition(0, count).rows(batch)


def test_numpy_integers_are_integers() -> None:
    """Catches counts that came out of a shape or an array being refused, or kept in a type JSON does not know."""
    data = Dataset(train=lambda partition: iter([]), records=np.int64(10), batch=np.int32(2))  # type: ignore[arg-type]
    assert (type(data.records), type(data.batch), data.batches_per_epoch) == (int, int, 5)
