"""Arrays and a manifest on the disk, through Orbax: the only module that imports it.

Small leaves share one array, because the store costs about as much for a scalar as for a megabyte. Every leaf has a
checksum of its own: Orbax writes none over array values, and a flipped bit comes back as another number.

Large leaves that no step can write lie in an item of their own. A later checkpoint with the same ones has hard links to
its files: they are on the disk once, every checkpoint is whole by itself, and the last one to go takes them along.

Leaves that several processes hold parts of are written by each of them, see `telic.checkpoints.parts`.
"""

import hashlib
import logging
import os
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from telic.checkpoints import files, parts
from telic.checkpoints.leaves import Leaf, as_bytes
from telic.checkpoints.manifest import Entry, Manifest, dtype_of, encode, is_plain
from telic.checkpoints.manifest import read as read_manifest
from telic.checkpoints.points import reach
from telic.errors import CheckpointError

ARRAYS = "arrays"
"""Item of a checkpoint with the leaves that change."""

SMALL = "small"
"""The array that small leaves share."""

SMALL_BYTES = 2**16
"""A leaf of at most this size shares an array with others."""

FROZEN = "frozen"
"""Item of a checkpoint with the leaves that no step can write."""

_FROZEN_AT = "f"
"""What the names of its arrays begin with."""

MAX_RATIO = 4096
"""Bytes of arrays for each byte on the disk, at most: more is no checkpoint but a bomb."""

MANIFEST = Path("manifest") / "metadata"
"""Where Orbax puts the JSON of a checkpoint's manifest."""


Arrays = dict[str, np.ndarray[Any, Any]]
"""Arrays of the store by the names a manifest has for them."""


def pack(leaves: Mapping[str, Leaf], frozen: Collection[str] = ()) -> tuple[dict[str, Entry], Arrays]:
    """Give the entries of leaves and the arrays to be stored.

    Args:
      leaves: Leaves by name.
      frozen: Names of those that no step can write.
    """
    entries: dict[str, Entry] = {}
    arrays: Arrays = {}
    small: list[bytes] = []
    offset = 0
    for name, leaf in leaves.items():
        data = np.ascontiguousarray(leaf.data).reshape(leaf.data.shape)
        dtype = dtype_of(data.dtype.name).name
        view = as_bytes(data)
        digest = hashlib.sha256(view).hexdigest()
        if data.nbytes <= SMALL_BYTES:
            entries[name] = Entry(data.shape, dtype, digest, SMALL, offset, leaf.key)
            small.append(bytes(view))
            offset += data.nbytes
        else:
            at = f"{_FROZEN_AT if name in frozen else 'a'}{len(arrays):06d}"
            entries[name] = Entry(data.shape, dtype, digest, at, None, leaf.key)
            arrays[at] = data if is_plain(data.dtype) else data.view(np.uint8)
    # The store refuses arrays without elements.
    arrays[SMALL] = np.frombuffer(b"".join((*small, b"\0")), np.uint8)
    return entries, arrays


def is_frozen(at: str) -> bool:
    """Say whether an array of the store is one that no step can write."""
    return at.startswith(_FROZEN_AT)


def write(
    root: Path, name: str, manifest: Manifest, arrays: Arrays, like: str | None, *, beside: Path | None = None
) -> None:
    """Write a checkpoint and make it visible.

    Args:
      root: The run's directory.
      name: Its name.
      manifest: Its manifest.
      arrays: Its arrays.
      like: A checkpoint with the same frozen arrays, whose files are linked; None writes them.
      beside: Parts that the processes have written; they become a part of the checkpoint.
    Raises:
      OSError: It could not be written; nothing of it is visible.
    """
    ocp = _orbax()
    writing = files.inside(root, name + files.WRITING)
    items = _items(arrays)
    linked = like is not None and items.pop(FROZEN, None) is not None
    with _checkpointer(ocp) as checkpointer:
        checkpointer.save(
            os.fspath(writing.absolute()),
            args=ocp.args.Composite(
                **{item: ocp.args.PyTreeSave(part) for item, part in items.items()},
                manifest=ocp.args.JsonSave(encode(manifest)),
            ),
        )
    if like is not None and linked:
        files.link_tree(files.inside(root, like) / FROZEN, writing / FROZEN)
    if beside is not None:
        os.rename(beside, writing / parts.FOLDER)
    reach("arrays_written")
    files.commit(root, name)


def _items(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Give arrays by the item they lie in."""
    items: dict[str, dict[str, Any]] = {ARRAYS: {}}
    for at, array in arrays.items():
        items.setdefault(FROZEN if is_frozen(at) else ARRAYS, {})[at] = array
    return items


def read(root: Path, name: str, *, check_parts: bool = True) -> tuple[Manifest, dict[str, Leaf]]:
    """Read a checkpoint whole and check every leaf of it; leaves in parts stay on the disk.

    Args:
      root: The run's directory.
      name: The checkpoint.
      check_parts: Check the parts too; without it somebody else does.
    Raises:
      CheckpointError: Something in it is damaged; the text names what.
    """
    path = files.inside(root, name)
    if path.is_symlink():
        raise CheckpointError("it is a link, not a checkpoint written here")
    manifest = read_manifest(path / MANIFEST)
    found = _read_arrays(path, manifest)
    if check_parts:
        for leaf in found.values():
            if isinstance(leaf.data, parts.Parted):
                leaf.data.check()
    return manifest, found


def _read_arrays(path: Path, manifest: Manifest) -> dict[str, Leaf]:
    shapes = _stored_shapes(manifest)
    total = sum(int(np.prod(shape, dtype=object)) * dtype.itemsize for shape, dtype in shapes.values())
    items = _items(shapes)
    on_disk = sum(files.size(path / item) for item in items if (path / item).is_dir())
    if total > MAX_RATIO * max(on_disk, 1) + SMALL_BYTES:
        raise CheckpointError(f"its arrays are damaged: {on_disk} bytes on the disk cannot hold {total}")
    ocp = _orbax()
    as_numpy = {at: ocp.RestoreArgs(restore_type=np.ndarray) for at in shapes}
    try:
        with _checkpointer(ocp) as checkpointer:
            restored = checkpointer.restore(
                os.fspath(path.absolute()),
                args=ocp.args.Composite(
                    **{
                        item: ocp.args.PyTreeRestore(
                            item=dict.fromkeys(part, 0), restore_args={at: as_numpy[at] for at in part}
                        )
                        for item, part in items.items()
                    }
                ),
            )
        wanted = {at: array for item in items for at, array in dict(restored[item]).items()}
    except Exception as error:
        # Whatever the store raises for damaged files: its kinds are many, and all of them mean this.
        first = (str(error).strip() or "no reason given").splitlines()[0][:200]
        raise CheckpointError(f"its arrays cannot be read ({type(error).__name__}: {first})") from error
    reach("arrays_read")
    for at, (shape, dtype) in shapes.items():
        array = wanted.get(at)
        is_small = at == SMALL
        if not isinstance(array, np.ndarray) or array.dtype != dtype or (not is_small and array.shape != shape):
            raise CheckpointError(f"its arrays are damaged: {at} is not {dtype}{list(shape)}")
    return {name: _leaf(path, name, entry, wanted) for name, entry in manifest.leaves.items()}


def _stored_shapes(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Give shape and dtype of the arrays of the store that a manifest's leaves lie in."""
    small = max((e.offset + e.bytes for e in manifest.leaves.values() if e.offset is not None), default=0)
    shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {SMALL: ((small + 1,), np.dtype(np.uint8))}
    for name, entry in manifest.leaves.items():
        if entry.pieces:
            continue
        if entry.offset is not None:
            if entry.at != SMALL:
                raise CheckpointError(f"its manifest is damaged: the entry of {name!r} is none")
            continue
        if entry.at in shapes:
            raise CheckpointError(f"its manifest is damaged: {entry.at} holds two leaves")
        dtype = dtype_of(entry.dtype)
        shapes[entry.at] = (entry.shape, dtype if is_plain(dtype) else np.dtype(np.uint8))
    return shapes


def _leaf(path: Path, name: str, entry: Entry, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Leaf:
    if entry.pieces:
        return Leaf(parts.Parted(path / parts.FOLDER, name, entry))
    array = arrays[entry.at]
    if entry.offset is not None:
        data = array[entry.offset : entry.offset + entry.bytes]
        if data.nbytes != entry.bytes:
            raise CheckpointError(f"its arrays are damaged: {name} is cut short")
        data = np.frombuffer(data.tobytes(), dtype_of(entry.dtype)).reshape(entry.shape)
    else:
        data = array if array.dtype == dtype_of(entry.dtype) else array.view(dtype_of(entry.dtype))
    if hashlib.sha256(as_bytes(data)).hexdigest() != entry.sha256:
        raise CheckpointError(f"leaf {name} is damaged: its checksum differs")
    return Leaf(data, entry.key)


def prepare() -> None:
    """Import Orbax now: a save in haste has no time for it, and a thread should not import."""
    _orbax()


def _orbax() -> Any:
    """Import Orbax when a run first needs it: it takes longer to load than all of telic."""
    import orbax.checkpoint as ocp

    return ocp


def _alone(ocp: Any) -> dict[str, Any]:
    """Give the options that keep Orbax from waiting for other processes: one of them writes, and each reads."""
    if jax.process_count() == 1:
        return {}
    index = jax.process_index()
    options = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"telic{index}"
    )
    return {"multiprocessing_options": options}


@contextmanager
def _checkpointer(ocp: Any) -> Generator[Any]:
    logger = logging.getLogger("absl")
    before = logger.level
    # Weights hardly compress: it would cost the training more processor time than it saves of the disk.
    alone = _alone(ocp)
    kinds = {item: ocp.PyTreeCheckpointHandler(use_compression=False, **alone) for item in (ARRAYS, FROZEN)}
    handler = ocp.CompositeCheckpointHandler(
        **kinds, composite_options=ocp.CompositeOptions(**alone), manifest=ocp.JsonCheckpointHandler(**alone)
    )
    with ocp.Checkpointer(handler, **alone) as checkpointer:
        # Orbax tells every step of a save at INFO and WARNING; what matters of it is raised.
        logger.setLevel(logging.ERROR)
        try:
            yield checkpointer
        finally:
            logger.setLevel(before)
