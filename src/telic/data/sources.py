"""Everything users pass as training data, behind the one port the loop reads.

Three manners of reading cover all kinds. Data that can be read again (a list, a loader) or made again (a function of
the epoch) is opened in each epoch. A `Dataset` is opened once and read on. An iterator is read on and cannot be opened
again.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from telic.data.batches import (
    COLUMNS_HINT,
    Opener,
    as_stateful,
    host_batch,
    length_of,
    loaded,
    native_state,
    plain_state,
    refuse_batch,
)
from telic.data.dataset import WHOLE, DataPartition, Dataset
from telic.data.loaders import opened
from telic.data.table import ColumnIterator, ColumnReader, StatesAfter
from telic.errors import DataError
from telic.loop.ports import Position, Source, View
from telic.types import Batch

_READ_ONCE = "an iterator can be read only once; pass a list, a Dataset or a function of the epoch"


class BatchSource:
    """Batches of opened data, counted; the position after each says how to come back to it.

    A position is ``{"epoch", "batch", "opening", "offset", "length", "iterator"}``: batches done in the epoch; which
    opening of the data is being read and how many batches of it are done (they differ from the first two where the data
    does not begin anew with the epoch); the data's length where it has one; and the state of its iterator, or None for
    an iterator without one, whose batches are then read again up to the offset.
    """

    read_ahead = True

    def __init__(
        self,
        open: Opener,
        *,
        what: str,
        each_epoch: bool,
        once: bool = False,
        per_epoch: int | None = None,
        fresh: bool = False,
        length: int | None = None,
        not_resumable: str | None = None,
    ):
        """Read what `open` gives.

        Args:
          open: Opens the data for the n-th time.
          what: What the data is called in errors.
          each_epoch: Begin a new opening with each epoch; False reads on where the last epoch stopped.
          once: The data cannot be opened again.
          per_epoch: Batches of an epoch; None when the end of the data ends it.
          fresh: Batches lie in memory of their own and are checked already.
          length: Batches of one opening, where it is known.
          not_resumable: Why no position but the start can be restored, and what to write instead.
        """
        self.fresh = fresh
        self._open = open
        self._what = what
        self._each_epoch = each_epoch
        self._once = once
        self._per_epoch = per_epoch
        self._length = length
        self._not_resumable = not_resumable
        self._epoch: int | None = None
        self._continuous = False
        self._batch = 0
        self._opening = 0
        self._offset = 0
        self._skip = 0
        self._ended = False
        self._touched = False
        self._resume: Any = None
        # An iterator that was passed in is open already, so that its state is known before the first batch.
        self._iterator: Iterator[Any] | None = opened(open(0), what=what) if once else None

    @property
    def not_resumable(self) -> str | None:
        """Why another process cannot come back to a position of this data, and what to write; None where it can."""
        if self._not_resumable is not None:
            return f"{self._what} cannot resume: {self._not_resumable}"
        if self._once and as_stateful(self._iterator) is None:
            return (
                f"{self._what} has no get_state and set_state; give it both, or pass a function that makes it anew, "
                "telic.data.Dataset(train=lambda partition: ...), which is then read up to the position"
            )
        return None

    def begin(self, epoch: int, *, continuous: bool = False) -> None:
        """Start an epoch; for the one already begun, change nothing but `continuous`."""
        self._continuous = continuous
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._batch = 0
        if self._each_epoch:
            self._reopen(epoch)
        elif self._ended and not self._once:
            self._reopen(self._opening + 1)
        self._ended = False

    def next(self, view: View) -> tuple[Batch, Position]:
        """Give the next batch and the position after it.

        Raises:
          DataError: The data is empty, exhausted, shorter than promised, or a batch is no pytree of numeric arrays.
        """
        if self._epoch is None:
            self.begin(view.epoch)
        if self._ended or self._epoch_is_full():
            raise StopIteration
        where = f"batch {self._batch} of epoch {self._epoch}"
        while True:
            iterator = self._opened()
            try:
                batch = next(iterator)
                break
            except StopIteration:
                pass
            except Exception as error:
                error.add_note(f"while reading {where}")
                if type(error).__name__ == "UnparsedFlagAccessError":
                    error.add_note(
                        "Grain's workers read the flags of absl: call absl.flags.FLAGS.mark_as_parsed() before the "
                        "run, or start the program with absl.app.run"
                    )
                raise
            if self._at_end():
                self._ended = True
                raise StopIteration
            self._reopen(self._opening + 1)
        if not self.fresh:
            batch = host_batch(batch, where)
        self._offset += 1
        self._batch += 1
        return batch, self.get_state()

    def fill(self, memory: Batch, count: int) -> Sequence[Position] | None:
        """Write the next batches of the epoch into memory, where the data is columns; give the position after each.

        Args:
          memory: Arrays of a batch's structure with one more dimension in front, at least `count` long.
          count: Batches at most.
        """
        iterator = self._iterator
        if not isinstance(iterator, ColumnIterator) or self._skip or self._epoch is None:
            return None
        if self._ended or self._epoch_is_full():
            raise StopIteration
        if self._per_epoch is not None and not self._continuous:
            count = min(count, self._per_epoch - self._batch)
        before = self.get_state()
        states = iterator.fill(memory, count)
        self._offset += len(states)
        self._batch += len(states)
        return _PositionsAfter(before, states)

    def _epoch_is_full(self) -> bool:
        return self._per_epoch is not None and not self._continuous and self._batch >= self._per_epoch

    def _at_end(self) -> bool:
        """Say whether the end of the data ends the epoch; otherwise it is opened again."""
        if self._offset == 0:
            raise DataError(self._empty())
        if self._per_epoch is not None:
            if self._offset % self._per_epoch:
                raise DataError(
                    f"{self._what} ended after {self._offset} batches, but records // batch promises {self._per_epoch} "
                    "in each epoch; correct records=, or leave it out to let the end of the stream end the epoch"
                )
            return False
        if self._batch and not (self._continuous and not self._once):
            return True
        if self._once:
            raise DataError(f"{self._what} is exhausted: epoch {self._epoch} has no batches; {_READ_ONCE}")
        return False

    def _empty(self) -> str:
        if self._once:
            return f"data is empty: {self._what} gave no batches; {_READ_ONCE}"
        if self._opening == 0 or not self._each_epoch:
            return f"data is empty: {self._what} gave no batches"
        return (
            f"{self._what} gave no batches in epoch {self._opening}, so it is exhausted: it must give its batches anew "
            "each time it is read; pass a list, a Dataset or a function of the epoch"
        )

    def _opened(self) -> Iterator[Any]:
        self._touched = True
        if self._iterator is None:
            iterator = opened(self._open(self._opening), what=self._what)
            if self._resume is not None:
                self._restore(iterator, self._resume)
            self._iterator = iterator
        iterator = self._iterator
        while self._skip:
            try:
                next(iterator)
            except StopIteration:
                raise DataError(
                    f"{self._what} ended before the position it should resume at: batch {self._offset} of the opening, "
                    f"{self._skip} more than it has; resume with the data the position was taken from"
                ) from None
            self._skip -= 1
        return iterator

    def _reopen(self, opening: int) -> None:
        if not self._once:
            self._drop()
        self._opening, self._offset, self._skip = opening, 0, 0

    def get_state(self) -> Position:
        """Give the position of the next batch."""
        iterator = self._iterator
        state = self._resume
        if isinstance(iterator, ColumnIterator):
            state = iterator.get_state()
        elif (stateful := as_stateful(iterator)) is not None and not self._skip:
            state = plain_state(stateful.get_state())
        return {
            "epoch": self._epoch or 0,
            "batch": self._batch,
            "opening": self._opening,
            "offset": self._offset,
            "length": self._length,
            "iterator": state,
        }

    def set_state(self, position: Position) -> None:
        """Go to a position that `get_state` or `next` gave.

        Raises:
          DataError: It is no position, belongs to data of another length, the data's own iterator refuses its state, or
            the data cannot come back to a position.
        """
        epoch, batch, opening, offset = self._checked(position)
        at_start = epoch == 0 and offset == 0
        if self._not_resumable and not at_start:
            raise DataError(f"{self._what} cannot resume: {self._not_resumable}")
        state = position["iterator"]
        if self._once:
            self._seek_once(state, offset)
        else:
            self._drop()
            self._skip = offset if state is None else 0
            if state is not None:
                self._restore(opened(self._open(opening), what=self._what), state)
        self._epoch, self._batch, self._opening, self._offset = epoch, batch, opening, offset
        self._ended = False

    def _seek_once(self, state: Any, offset: int) -> None:
        iterator = opened(self._open(0), what=self._what)
        if state is not None:
            self._restore(iterator, state)
            return
        if self._touched:
            raise DataError(
                f"{self._what} has been read already and cannot go back; {_READ_ONCE}, or give a new iterator from its "
                "start"
            )
        self._skip = offset

    def _restore(self, iterator: Iterator[Any], state: Any) -> None:
        stateful = as_stateful(iterator)
        if stateful is None:
            raise DataError(
                f"the position holds an iterator's state, but the iterator of {self._what} has no set_state; resume "
                "with the data the position was taken from"
            )
        try:
            stateful.set_state(native_state(state))
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"the iterator of {self._what} refuses the state of the position ({type(error).__name__}: {error}); "
                "resume with the data and the number of workers the position was taken with"
            ) from error
        self._skip = 0
        self._iterator, self._resume = iterator, None

    def _checked(self, given: Any) -> tuple[int, int, int, int]:
        fields = self.get_state()
        position = cast(Mapping[str, Any], given if isinstance(given, Mapping) else {})
        if set(position) != set(fields):
            raise DataError(
                f"a position of {self._what} has the fields {', '.join(fields)}, got {given!r}; pass what "
                "get_state() gave"
            )
        counts: list[int] = []
        for name in ("epoch", "batch", "opening", "offset"):
            value = position[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise DataError(f"a position's {name} must be an integer of at least 0, got {value!r}")
            counts.append(value)
        if position["length"] != self._length:
            raise DataError(
                f"the position was taken with length={position['length']} batches, {self._what} has "
                f"length={self._length}; resume with the same data, or start a new run"
            )
        return counts[0], counts[1], counts[2], counts[3]

    def close(self) -> None:
        """Release what was opened here; an iterator that was passed in stays its owner's."""
        if not self._once and self._iterator is not None:
            try:
                state = self.get_state()["iterator"]
            except Exception:
                # An iterator that broke may not say where it stands, and its own error is the one to be seen: if it is
                # opened again, it is read up to here.
                state = None
            self._drop()
            self._resume, self._skip = state, self._offset if state is None else 0

    def _drop(self) -> None:
        close = getattr(self._iterator, "close", None)
        self._iterator = self._resume = None
        if callable(close):
            close()


@dataclass(frozen=True)
class _PositionsAfter(Sequence[Position]):
    """The positions after consecutive batches, each made when it is asked for."""

    before: dict[str, Any]
    states: StatesAfter

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: Any) -> Any:
        done = {name: self.before[name] + index + 1 for name in ("batch", "offset")}
        return {**self.before, **done, "iterator": self.states[index]}


def as_source(data: Any, *, partition: DataPartition = WHOLE) -> Source:
    """Turn training data of any kind into the port the loop reads.

    A re-iterable is read from its beginning in each epoch, a function is called with the epoch's number, a `Dataset`
    and an iterator are read on. Where the loop asks for one continuous stream, data that ends begins again. Batches are
    pytrees of arrays; those of torch and other libraries become NumPy arrays.

    Resuming reads the data again up to the position, unless its iterator has ``get_state`` and ``set_state`` (column
    data and Grain have). So a list, a loader or a function must give the same batches for the same epoch: draw shuffles
    from the epoch's number.

    Args:
      data: A `Dataset`; a list, tuple or other re-iterable of batches; an iterator; a function ``(epoch) -> iterable``;
        a Grain MapDataset, IterDataset or DataLoader; a torch DataLoader. A source is given back as it is.
      partition: The share of a `Dataset` this process reads. Other data is taken to be this process's share already.
    Raises:
      TypeError: The value is not data: None, an array, a mapping, one batch, records instead of batches, or a function
        that does not take exactly the epoch. The text says what to write.
    """
    if _is_source(data):
        return data
    if isinstance(data, Dataset):
        return _dataset_source(data, partition)
    refuse_batch(data, what="data")
    if isinstance(data, Iterator):
        iterator = cast(Iterator[Any], data)
        return BatchSource(
            lambda _: iterator,
            what=f"the iterator ({type(iterator).__name__})",
            each_epoch=False,
            once=True,
            fresh=isinstance(iterator, ColumnIterator),
        )
    if isinstance(data, loaded("torch.utils.data", "DataLoader")):
        return _torch_source(data)
    if isinstance(data, Iterable):
        batches = cast(Iterable[Any], data)
        return BatchSource(
            lambda _: batches, what=f"the {type(data).__name__}", each_epoch=True, length=length_of(batches)
        )
    if callable(data):
        _check_takes_epoch(data)
        function = cast(Callable[[int], Iterable[Any]], data)
        return BatchSource(
            lambda n: _seeded(function(n), n),
            what=f"the function {getattr(data, '__name__', type(data).__name__)}",
            each_epoch=True,
        )
    raise TypeError(
        f"data must be batches, got {type(data).__name__}, which cannot be iterated; pass a telic.data.Dataset, a list "
        f"of batches, a function (epoch) -> iterable, or {COLUMNS_HINT}"
    )


def _is_source(data: Any) -> bool:
    methods = ("begin", "next", "get_state", "set_state", "close")
    return all(callable(getattr(data, name, None)) for name in methods) and hasattr(data, "read_ahead")


def _dataset_source(data: Dataset, partition: DataPartition) -> BatchSource:
    return BatchSource(
        lambda _: data.train(partition),
        what="Dataset.train(partition)",
        each_epoch=False,
        per_epoch=data.batches_per_epoch,
        fresh=isinstance(data.train, ColumnReader),
    )


def _torch_source(loader: Any) -> BatchSource:
    random = loaded("torch.utils.data", "RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")
    random += loaded("torchdata.stateful_dataloader.sampler", "RandomSampler")
    # Not even a loader that has a state can: what it restores is the order of one epoch, not that of the next.
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    shuffles = any(isinstance(sampler, random) for sampler in samplers)
    return BatchSource(
        lambda n: _seeded(loader, n),
        what="the torch DataLoader",
        each_epoch=True,
        length=length_of(loader),
        not_resumable=(
            "it shuffles with torch's own random state, so its order cannot come back; pass a function, lambda epoch: "
            f"{type(loader).__name__}(dataset, shuffle=True, generator=torch.Generator().manual_seed(epoch), ...)"
            if shuffles
            else None
        ),
    )


def _seeded(batches: Any, epoch: int) -> Any:
    """Tell a torch DistributedSampler its epoch: without it every epoch has the order of the first."""
    if isinstance(batches, loaded("torch.utils.data", "DataLoader")):
        sampler: Any = getattr(batches, "sampler", None)
        if isinstance(sampler, loaded("torch.utils.data", "DistributedSampler")):
            sampler.set_epoch(epoch)
    return batches


def required_parameters(function: Callable[..., Any]) -> list[str] | None:
    """Give the names of the parameters a function cannot be called without; None when Python cannot say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _check_takes_epoch(function: Any) -> None:
    required = required_parameters(function)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if required is not None and len(required) == 1:
        if inspect.signature(function).parameters[required[0]].kind in by_position:
            return
    name = getattr(function, "__name__", type(function).__name__)
    shown = "a signature Python cannot read" if required is None else f"({', '.join(required)})"
    raise TypeError(
        f"a function given as data must be (epoch) -> iterable of batches, got {name} with the required parameters "
        f"{shown}; write lambda epoch: {name}(...)"
    )
