"""`as_source`: every kind of data behind the port, epochs, exhaustion, positions, and what is refused."""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telic.data import Dataset, as_source, columns
from telic.errors import DataError
from telic.loop.ports import Source, View


def numbers(start: int, stop: int) -> list[np.ndarray]:
    return [np.full(2, i) for i in range(start, stop)]


def of_epoch(epoch: int) -> list[np.ndarray]:
    return numbers(10 * epoch, 10 * epoch + 4)


class Loader:
    """A re-iterable without a length."""

    def __init__(self, batches: Sequence[np.ndarray]):
        self.batches = batches
        self.times = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        self.times += 1
        return iter(self.batches)


class Records:
    """A random-access source of Grain with a length."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> int:
        return int(index)

    def __repr__(self) -> str:
        return f"Records({self.length})"  # a Grain DataLoader compares this when it is restored


def pipeline(length: int = 11, batch: int = 2, seed: int = 3) -> grain.MapDataset:
    return grain.MapDataset.source(Records(length)).seed(seed).shuffle().batch(batch, drop_remainder=True)


def loader(length: int = 8, batch: int = 2, seed: int = 1) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(
        num_records=length, num_epochs=1, shard_options=grain.sharding.NoSharding(), shuffle=True, seed=seed
    )
    return grain.DataLoader(
        data_source=Records(length), sampler=sampler, operations=[grain.transforms.Batch(batch)], worker_count=0
    )


def name_of(batch: Any) -> int:
    return int(np.asarray(batch).flat[0])


def epoch_of(source: Source, epoch: int, *, most: int = 1000, continuous: bool = False, start: int = 0) -> list[int]:
    """Read an epoch as the loop does; each batch is named by its first element."""
    source.begin(epoch, continuous=continuous)
    out: list[int] = []
    while len(out) < most:
        try:
            batch, _ = source.next(View(None, epoch, start + len(out)))
        except StopIteration:
            break
        out.append(name_of(batch))
    return out


KINDS: dict[str, Callable[[], Any]] = {
    "list": lambda: numbers(0, 4),
    "tuple of lists": lambda: tuple([b] for b in numbers(0, 4)),
    "re-iterable": lambda: Loader(numbers(0, 4)),
    "function": lambda: of_epoch,
    "function with a generator": lambda: lambda epoch: (b for b in of_epoch(epoch)),
    "grain map": pipeline,
    "grain iter": lambda: pipeline().to_iter_dataset(),
    "grain window shuffle": lambda: grain.experimental.WindowShuffleIterDataset(
        grain.MapDataset.source(Records(10)).batch(2).to_iter_dataset(), window_size=3, seed=1
    ),
    "grain loader": loader,
    "function with grain": lambda: lambda epoch: pipeline(seed=epoch),
    "dataset": lambda: Dataset(train=lambda partition: iter(numbers(0, 4))),
    "dataset with records": lambda: Dataset(train=lambda partition: iter(numbers(0, 8)), records=8, batch=2),
    "dataset with grain": lambda: Dataset(train=lambda partition: iter(pipeline())),
    "columns": lambda: columns((np.arange(9),), batch=2, seed=4),
}


# -- epochs


@pytest.mark.parametrize("make", [KINDS["list"], KINDS["tuple of lists"], KINDS["re-iterable"]])
def test_what_can_be_read_again_is_read_again(make: Callable[[], Any]) -> None:
    """Catches an empty second epoch."""
    source = as_source(make())
    assert [epoch_of(source, e) for e in range(3)] == [[0, 1, 2, 3]] * 3


def test_function_gets_the_epoch() -> None:
    """Catches a function called with the number of the call, or once for all epochs."""
    source = as_source(of_epoch)
    assert [epoch_of(source, e) for e in (0, 1, 5)] == [[0, 1, 2, 3], [10, 11, 12, 13], [50, 51, 52, 53]]


def test_halted_epoch_starts_the_next_from_its_beginning() -> None:
    """Catches the rest of a halted epoch leaking into the next one."""
    source = as_source(of_epoch)
    assert epoch_of(source, 0, most=1) == [0]
    assert epoch_of(source, 1) == [10, 11, 12, 13]


@pytest.mark.parametrize("kind", KINDS)
def test_begin_is_idempotent(kind: str) -> None:
    """Catches a second begin of an epoch that repeats its first batches."""
    whole = epoch_of(as_source(KINDS[kind]()), 0)
    source = as_source(KINDS[kind]())
    assert epoch_of(source, 0, most=2) + epoch_of(source, 0, start=2) == whole
    assert epoch_of(source, 0, start=len(whole)) == []


def test_continuous_data_is_one_stream() -> None:
    """Catches `fit(steps=...)` ending with the list, and a function asked for the same epoch again."""
    assert epoch_of(as_source(numbers(0, 3)), 0, most=7, continuous=True) == [0, 1, 2, 0, 1, 2, 0]
    got = epoch_of(as_source(of_epoch), 0, most=9, continuous=True)
    assert got == [0, 1, 2, 3, 10, 11, 12, 13, 20]


def test_one_shot_iterator_goes_on_where_it_stood() -> None:
    """Catches a first batch lost to a peek, and an epoch that starts over."""
    source = as_source(iter(numbers(0, 5)))
    assert epoch_of(source, 0, most=2) == [0, 1]
    assert epoch_of(source, 1) == [2, 3, 4]


def test_exhausted_iterator_raises_in_the_next_epoch() -> None:
    """Catches epochs of zero iterations that complete with zero metrics (B36)."""
    source = as_source(iter(numbers(0, 3)))
    assert epoch_of(source, 0) == [0, 1, 2]
    with pytest.raises(DataError, match=r"is exhausted: epoch 1 has no batches; .* pass a list, a Dataset or a fun"):
        epoch_of(source, 1)


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: [], lambda: iter([]), lambda: Loader([]), lambda: lambda epoch: [], lambda: pipeline(0)]
)
def test_empty_data_raises(make: Callable[[], Any], continuous: bool) -> None:
    """Catches a run over no data that completes, or that looks for data for ever."""
    with pytest.raises(DataError, match="data is empty"):
        epoch_of(as_source(make()), 0, continuous=continuous)


def test_function_without_batches_in_a_later_epoch_raises() -> None:
    """Catches a later empty epoch passing in silence."""
    source = as_source(lambda epoch: numbers(0, 2) if epoch == 0 else [])
    epoch_of(source, 0)
    with pytest.raises(DataError, match="gave no batches in epoch 1"):
        epoch_of(source, 1)


def test_re_iterable_that_hands_out_one_iterator_raises() -> None:
    """Catches a loader class whose __iter__ gives the same exhausted stream each time."""

    class Once(Loader):
        def __iter__(self) -> Iterator[np.ndarray]:
            self.stream = getattr(self, "stream", iter(self.batches))
            return self.stream

    source = as_source(Once(numbers(0, 2)))
    epoch_of(source, 0)
    with pytest.raises(DataError, match="exhausted"):
        epoch_of(source, 1)


def test_infinite_iterator_is_cut_by_the_loop() -> None:
    """Catches an endless stream read to its end before the first batch."""
    source = as_source(np.full(2, i) for i in itertools.count())
    assert [epoch_of(source, e, most=3) for e in range(2)] == [[0, 1, 2], [3, 4, 5]]


def test_data_is_opened_when_it_is_read() -> None:
    """Catches workers started, or files opened, by building a source."""
    data = Loader(numbers(0, 2))
    source = as_source(data)
    source.begin(0)
    assert data.times == 0
    epoch_of(source, 0)
    assert data.times == 1


# -- positions


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_any_position_restores_the_exact_stream(kind: str, continuous: bool) -> None:
    """Catches early data read twice and later data never, at any position of any kind (XS097, XS099)."""
    source = as_source(KINDS[kind]())
    positions = [source.get_state()]
    stream: list[int] = []
    for epoch in range(1 if continuous else 3):
        source.begin(epoch, continuous=continuous)
        for i in range(11 if continuous else 1000):
            try:
                batch, position = source.next(View(None, epoch, i))
            except StopIteration:
                break
            assert position == source.get_state()
            stream.append(name_of(batch))
            positions.append(position)
    source.close()
    assert len(positions) >= 12
    for done, position in enumerate(positions):
        again = as_source(KINDS[kind]())
        again.set_state(json.loads(json.dumps(position)))
        rest: list[int] = []
        for epoch in range(position["epoch"], 1 if continuous else 3):
            most = 11 - done if continuous else 1000
            rest += epoch_of(again, epoch, continuous=continuous, most=most)
        again.close()
        assert rest == stream[done:]


@given(stops=st.lists(st.integers(1, 4), min_size=2, max_size=5), kind=st.sampled_from(["list", "function", "columns"]))
def test_resume_again_and_again(stops: list[int], kind: str) -> None:
    """Catches a position that stops advancing after the first restore: the second one restarts the data (S28)."""
    whole = epoch_of(as_source(KINDS[kind]()), 0, most=sum(stops), continuous=True)
    got: list[int] = []
    position = None
    for stop in stops:
        source = as_source(KINDS[kind]())
        if position is not None:
            source.set_state(position)
        got += epoch_of(source, 0, most=stop, continuous=True)
        position = source.get_state()
    assert got == whole


@pytest.mark.parametrize("kind", ["grain map", "grain loader", "dataset", "re-iterable"])
def test_resume_twice(kind: str) -> None:
    """Catches the same for kinds that open threads (S28)."""
    whole = epoch_of(as_source(KINDS[kind]()), 0, most=7, continuous=True)
    got: list[int] = []
    position = None
    for stop in (2, 3, 2):
        source = as_source(KINDS[kind]())
        if position is not None:
            source.set_state(position)
            assert source.get_state() == position
        got += epoch_of(source, 0, most=stop, continuous=True)
        position = source.get_state()
        source.close()
    assert got == whole


def test_a_source_can_go_back() -> None:
    """Catches a restore that only works on a new source."""
    source = as_source(of_epoch)
    start = source.get_state()
    assert epoch_of(source, 0) == [0, 1, 2, 3]
    source.set_state(start)
    assert epoch_of(source, 0) == [0, 1, 2, 3]


def test_close_keeps_the_place() -> None:
    """Catches a source that, read after close, repeats its epoch from the beginning."""
    for kind in ("list", "columns", "grain map", "function with a generator"):
        whole = epoch_of(as_source(KINDS[kind]()), 0)
        source = as_source(KINDS[kind]())
        assert epoch_of(source, 0, most=2) == whole[:2]
        position = source.get_state()
        source.close()
        source.close()
        assert source.get_state() == position
        assert epoch_of(source, 0, start=2) == whole[2:]


def test_close_closes_what_was_opened_and_not_what_was_given() -> None:
    """Catches files left open by a halted run, and a caller's own generator closed behind their back."""
    closed: list[str] = []

    def stream(name: str) -> Iterator[np.ndarray]:
        try:
            yield from numbers(0, 4)
        finally:
            closed.append(name)

    opened = as_source(lambda epoch: stream("opened"))
    epoch_of(opened, 0, most=1)
    opened.close()
    assert closed == ["opened"]
    given_ = stream("given")
    source = as_source(given_)
    epoch_of(source, 0, most=1)
    source.close()
    assert closed == ["opened"]
    assert name_of(next(given_)) == 1


def test_iterator_skips_when_it_is_new() -> None:
    """Catches a resumed run on a new generator that starts from its first batch, also the second time."""
    source = as_source(iter(numbers(0, 9)))
    epoch_of(source, 0, most=2)
    again = as_source(iter(numbers(0, 9)))
    again.set_state(source.get_state())
    assert epoch_of(again, 0, most=3) == [2, 3, 4]
    third = as_source(iter(numbers(0, 9)))
    third.set_state(again.get_state())
    assert epoch_of(third, 1) == [5, 6, 7, 8]


def test_iterator_that_was_read_refuses_to_go_back() -> None:
    """Catches a restore that goes on from wherever the iterator happens to be."""
    source = as_source(iter(numbers(0, 9)))
    start = source.get_state()
    epoch_of(source, 0, most=2)
    with pytest.raises(DataError, match="has been read already and cannot go back"):
        source.set_state(start)


def test_advanced_iterator_is_not_opened_again() -> None:
    """Catches iter() called on the data again, which loses a restored place (XS100)."""
    stream = iter(pipeline())
    whole = [name_of(b) for b in pipeline()]
    for _ in range(3):
        next(stream)
    source = as_source(stream)
    assert epoch_of(source, 0) == whole[3:]


def test_iterator_with_a_state_goes_anywhere() -> None:
    """Catches a Grain iterator treated like a generator, which could not go back."""
    source = as_source(iter(pipeline()))
    start = source.get_state()
    whole = epoch_of(source, 0)
    source.set_state(start)
    assert epoch_of(source, 0) == whole


def test_position_does_not_change_with_the_iterator() -> None:
    """Catches a position that shares memory with the live state and moves on after it was taken."""
    source = as_source(pipeline().to_iter_dataset())
    source.begin(0)
    _, position = source.next(View(None, 0, 0))
    before = json.dumps(position)
    epoch_of(source, 0)
    assert json.dumps(position) == before


@pytest.mark.parametrize(
    ("make", "other", "message"),
    [
        (lambda: numbers(0, 4), lambda: numbers(0, 5), "length=4 batches, .* has length=5"),
        (lambda: pipeline(11), lambda: pipeline(20), "length=5 batches, .* has length=10"),
        (lambda: pipeline(12, 2), lambda: pipeline(12, 3), "length=6 batches, .* has length=4"),
        (lambda: loader(8), lambda: loader(10), "refuses the state of the position"),
        (lambda: loader(seed=1), lambda: loader(seed=2), "refuses the state of the position"),
        (lambda: pipeline(), lambda: numbers(0, 5), "the iterator of the list has no set_state"),
        (lambda: columns((np.arange(9),), batch=2), lambda: columns((np.arange(9),), batch=3), "taken with batch=2"),
    ],
)
def test_position_of_other_data_is_refused(make: Callable[[], Any], other: Callable[[], Any], message: str) -> None:
    """Catches a resume on changed data that goes on as if nothing had happened."""
    source = as_source(make())
    epoch_of(source, 0, most=2)
    with pytest.raises(DataError, match=message):
        as_source(other()).set_state(source.get_state())


def test_data_shorter_than_the_position_raises() -> None:
    """Catches a resume that takes the end of shorter data for the end of the epoch."""
    source = as_source(lambda epoch: numbers(0, 5))
    epoch_of(source, 0, most=4)
    again = as_source(lambda epoch: numbers(0, 3))
    again.set_state(source.get_state())
    with pytest.raises(DataError, match="ended before the position it should resume at: batch 4"):
        epoch_of(again, 0)


@pytest.mark.parametrize("position", [None, 3, {}, {"epoch": 0, "batch": 1}])
def test_what_is_no_position_is_refused(position: Any) -> None:
    """Catches a damaged checkpoint that starts the data anew."""
    with pytest.raises(DataError, match="a position of the list has the fields epoch, batch"):
        as_source(numbers(0, 4)).set_state(position)


@pytest.mark.parametrize("value", [-1, 1.0, "1", True])
def test_damaged_counts_are_refused(value: Any) -> None:
    """Catches a negative offset, which would skip nothing."""
    source = as_source(numbers(0, 4))
    with pytest.raises(DataError, match="a position's offset must be an integer"):
        source.set_state({**source.get_state(), "offset": value})


# -- kinds


def test_a_source_is_itself() -> None:
    """Catches a rollout source wrapped as if its batches were known beforehand."""
    source = as_source(numbers(0, 2))
    assert as_source(source) is source


@pytest.mark.parametrize("kind", KINDS)
def test_read_ahead_and_fresh(kind: str) -> None:
    """Catches a loader's reused memory passed on without a copy."""
    source = as_source(KINDS[kind]())
    assert (source.read_ahead, source.fresh) == (True, kind == "columns")


@pytest.mark.parametrize(
    "function",
    [
        of_epoch,
        functools.partial(lambda scale, epoch: of_epoch(scale * epoch), 1),
        lambda epoch, length=4: of_epoch(epoch)[:length],
        lambda epoch, *rest, **options: of_epoch(epoch),
    ],
)
def test_functions_of_one_epoch(function: Any) -> None:
    """Catches a count of parameters that does not see through partial, or counts defaults."""
    assert epoch_of(as_source(function), 2) == [20, 21, 22, 23]


def no_epoch() -> list[np.ndarray]:
    return []


def keyword_epoch(*, epoch: int) -> list[np.ndarray]:
    return of_epoch(epoch)


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (no_epoch, r"no_epoch with the required parameters \(\)"),
        (lambda epoch=0: of_epoch(epoch), r"required parameters \(\)"),
        (lambda *epochs: of_epoch(0), r"required parameters \(\)"),
        (lambda epoch, seed: of_epoch(epoch), r"required parameters \(epoch, seed\)"),
        (keyword_epoch, r"keyword_epoch with the required parameters \(epoch\)"),
    ],
)
def test_other_functions_are_refused(function: Any, shown: str) -> None:
    """Catches a generator function of no argument called with the epoch, deep inside the run."""
    with pytest.raises(TypeError, match=r"must be \(epoch\) -> iterable of batches, got .*" + shown):
        as_source(function)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "data must be batches, got None"),
        ({"inputs": np.zeros((4, 2)), "targets": np.zeros(4)}, r"'inputs', 'targets'; pass columns as .*columns\("),
        ({}, "a mapping with no names"),
        (np.zeros((4, 2)), r"one array float64\[4, 2\]; pass columns as"),
        (jnp.zeros((4, 2)), r"one array float32\[4, 2\]"),
        ((np.zeros((4, 2)), np.zeros(4)), r"one tuple of arrays \(float64\[4, 2\], float64\[4\]\)"),
        (((np.zeros(4), np.zeros(4)), np.zeros(4)), "one tuple of arrays"),
        ([np.zeros((4, 2)), np.zeros(4)], "a list of arrays that differ in rank or dtype"),
        ("train", "got 'train'"),
        (7, "got 7"),
        (object(), "got object, which cannot be iterated"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, message: str) -> None:
    """Catches columns, or one batch, iterated record by record as if they were batches."""
    with pytest.raises(TypeError, match=message):
        as_source(data)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (None, "the function .* must be batches, got None"),
        ({"x": np.zeros(4)}, "got a mapping"),
        (np.zeros(4), "one array"),
        (3.5, "got 3.5"),
        (object(), "cannot be iterated"),
    ],
)
def test_function_that_gives_no_batches_is_refused(made: Any, message: str) -> None:
    """Catches a function that forgot its return, or returns one batch."""
    source = as_source(lambda epoch: made)
    with pytest.raises(TypeError, match=message):
        epoch_of(source, 0)


# -- batches


def first(data: Any) -> Any:
    source = as_source(data)
    source.begin(0)
    return source.next(View(None, 0, 0))[0]


def test_batches_pass_unchanged() -> None:
    """Catches arrays copied, cast or moved, and numbers turned into arrays."""
    batch = {"x": np.zeros((2, 3), np.uint8), "y": (jnp.ones(2), [1.5, 2]), "n": None}
    got = first([batch])
    assert got["x"] is batch["x"]
    assert got["y"][0] is batch["y"][0]
    assert (got["y"][1], got["n"]) == ([1.5, 2], None)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "at least one array"),
        ({"x": np.zeros(2), "text": np.array(["a", "b"])}, "leaf text must be an array of numbers, got dtype <U1"),
        ({"x": {"ids": np.array([[1], None], object)}}, "leaf x/ids must be an array of numbers, got dtype object"),
        ((np.zeros(2), np.array(["2020-01-01"], "M8[D]")), "leaf 1 must be an array of numbers, got dtype datetime64"),
        ({"x": np.zeros(2), "caption": "a cat"}, "leaf caption must be an array of numbers, got str"),
    ],
)
def test_batches_of_no_numbers_are_refused(batch: Any, message: str) -> None:
    """Catches text and objects that reach JAX, whose message does not name batch and leaf."""
    with pytest.raises(DataError, match=message):
        first([batch])


def test_error_of_the_data_names_the_batch() -> None:
    """Catches an exception from a bad record that does not say which batch it was in."""

    def stream(epoch: int) -> Iterator[np.ndarray]:
        yield np.zeros(2)
        raise OSError("record 17 is damaged")

    source = as_source(stream)
    with pytest.raises(OSError, match="record 17") as caught:
        epoch_of(source, 0)
    assert caught.value.__notes__ == ["while reading batch 1 of epoch 0"]


# -- torch and Hugging Face, by stand-ins: neither is a test dependency


class Tensor:
    """What a CPU tensor of torch shows to others."""

    def __init__(self, values: np.ndarray, dtype: str = "torch.float32"):
        self.values, self.dtype, self.shape = values, dtype, values.shape

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("call numpy() on a detached tensor")

    def detach(self) -> "Tensor":
        return self

    def cpu(self) -> "Tensor":
        return self

    def view(self, dtype: str) -> "Tensor":
        assert (self.dtype, dtype) == ("torch.bfloat16", "torch.int16")
        return Tensor(self.values, dtype)

    def numpy(self) -> np.ndarray:
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.values


class SequentialSampler: ...


class RandomSampler: ...


class DistributedSampler:
    epochs: list[int]

    def __init__(self) -> None:
        self.epochs = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class TorchDataset: ...


class DataLoader:
    def __init__(self, batches: Iterable[Any], sampler: Any):
        self.batches, self.sampler = batches, sampler

    def __len__(self) -> int:
        return len(list(self.batches))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(Tensor=Tensor, bfloat16="torch.bfloat16", int16="torch.int16")
    parts = (SequentialSampler, RandomSampler, DistributedSampler, DataLoader)
    data = SimpleNamespace(**{part.__name__: part for part in parts}, Dataset=TorchDataset)
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.utils.data", data)  # type: ignore[arg-type]


@pytest.mark.usefixtures("torch")
def test_tensors_become_numpy() -> None:
    """Catches tensors that reach JAX, and bfloat16 that NumPy refuses."""
    one = np.array([1.0, 2.0], np.float32)
    half = np.array([0x3F80, 0x4000], np.int16)
    x, y = first(DataLoader([[Tensor(one), Tensor(half, "torch.bfloat16")]], SequentialSampler()))
    assert x is one
    assert (str(y.dtype), y.astype(np.float32).tolist()) == ("bfloat16", [1.0, 2.0])


@pytest.mark.usefixtures("torch")
def test_torch_loader_resumes_in_order() -> None:
    """Catches an ordered loader that starts over after a resume."""
    source = as_source(DataLoader(numbers(0, 4), SequentialSampler()))
    epoch_of(source, 0, most=2)
    again = as_source(DataLoader(numbers(0, 4), SequentialSampler()))
    again.set_state(source.get_state())
    assert epoch_of(again, 0) == [2, 3]


@pytest.mark.usefixtures("torch")
def test_shuffling_torch_loader_does_not_pretend_to_resume() -> None:
    """Catches a shuffled order that comes back different, with some records twice and some never (XS098)."""
    source = as_source(DataLoader(numbers(0, 4), RandomSampler()))
    start = source.get_state()
    epoch_of(source, 0, most=2)
    again = as_source(DataLoader(numbers(0, 4), RandomSampler()))
    again.set_state(start)
    with pytest.raises(DataError, match=r"cannot resume: it shuffles .* lambda epoch: DataLoader\("):
        again.set_state(source.get_state())


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("as_function", [False, True])
def test_distributed_sampler_is_told_its_epoch(as_function: bool) -> None:
    """Catches a DistributedSampler that repeats the order of epoch 0 for ever."""
    sampler = DistributedSampler()
    data = DataLoader(numbers(0, 4), sampler)
    source = as_source((lambda epoch: data) if as_function else data)
    for epoch in range(3):
        epoch_of(source, epoch)
    assert sampler.epochs == [0, 1, 2]


@pytest.mark.usefixtures("torch")
def test_torch_dataset_is_refused() -> None:
    """Catches single records read as batches."""
    with pytest.raises(TypeError, match=r"a torch Dataset, which gives records; write torch.utils.data.DataLoader\("):
        as_source(TorchDataset())


def test_hugging_face_data_is_refused_with_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches single records read as batches, and a dictionary of splits read as columns."""

    class Table: ...

    class Splits(dict[str, Any]): ...

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=Table, DatasetDict=Splits))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Hugging Face Table.*iter\(batch_size=32.*telic.data.columns\("):
        as_source(Table())
    with pytest.raises(TypeError, match=r"pick a split, such as data\['train'\]"):
        as_source(Splits())
