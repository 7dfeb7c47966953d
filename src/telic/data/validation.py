"""Batches that are read whole, once per validation."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from telic.data.batches import host_batch, iterate, length_of, loaded, refuse_batch
from telic.data.dataset import WHOLE, DataPartition, Dataset, as_count
from telic.data.sources import required_parameters
from telic.data.table import HeldOutReader
from telic.errors import DataError
from telic.types import Batch

MOST_BATCHES = 100_000
"""Batches of one pass over data without a length, after which it is taken to be infinite."""

_INFINITE_LENGTH = 2**40


@dataclass(frozen=True, eq=False)
class ValidationBatches:
    """Validation data: each iteration is one pass over all its batches.

    Attributes:
      open: Opens one pass.
      what: What the data is called in errors.
      limit: Batches of a pass at most; None reads all.
      fresh: Whether each batch lies in memory that is never written again.
    """

    open: Callable[[], Iterable[Any]]
    what: str
    limit: int | None = None
    fresh: bool = False

    def __iter__(self) -> Iterator[Batch]:
        data = self.open()
        if self.limit is None:
            _refuse_infinite(data, self.what)
        known = length_of(data) is not None
        count = 0
        for batch in itertools.islice(iterate(data, what=self.what), self.limit):
            if self.limit is None and not known and count == MOST_BATCHES:
                raise DataError(
                    f"{self.what} has no length and gave {MOST_BATCHES:,} batches in one pass, so it is taken to be "
                    "infinite; give limit=, the most batches of a validation"
                )
            yield batch if self.fresh else host_batch(batch, f"validation batch {count}")
            count += 1
        if not count:
            raise DataError(f"{self.what} gave no batches: it must give its batches anew each time it is read")


def as_validation(data: Any, *, partition: DataPartition = WHOLE, limit: int | None = None) -> ValidationBatches:
    """Turn validation data into batches that can be read again and again.

    Args:
      data: A `Dataset` (its `val`), a list or other re-iterable of batches, a Grain or torch loader, or a function
        ``() -> iterable``.
      partition: The share of a `Dataset` this process reads.
      limit: Batches of one pass at most, from the beginning. Data that never ends needs it.
    Raises:
      TypeError: The value is not data, is an iterator (validation runs many times), or a function with parameters.
      DataError: The `Dataset` has no `val`, or the data is infinite and no limit is given.
      ValueError: The limit is not a positive integer.
    """
    if limit is not None:
        limit = as_count("limit", limit, minimum=1)
    what = "validation data"
    if isinstance(data, Dataset):
        val = data.val
        if val is None:
            raise DataError("Dataset has no val; pass val= or held_out=")
        what = "Dataset.val"
        if callable(val) and not isinstance(val, Iterable):
            return ValidationBatches(lambda: val(partition), what, limit, fresh=isinstance(val, HeldOutReader))
        data = cast(Any, val)
    _refuse_infinite(data, what, limit)
    refuse_batch(data, what=what)
    # An endless repeat is the one iterator that a pass does not change.
    endless_repeat = isinstance(data, itertools.repeat) and _is_infinite(cast(Any, data))
    if isinstance(data, Iterator) and not endless_repeat:
        raise TypeError(
            f"{what} must be readable many times, got an iterator ({type(data).__name__}), which can be read only "
            "once; pass a list, or a function () -> iterable"
        )
    if isinstance(data, Iterable):
        batches = cast(Iterable[Any], data)
        return ValidationBatches(lambda: batches, what, limit)
    if callable(data):
        required = required_parameters(data)
        if required is None or required:
            raise TypeError(
                f"a function given as {what} must be () -> iterable of batches, got the required parameters "
                f"({', '.join(required or ['unknown'])}); write lambda: ..."
            )
        return ValidationBatches(cast(Callable[[], Iterable[Any]], data), what, limit)
    raise TypeError(
        f"{what} must be batches, got {type(data).__name__}, which cannot be iterated; pass a telic.data.Dataset, a "
        "list of batches or a function () -> iterable"
    )


def _refuse_infinite(data: Any, what: str, limit: int | None = None) -> None:
    if limit is None and _is_infinite(data):
        raise DataError(
            f"{what} is infinite ({type(data).__name__}); give limit=, the most batches of a validation, or data that "
            "ends"
        )


def _is_infinite(data: Any) -> bool:
    """Say whether data is known never to end."""
    if isinstance(data, (itertools.cycle, itertools.count)):
        return True
    if isinstance(data, itertools.repeat):
        try:
            data.__length_hint__()
        except TypeError:
            return True
        return False
    return _grain_is_infinite(data)


def _grain_is_infinite(data: Any) -> bool:
    """Find an endless repeat in a Grain pipeline that no limit follows."""
    if isinstance(data, loaded("grain", "MapDataset")):
        return len(data) >= _INFINITE_LENGTH
    if not isinstance(data, loaded("grain", "IterDataset")):
        return False
    if isinstance(data, loaded("grain.experimental", "LimitIterDataset")):
        return False
    if isinstance(data, loaded("grain.experimental", "RepeatIterDataset")):
        return getattr(data, "_num_epochs", 0) is None or _grain_is_infinite(data.parents[0])
    return any(_grain_is_infinite(parent) for parent in data.parents)
