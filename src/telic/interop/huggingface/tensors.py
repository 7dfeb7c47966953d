"""Safetensors files, read through a memory map and written in one go.

The format is a length, a JSON table of names, dtypes, shapes and byte ranges, and the bytes. A file comes from
anywhere, so nothing in the table is believed before it fits the file: sizes are compared before anything is allocated.
"""

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from telic.errors import PretrainedError

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(jnp.bfloat16),
        "I64": np.dtype(np.int64),
        "I32": np.dtype(np.int32),
        "I16": np.dtype(np.int16),
        "I8": np.dtype(np.int8),
        "U8": np.dtype(np.uint8),
        "BOOL": np.dtype(np.bool_),
        "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
        "F8_E5M2": np.dtype(jnp.float8_e5m2),
    }
)
"""Dtypes by their name in a file."""

_MOST_HEADER_BYTES = 100_000_000
"""The format's own limit of the table."""


@dataclass(frozen=True)
class Entry:
    """What a file says of one tensor.

    Attributes:
      dtype: NumPy dtype.
      shape: Its dimensions.
      begin: First byte, counted from the end of the table.
      end: Byte after the last.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class TensorFile:
    """One safetensors file: its table, checked, and its tensors when asked for.

    Attributes:
      path: The file.
      entries: What it holds, by name.
      metadata: Its own notes, words to words.
      start: Where the tensors begin, in bytes.
    """

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    start: int

    @staticmethod
    def open(path: Path) -> "TensorFile":
        """Read the table of a file.

        Raises:
          PretrainedError: The file is no safetensors file, is cut short, or its table does not fit it.
          OSError: It cannot be read.
        """
        info = path.stat()
        if not stat.S_ISREG(info.st_mode):
            raise PretrainedError(f"{path} is no regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            room = info.st_size - 8
            if room < 2 or not 2 <= length <= min(room, _MOST_HEADER_BYTES):
                raise PretrainedError(
                    f"{path}: the table is said to have {length} bytes, and the file has {max(room, 0)} after its "
                    "length: it is cut short, or no safetensors file"
                )
            text = file.read(length)
        table = _parse(path, text)
        metadata = table.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):  # pyright: ignore
            raise PretrainedError(f"{path}: __metadata__ must map words to words")
        entries = {name: _entry(path, name, value, room - length) for name, value in table.items()}
        _check_ranges(path, entries, room - length)
        return TensorFile(path, entries, metadata, 8 + length)  # pyright: ignore[reportUnknownArgumentType]

    def read(self, name: str) -> np.ndarray:
        """Give a tensor as a read-only array over the file; its bytes are read when they are used."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return np.zeros(entry.shape, entry.dtype)
        raw = np.memmap(self.path, np.uint8, "r", offset=self.start + entry.begin, shape=(entry.end - entry.begin,))
        return raw.view(np.ndarray).view(entry.dtype).reshape(entry.shape)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise PretrainedError(f"{path}: the table names {twice!r} twice")
        return dict(pairs)

    try:
        table = json.loads(text, object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PretrainedError(f"{path}: the table is no JSON ({type(error).__name__})") from error
    if not isinstance(table, dict):
        raise PretrainedError(f"{path}: the table must be a JSON object, got {type(table).__name__}")
    return table  # pyright: ignore[reportUnknownVariableType]


def _entry(path: Path, name: str, value: Any, room: int) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if len(value) == 3:
            pass
        case _:
            raise PretrainedError(f"{path}: {name!r} needs dtype, shape and data_offsets, got {str(value)[:200]}")
    if dtype not in DTYPES:
        raise PretrainedError(f"{path}: {name!r} has the dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if not all(type(n) is int and 0 <= n < 2**63 for n in shape):  # pyright: ignore[reportUnknownVariableType]
        raise PretrainedError(f"{path}: {name!r} has the shape {str(shape)[:200]}, which is none")
    if len(shape) > 32:  # pyright: ignore[reportUnknownArgumentType]
        raise PretrainedError(f"{path}: {name!r} has {len(shape)} dimensions")  # pyright: ignore[reportUnknownArgumentType]
    if not 0 <= begin <= end <= room:
        raise PretrainedError(
            f"{path}: {name!r} is said to lie at bytes {begin} to {end}, and the file has {room}: it is cut short or "
            "made up"
        )
    size = math.prod(shape) * DTYPES[dtype].itemsize  # pyright: ignore[reportUnknownArgumentType]
    if size != end - begin:
        raise PretrainedError(f"{path}: {name!r}, {dtype} {shape}, needs {size} bytes and has {end - begin}")
    return Entry(DTYPES[dtype], tuple(shape), begin, end)  # pyright: ignore[reportUnknownArgumentType]


def _check_ranges(path: Path, entries: Mapping[str, Entry], room: int) -> None:
    """Check that the tensors lie end to end: no byte belongs to two, and none to nobody."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            kind = "overlaps the tensor before it" if entry.begin < at else "leaves a gap before it"
            raise PretrainedError(f"{path}: {name!r} at byte {entry.begin} {kind}, which ends at {at}")
        at = entry.end
    if at != room:
        raise PretrainedError(f"{path}: the tensors end at byte {at}, and the file has {room}")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file: wide dtypes first, then by name, as its own library does. It appears by one rename.

    Raises:
      ValueError: A tensor has a dtype that the format lacks.
    """
    names_of = {dtype: name for name, dtype in DTYPES.items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in names_of:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors lacks; known: {', '.join(DTYPES)}")
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        tensor = tensors[name]
        table[name] = {
            "dtype": names_of[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).view(np.uint8).data if tensors[name].nbytes else b"")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
