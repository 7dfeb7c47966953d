"""Loop states in files: the last ones, and the best by a metric, each in a pool of its own."""

import contextlib
import json
import math
import os
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from telic.errors import closest
from telic.handlers.monitor import Mode, check_may_come, read_metric
from telic.loop.ports import State

INDEX = "checkpoints.json"
"""File in the directory that says which checkpoints are whose, and the scores of the best."""

_SCHEMA = 1
_TEMPORARY = ".telic-"
_MAX_INDEX_BYTES = 16 * 2**20


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Handler that writes the loop state to a file.

    A file becomes visible by one rename, after its bytes are on the disk; a failed or killed write leaves the earlier
    files as they are. Without `metric` each event is written and the `keep_last` newest stay. With `metric` an event is
    written when the metric is better than every one before, this run's or an earlier run's in the same directory, and
    the `keep_best` best stay; of equal scores the oldest is the best. Both pools are separate: what one removes, the
    other keeps.

    Args:
      directory: Where files go; made when the run starts.
      encode: Gives the bytes of the state after the event.
      record: Unique name; ``{"last", "best", "score"}`` in `handler_state` are the newest and best file and its score.
      pattern: File name with ``{epoch}``, ``{iteration}``, ``{total_iterations}`` and ``{steps}`` as the handler sees
        them, or a function of the state.
      metric: What decides; None writes at every event.
      mode: Which direction is better.
      keep_last: Newest files that stay, or "all"; 0 writes improvements only.
      keep_best: Best files that stay, or "all".
      awaits: Says whether an absent metric may still come.
    """

    directory: Path
    encode: Callable[[Any], bytes]
    record: str
    pattern: str | Callable[[Any], str] = "checkpoint_{epoch}_{iteration}"
    metric: str | None = None
    mode: Mode | None = None
    keep_last: int | Literal["all"] = 2
    keep_best: int | Literal["all"] = 1
    awaits: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for name, least in (("keep_last", 0 if self.metric is not None else 1), ("keep_best", 1)):
            value = getattr(self, name)
            if value == "all":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{self.record}: {name} must be a number of files or 'all', got {value!r}")
            if value < least:
                raise ValueError(f"{self.record}: {name} must be at least {least}, got {value}")
        if isinstance(self.pattern, str):
            check_file_name(_format(self.pattern, dict.fromkeys(_FIELDS, 0)))
        elif not callable(self.pattern):
            raise TypeError(f"file_pattern must be text or a function of the state, got {self.pattern!r}")

    def prepare(self, state: State) -> None:
        """Make the directory, see that it can be written, and clear what a killed run left.

        Raises:
          OSError: It cannot be made or written; said before training begins.
          ValueError: Its index is damaged, or of another metric.
        """
        del state
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f"{_TEMPORARY}probe.tmp"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            error.add_note(f"checkpoints should go to {self.directory}: give a directory that can be written")
            raise
        for left in self.directory.glob(f"{_TEMPORARY}*.tmp"):
            left.unlink()
        index = read_index(self.directory)
        if index["removing"]:
            self._remove(index)
        self._pool(index)

    def __call__(self, state: State) -> None:
        """Write the state if this event asks for it.

        Raises:
          ContractError: The metric does not exist.
          ValueError: The file name leaves the directory.
        """
        score = None if self.metric is None else self._score(state)
        index = read_index(self.directory)
        pool = self._pool(index)
        best: list[dict[str, Any]] = pool["best"]
        improved = score is not None and (not best or self._is_better(score, best[-1]["score"]))
        if not improved and not self.keep_last:
            return
        name = check_file_name(self._name(state))
        if improved:
            best[:] = [entry for entry in best if entry["name"] != name]
            best.append({"name": name, "score": score})
        if self.keep_last:
            pool["last"] = [*(old for old in pool["last"] if old != name), name]
        dropped = _over(pool["last"], self.keep_last) + [entry["name"] for entry in _over(best, self.keep_best)]
        shown = best[-1] if best else {"name": None, "score": None}
        # Before the bytes are made, so that the file holds its own record.
        state.handler_state[self.record] = {"last": name, "best": shown["name"], "score": shown["score"]}
        write_file(self.directory, name, self.encode(state))
        kept = _kept(index)
        index["removing"] = sorted({*index["removing"], *dropped} - kept)
        write_file(self.directory, INDEX, json.dumps(index, indent=1).encode())
        if index["removing"]:
            self._remove(index)

    def _score(self, state: State) -> float | None:
        """Give the metric, or None where it is not finite or may still come."""
        metric = cast(str, self.metric)
        value = read_metric(state, metric, self.record)
        if value is None:
            check_may_come(state, metric, self.record, self.awaits)
            return None
        return value if math.isfinite(value) else None

    def _is_better(self, score: float, best: float) -> bool:
        return score < best if self.mode == "min" else score > best

    def _name(self, state: State) -> str:
        if isinstance(self.pattern, str):
            return _format(self.pattern, {field: getattr(state, field) for field in _FIELDS})
        return self.pattern(state)

    def _pool(self, index: dict[str, Any]) -> dict[str, Any]:
        """Give this handler's part of the index, without files that are gone."""
        pool = index["pools"].setdefault(
            self.record, {"metric": self.metric, "mode": self.mode, "last": [], "best": []}
        )
        if (pool["metric"], pool["mode"]) != (self.metric, self.mode):
            raise ValueError(
                f"{self.directory / INDEX} has scores of {pool['metric']!r} (mode {pool['mode']!r}) under "
                f"{self.record!r}, this run saves by {self.metric!r} (mode {self.mode!r}); give another directory or "
                "another name="
            )
        pool["last"] = [name for name in pool["last"] if (self.directory / name).is_file()]
        pool["best"] = [entry for entry in pool["best"] if (self.directory / entry["name"]).is_file()]
        return pool

    def _remove(self, index: dict[str, Any]) -> None:
        """Delete what the index says is being removed: only files that a checkpoint handler wrote and none keeps."""
        for name in sorted(set(index["removing"]) - _kept(index)):
            (self.directory / name).unlink(missing_ok=True)
        index["removing"] = []
        write_file(self.directory, INDEX, json.dumps(index, indent=1).encode())


def best_checkpoint(directory: str | os.PathLike[str], record: str | None = None) -> Path | None:
    """Give the file with the best score in a checkpoint directory, or None when there is none.

    Args:
      directory: Where `Loop.checkpoint(criteria=...)` wrote.
      record: Name of the handler; needed when several of them write there.
    """
    entry = _pool_of(directory, record, "best")
    return None if entry is None else Path(directory) / entry["name"]


def last_checkpoint(directory: str | os.PathLike[str], record: str | None = None) -> Path | None:
    """Give the newest file of a checkpoint directory, or None when there is none.

    Args:
      directory: Where `Loop.checkpoint` wrote.
      record: Name of the handler; needed when several of them write there.
    """
    name = _pool_of(directory, record, "last")
    return None if name is None else Path(directory) / name


def _pool_of(directory: str | os.PathLike[str], record: str | None, kind: str) -> Any:
    pools = {name: pool for name, pool in read_index(Path(directory))["pools"].items() if pool[kind]}
    if record is not None:
        return pools[record][kind][-1] if record in pools else None
    if len(pools) > 1:
        raise ValueError(f"several handlers write to {directory}: say which with record=, of {', '.join(pools)}")
    return next((pool[kind][-1] for pool in pools.values()), None)


# -- names -------------------------------------------------------------------------------------------------------------

_FIELDS = ("epoch", "iteration", "total_iterations", "steps")


def _format(pattern: str, values: Mapping[str, int]) -> str:
    """Fill a pattern.

    Raises:
      ValueError: It has a field that is no plain name of those there are.
    """
    for _, field, _, _ in string.Formatter().parse(pattern):
        if field is not None and field not in values:
            raise ValueError(
                f"file_pattern {pattern!r} has the field {{{field}}}.{closest(field, values)} Known: "
                f"{', '.join(values)}; for anything else give a function of the state"
            )
    return pattern.format(**values)


def check_file_name(name: Any) -> str:
    """Check that a name is that of a file in the directory itself.

    Raises:
      TypeError: It is no text.
      ValueError: It would lead elsewhere, is hidden, or is the index's.
    """
    if not isinstance(name, str):
        raise TypeError(f"a checkpoint's file name must be text, got {name!r}")
    if not name or name.startswith(".") or name == INDEX or any(c in "/\\:" or not c.isprintable() for c in name):
        raise ValueError(
            f"a checkpoint's file name must be one plain name in its directory, got {name!r}; put the path into the "
            "directory, and give names such as 'checkpoint_{epoch}'"
        )
    return name


# -- files -------------------------------------------------------------------------------------------------------------


def write_file(directory: Path, name: str, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    temporary = directory / f"{_TEMPORARY}{name}.tmp"
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(directory / name)
    except BaseException as error:
        error.add_note(f"while writing {directory / name}; earlier checkpoints are as they were")
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_index(directory: Path) -> dict[str, Any]:
    """Read a directory's index; an empty one when there is none.

    Raises:
      ValueError: It is damaged, or written by another version.
    """
    path = directory / INDEX
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        return {"schema": _SCHEMA, "pools": {}, "removing": []}
    try:
        if len(raw) > _MAX_INDEX_BYTES:
            raise ValueError(f"more than {_MAX_INDEX_BYTES} bytes")
        return _checked_index(json.loads(raw))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no index of checkpoints ({error}); move it away to begin a new one, the checkpoints stay"
        ) from error


def _checked_index(index: Any) -> dict[str, Any]:
    match index:
        case {"schema": schema} if schema != _SCHEMA:
            raise ValueError(f"schema {schema!r}, this version of Telic reads {_SCHEMA}")
        case {"pools": dict(pools), "removing": list(removing)} if len(index) == 3:
            pass
        case _:
            raise ValueError("unexpected contents")
    for name in cast(list[Any], removing):
        check_file_name(name)
    for pool in cast(dict[str, Any], pools).values():
        match pool:
            case {"metric": None | str(), "mode": None | "min" | "max", "last": list(last), "best": list(best)}:
                for name in cast(list[Any], last):
                    check_file_name(name)
                for entry in cast(list[Any], best):
                    match entry:
                        case {"name": name, "score": float(score)} if math.isfinite(score):
                            check_file_name(name)
                        case _:
                            raise ValueError(f"unexpected entry {entry!r}")
            case _:
                raise ValueError("unexpected pool")
    return cast(dict[str, Any], index)


def _over(names: list[Any], keep: int | Literal["all"]) -> list[Any]:
    """Take off the oldest entries beyond `keep`, in place, and give them. The best pool is in order of score too."""
    if keep == "all":
        return []
    dropped = names[: max(0, len(names) - keep)]
    del names[: len(dropped)]
    return dropped


def _kept(index: Mapping[str, Any]) -> set[str]:
    """Give the files that some pool keeps."""
    kept: set[str] = set()
    for pool in index["pools"].values():
        kept.update(pool["last"])
        kept.update(entry["name"] for entry in pool["best"])
    return kept
