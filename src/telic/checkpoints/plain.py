"""The host's part of a run as JSON: numbers, text and containers as they are, arrays as named leaves beside them."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np

from telic.checkpoints.leaves import Leaf, as_bytes
from telic.checkpoints.manifest import DTYPES, MAX_RANK, dtype_of
from telic.checkpoints.parts import Parted
from telic.errors import CheckpointError

_MAX_DEPTH = 64


def dump(value: Any, where: str, arrays: dict[str, Any], depth: int = 0) -> Any:
    """Give a value as JSON: scalars as they are, containers as lists that begin with their kind.

    Args:
      value: None, numbers, text, arrays, and dictionaries, lists and tuples of them.
      where: What it is called in errors, and the prefix of its arrays' names.
      arrays: Takes the arrays, by name.
      depth: Containers around it.
    Raises:
      CheckpointError: It holds something else; its place is named.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{where} is nested deeper than {_MAX_DEPTH}, or holds itself")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        arrays[where] = value
        return ["array", where, isinstance(value, np.generic)]
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return ["dict", *([_key(k, where), dump(v, f"{where}/{k}", arrays, depth + 1)] for k, v in items)]
    if type(value) in (list, tuple):
        items = cast(list[Any], value)
        return [type(value).__name__, *(dump(v, f"{where}/{i}", arrays, depth + 1) for i, v in enumerate(items))]
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}, which a checkpoint cannot keep: use numbers, text, arrays, and "
        "dictionaries, lists and tuples of them"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (int, str):
        return key
    raise CheckpointError(f"{where} has the key {key!r}: keys are text or whole numbers")


def load(value: Any, arrays: Mapping[str, Leaf] | None, *, apart: Callable[[Parted], Any] = np.asarray) -> Any:
    """Give back what `dump` was given.

    Args:
      value: What `dump` gave.
      arrays: Its arrays by name; None puts None in their places, for those who read the rest.
      apart: Makes an array of one that lies on the disk in parts; by default a whole one on the host.
    Raises:
      CheckpointError: It is nothing that `dump` gives.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case ["array", str(), bool()] if arrays is None:
            return None
        case ["array", str() as name, bool() as is_scalar] if arrays is not None and name in arrays:
            leaf = arrays[name]
            if isinstance(leaf.data, Parted):
                return apart(leaf.data)
            if leaf.key is not None:
                return jax.random.wrap_key_data(leaf.data, impl=leaf.key)
            return leaf.data[()] if is_scalar else leaf.data.copy()
        case ["dict", *items]:
            return {key: load(item, arrays, apart=apart) for key, item in cast(list[tuple[Any, Any]], items)}
        case ["list", *items]:
            return [load(item, arrays, apart=apart) for item in items]
        case ["tuple", *items]:
            return tuple(load(item, arrays, apart=apart) for item in items)
        case _:
            raise CheckpointError("its manifest is damaged: a value in it is none")


def describe(batch: Any) -> Any:
    """Give a batch's structure, shapes and dtypes as JSON, or None when it has containers of other kinds."""
    if batch is None:
        return ["none"]
    if isinstance(batch, np.ndarray | np.generic | jax.Array):
        return ["leaf", list(np.shape(batch)), str(batch.dtype)] if str(batch.dtype) in DTYPES else None
    if type(batch) is dict:
        named = cast(dict[Any, Any], batch)
        parts: list[Any] = [[key, describe(part)] for key, part in named.items()]
        fine = all(type(key) is str and part is not None for key, part in parts)
    elif type(batch) in (list, tuple):
        parts = [describe(part) for part in cast(list[Any], batch)]
        fine = all(part is not None for part in parts)
    else:
        return None
    return [type(cast(object, batch)).__name__, *parts] if fine else None


def example(description: Any) -> Any:
    """Give a batch of zeros of a description.

    Raises:
      CheckpointError: It is no description.
    """
    match description:
        case ["none"]:
            return None
        case ["leaf", list() as shape, str() as dtype]:
            numbers = cast(list[Any], shape)
            if len(numbers) > MAX_RANK or not all(type(n) is int and 0 <= n < 2**40 for n in numbers):
                raise CheckpointError("its manifest is damaged: the batch in it is none")
            return np.zeros(tuple(numbers), dtype_of(dtype))
        case ["dict", *items]:
            return {key: example(part) for key, part in cast(list[tuple[str, Any]], items)}
        case ["list", *items]:
            return [example(part) for part in items]
        case ["tuple", *items]:
            return tuple(example(part) for part in items)
        case _:
            raise CheckpointError("its manifest is damaged: the batch in it is none")


def batch_digest(batch: Any) -> str:
    """Give the SHA-256 of a batch: its structure, names, shapes, dtypes and bytes; of an array that lies on the devices
    of several processes, the bytes that this one has.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        is_here = not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
        parts = [leaf] if is_here else [shard.data for shard in leaf.addressable_shards]
        for part in parts:
            array = np.ascontiguousarray(np.asarray(part))
            digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {np.shape(part)};".encode())
            digest.update(as_bytes(array))
    return digest.hexdigest()
