"""What a checkpoint says of itself: JSON with a checksum of its own, bounded and checked before it is believed.

On the disk it is an envelope ``{"telic": "checkpoint", "sha256": ..., "body": "..."}`` whose body is JSON again, as
text, so that the checksum covers exactly the bytes that are read. Nothing in it is executed or imported: it is
compared.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from telic.checkpoints.leaves import KEY_IMPLEMENTATIONS
from telic.errors import CheckpointError

SCHEMA = 2
"""Newest version of the format: 2 has leaves in parts. A checkpoint without any is written as 1, which is the same."""

MIGRATIONS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: lambda body: body}
"""From a schema to the next one: what an older body becomes."""

MAX_BYTES = 64 * 2**20
"""A longer manifest is refused unread."""

MAX_LEAVES = 1_000_000
MAX_RANK = 32

_PLAIN = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
    + "float16 bfloat16 float32 float64 complex64 complex128".split()
)
_NARROW = frozenset("int4 uint4 float8_e4m3fn float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split())
DTYPES = _PLAIN | _NARROW
"""Dtypes a checkpoint may hold; those the array store does not know are stored as their bytes."""


@dataclass(frozen=True)
class Piece:
    """A part of a leaf, in the file of the process that had it.

    Attributes:
      process: The process.
      start: First index of the part, by dimension.
      shape: Its shape.
      offset: Its first byte in the file.
      sha256: Checksum of its bytes in C order.
    """

    process: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    sha256: str


@dataclass(frozen=True)
class Entry:
    """One stored array.

    Attributes:
      shape: Its shape (of the words, for a key).
      dtype: Name of its dtype.
      sha256: Checksum of its bytes in C order; of a leaf in parts, of the parts' checksums.
      at: Array of the store that holds it, or the kind of its parts.
      offset: First byte in that array, for one of the small leaves that share it; None where it has one of its own.
      key: The PRNG of a key, or None.
      pieces: Its parts; none where it lies whole.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    at: str
    offset: int | None
    key: str | None
    pieces: tuple[Piece, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return int(np.prod(self.shape, dtype=object)) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's own description.

    Attributes:
      run: Random name of the run, the same in all its checkpoints.
      leaves: Arrays by name.
      body: The other fields, plain data: cursor, configuration, versions, score.
    """

    run: str
    leaves: Mapping[str, Entry]
    body: Mapping[str, Any]


def dtype_of(name: str) -> np.dtype[Any]:
    """Give a dtype by the name a manifest has for it.

    Raises:
      CheckpointError: It is none of those a checkpoint may hold.
    """
    if name not in DTYPES:
        raise CheckpointError(f"a checkpoint may hold arrays of {', '.join(sorted(DTYPES))}; got dtype {name!r}")
    # NumPy finds bfloat16 and its kin by name because JAX, which is imported, has registered them.
    return np.dtype(name)


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Say whether the array store knows a dtype; the bytes of others are stored."""
    return dtype.name in _PLAIN


def encode(manifest: Manifest) -> dict[str, str]:
    """Give the envelope of a manifest.

    Raises:
      CheckpointError: A value in it is no plain data, or there is too much of it.
    """
    leaves = {name: _listed(entry) for name, entry in manifest.leaves.items()}
    schema = SCHEMA if any(entry.pieces for entry in manifest.leaves.values()) else 1
    try:
        text = json.dumps(
            {**manifest.body, "schema": schema, "run": manifest.run, "leaves": leaves}, separators=(",", ":")
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"a checkpoint's record holds numbers, text, lists and mappings: {error}") from error
    if len(text) > MAX_BYTES // 2:
        raise CheckpointError(f"a checkpoint's record may have {MAX_BYTES // 2} bytes, this one has {len(text)}")
    return {"telic": "checkpoint", "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}


def _listed(entry: Entry) -> list[Any]:
    whole = [list(entry.shape), entry.dtype, entry.sha256, entry.at, entry.offset, entry.key]
    return [*whole, [listed_piece(piece) for piece in entry.pieces]] if entry.pieces else whole


def listed_piece(piece: Piece) -> list[Any]:
    """Give a part as JSON."""
    return [piece.process, list(piece.start), list(piece.shape), piece.offset, piece.sha256]


def read(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises:
      CheckpointError: It is missing, too long, damaged, or of a later release; the text says which.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError("its manifest is missing") from None
    except OSError as error:
        raise CheckpointError(f"its manifest cannot be read: {error}") from error
    if len(text) > MAX_BYTES:
        raise CheckpointError(f"its manifest is damaged: it has more than {MAX_BYTES} bytes")
    return decode(text)


def decode(text: bytes) -> Manifest:
    """Give the manifest of an envelope's bytes.

    Raises:
      CheckpointError: The bytes are damaged, or of a later release.
    """
    envelope = _json(text)
    content, digest = envelope.get("body"), envelope.get("sha256")
    if (
        set(envelope) != {"telic", "sha256", "body"}
        or envelope["telic"] != "checkpoint"
        or not isinstance(content, str)
    ):
        raise CheckpointError("its manifest is damaged: it is not the envelope of one")
    try:
        inner = content.encode()
    except UnicodeEncodeError:
        raise CheckpointError("its manifest is damaged: its text is not text") from None
    if hashlib.sha256(inner).hexdigest() != digest:
        raise CheckpointError("its manifest is damaged: its checksum differs")
    return _checked(_migrated(_json(inner)))


def _migrated(body: dict[str, Any]) -> dict[str, Any]:
    schema = body.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise CheckpointError(f"its manifest is damaged: schema {schema!r} is no version")
    if schema > SCHEMA:
        raise CheckpointError(
            f"it was written by a later release (format {schema}, this one reads up to {SCHEMA}): update telic"
        )
    while schema < SCHEMA:
        body = MIGRATIONS[schema](body)
        schema += 1
    return body


def _json(text: bytes) -> dict[str, Any]:
    """Parse JSON that is a mapping. Its size is bounded by the reader, its depth by Python's own limit."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its manifest is damaged: it is not JSON ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise CheckpointError("its manifest is damaged: it is not a mapping")
    return cast(dict[str, Any], found)


def _checked(body: dict[str, Any]) -> Manifest:
    run, leaves = body.get("run"), body.get("leaves")
    if not isinstance(run, str) or not isinstance(leaves, dict):
        raise CheckpointError("its manifest is damaged: run or leaves are missing")
    entries = cast(dict[str, Any], leaves)
    if len(entries) > MAX_LEAVES:
        raise CheckpointError(f"its manifest is damaged: it lists {len(entries)} arrays, at most {MAX_LEAVES} are read")
    rest = {name: value for name, value in body.items() if name not in ("run", "leaves", "schema")}
    return Manifest(run, {name: _entry(name, value) for name, value in entries.items()}, rest)


def _entry(name: str, value: Any) -> Entry:
    match value:
        case [list() as shape, str() as dtype, str() as digest, str() as at, offset, key, *rest] if len(rest) <= 1:
            pass
        case _:
            raise CheckpointError(f"its manifest is damaged: the entry of {name!r} is none")
    numbers = cast(list[Any], shape)
    is_offset = offset is None or _is_size(offset)
    is_key = key is None or key in KEY_IMPLEMENTATIONS
    if not _is_shape(numbers) or not is_offset or not is_key or not at.isalnum() or not at.isascii() or len(at) > 32:
        raise CheckpointError(f"its manifest is damaged: the entry of {name!r} is none")
    dtype_of(dtype)
    pieces = tuple(piece_of(name, given) for given in _parts(name, rest))
    if pieces and (offset is not None or key is not None or not _tile(tuple(numbers), pieces)):
        raise CheckpointError(f"its manifest is damaged: the parts of {name!r} do not make it up")
    return Entry(tuple(numbers), dtype, digest, at, offset, key, pieces)


def _parts(name: str, rest: list[Any]) -> list[Any]:
    match rest:
        case []:
            return []
        case [[_, *_] as parts]:
            return cast(list[Any], parts)
        case _:
            raise CheckpointError(f"its manifest is damaged: the entry of {name!r} is none")


def piece_of(name: str, value: Any) -> Piece:
    """Give the part of a leaf that `listed_piece` gave as JSON.

    Raises:
      CheckpointError: It is none.
    """
    match value:
        case [int() as process, list() as start, list() as shape, offset, str() as digest] if (
            _is_size(process) and _is_size(offset) and _is_shape(start) and _is_shape(shape)
        ):
            return Piece(process, tuple(start), tuple(shape), offset, digest)
        case _:
            raise CheckpointError(f"its manifest is damaged: a part of {name!r} is none")


def _tile(shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> bool:
    """Say whether parts are the cells of a grid over a shape, each of them once."""
    if any(len(piece.start) != len(shape) or len(piece.shape) != len(shape) for piece in pieces):
        return False
    cells = 1
    for dim, length in enumerate(shape):
        intervals = sorted({(piece.start[dim], piece.shape[dim]) for piece in pieces})
        ends = [0, *(start + size for start, size in intervals)]
        if ends[-1] != length or any(start != end for (start, _), end in zip(intervals, ends, strict=False)):
            return False
        cells *= len(intervals)
    return cells == len(pieces) == len({piece.start for piece in pieces})


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


def _is_shape(value: list[Any]) -> bool:
    return len(value) <= MAX_RANK and all(map(_is_size, value))
