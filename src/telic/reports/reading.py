"""A run directory as values. Nothing in it is believed: what is damaged, missing or odd is left out and counted."""

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from telic.reports.log import Line, Log

METRICS, RECORD, PROFILE, PREVIEWS = "metrics.jsonl", "run.json", "profile.json", "previews"

_MAX_JSON_BYTES = 4 * 2**20
_MAX_PICTURE_BYTES = 4 * 2**20
_MAX_TEXT_BYTES = 64 * 2**10
_PREVIEW = re.compile(r"(?P<name>.+)_(?P<step>[0-9]{1,12})\.(?P<kind>png|txt|json)\Z", re.ASCII)
_SKIPPED = re.compile(r"[0-9]+(\.[0-9]+)?\Z|\.|earlier\Z")


@dataclass(frozen=True)
class Shown:
    """One preview: a picture or a text.

    Attributes:
      name: What it shows.
      step: Updates at which it was made.
      kind: "png" or "txt".
      path: The file.
    """

    name: str
    step: int
    kind: str
    path: Path

    def read(self) -> bytes | None:
        """Give its bytes, None where they cannot be shown: too many, gone, or no picture after all."""
        limit = _MAX_PICTURE_BYTES if self.kind == "png" else _MAX_TEXT_BYTES
        try:
            with self.path.open("rb") as file:
                found = file.read(limit + 1)
        except OSError:
            return None
        if self.kind == "png":
            return found if len(found) <= limit and found.startswith(b"\x89PNG\r\n\x1a\n") else None
        return found[:limit]


@dataclass(frozen=True)
class Run:
    """What a run directory says.

    Attributes:
      name: The directory, as a person names it.
      directory: Where it is.
      record: ``run.json``; empty without one.
      lines: Lines of ``metrics.jsonl`` in order.
      profile: ``profile.json``; empty without one.
      previews: Pictures and texts, the newest of each name last.
      bad_lines: Lines that could not be read.
      status: "running", "completed", "halted", "interrupted", "failed", "gone" (it says running and nobody runs it), or
        "unknown".
    """

    name: str
    directory: Path
    record: Mapping[str, Any]
    lines: tuple[Line, ...]
    profile: Mapping[str, Any]
    previews: tuple[Shown, ...]
    bad_lines: int
    status: str

    @property
    def stamp(self) -> str:
        """A text that changes when anything shown changes."""
        return stamp_of(self.directory)

    def part(self, *names: str) -> Mapping[str, Any]:
        """Give a mapping inside the record; empty where there is none."""
        found: Any = self.record
        for name in names:
            found = cast(Mapping[str, Any], found).get(name) if isinstance(found, Mapping) else None
        return cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {}


def read_run(directory: Path, name: str | None = None, *, log: Log | None = None) -> Run:
    """Read a run directory; whatever is wrong in it is left out, and never raised.

    Args:
      directory: The directory.
      name: How it is called; by default its own name.
      log: Its metrics, for who reads them again and again or only the newest; by default all are read.
    """
    record = _json(directory / RECORD)
    lines, bad = (Log(directory / METRICS) if log is None else log).read()
    called = name or directory.resolve().name
    profile = _json(directory / PROFILE)
    return Run(called, directory, record, lines, profile, tuple(_previews(directory)), bad, status_of(record))


def find_runs(folder: Path) -> dict[str, Path]:
    """Give the directories below a folder, itself among them, that hold a record, by their name; the newest first."""
    found: list[tuple[float, str, Path]] = []
    for root, names, inside in os.walk(folder):
        path = Path(root)
        if RECORD in inside or METRICS in inside:
            name = path.resolve().name if path == folder else path.relative_to(folder).as_posix()
            found.append((-_changed(path), name, path))
        names[:] = sorted(n for n in names if not _SKIPPED.match(n))
    return {name: path for _, name, path in sorted(found)}


def stamp_of(directory: Path) -> str:
    """Give a text that changes when a run's files do."""
    marks: list[str] = []
    for name in (RECORD, METRICS, PROFILE, PREVIEWS):
        try:
            found = (directory / name).stat()
            marks.append(f"{found.st_mtime_ns:x}-{found.st_size:x}")
        except OSError:
            marks.append("0")
    return ".".join(marks)


def _changed(path: Path) -> float:
    times = [0.0]
    for name in (RECORD, METRICS):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(_MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def _previews(directory: Path) -> Iterator[Shown]:
    try:
        names = sorted(os.listdir(directory / PREVIEWS))
    except OSError:
        return
    found: list[Shown] = []
    for name in names:
        match = _PREVIEW.match(name)
        if match is not None and match["kind"] != "json" and not name.startswith("."):
            found.append(Shown(match["name"], int(match["step"]), match["kind"], directory / PREVIEWS / name))
    yield from sorted(found, key=lambda shown: (shown.name, shown.kind, shown.step))


def status_of(record: Mapping[str, Any]) -> str:
    """Give the status of a run by its ``run.json``, as `Run.status` says; one whose process is not there is "gone"."""
    status = record.get("status")
    if not isinstance(status, str):
        return "unknown"
    if status != "running":
        return status if status in ("completed", "halted", "interrupted", "failed") else "unknown"
    process: Any = record.get("process")
    pid: Any = cast(dict[str, Any], process).get("pid") if isinstance(process, dict) else None
    host: Any = cast(dict[str, Any], process).get("host") if isinstance(process, dict) else None
    if not isinstance(pid, int) or isinstance(pid, bool) or pid < 1 or host != socket.gethostname():
        return "running"
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return "gone"
    except OSError:
        return "running"
    return "running"
