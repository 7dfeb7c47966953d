"""Loaders that keep their position themselves, not in their iterators: torchdata's StatefulDataLoader."""

import base64
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from telic.data.batches import iterate, loaded
from telic.errors import DataError


def opened(data: Iterable[Any], *, what: str) -> Iterator[Any]:
    """Open an iterator over batches: for a loader that keeps its position, one that can be asked for it."""
    if isinstance(data, loaded("torchdata.stateful_dataloader", "StatefulDataLoader")):
        return LoaderIterator(data)
    return iterate(data, what=what)


class LoaderIterator:
    """The batches of a StatefulDataLoader, with its position after each.

    The position is taken after each batch and not when it is asked for: at the end of an epoch the loader's own is that
    of the next one.
    """

    def __init__(self, loader: Any):
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._state: Any = None

    def __iter__(self) -> "LoaderIterator":
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        batch = next(self._batches)
        self._state = _as_json(self._loader.state_dict(), "state_dict()")
        return batch

    def get_state(self) -> Any:
        """Give the position after the last batch as a value JSON can hold; None before the first."""
        return self._state

    def set_state(self, state: Any) -> None:
        """Go to a position that `get_state` gave."""
        self._loader.load_state_dict(_from_json(state))
        self._state, self._batches = state, None

    def close(self) -> None:
        """Let go of the iterator, and with it of its workers."""
        self._batches = None


def _as_json(value: Any, where: str) -> Any:
    """Give a loader's state as JSON; containers and arrays are named, so that they come back as what they were."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, np.ndarray | np.generic) or isinstance(value, loaded("torch", "Tensor")):
        array = np.ascontiguousarray(cast(Any, value))
        kind = "array" if isinstance(value, np.ndarray | np.generic) else "tensor"
        return {kind: [str(array.dtype), list(np.shape(value)), base64.b64encode(array.tobytes()).decode("ascii")]}
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {"dict": [[_as_json(k, where), _as_json(v, f"{where}[{k!r}]")] for k, v in items]}
    if isinstance(value, list | tuple):
        parts = [_as_json(part, f"{where}[{i}]") for i, part in enumerate(cast(list[Any], value))]
        return {"list" if isinstance(value, list) else "tuple": parts}
    raise DataError(
        f"the loader's {where} holds a {type(value).__name__}, which a checkpoint cannot keep: a dataset's or "
        "sampler's state_dict() may give numbers, text, bytes, arrays, and dictionaries, lists and tuples of them"
    )


def _from_json(value: Any) -> Any:
    """Undo `_as_json`.

    Raises:
      DataError: It is nothing that `_as_json` gives.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case {"bytes": str(text)}:
            return base64.b64decode(text)
        case {"array": [str() as dtype, list() as shape, str(text)]}:
            return _array(dtype, cast(list[Any], shape), text)
        case {"tensor": [str() as dtype, list() as shape, str(text)]}:
            return sys.modules["torch"].from_numpy(_array(dtype, cast(list[Any], shape), text))
        case {"dict": [*items]}:
            return {_from_json(key): _from_json(part) for key, part in items}
        case {"list": [*items]}:
            return [_from_json(part) for part in items]
        case {"tuple": [*items]}:
            return tuple(_from_json(part) for part in items)
        case _:
            raise DataError(f"a loader's position is damaged: {str(value)[:100]}")


def _array(dtype: str, shape: list[Any], text: str) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise DataError(f"a loader's position is damaged: it holds objects, dtype {dtype!r}")
    return np.frombuffer(base64.b64decode(text), kind).reshape(shape).copy()
