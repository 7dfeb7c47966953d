"""A run's directory, opened: finding the newest whole checkpoint, saving in the background, keeping what is to stay."""

import logging
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from telic.checkpoints import files, leaves, store
from telic.checkpoints.config import Checkpoints, superfluous
from telic.checkpoints.files import Order
from telic.checkpoints.leaves import Leaf
from telic.checkpoints.manifest import Entry, Manifest
from telic.checkpoints.manifest import read as read_manifest
from telic.checkpoints.parts import FOLDER, Held
from telic.checkpoints.points import reach
from telic.checkpoints.sharing import SharedSave, next_number
from telic.errors import CheckpointError
from telic.loop.ports import Post

MAX_FAILURES = 2
"""Saves in a row that may fail before the run is stopped."""

_log = logging.getLogger("telic.checkpoints")


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it was read: whole and checked.

    Attributes:
      name: Its name in the directory.
      body: Its plain fields.
      arrays: Its arrays by name.
    """

    name: str
    body: Mapping[str, Any]
    arrays: Mapping[str, Leaf]


@dataclass
class Found:
    """What looking for a checkpoint gave.

    Attributes:
      saved: The newest whole one, or None.
      rejected: Why each newer one was not taken, by name.
      strays: Names that look like checkpoints and are none.
    """

    saved: Saved | None = None
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    strays: list[str] = field(default_factory=list[str])


class RunDirectory:
    """A run directory under its lock. Every method but the saving itself runs on the caller's thread.

    Args:
      config: Where, and which checkpoints stay.
      post: The processes that save their parts with this one; None where it is alone.
    """

    def __init__(self, config: Checkpoints, post: Post | None = None):
        self._config = config
        self._post = post
        self._root = config.directory
        self._held = ExitStack()
        self._run = secrets.token_hex(16)
        self._scores: dict[Order, float | None] = {}
        self._frozen: tuple[str, dict[str, Entry]] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._failures = 0
        self.waited_seconds = 0.0

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def open(self) -> list[str]:
        """Make the directory, take its lock and remove what interrupted saves left; give those names.

        Raises:
          BusyError: Another run holds it.
          OSError: It cannot be made or written.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._held.enter_context(files.locked(self._root))
            store.prepare()
            return files.clean(self._root)
        except OSError as error:
            error.add_note(f"checkpoints should go to {self._root}: give a directory that can be written")
            raise

    def close(self) -> None:
        """Wait for the save under way and give the lock back."""
        self._join()
        self._held.close()

    # -- reading -------------------------------------------------------------------------------------------------

    def find(self) -> Found:
        """Read the newest whole checkpoint.

        Raises:
          CheckpointError: There are checkpoints, and none is whole; the reason of each is named.
        """
        orders, strays = files.listing(self._root)
        reach("candidates_listed")
        found = Found(strays=strays)
        for order in reversed(orders):
            name = files.name_of(order)
            try:
                manifest, arrays = store.read(self._root, name)
            except CheckpointError as error:
                found.rejected[name] = str(error)
                continue
            found.saved = Saved(name, manifest.body, arrays)
            self._note_frozen(name, manifest.leaves)
            self._adopt(manifest.run, orders)
            break
        if found.saved is None and found.rejected:
            reasons = "\n".join(f"  {name}: {why}" for name, why in found.rejected.items())
            raise CheckpointError(
                f"{self._root} has checkpoints and none of them is whole:\n{reasons}\n"
                "Nothing was trained or deleted. Bring one back from a copy, or begin anew with resume='never', which "
                "sets these aside"
            )
        return found

    def _adopt(self, run: str, orders: list[Order]) -> None:
        """Continue a run: its readable checkpoints are ours to keep or to delete."""
        self._run = run
        for order in orders:
            try:
                manifest = read_manifest(files.inside(self._root, files.name_of(order)) / store.MANIFEST)
            except CheckpointError:
                continue
            if manifest.run == run:
                self._scores[order] = _score(manifest)

    def _note_frozen(self, name: str, leaves: Mapping[str, Entry]) -> None:
        """Remember a checkpoint whose frozen arrays later ones may link to."""
        frozen = {leaf: entry for leaf, entry in leaves.items() if store.is_frozen(entry.at)}
        self._frozen = (name, frozen) if frozen else None

    def set_aside(self) -> Path | None:
        """Move the checkpoints there are out of the way; give where, or None when there are none."""
        orders, _ = files.listing(self._root)
        return files.set_aside(self._root, orders) if orders else None

    # -- saving --------------------------------------------------------------------------------------------------

    def save(
        self,
        updates: int,
        body: Mapping[str, Any],
        arrays: Mapping[str, Any],
        score: float | None,
        *,
        frozen: Collection[str] = (),
        parts: Mapping[str, Held] | None = None,
        in_haste: bool = False,
    ) -> None:
        """Begin to save; returns before it is saved, and waits first for a save that is still under way.

        Args:
          updates: Updates done, the checkpoint's name.
          body: Plain data.
          arrays: Arrays by name that nothing will change or donate.
          score: What ranks it, or None.
          frozen: Names of arrays that no step can write: they are on the disk once.
          parts: This process's parts of those arrays that no process has whole, where several save together.
          in_haste: The process is about to be killed: write, and leave reading back and deleting to the next run.
        """
        began = time.monotonic()
        self._join()
        self.waited_seconds += time.monotonic() - began
        together = None
        if self._post is not None and parts:
            together = SharedSave(self._root, self._post, next_number(), parts, frozen, in_haste=in_haste)

        def work() -> None:
            try:
                self._save(updates, body, arrays, score, frozen, together, in_haste)
                self._failures, self._error = 0, None
            except Exception as error:
                self._failures += 1
                self._error = error
                if together is not None:
                    # Nobody writes to what is half written any more, and none of it is linked to again.
                    together.abandon()
                    self._frozen = None
                    files.clean(self._root)

        self._thread = threading.Thread(target=work, name="telic-checkpoint", daemon=True)
        self._thread.start()

    def poll(self) -> Exception | None:
        """Give, once, the error of a save that failed; None while all is well or still under way.

        Raises:
          CheckpointError: The saves fail again and again.
        """
        if self._thread is not None and self._thread.is_alive():
            return None
        self._join()
        error, self._error = self._error, None
        if error is not None and self._failures >= MAX_FAILURES:
            raise self._failed(error, f"{self._failures} checkpoints in a row could not be saved")
        return error

    def finish(self) -> None:
        """Wait for the last save.

        Raises:
          CheckpointError: It failed.
        """
        self._join()
        if self._error is not None:
            raise self._failed(self._error, "the last checkpoint could not be saved")

    def _failed(self, error: Exception, what: str) -> CheckpointError:
        kept = ", ".join(map(files.name_of, sorted(self._scores))) or "none"
        made = CheckpointError(f"{what} in {self._root}: {_reason(error)}. Whole checkpoints there: {kept}")
        made.__cause__ = error
        return made

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _save(
        self,
        updates: int,
        body: Mapping[str, Any],
        arrays: Mapping[str, Any],
        score: float | None,
        frozen: Collection[str],
        together: SharedSave | None,
        in_haste: bool,
    ) -> None:
        """Write, read back, and delete what is superfluous: on the background thread."""
        host = leaves.to_host(arrays)
        reach("snapshot_taken")
        entries, packed = store.pack(host, frozen)
        reach("digests_made")
        order = self._free_order(updates)
        name = files.name_of(order)
        beside = None
        if together is not None:
            entries |= together.lead(name, lambda made: self._like({**entries, **made}))
            beside = together.folder(name)
        manifest = Manifest(self._run, entries, {**body, "score": score, "versions": versions()})
        like = self._like(entries)
        try:
            self._write(name, manifest, packed, like, in_haste, beside)
        except (CheckpointError, FileNotFoundError):
            if like is None or beside is not None:
                raise
            # The files it was linked to may be damaged or gone: what is in memory is not.
            self._write(name, manifest, packed, None, in_haste)
        self._note_frozen(name, entries)
        self._scores[order] = score
        _log.info("saved %s in %s", name, self._root)
        if in_haste:
            return
        reach("read_back")
        for old in superfluous(self._config, self._scores):
            files.remove(self._root, files.name_of(old))
            del self._scores[old]

    def _like(self, entries: Mapping[str, Entry]) -> str | None:
        """Give a checkpoint that has exactly these frozen arrays, or None."""
        frozen = {name: entry for name, entry in entries.items() if store.is_frozen(entry.at)}
        if self._frozen is None or not frozen or self._frozen[1] != frozen:
            return None
        name = self._frozen[0]
        path = files.inside(self._root, name)
        return name if any((path / part).is_dir() for part in (store.FROZEN, FOLDER)) else None

    def _write(
        self,
        name: str,
        manifest: Manifest,
        arrays: store.Arrays,
        like: str | None,
        in_haste: bool,
        beside: Path | None = None,
    ) -> None:
        """Write a checkpoint and read it back; of one that fails nothing stays."""
        size = sum(array.nbytes for at, array in arrays.items() if like is None or not store.is_frozen(at))
        free = shutil.disk_usage(self._root).free
        if free < size:
            raise OSError(f"the disk is full: {size:,} bytes are needed and {free:,} are free")
        try:
            store.write(self._root, name, manifest, arrays, like, beside=beside)
            if not in_haste:
                # Each process has read its parts back.
                store.read(self._root, name, check_parts=beside is None)
        except Exception:
            # What is half written or does not read back would fill the disk, or be taken for a checkpoint.
            if (self._root / name).exists():
                files.remove(self._root, name)
            files.clean(self._root)
            raise

    def _free_order(self, updates: int) -> Order:
        orders, strays = files.listing(self._root)
        taken = {*orders, *(order for order in map(files.parse, strays) if order is not None)}
        same = [ordinal for number, ordinal in taken if number == updates]
        return (updates, max(same) + 1 if same else 0)


def versions() -> dict[str, str]:
    """Give the versions that decide what bits a program computes."""
    return {name: metadata.version(name) for name in ("telic", "jax", "jaxlib", "optax", "orbax-checkpoint")} | {
        "python": platform.python_version()
    }


def _score(manifest: Manifest) -> float | None:
    score = manifest.body.get("score")
    return float(score) if isinstance(score, int | float) and not isinstance(score, bool) else None


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300]}" if text else type(error).__name__


Say = Callable[[str], None]
"""Takes a line for the person who watches."""
