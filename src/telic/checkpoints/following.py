"""A run directory as those processes see it that do not write it: process 0 does, and tells them what to read."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from telic.checkpoints import store
from telic.checkpoints.config import Checkpoints
from telic.checkpoints.directory import Found, Saved
from telic.errors import CheckpointError


class FollowedDirectory:
    """The directory of a run that process 0 writes; it must be visible here too.

    Args:
      config: Where.
    """

    def __init__(self, config: Checkpoints):
        self._root = config.directory

    @property
    def root(self) -> Path:
        """The directory."""
        return self._root

    def open(self) -> list[str]:
        """Do nothing: the lock is process 0's."""
        store.prepare()
        return []

    def close(self) -> None:
        """Do nothing."""

    def find(self) -> Found:
        """Find nothing: process 0 says which checkpoint to read."""
        return Found()

    def read(self, name: str) -> Saved:
        """Read the checkpoint that process 0 found.

        Raises:
          CheckpointError: It is not whole, or not visible here.
        """
        try:
            manifest, arrays = store.read(self._root, name)
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
        in_haste: bool = False,
    ) -> None:
        """Do nothing: process 0 has all the values."""
        del updates, body, arrays, score, frozen, in_haste

    def poll(self) -> None:
        """Give None: what fails, fails in process 0."""

    def finish(self) -> None:
        """Do nothing."""
