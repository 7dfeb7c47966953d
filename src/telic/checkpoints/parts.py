"""Parts of leaves, one file for each process of a run: nobody needs a leaf whole to save it, or to take it up again.

A checkpoint of several processes has a folder ``parts`` with ``<process>.arrays``, and ``<process>.frozen`` for leaves
that no step can write: the bytes of the parts that lie on that process's devices, one after another in C order. The
manifest says which part of which leaf lies where, with a checksum for each.
"""

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telic.checkpoints.leaves import as_bytes
from telic.checkpoints.manifest import Entry, Piece, dtype_of
from telic.errors import CheckpointError

FOLDER = "parts"
"""Folder of a checkpoint with the parts."""

PARTS = "parts"
"""What an entry of the manifest has in the place of an array's name, for a leaf in parts."""

FROZEN_PARTS = "fparts"
"""What it has for one that no step can write."""


@dataclass(frozen=True)
class Held:
    """Parts of one leaf that a process has.

    Attributes:
      shape: Shape of the whole leaf.
      dtype: Its dtype's name.
      parts: The first index of each part, and its values.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[tuple[tuple[int, ...], Any]]


Described = dict[str, list[Piece]]
"""Parts by the leaf's name."""


def file_of(folder: Path, process: int, *, frozen: bool) -> Path:
    """Give the file of a process's parts."""
    return folder / f"{process}.{'frozen' if frozen else 'arrays'}"


def write(path: Path, process: int, leaves: Mapping[str, Held]) -> Described:
    """Write parts to a new file, one after another, and flush it to the disk; give what they are.

    Raises:
      OSError: It could not be written.
    """
    with path.open("xb") as file:
        found = _described(process, leaves, file.write)
        file.flush()
        os.fsync(file.fileno())
    return found


def describe(process: int, leaves: Mapping[str, Held]) -> Described:
    """Give what `write` would give for parts, without writing them."""
    return _described(process, leaves, len)


def _described(process: int, leaves: Mapping[str, Held], take: Any) -> Described:
    found: Described = {}
    offset = 0
    for name, held in leaves.items():
        found[name] = []
        for start, values in held.parts:
            array = np.asarray(values)  # one at a time on the host
            view = as_bytes(array)
            take(view)
            digest = hashlib.sha256(view).hexdigest()
            found[name].append(Piece(process, start, array.shape, offset, digest))
            offset += array.nbytes
    return found


def entries(leaves: Mapping[str, Held], described: Sequence[Described], frozen: Collection[str]) -> dict[str, Entry]:
    """Give the manifest's entries of leaves whose parts all processes have described."""
    made: dict[str, Entry] = {}
    for name, held in leaves.items():
        pieces = tuple(piece for own in described for piece in own.get(name, ()))
        at = FROZEN_PARTS if name in frozen else PARTS
        made[name] = Entry(held.shape, dtype_of(held.dtype).name, _digest(pieces), at, None, None, pieces)
    return made


def _digest(pieces: Sequence[Piece]) -> str:
    return hashlib.sha256("".join(piece.sha256 for piece in pieces).encode()).hexdigest()


def read(folder: Path, name: str, dtype: np.dtype[Any], piece: Piece, *, frozen: bool) -> np.ndarray[Any, Any]:
    """Read one part and check it.

    Raises:
      CheckpointError: It is damaged.
    """
    path = file_of(folder, piece.process, frozen=frozen)
    size = int(np.prod(piece.shape, dtype=object)) * dtype.itemsize
    try:
        if path.is_symlink() or piece.offset + size > path.stat().st_size:
            raise CheckpointError(f"its arrays are damaged: {name} is cut short in {path.name}")
        data = np.fromfile(path, np.uint8, count=size, offset=piece.offset)
    except OSError as error:
        raise CheckpointError(f"its arrays cannot be read: {FOLDER}/{path.name}: {error.strerror}") from error
    if hashlib.sha256(data.data).hexdigest() != piece.sha256:
        raise CheckpointError(f"leaf {name} is damaged: the checksum of its part in {path.name} differs")
    return data.view(dtype).reshape(piece.shape)


class Parted:
    """A leaf in parts, read from the disk where it is looked at: ``leaf[index]``, or whole as a NumPy array.

    Args:
      folder: The parts of its checkpoint.
      name: Its name.
      entry: Its entry in the manifest.
    """

    def __init__(self, folder: Path, name: str, entry: Entry):
        self._folder = folder
        self._name = name
        self._entry = entry
        self.shape = entry.shape
        self.dtype = dtype_of(entry.dtype)

    def check(self) -> None:
        """Read every part and check it.

        Raises:
          CheckpointError: One is damaged.
        """
        if _digest(self._entry.pieces) != self._entry.sha256:
            raise CheckpointError(f"leaf {self._name} is damaged: its checksum differs")
        for piece in self._entry.pieces:
            self._read(piece)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Give the values of one range of each dimension; only the parts that have some of them are read."""
        ranges = [one.indices(length)[:2] for one, length in zip(index, self.shape, strict=True)]
        found = np.empty([stop - start for start, stop in ranges], self.dtype)
        for piece in self._entry.pieces:
            both = [
                (max(start, at), min(stop, at + size))
                for (start, stop), at, size in zip(ranges, piece.start, piece.shape, strict=True)
            ]
            if all(start < stop for start, stop in both):
                here = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(both, ranges, strict=True))
                there = tuple(slice(a - at, b - at) for (a, b), at in zip(both, piece.start, strict=True))
                found[here] = self._read(piece)[there]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Give it whole."""
        del copy
        whole = self[tuple(slice(0, length) for length in self.shape)]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _read(self, piece: Piece) -> np.ndarray[Any, Any]:
        return read(self._folder, self._name, self.dtype, piece, frozen=self._entry.at == FROZEN_PARTS)
