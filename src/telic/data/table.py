"""Batches gathered from columns: arrays in memory (or mapped from a file) whose first axis counts the records.

The order of an epoch is a function of (seed, epoch) alone. So a position is a count, a restored iterator gives the rest
of the stream exactly, and batch k holds the same records for any number of processes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from telic.data.dataset import DataPartition, Dataset, as_count
from telic.errors import DataError


class Records(Protocol):
    """Records that are gathered into batches by their numbers."""

    @property
    def fingerprint(self) -> str:
        """What the records are, in words; a position taken with others is refused."""
        ...

    def take(self, records: NDArray[np.int64] | slice) -> Any:
        """Copy records into a new batch."""
        ...

    def fill(self, memory: Any, records: NDArray[np.int64]) -> None:
        """Copy the records of several batches, [batches, rows], into the first rows of arrays of one more dimension."""
        ...


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length, with names; `names` is None when batches are tuples."""

    arrays: tuple[NDArray[Any], ...]
    names: tuple[str, ...] | None

    @property
    def fingerprint(self) -> str:
        """The columns' names, dtypes and record shapes, in words."""
        names = self.names or tuple(map(str, range(len(self.arrays))))
        return "; ".join(
            f"{name} {array.dtype.name}{list(array.shape[1:])}" for name, array in zip(names, self.arrays, strict=True)
        )

    def take(self, records: NDArray[np.int64] | slice) -> Any:
        """Copy records into a new batch."""
        if isinstance(records, slice):
            parts = [np.array(array[records]) for array in self.arrays]
        else:
            parts = [np.take(array, records, axis=0) for array in self.arrays]
        return tuple(parts) if self.names is None else dict(zip(self.names, parts, strict=True))

    def fill(self, memory: Any, records: NDArray[np.int64]) -> None:
        """Copy the records of several batches, [batches, rows], into the first rows of arrays of one more dimension."""
        for i, array in enumerate(self.arrays):
            out = memory[i if self.names is None else self.names[i]][: len(records)]
            # With mode="raise" NumPy gathers into memory of its own first.
            np.take(array, records, axis=0, out=out, mode="clip")


_ORDERS = 0x6F726465
"""Sets the streams of orders apart from all others with the same seed."""


def epoch_order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Give the order of an epoch: a permutation of ``range(length)``, the same in every process and version.

    It sorts raw words of PCG64, whose stream NumPy guarantees; it does not guarantee `Generator.permutation`. The
    stream is none that `np.random.default_rng` gives for a seed: rows drawn from that one would come out sorted.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch], spawn_key=(_ORDERS,))).random_raw(length)
    return np.argsort(words, kind="stable")


class ColumnIterator(Iterator[Any]):
    """An endless stream of batches of a table, reshuffled each epoch, with a position that can be restored."""

    def __init__(self, reader: "ColumnReader", partition: DataPartition):
        self._reader = reader
        self._rows = partition.rows(reader.batch)
        self._batches = 0
        self._epoch = -1
        self._order: NDArray[np.int64] | None = None

    def __next__(self) -> Any:
        reader = self._reader
        epoch, index = divmod(self._batches, reader.length // reader.batch)
        first = index * reader.batch
        if not reader.shuffle:
            batch = reader.table.take(slice(first + self._rows.start, first + self._rows.stop))
        else:
            if self._order is None or epoch != self._epoch:
                self._order, self._epoch = epoch_order(reader.seed, epoch, reader.length), epoch
            batch = reader.table.take(self._order[first + self._rows.start : first + self._rows.stop])
        self._batches += 1
        return batch

    def fill(self, memory: Any, count: int) -> "StatesAfter":
        """Gather the next batches into the first rows of `memory`, `count` of them at most and no more than an epoch's.

        Args:
          memory: Arrays of a batch's structure with one more dimension in front, at least `count` long.
          count: Batches, at least 1.
        Returns:
          The position after each batch.
        """
        reader = self._reader
        per_epoch = reader.length // reader.batch
        epoch, index = divmod(self._batches, per_epoch)
        count = min(count, per_epoch - index)
        if reader.shuffle and (self._order is None or epoch != self._epoch):
            self._order, self._epoch = epoch_order(reader.seed, epoch, reader.length), epoch
        first, last = index * reader.batch, (index + count) * reader.batch
        is_drawn = reader.shuffle and self._order is not None
        records = self._order[first:last] if is_drawn else np.arange(first, last)  # pyright: ignore[reportOptionalSubscript]
        reader.table.fill(memory, records.reshape(count, reader.batch)[:, self._rows])
        self._batches += count
        return StatesAfter(self, self._batches - count, count)

    def get_state(self) -> dict[str, Any]:
        """Give the position of the next batch: the batches done, and what the stream is made of."""
        return self.state_after(self._batches)

    def state_after(self, batches: int) -> dict[str, Any]:
        """Give the position after a number of batches."""
        return {"batches": batches, **self._reader.identity}

    def set_state(self, position: dict[str, Any]) -> None:
        """Go to a position of a stream of the same columns; the number of processes may differ.

        Raises:
          DataError: The position belongs to other columns, another seed, length or batch; the field is named.
        """
        identity = self._reader.identity
        if not isinstance(position, Mapping) or set(position) != {"batches", *identity}:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(
                f"a position of columns has the fields {', '.join(['batches', *identity])}, got {position!r}; "
                "pass what get_state() gave"
            )
        for name, here in identity.items():
            if position[name] != here:
                raise DataError(
                    f"the position was taken with {name}={position[name]!r}, these columns have {name}={here!r}; "
                    "resume with the same data, or start a new run"
                )
        batches = position["batches"]
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 0:
            raise DataError(f"a position's batches must be an integer of at least 0, got {batches!r}")
        self._batches = batches


@dataclass(frozen=True, eq=False)
class StatesAfter:
    """The positions after consecutive batches of a stream, each made when it is asked for."""

    iterator: ColumnIterator
    before: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.iterator.state_after(self.before + index + 1)


@dataclass(frozen=True, eq=False)
class ColumnReader:
    """Opens the training stream of a table's first `length` records; `Dataset.train` of `columns`."""

    table: Records
    length: int
    batch: int
    seed: int
    shuffle: bool
    identity: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        identity = {
            "seed": self.seed,
            "length": self.length,
            "batch": self.batch,
            "shuffle": self.shuffle,
            "columns": self.table.fingerprint,
        }
        object.__setattr__(self, "identity", identity)

    def __call__(self, partition: DataPartition) -> ColumnIterator:
        return ColumnIterator(self, partition)


@dataclass(frozen=True, eq=False)
class HeldOutReader:
    """Opens one pass over a table's records from `first` on, in order, each once; `Dataset.val` of `columns`."""

    table: Records
    first: int
    last: int
    batch: int

    def __call__(self, partition: DataPartition) -> "HeldOutBatches":
        partition.rows(self.batch)
        return HeldOutBatches(self, partition)


@dataclass(frozen=True, eq=False)
class HeldOutBatches:
    """One process's share of the held-out batches; the last one holds what is left."""

    reader: HeldOutReader
    partition: DataPartition

    def __len__(self) -> int:
        return -(-(self.reader.last - self.reader.first) // self.reader.batch)

    def __iter__(self) -> Iterator[Any]:
        reader = self.reader
        for first in range(reader.first, reader.last, reader.batch):
            rows = self.partition.even_rows(min(reader.batch, reader.last - first))
            yield reader.table.take(slice(first + rows.start, first + rows.stop))


def columns(
    data: Mapping[str, Any] | tuple[Any, ...],
    *,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    held_out: int = 0,
) -> Dataset:
    """Make a data set of columns: arrays whose first axis counts the records.

    Each batch is gathered into new memory, in the columns' dtypes (uint8 stays uint8), as a mapping with the columns'
    names, or as a tuple when a tuple was given. Training drops the records of an epoch that do not fill a batch; the
    shuffle decides anew which they are. Validation covers every held-out record once, in order.

    Args:
      data: Columns by name, ``{"inputs": X, "targets": Y}``, or a tuple ``(X, Y)``: arrays of NumPy, JAX or anything
        `numpy.asarray` takes. They are read in place: do not write to them during a run.
      batch: Records per batch over all processes; each process reads its share of every batch.
      seed: Seed of the order. Epoch e has an order of its own, a function of (seed, e).
      shuffle: Reshuffle in each epoch; False keeps the given order.
      held_out: Records taken off the end for validation. The given order decides which they are, so shuffle data that
        comes sorted by class first.
    Raises:
      TypeError: The data is not a mapping or a tuple of arrays.
      ValueError: The columns' lengths differ, a column holds objects or text, or fewer records than a batch are left.
    Example:
      >>> data = columns({"inputs": np.zeros((10, 3)), "targets": np.arange(10)}, batch=4, held_out=2)
      >>> next(data.train(DataPartition()))["inputs"].shape, len(list(data.val(DataPartition())))
      ((4, 3), 1)
    """
    batch = as_count("columns batch", batch, minimum=1)
    seed = as_count("columns seed", seed, minimum=0)
    held_out = as_count("columns held_out", held_out, minimum=0)
    table = _table(data)
    total = table.arrays[0].shape[0]
    length = total - held_out
    if length <= 0 and held_out:
        raise ValueError(
            f"held_out must be less than the {total} records there are, got {held_out}: nothing is left to train on"
        )
    if length < batch:
        raise ValueError(
            f"columns need at least one batch of {batch} training records, got {length}"
            f"{f' ({total} records less held_out={held_out})' if held_out else ''}; give a smaller batch"
        )
    return Dataset(
        train=ColumnReader(table, length, batch, seed, bool(shuffle)),
        val=HeldOutReader(table, length, total, batch) if held_out else None,
        records=length,
        batch=batch,
        held_out=held_out,
    )


def _table(data: Any) -> Table:
    if isinstance(data, Mapping):
        named = cast(Mapping[Any, Any], data)
        names = tuple(named)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"columns are named by strings, got the names {list(names)!r}")
        arrays = tuple(_column(repr(name), value) for name, value in named.items())
    elif isinstance(data, tuple):
        names = None
        arrays = tuple(_column(str(i), value) for i, value in enumerate(cast(tuple[Any, ...], data)))
    else:
        raise TypeError(
            f"columns takes a mapping of arrays or a tuple of arrays, got {type(data).__name__}; "
            'write columns({"inputs": X, "targets": Y}, batch=...)'
        )
    if not arrays:
        raise ValueError('columns needs at least one column, got none; write columns({"inputs": X, ...}, batch=...)')
    lengths = [array.shape[0] for array in arrays]
    if len(set(lengths)) > 1:
        shown = ", ".join(f"{name}: {n}" for name, n in zip(names or range(len(arrays)), lengths, strict=True))
        raise ValueError(f"columns must have one length, got lengths by column {{{shown}}}")
    return Table(arrays, names)


def _column(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, Mapping):
        raise TypeError(f"column {name} must be an array, got a mapping; give each array a column of its own")
    try:
        array = np.asarray(value)
    except ValueError as error:
        error.add_note(f"column {name} must be an array whose rows have one shape")
        raise
    if not is_numeric(array.dtype):
        raise ValueError(
            f"column {name} must hold numbers, got dtype {array.dtype}; encode text as token ids, "
            "and give rows of one length"
        )
    if array.ndim == 0:
        raise ValueError(f"column {name} must be an array with one row per record, got the single value {value!r}")
    return array


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Say whether a dtype is one of numbers or truth values, those of ml_dtypes included."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.type is not np.void)
