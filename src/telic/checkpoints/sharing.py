"""One save by all processes of a run: each writes the parts it has, process 0 the rest and the manifest.

All of it happens on the threads that save, in this order: process 0 makes a folder and tells its name; each writes its
parts there, flushed, and tells what they are; process 0 tells which checkpoint the frozen ones can be linked from; each
has them and reads all of its own back; process 0 writes the checkpoint around the folder. Whoever fails tells that
instead, and process 0 raises it.
"""

import itertools
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from telic.checkpoints import files, parts
from telic.checkpoints.manifest import Entry, listed_piece, piece_of
from telic.checkpoints.parts import Described, Held
from telic.errors import CheckpointError, ProcessError
from telic.loop.ports import Post

_numbers = itertools.count()


def next_number() -> int:
    """Give the number of the next save of parts in this process: all processes save in the same order."""
    return next(_numbers)


class SharedSave:
    """One process's side of a save.

    Args:
      root: The run's directory.
      post: The processes.
      number: The save's number.
      leaves: This process's parts by the leaf's name.
      frozen: Names of leaves that no step can write.
      in_haste: Do not read back.
    """

    def __init__(
        self,
        root: Path,
        post: Post,
        number: int,
        leaves: Mapping[str, Held],
        frozen: Collection[str],
        *,
        in_haste: bool,
    ):
        self._root = root
        self._post = post
        self._at = f"save/{number}"
        self._changing = {name: held for name, held in leaves.items() if name not in frozen}
        self._frozen = {name: held for name, held in leaves.items() if name in frozen}
        self._in_haste = in_haste
        self._untold = ["folder", "like"]
        self._over = False

    def follow(self) -> None:
        """Save the parts of a process other than 0; what fails is told to process 0, which raises it."""
        told = False
        try:
            name = self._hear("folder")
            if name is not None:
                folder = files.inside(self._root, name)
                described = self._write(folder)
                self._tell("parts", {n: [listed_piece(piece) for piece in pieces] for n, pieces in described.items()})
                told = True
                like = self._hear("like")
                if like is not None:
                    self._finish(folder, described, like)
            failed = None
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        if not told:
            self._tell("parts", failed)
        self._tell("done", failed)

    def lead(self, name: str, like: Callable[[Mapping[str, Entry]], str | None]) -> dict[str, Entry]:
        """Save process 0's parts and wait for those of the others; give the entries of all leaves in parts.

        Args:
          name: The checkpoint's name.
          like: Gives the checkpoint whose frozen parts can be linked, from the entries.
        Raises:
          ProcessError: Another process could not save its parts.
          OSError: This one could not.
        """
        folder = self.folder(name)
        folder.mkdir()
        self._tell(self._untold.pop(0), folder.name)
        described = self._write(folder)
        found = [described, *(self._heard_parts(index) for index in range(1, self._post.count))]
        made = parts.entries({**self._changing, **self._frozen}, found, self._frozen)
        source = like(made) or ""
        self._tell(self._untold.pop(0), source)
        self._finish(folder, described, source)
        for index, failed in enumerate(self._ended(), start=1):
            self._raise(index, failed)
        return made

    def abandon(self) -> None:
        """Let the other processes know that process 0 gave up, if they wait for it, and wait until they have."""
        while self._untold:
            self._tell(self._untold.pop(0), None)
        self._ended()

    def _ended(self) -> list[str | None]:
        """Wait until the other processes are done; give why each failed, once."""
        if self._over:
            return []
        self._over = True
        ended = [self._hear("done", index) for index in range(1, self._post.count)]
        self._post.forget(self._at)
        return ended

    def folder(self, name: str) -> Path:
        """Give where the parts of a checkpoint are until it is written."""
        return files.inside(self._root, name + files.PARTS_WRITING)

    def _write(self, folder: Path) -> Described:
        index = self._post.index
        written = parts.write(parts.file_of(folder, index, frozen=False), index, self._changing)
        return {**written, **parts.describe(index, self._frozen)}

    def _finish(self, folder: Path, described: Described, like: str) -> None:
        """Put the frozen parts beside the others, and read back."""
        index = self._post.index
        if self._frozen:
            path = parts.file_of(folder, index, frozen=True)
            if not like or not self._linked(folder, described, like):
                path.unlink(missing_ok=True)
                parts.write(path, index, self._frozen)
        files.sync_directory(folder)
        if not self._in_haste:
            self._check(folder, described, {**self._changing, **self._frozen})

    def _linked(self, folder: Path, described: Described, like: str) -> bool:
        """Link the frozen parts of another checkpoint; say whether they are there and whole."""
        path = parts.file_of(folder, self._post.index, frozen=True)
        source = files.inside(self._root, like) / parts.FOLDER / path.name
        # The files may be damaged or gone: what is in memory is not.
        with suppress(OSError, CheckpointError):
            files.link(str(source), str(path))
            self._check(folder, described, self._frozen)
            return True
        return False

    def _check(self, folder: Path, described: Described, leaves: Mapping[str, Held]) -> None:
        for name in leaves:
            dtype = parts.dtype_of(leaves[name].dtype)
            for piece in described[name]:
                parts.read(folder, name, dtype, piece, frozen=name in self._frozen)

    def _heard_parts(self, index: int) -> Described:
        told = self._hear("parts", index)
        if not isinstance(told, dict):
            self._raise(index, str(told))
        return {name: [piece_of(name, piece) for piece in pieces] for name, pieces in told.items()}

    def _raise(self, index: int, failed: str | None) -> None:
        if failed is not None:
            raise ProcessError(f"process {index} could not save its parts: {failed}")

    def _tell(self, what: str, value: Any) -> None:
        self._post.tell(f"{self._at}/{what}", value)

    def _hear(self, what: str, teller: int = 0) -> Any:
        return self._post.hear(f"{self._at}/{what}", teller)
