"""Two checkpoints side by side, bit by bit: every array, and what the host remembers."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from telic.checkpoints import plain, store
from telic.checkpoints.leaves import Leaf, as_bytes, stored_spec
from telic.errors import CheckpointError

TIMES = ("times",)
"""Parts of a loop's record that tell how long something took, which no run repeats."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      arrays: Arrays of the first checkpoint.
      differing: How each array or record that is not the same differs, by name: weights, the rest of the
        state, what the host keeps.
    """

    arrays: int
    differing: Mapping[str, str]

    @property
    def is_same(self) -> bool:
        """Whether every bit is the same."""
        return not self.differing

    @property
    def first(self) -> str | None:
        """Name of the first that differs, arrays before records; None when all are the same."""
        return next(iter(self.differing), None)

    def lines(self, limit: int = 12) -> list[str]:
        """Give a line for each difference, and one for those past the limit."""
        shown = [f"{name}: {how}" for name, how in self.differing.items()]
        return shown if len(shown) <= limit else [*shown[:limit], f"and {len(shown) - limit} more"]


def compare(first: Path, second: Path, *, host: bool = True) -> Comparison:
    """Compare two checkpoints bit by bit; both are read whole and checked.

    Args:
      first: A checkpoint.
      second: Another.
      host: Compare what the host remembers too: cursor, history, event counts, handlers, data position, next batch.
        Without it only the step's state is compared.
    Raises:
      CheckpointError: One of them is damaged.
    """
    (here, ours), (there, theirs) = _read(first), _read(second)
    names = [name for name in {**ours, **theirs} if host or name == "state" or name.startswith("state/")]
    # Weights first: what else differs mostly follows from them.
    names.sort(key=lambda name: (not name.startswith("state/variables/"), not name.startswith("state")))
    found: dict[str, str] = {}
    for name in names:
        how = _difference(ours.get(name), theirs.get(name))
        if how is not None:
            found[name] = how
    if host:
        mine, other = _records(here, ours), _records(there, theirs)
        if here.get("shares", 1) != there.get("shares", 1):
            # Each has the digest of its first process's share.
            del mine["next_batch"], other["next_batch"]
        for name in {**mine, **other}:
            a, b = mine.get(name, "nothing"), other.get(name, "nothing")
            if a != b:
                found[name] = f"{_short(a)} and {_short(b)}"
    return Comparison(len([name for name in ours if name in names]), found)


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Leaf]]:
    try:
        manifest, arrays = store.read(path.parent, path.name)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error
    return manifest.body, arrays


def _difference(ours: Leaf | None, theirs: Leaf | None) -> str | None:
    """Say how two arrays differ; None when no bit does."""
    if ours is None or theirs is None:
        only = ours or theirs
        return (
            f"only in the {'first' if theirs is None else 'second'}{'' if only is None else f', {stored_spec(only)}'}"
        )
    if stored_spec(ours) != stored_spec(theirs):
        return f"{stored_spec(ours)} and {stored_spec(theirs)}"
    if as_bytes(ours.data) == as_bytes(theirs.data):
        return None
    a, b = (np.ascontiguousarray(leaf.data).reshape(-1) for leaf in (ours, theirs))
    bits = (a.view(np.uint8) != b.view(np.uint8)).reshape(a.size, -1).any(axis=1)
    text = f"{stored_spec(ours)}, {int(bits.sum()):,} of {a.size:,} values differ"
    if ours.key is None and a.dtype.kind in "fiu":
        with np.errstate(all="ignore"):
            apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
        text += f", by {np.nanmax(apart):.3g} at most" if not np.isnan(apart).all() else ""
    return text


def _records(body: Mapping[str, Any], arrays: Mapping[str, Leaf]) -> dict[str, str]:
    """Give the host's part of a checkpoint as texts by name."""
    loop = plain.load(body.get("loop"), arrays)
    kept = {name: value for name, value in cast(dict[str, Any], loop or {}).items() if name not in TIMES}
    found = dict(_flat("loop", kept))
    found |= {name: _text(body.get(name)) for name in ("next_batch", "configuration")}
    return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in cast(Mapping[Any, Any], value).items():
            yield from _flat(f"{name}/{key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(cast(list[Any], value)):
            yield from _flat(f"{name}/{i}", item)
    elif not isinstance(value, np.ndarray | np.generic | jax.Array):  # arrays are compared as arrays
        yield name, _text(value)


def _text(value: Any) -> str:
    # Text, because a NaN is the same as a NaN here.
    return json.dumps(value)


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
