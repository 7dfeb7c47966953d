"""What one batch may be, which values are batches given in place of data, and how positions become plain values."""

import base64
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from telic.data.table import is_numeric
from telic.errors import DataError
from telic.tree import is_array, path_name
from telic.types import Batch

COLUMNS_HINT = 'telic.data.columns({"inputs": X, "targets": Y}, batch=32)'


@runtime_checkable
class Stateful(Protocol):
    """An iterator that can be sent to a position, such as those of Grain."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any, /) -> None: ...


def as_stateful(value: object) -> Stateful | None:
    """Give an iterator that can be sent to a position, else None. Asked at every batch, so kept by class."""
    return cast(Stateful, value) if _is_stateful_class(type(value)) else None


@functools.lru_cache(maxsize=256)
def _is_stateful_class(kind: type) -> bool:
    return issubclass(kind, Stateful)


def loaded(module: str, *names: str) -> tuple[type, ...]:
    """Give classes of an optional module if the program has imported it: values of them cannot exist otherwise."""
    found = sys.modules.get(module)
    return tuple(kind for name in names if isinstance(kind := getattr(found, name, None), type))


def host_batch(batch: Batch, where: str) -> Batch:
    """Give a batch with the arrays of other libraries as NumPy arrays; memory is shared where that is possible.

    Args:
      batch: Any pytree; plain numbers in it become arrays without dimensions.
      where: Which batch it is, for the error.
    Raises:
      DataError: The batch holds no array and no number, or a leaf is text or an array of objects, text or dates; the
        leaf is named.
    """
    plain = jax.tree.leaves(batch)
    if plain and all(type(leaf) is np.ndarray and _is_plain(leaf.dtype) for leaf in plain):
        return batch
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    arrays = 0
    out: list[Any] = []
    for path, leaf in leaves:
        if isinstance(leaf, (str, bytes)):
            raise _not_numbers(where, path, type(leaf).__name__)
        if isinstance(leaf, jax.Array):
            arrays += 1
        elif isinstance(leaf, (bool, int, float, complex)):
            arrays += 1
            leaf = np.asarray(leaf)
            _check_fits(leaf, where, path)
        elif is_array(leaf):
            arrays += 1
            leaf = _to_numpy(leaf)
            if not is_numeric(leaf.dtype):
                raise _not_numbers(where, path, f"dtype {leaf.dtype}")
            _check_fits(leaf, where, path)
        out.append(leaf)
    if not arrays:
        raise DataError(
            f"{where} must be a pytree with at least one array or number, got {_shown(batch)}; give records in "
            "batches, not one by one"
        )
    return jax.tree_util.tree_unflatten(structure, out)


@functools.lru_cache(maxsize=64)
def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Say whether arrays of a dtype are taken as they are: numbers, and no long integers that might not fit."""
    return is_numeric(dtype) and not (dtype.kind in "iu" and dtype.itemsize == 8)


def _check_fits(leaf: Any, where: str, path: Any) -> None:
    """Refuse 64-bit integers that JAX would cut to 32 bits."""
    is_long = leaf.dtype in (np.int64, np.uint64) and jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype
    if not is_long or not leaf.size:
        return
    low, high = int(leaf.min()), int(leaf.max())
    if low < -(2**31) or high >= (2**31 if leaf.dtype == np.int64 else 2**32):
        raise DataError(
            f"{where}: leaf {path_name(path) or 'the batch itself'} holds {leaf.dtype} values from {low} to {high}, "
            "which do not fit 32 bits; make them smaller, use floats, or enable jax_enable_x64"
        )


def _not_numbers(where: str, path: Any, kind: str) -> DataError:
    name = path_name(path) or "the batch itself"
    return DataError(
        f"{where}: leaf {name} must be an array of numbers, got {kind}; encode text as token ids, stack rows of one "
        "length, or leave the field out"
    )


def _to_numpy(leaf: Any) -> Any:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    if isinstance(leaf, loaded("torch", "Tensor")):
        tensor: Any = leaf.detach().cpu()
        torch = sys.modules["torch"]
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()
    return np.asarray(leaf)


def refuse_batch(data: Any, *, what: str) -> None:
    """Raise for a value that is a batch, or columns, where an iterable of batches is meant.

    Raises:
      TypeError: The data is None, text, a number, an array, a mapping, or arrays in a tuple; the text says what to
        write.
    """
    _refuse_records(data, what)
    write = f"pass columns as {COLUMNS_HINT}, or one batch as [batch]"
    if data is None:
        raise TypeError(
            f"{what} must be batches, got None; pass a telic.data.Dataset, a list of batches or {COLUMNS_HINT}"
        )
    if isinstance(data, (str, bytes, int, float, complex)):
        raise TypeError(f"{what} must be batches, got {data!r}; {write}")
    if is_array(data):
        raise TypeError(f"{what} must be batches, got one array {_shown(data)}; {write}")
    if isinstance(data, Mapping):
        raise TypeError(f"{what} must be batches, got a mapping with {_shown_names(data)}; {write}")
    if isinstance(data, tuple) and any(is_array(part) for part in data):
        raise TypeError(f"{what} must be batches, got one tuple of arrays {_shown(data)}; {write}")
    if isinstance(data, list) and _are_columns(data):
        raise TypeError(f"{what} must be batches, got a list of arrays that differ in rank or dtype; {write}")


def _refuse_records(data: Any, what: str) -> None:
    """Refuse data sets that give records, not batches."""
    if isinstance(data, loaded("datasets", "DatasetDict", "IterableDatasetDict")):
        raise TypeError(f"{what} must be batches, got {type(data).__name__}; pick a split, such as data['train']")
    if isinstance(data, loaded("datasets", "Dataset", "IterableDataset")):
        raise TypeError(
            f"{what} must be batches, got a Hugging Face {type(data).__name__}, which gives records; with ds = "
            'data.with_format("numpy") write lambda epoch: ds.shuffle(seed=epoch).iter(batch_size=32, '
            'drop_last_batch=True), or telic.data.columns({"inputs": ds["image"][:], "targets": ds["label"][:]}, '
            "batch=32)"
        )
    if isinstance(data, loaded("torch.utils.data", "Dataset")):
        raise TypeError(
            f"{what} must be batches, got a torch Dataset, which gives records; write "
            "torch.utils.data.DataLoader(data, batch_size=32)"
        )


def _are_columns(values: Sequence[Any]) -> bool:
    if not values or not all(is_array(value) for value in values):
        return False
    return len({(len(value.shape), str(value.dtype)) for value in values}) > 1


def _shown(value: Any) -> str:
    if is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown_names(data: Mapping[Any, Any]) -> str:
    names = [repr(name) for name in data]
    return f"the names {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" if names else "no names"


def iterate(data: Iterable[Any], *, what: str) -> Iterator[Any]:
    """Open an iterator over batches, or say that the value cannot be read as batches."""
    refuse_batch(data, what=what)
    if isinstance(data, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        return iter(data)
    raise TypeError(
        f"{what} must be batches, got {type(data).__name__}, which cannot be iterated; pass a telic.data.Dataset, "
        f"a list of batches, a function (epoch) -> iterable, or {COLUMNS_HINT}"
    )


def length_of(data: Any) -> int | None:
    """Give the number of batches of data that knows it."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def plain_state(state: Any) -> Any:
    """Copy an iterator's state into a value JSON can hold. Bytes become ``{"base64": text}``."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode("ascii")}
    try:
        return json.loads(json.dumps(state, default=_plain_number))
    except (TypeError, ValueError) as error:
        error.add_note("an iterator's get_state() must give bytes or a value that JSON can hold")
        raise


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def native_state(state: Any) -> Any:
    """Undo `plain_state`, into a value of its own."""
    match state:
        case {"base64": str(text), **rest} if not rest:
            return base64.b64decode(text)
        case _:
            return json.loads(json.dumps(state))


Opener = Callable[[int], Iterable[Any]]
"""Opens the data for the n-th time; for a function of the epoch, n is the epoch."""
