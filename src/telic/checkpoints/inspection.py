"""Looking at checkpoints without a run: are they whole, and what is in them."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from telic.checkpoints import files, plain, store
from telic.checkpoints.config import best as ranked
from telic.checkpoints.leaves import Leaf
from telic.checkpoints.manifest import Entry
from telic.checkpoints.manifest import read as read_manifest
from telic.errors import CheckpointError
from telic.tree import PathFilter, as_filter, check_selects


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

    @property
    def loop(self) -> dict[str, Any]:
        """The loop's record, such as ``iteration``, ``history`` and ``status``; None where it holds arrays.

        Raises:
          CheckpointError: It has none.
        """
        found = plain.load(self.body.get("loop"), None)
        if not isinstance(found, dict):
            raise CheckpointError(f"checkpoint {self.name} lacks the record of its loop")
        return cast(dict[str, Any], found)

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


def load_variables(
    checkpoint: str | PathLike[str],
    *,
    best: Literal["min", "max"] | None = None,
    select: PathFilter | None = None,
    averaged: bool = False,
) -> dict[str, Any]:
    """Read the weights of a checkpoint, checked, to start another run from.

    Give them as ``supervised(model, loss, variables=...)`` or ``fit(state=...)``, which list what is missing and what
    the model lacks. Only what `select` keeps is given back.

    Args:
      checkpoint: A checkpoint, or a run's directory, whose newest whole one is taken.
      best: Take the one of best score instead: "min" or "max", as the run ranked them.
      select: Filter over names such as ``params/encoder/**``.
      averaged: Lay the moving average over them.
    Returns:
      Nested dictionaries of NumPy arrays, such as ``{"params": {...}, "batch_stats": {...}}``.
    Raises:
      FileNotFoundError: There is no such directory.
      CheckpointError: None is whole, none has a score, it holds no variables, or no average where that is asked for.
    """
    path = _existing(checkpoint)
    if (path / store.MANIFEST.parent).is_dir():
        root, names = path.parent, [path.name]
    else:
        root = path
        orders, _ = files.listing(path)
        if best is not None:
            orders = list(reversed(ranked({order: _score(path, order) for order in orders}, best)))
        names = [files.name_of(order) for order in reversed(orders)]
    reasons: list[str] = []
    for name in names:
        try:
            _, arrays = store.read(root, name)
        except CheckpointError as error:
            reasons.append(f"{name}: {error}")
            continue
        return _nested(_laid_over(arrays, root / name) if averaged else arrays, select, root / name)
    raise CheckpointError(f"{path} has no whole checkpoint to read: {'; '.join(reasons) or 'there is none'}")


def _score(root: Path, order: files.Order) -> float | None:
    try:
        score = read_manifest(root / files.name_of(order) / store.MANIFEST).body.get("score")
    except CheckpointError:
        return None
    return float(score) if isinstance(score, int | float) else None


def _laid_over(arrays: Mapping[str, Leaf], path: Path) -> dict[str, Leaf]:
    """Give a checkpoint's arrays with the average in the place of what it is the average of, in that one's dtype."""
    prefix = "state/learner/ema/"
    means = {"state/variables/" + n.removeprefix(prefix): leaf for n, leaf in arrays.items() if n.startswith(prefix)}
    if not means:
        raise CheckpointError(f"{path} holds no moving average: its objective kept none")
    return {
        **arrays,
        **{name: Leaf(np.asarray(mean.data).astype(arrays[name].data.dtype)) for name, mean in means.items()},
    }


def _nested(arrays: Mapping[str, Leaf], select: PathFilter | None, path: Path) -> dict[str, Any]:
    prefix = "state/variables/"
    found = {n.removeprefix(prefix): np.asarray(leaf.data) for n, leaf in arrays.items() if n.startswith(prefix)}
    if not found:
        raise CheckpointError(f"{path} holds no variables: its run's state was made by a step of its own")
    made: dict[str, Any] = {}
    for name, data in found.items():
        *folders, last = name.split("/")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = data
    if select is None:
        return made
    check_selects(made, select, what="select")
    keep = as_filter(select)
    return _nested({prefix + name: Leaf(data) for name, data in found.items() if keep(name)}, None, path)


def _existing(directory: str | PathLike[str]) -> Path:
    root = Path(directory)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no directory {root}; give the directory of a run")
    return root
