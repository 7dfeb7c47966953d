"""A run directory as the processes other than 0 see it: that one writes it, and tells them what to read.

Where the state is in parts they write theirs.
"""

import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from telic.checkpoints import store
from telic.checkpoints.config import Checkpoints
from telic.checkpoints.directory import Found, Saved
from telic.checkpoints.parts import Held
from telic.checkpoints.sharing import SharedSave, next_number
from telic.errors import CheckpointError
from telic.loop.ports import Post


class FollowedDirectory:
    """The directory of a run that process 0 writes; it must be visible here too.

    Args:
      config: Where.
      post: The processes that save their parts together.
    """

    def __init__(self, config: Checkpoints, post: Post | None = None):
        self._root = config.directory
        self._post = post
        self._thread: threading.Thread | None = None

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def open(self) -> list[str]:
        """Do nothing: the lock is process 0's."""
        store.prepare()
        return []

    def close(self) -> None:
        """Wait for the save under way."""
        self._join()

    def find(self) -> Found:
        """Find nothing: process 0 says which checkpoint to read."""
        return Found()

    def read(self, name: str) -> Saved:
        """Read the checkpoint that process 0 found.

        Raises:
          CheckpointError: It is not whole, or not visible here.
        """
        try:
            manifest, arrays = store.read(self._root, name, check_parts=False)  # process 0 checked them
        except CheckpointError as error:
            error.add_note(
                f"process 0 reads checkpoint {name} in {self._root}: the directory must be one that all processes see"
            )
            raise
        return Saved(name, manifest.body, arrays)

    def set_aside(self) -> None:
        """Do nothing: process 0 does."""

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
        """Begin to save this process's parts; process 0 has all other values."""
        del updates, body, arrays, score
        self._join()
        if self._post is not None and parts:
            together = SharedSave(self._root, self._post, next_number(), parts, frozen, in_haste=in_haste)
            self._thread = threading.Thread(target=together.follow, name="telic-checkpoint", daemon=True)
            self._thread.start()

    def poll(self) -> None:
        """Give None: what fails, fails in process 0."""

    def finish(self) -> None:
        """Wait for the last save."""
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
