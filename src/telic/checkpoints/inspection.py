"""Looking at checkpoints without a run: are they whole, and what is in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from telic.checkpoints import files, store
from telic.checkpoints.manifest import Entry
from telic.checkpoints.manifest import read as read_manifest
from telic.errors import CheckpointError


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
      directory: What was looked at.
      whole: Names of the checkpoints whose every byte was read and checked, oldest first.
      damaged: Why each other one is not, by name.
      leftovers: What interrupted saves left; the next run removes it.
      strays: Names that look like checkpoints and are none.
    """

    directory: Path
    whole: tuple[str, ...]
    damaged: Mapping[str, str]
    leftovers: tuple[str, ...]
    strays: tuple[str, ...]

    @property
    def is_fine(self) -> bool:
        """Whether every checkpoint is whole."""
        return not self.damaged

    def __str__(self) -> str:
        lines = [f"{self.directory}: {len(self.whole)} whole, {len(self.damaged)} damaged"]
        lines += [f"  {name}: whole" for name in self.whole]
        lines += [f"  {name}: {why}" for name, why in self.damaged.items()]
        lines += [f"  {name}: left by an interrupted save; the next run removes it" for name in self.leftovers]
        lines += [f"  {name}: not a checkpoint" for name in self.strays]
        return "\n".join(lines)


@dataclass(frozen=True)
class Contents:
    """What `inspect` found in one checkpoint.

    Attributes:
      name: Its name.
      leaves: Its arrays by name, in the order they were saved.
      body: Its other fields: cursor, configuration, versions, score.
    """

    name: str
    leaves: Mapping[str, Entry]
    body: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(entry.bytes for entry in self.leaves.values())

    def __str__(self) -> str:
        lines = [f"checkpoint {self.name}: {len(self.leaves)} arrays, {self.bytes:,} bytes"]
        lines += [f"  {package} {version}" for package, version in dict(self.body.get("versions", {})).items()]
        lines += [f"  {name}  {entry.dtype}{list(entry.shape)}" for name, entry in self.leaves.items()]
        return "\n".join(lines)


def verify(directory: str | PathLike[str]) -> Report:
    """Read every checkpoint of a run directory and check every byte that counts; nothing is changed, no lock is needed.

    Args:
      directory: A run's directory.
    Raises:
      FileNotFoundError: There is no such directory.
    """
    root = _existing(directory)
    orders, strays = files.listing(root)
    whole: list[str] = []
    damaged: dict[str, str] = {}
    for name in map(files.name_of, orders):
        try:
            store.read(root, name)
            whole.append(name)
        except CheckpointError as error:
            damaged[name] = str(error)
    return Report(root, tuple(whole), damaged, tuple(p.name for p in files.leftovers(root)), tuple(strays))


def inspect(checkpoint: str | PathLike[str]) -> Contents:
    """Read what a checkpoint says of itself: names, shapes, dtypes, sizes, versions. No array is read.

    Args:
      checkpoint: A checkpoint, or a run's directory, whose newest is taken.
    Raises:
      FileNotFoundError: There is no such directory.
      CheckpointError: It is no checkpoint, or its manifest is damaged.
    """
    path = _existing(checkpoint)
    if not (path / store.MANIFEST.parent).is_dir():
        orders, _ = files.listing(path)
        if not orders:
            raise CheckpointError(f"{path} is no checkpoint and has none; give <run> or <run>/<updates>")
        path = path / files.name_of(orders[-1])
    try:
        manifest = read_manifest(path / store.MANIFEST)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return Contents(path.name, manifest.leaves, manifest.body)


def _existing(directory: str | PathLike[str]) -> Path:
    root = Path(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no directory {root}; give the directory of a run")
    return root
