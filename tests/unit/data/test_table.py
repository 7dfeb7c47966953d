"""`columns`: order, coverage, positions, partitions and what is refused."""

import itertools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telic.data import DataPartition, Dataset, as_source, as_validation, columns
from telic.data.table import epoch_order
from telic.errors import DataError
from telic.loop.ports import View

ALL = DataPartition()


def make(length: int = 10, batch: int = 3, **options: Any) -> Dataset:
    data = {"inputs": np.arange(2 * length, dtype=np.float32).reshape(length, 2), "targets": np.arange(length)}
    return columns(data, batch=batch, **options)


def targets(data: Dataset, count: int, partition: DataPartition = ALL, state: Any = None) -> list[list[int]]:
    stream = iter(data.train(partition))
    if state is not None:
        stream.set_state(state)  # type: ignore[attr-defined]
    return [batch["targets"].tolist() for batch in itertools.islice(stream, count)]


def test_rows_of_all_columns_stay_together() -> None:
    """Catches columns shuffled apart, so that inputs meet the targets of other records."""
    batch = next(iter(make().train(ALL)))
    assert batch["inputs"][:, 0].tolist() == (2 * batch["targets"]).tolist()
    assert list(batch) == ["inputs", "targets"]


@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 40),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 3),
)
def test_each_epoch_is_part_of_a_permutation(length: int, batch: int, seed: int, epoch: int) -> None:
    """Catches records that come twice in an epoch, and a last batch of another size."""
    if batch > length:
        return
    per_epoch = length // batch
    batches = targets(make(length, batch, seed=seed), per_epoch * (epoch + 1))[per_epoch * epoch :]
    records = list(itertools.chain(*batches))
    assert {len(b) for b in batches} == {batch}
    assert len(set(records)) == len(records) == per_epoch * batch
    assert sorted(epoch_order(seed, epoch, length).tolist()) == list(range(length))


@given(length=st.integers(2, 30), batch=st.integers(1, 8), done=st.integers(0, 40), shuffle=st.booleans())
def test_any_position_restores_the_exact_stream(length: int, batch: int, done: int, shuffle: bool) -> None:
    """Catches a resume that repeats, drops or reorders batches, in mid-epoch and at borders (XS099, XS104)."""
    if batch > length:
        return
    data = make(length, batch, seed=5, shuffle=shuffle)
    expected = targets(data, done + 12)
    stream = iter(data.train(ALL))
    for _ in range(done):
        next(stream)
    position = json.loads(json.dumps(stream.get_state()))  # type: ignore[attr-defined]
    assert targets(make(length, batch, seed=5, shuffle=shuffle), 12, state=position) == expected[done:]


@given(share=st.integers(1, 4), count=st.integers(1, 4), k=st.integers(0, 9), shuffle=st.booleans())
def test_partitions_tile_the_global_batch(share: int, count: int, k: int, shuffle: bool) -> None:
    """Catches another number of processes reading other batches, or two reading the same rows."""
    data = make(20, share * count, shuffle=shuffle)
    whole = targets(data, k + 1)[k]
    parts = [targets(data, k + 1, DataPartition(i, count))[k] for i in range(count)]
    assert [len(part) for part in parts] == [share] * count
    assert list(itertools.chain(*parts)) == whole


def test_position_moves_to_another_number_of_processes() -> None:
    """Catches a checkpoint that holds only on as many processes as wrote it."""
    data = make(20, 4)
    stream = iter(data.train(DataPartition(1, 2)))
    for _ in range(7):
        next(stream)
    state = stream.get_state()  # type: ignore[attr-defined]
    assert targets(data, 3, ALL, state) == targets(data, 10)[7:]


@given(length=st.integers(2, 40), batch=st.integers(1, 12), held_out=st.integers(1, 30), count=st.integers(1, 3))
def test_validation_covers_each_held_out_record_once_in_order(
    length: int, batch: int, held_out: int, count: int
) -> None:
    """Catches a dropped remainder, and a held-out record that training reads (XS103)."""
    if length - held_out < batch * count:
        return
    data = make(length, batch * count, held_out=held_out)
    passes = [list(as_validation(data, partition=DataPartition(i, count))) for i in range(count)]
    together = [r for parts in zip(*passes, strict=True) for part in parts for r in part["targets"].tolist()]
    assert together == list(range(length - held_out, length))
    trained = set(itertools.chain(*targets(data, 3 * data.batches_per_epoch)))  # type: ignore[operator]
    assert trained.isdisjoint(together)


def test_order_is_pinned() -> None:
    """Catches a shuffle that depends on the version of NumPy, the process or the machine."""
    assert epoch_order(0, 0, 8).tolist() == [7, 3, 0, 6, 5, 4, 1, 2]
    assert epoch_order(3, 2, 8).tolist() == [5, 4, 7, 3, 2, 6, 1, 0]


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_rows_drawn_from_the_same_seed_do_not_come_out_sorted(seed: int) -> None:
    """NumPy pads a seed with zeros, so that epoch 0 of a seed was the stream of ``default_rng(seed)``: rows drawn
    uniformly from that were read in ascending order, and trained badly without a word."""
    drawn = np.random.default_rng(seed).uniform(size=400)
    found = drawn[epoch_order(seed, 0, 400)]
    assert abs(np.corrcoef(found, np.arange(400))[0, 1]) < 0.2


def test_restarts_at_each_epoch_border_do_not_repeat_epoch_zero() -> None:
    """Catches a run preempted at every border that reads epoch 0's order for ever (XS105)."""
    data = make(12, 3)
    unbroken = targets(data, 12)
    broken: list[list[int]] = []
    position = None
    for _ in range(3):
        source = as_source(make(12, 3))
        if position is not None:
            source.set_state(position)
        epoch = len(broken) // 4
        source.begin(epoch)
        for i in range(4):
            batch, position = source.next(View(None, epoch, i))
            broken.append(batch["targets"].tolist())
    assert broken == unbroken[:12]
    assert len({str(broken[4 * e : 4 * e + 4]) for e in range(3)}) == 3


def test_resume_twice() -> None:
    """Catches a position that stops advancing after the first restore (S28)."""
    expected = targets(make(), 9)
    got: list[list[int]] = []
    position = None
    for _ in range(3):
        source = as_source(make())
        if position is not None:
            source.set_state(position)
        for _ in range(3):
            source.begin(len(got) // 3)
            batch, position = source.next(View(None, len(got) // 3, len(got) % 3))
            got.append(batch["targets"].tolist())
    assert got == expected


def test_without_shuffle_the_order_is_kept_and_the_remainder_dropped() -> None:
    """Catches shuffle=False that still shuffles, and an epoch that starts in the middle of the data."""
    assert targets(make(shuffle=False), 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_fresh_memory(shuffle: bool) -> None:
    """Catches a batch that is a view of the columns or of an earlier batch, and changes under the device."""
    inputs = np.zeros((8, 2), np.float32)
    data = columns({"inputs": inputs}, batch=4, shuffle=shuffle, held_out=4)
    stream = iter(data.train(ALL))
    first, second = next(stream)["inputs"], next(stream)["inputs"]
    (held,) = as_validation(data)
    for a, b in itertools.combinations([inputs, first, second, held["inputs"]], 2):
        assert not np.shares_memory(a, b)
    assert as_source(data).fresh is True
    assert as_validation(data).fresh is True


def test_dtypes_stay() -> None:
    """Catches uint8 images fed as float32 at four times the bytes, and bfloat16 refused or widened."""
    data = columns((np.zeros((4, 2), np.uint8), jnp.zeros((4,), jnp.bfloat16), [1, 2, 3, 4]), batch=2)
    batch = next(iter(data.train(ALL)))
    assert isinstance(batch, tuple)
    assert [str(x.dtype) for x in batch] == ["uint8", "bfloat16", "int64"]
    assert all(type(x) is np.ndarray for x in batch)


def test_epoch_length_reaches_the_dataset() -> None:
    """Catches an epoch counted over the held-out records as well."""
    data = make(10, 3, held_out=2)
    assert (data.records, data.batch, data.held_out, data.batches_per_epoch) == (8, 3, 2, 2)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 1}, "seed"),
        ({"length": 12}, "length"),
        ({"batch": 2}, "batch"),
        ({"shuffle": False}, "shuffle"),
        ({"held_out": 1}, "length"),
    ],
)
def test_position_of_other_columns_is_refused(change: dict[str, Any], field: str) -> None:
    """Catches a resume on a changed stream, which would repeat some records and never read others."""
    position = iter(make().train(ALL)).get_state()  # type: ignore[attr-defined]
    other = iter(make(**change).train(ALL))
    with pytest.raises(DataError, match=f"taken with {field}="):
        other.set_state(position)  # type: ignore[attr-defined]


def test_position_of_other_shapes_is_refused() -> None:
    """Catches columns exchanged for others of the same length."""
    position = iter(make().train(ALL)).get_state()  # type: ignore[attr-defined]
    other = iter(columns({"inputs": np.zeros((10, 3), np.float32), "targets": np.arange(10)}, batch=3).train(ALL))
    with pytest.raises(DataError, match=r"columns='inputs float32\[2\]; targets int64\[\]'"):
        other.set_state(position)  # type: ignore[attr-defined]


@pytest.mark.parametrize("position", [None, {}, 3, {"batches": 1}])
def test_what_is_no_position_is_refused(position: Any) -> None:
    """Catches a bare count, or half a position, taken for one."""
    with pytest.raises(DataError, match="a position of columns has the fields batches, seed"):
        iter(make().train(ALL)).set_state(position)  # type: ignore[attr-defined]


@pytest.mark.parametrize("batches", [-1, 1.5, "2", True])
def test_damaged_count_is_refused(batches: Any) -> None:
    """Catches a negative count, which reads from the end of an epoch before the first."""
    stream: Any = iter(make().train(ALL))
    with pytest.raises(DataError, match="batches must be an integer"):
        stream.set_state({**stream.get_state(), "batches": batches})


@pytest.mark.parametrize(
    ("data", "options", "kind", "message"),
    [
        ({"inputs": np.zeros(3), "targets": np.zeros(4)}, {}, ValueError, r"'?inputs'?: 3, '?targets'?: 4"),
        ((np.zeros(3), np.zeros(4)), {}, ValueError, "0: 3, 1: 4"),
        ({"inputs": np.array(["a", "b"])}, {}, ValueError, "column 'inputs' must hold numbers, got dtype <U1"),
        ({"inputs": np.array([None, 1])}, {}, ValueError, "column 'inputs' must hold numbers, got dtype object"),
        ({"inputs": np.array(["2020-01-01"], "M8[D]")}, {}, ValueError, "must hold numbers"),
        ({"inputs": 3.0}, {}, ValueError, "one row per record"),
        ({"inputs": {"a": np.zeros(4)}}, {}, TypeError, "a column of its own"),
        ({}, {}, ValueError, "at least one column"),
        ({1: np.zeros(4)}, {}, TypeError, "named by strings"),
        (np.zeros((4, 2)), {}, TypeError, "a mapping of arrays or a tuple of arrays, got ndarray"),
        ([np.zeros(4), np.zeros(4)], {}, TypeError, "got list"),
        (None, {}, TypeError, "got NoneType"),
        ({"inputs": np.zeros(4)}, {"batch": 5}, ValueError, "at least one batch of 5 training records, got 4"),
        ({"inputs": np.zeros(4)}, {"batch": 2, "held_out": 3}, ValueError, r"got 1 \(4 records less held_out=3\)"),
        ({"inputs": np.zeros(4)}, {"held_out": 4}, ValueError, "held_out must be less than the 4 records"),
        ({"inputs": np.zeros(4)}, {"held_out": 9}, ValueError, "held_out must be less than the 4 records"),
        ({"inputs": np.zeros(4)}, {"held_out": -1}, ValueError, "held_out must be an integer of at least 0"),
        ({"inputs": np.zeros(4)}, {"batch": 0}, ValueError, "batch must be an integer of at least 1"),
        ({"inputs": np.zeros(4)}, {"batch": 2.0}, ValueError, "batch must be an integer of at least 1"),
        ({"inputs": np.zeros(4)}, {"seed": -1}, ValueError, "seed must be an integer of at least 0"),
    ],
)
def test_what_is_no_table_is_refused(data: Any, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """Catches arrays that would fail later inside NumPy or JAX, without the column's name."""
    with pytest.raises(kind, match=message):
        columns(data, **{"batch": 2, **options})


def test_rows_of_several_lengths_name_the_column() -> None:
    """Catches NumPy's message about inhomogeneous shapes coming without the column."""
    with pytest.raises(ValueError, match="inhomogeneous") as caught:
        columns({"tokens": [[1, 2], [3]]}, batch=1)
    assert caught.value.__notes__ == ["column 'tokens' must be an array whose rows have one shape"]


@pytest.mark.parametrize("side", ["train", "val"])
def test_indivisible_batch_is_refused_when_opened(side: str) -> None:
    """Catches a global batch that is silently cut to a multiple of the processes (XS102)."""
    with pytest.raises(ValueError, match="does not divide over 2 processes"):
        getattr(make(10, 3, held_out=4), side)(DataPartition(0, 2))


def test_halted_epoch_goes_on_in_the_stream() -> None:
    """Catches records that a halted epoch would lose for ever."""
    data = make(9, 3)
    source = as_source(data)
    got: list[list[int]] = []
    for epoch, count in [(0, 1), (1, 3)]:
        source.begin(epoch)
        got += [source.next(View(None, epoch, i))[0]["targets"].tolist() for i in range(count)]
    assert got == targets(data, 4)
