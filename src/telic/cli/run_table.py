"""``telic runs``: the run directories below a folder, each in one line."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from telic.checkpoints import files, inspect
from telic.errors import CheckpointError
from telic.reports.reading import status_of
from telic.reports.text import visible

_MAX_RECORD_BYTES = 2**20
_MAX_LOG_BYTES = 2**16
_MAX_METRICS = 4
"""Metrics of a run that are shown."""


@dataclass(frozen=True)
class Run:
    """One line of the table.

    Attributes:
      name: The directory, below the folder that was asked for.
      state: "running", "completed", "halted", "interrupted", "failed", "unfinished", "damaged", or "gone": its
        record says that it is running, and its process is not there.
      step: Updates of the newest checkpoint that can be read; None without one.
      metrics: Last values by name.
      bytes: Bytes of all its files.
      changed: Seconds since the epoch at which something in it last changed.
    """

    name: str
    state: str
    step: int | None
    metrics: dict[str, Any]
    bytes: int
    changed: float


def table(folder: Path, *, now: Callable[[], float] = time.time) -> list[str]:
    """Give the lines of the table; the run that changed last comes first."""
    runs = sorted((_run(path, folder) for path in _directories(folder)), key=lambda run: (-run.changed, run.name))
    if not runs:
        return []
    rows: list[tuple[str, ...]] = [("run", "state", "step", "size", "changed", "last metrics")]
    for run in runs:
        step = "" if run.step is None else f"{run.step:,}"
        metrics = "  ".join(f"{n} {_number(v)}" for n, v in list(run.metrics.items())[:_MAX_METRICS])
        cells = (run.name, run.state, step, _size(run.bytes), _ago(now() - run.changed), metrics)
        rows.append(tuple(visible(cell, 400) for cell in cells))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    padded = [[cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]


def _directories(folder: Path) -> list[Path]:
    found: list[Path] = []
    for root, names, inside in os.walk(folder):
        path = Path(root)
        if files.LOCK in inside or "run.json" in inside or "metrics.jsonl" in inside or files.listing(path)[0]:
            found.append(path)
        # Checkpoints are not looked into, nor those a run began anew from.
        names[:] = sorted(n for n in names if files.parse(n) is None and n != files.EARLIER and not n.startswith("."))
    return found


def _run(path: Path, folder: Path) -> Run:
    """Read a run; whatever in it is damaged is said, and never raised."""
    state, step, metrics = _checkpointed(path)
    record = _json(path / "run.json", _MAX_RECORD_BYTES)
    if state == "" and (said := status_of(record)) != "unknown":
        state = said
    metrics = _logged(path / "metrics.jsonl") or metrics
    if files.is_held(path):
        state = "running"
    name = "." if path == folder else str(path.relative_to(folder))
    return Run(name, state or "unfinished", step, metrics, files.size(path), _changed(path))


def _checkpointed(path: Path) -> tuple[str, int | None, dict[str, Any]]:
    orders, _ = files.listing(path)
    for order in reversed(orders):
        try:
            loop = inspect(path / files.name_of(order)).loop
        except CheckpointError:
            continue
        history = cast(dict[int, dict[str, Any]], loop.get("history") or {})
        status = loop.get("status")
        return status if isinstance(status, str) else "unfinished", order[0], history[max(history)] if history else {}
    return ("damaged" if orders else ""), None, {}


def _logged(log: Path) -> dict[str, Any]:
    """Give the metrics of a log's last complete line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _MAX_LOG_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found: Any = json.loads(line)["metrics"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(found, dict):
            return {str(n): v for n, v in cast(dict[Any, Any], found).items() if isinstance(v, int | float | str)}
    return {}


def _json(path: Path, limit: int) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(limit))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _changed(path: Path) -> float:
    times = [path.stat().st_mtime]
    with os.scandir(path) as entries:
        times += [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    return max(times)


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)[:20]


def _size(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def _ago(seconds: float) -> str:
    for limit, unit, length in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{max(0, int(seconds // length))} {unit} ago"
    return f"{int(seconds // 86400)} days ago"
