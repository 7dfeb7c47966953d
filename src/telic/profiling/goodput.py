"""How much of a run's wall time went into training, over all its starts, in a file beside its checkpoints.

``goodput.jsonl`` in the run's directory has a line at each start, then every second at first and every hundredth of the
start's time later, after each save and at the end: so a kill loses at most one second or one per cent of what it ended.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from telic.errors import DataError
from telic.profiling.account import Account

FILE = "goodput.jsonl"

_log = logging.getLogger("telic.profiling")

_TRAINING = ("dispatch", "device", "loop")

_CLASSES: tuple[str, ...] = ("training", "lost", "data", "handlers", "checkpoint", "restore", "compile", "start")


class GoodputFile:
    """Writes a start's account into the run's directory. The file is opened at the first line.

    Args:
      directory: The run's directory.
      account: Where the time goes.
      clock: Monotonic seconds.
      wall: Seconds since 1970: how long a run was down between two starts is read from it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        account: Account,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        self._path = Path(directory) / FILE
        self._account = account
        self._clock = clock
        self._wall = wall
        self._began = self._written = clock()
        self._file: TextIO | None = None

    def open(self, iterations: int) -> None:
        """Begin a start that goes on after so many batches."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            _end_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self.write(iterations, "start")

    def tick(self, iterations: int) -> None:
        """Write a line when it is time for one."""
        now = self._clock()
        if now - self._written >= max(1.0, 0.01 * (now - self._began)):
            self.write(iterations, "running")

    def write(self, iterations: int, kind: str) -> None:
        """Write where the time of this start has gone until now.

        Args:
          iterations: Batches the run has behind it, over all starts.
          kind: "start", "running", "saved" or "end".
        """
        if self._file is None:
            return
        self._written = self._clock()
        seconds = {part: round(spent, 6) for part, spent in self._account.seconds.items()}
        line = {"kind": kind, "at": round(self._wall(), 3), "iterations": iterations, "seconds": seconds}
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            _log.warning("%s is not written any further, training goes on: %s", self._path, error)
            self._file = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _end_line(path: Path) -> None:
    """End a line that a kill cut short, so that the next one is whole."""
    with path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.write(b"\n")


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, over all its starts; every second is in one class.

    Attributes:
      seconds: Seconds by class: "training", "lost" (what a later start had to do again), "data", "handlers",
        "checkpoint", "restore", "compile" and "start".
      starts: How often the run was started.
      down_seconds: Between the end of each start and the next, as far as the last line of each tells.
    """

    seconds: Mapping[str, float]
    starts: int
    down_seconds: float

    @property
    def wall_seconds(self) -> float:
        """Time in which the run was up."""
        return sum(self.seconds.values())

    @property
    def fraction(self) -> float:
        """Share of that time which went into training that counts."""
        return self.seconds["training"] / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def __str__(self) -> str:
        times = "1 start" if self.starts == 1 else f"{self.starts} starts"
        lines = [f"goodput {self.fraction:.1%} of {self.wall_seconds:.1f} s in {times}"]
        wall = self.wall_seconds or 1.0
        lines += [f"  {name:<10} {spent:>9.1f} s {spent / wall:>6.1%}" for name, spent in self.seconds.items()]
        if self.starts > 1:
            lines.append(f"  down between starts {self.down_seconds:.1f} s")
        return "\n".join(lines)


def read_goodput(directory: str | os.PathLike[str]) -> Goodput:
    """Read where the time of a run went.

    Args:
      directory: The run's directory.
    Raises:
      DataError: There is no record; runs with ``profile=`` write one.
    """
    path = Path(directory) / FILE
    if not path.is_file():
        raise DataError(
            f"{directory} has no {FILE}: runs with checkpoints write one; with record=False only where profile=True"
        )
    starts: list[list[dict[str, Any]]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        line = _parsed(text)
        if line is None:
            continue
        if line["kind"] == "start":
            starts.append([])
        if starts:
            starts[-1].append(line)
    if not starts:
        raise DataError(f"{path} holds no whole line: no start of the run got as far as its first step")
    seconds: dict[str, float] = dict.fromkeys(_CLASSES, 0.0)
    down = 0.0
    for lines, later in zip(starts, [*starts[1:], None], strict=True):
        for part, spent in lines[-1]["seconds"].items():
            name = "training" if part in _TRAINING else part
            seconds[name] = seconds.get(name, 0.0) + spent
        if later is not None:
            for part in (*_TRAINING, "data", "handlers"):
                lost = lines[-1]["seconds"].get(part, 0.0) - _spent_at(lines, part, later[0]["iterations"])
                seconds["training" if part in _TRAINING else part] -= lost
                seconds["lost"] += lost
            # The later start's first line is written some way into it.
            down += max(0.0, later[0]["at"] - sum(later[0]["seconds"].values()) - lines[-1]["at"])
    return Goodput(seconds, len(starts), down)


def _parsed(text: str) -> dict[str, Any] | None:
    """Give a line, or None where a kill cut it short."""
    try:
        line = json.loads(text)
        known = line["kind"], line["at"] + 0.0, line["iterations"] + 0, sum(line["seconds"].values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return line if known else None


def _spent_at(lines: list[dict[str, Any]], part: str, iterations: int) -> float:
    """Give a part's seconds of a start when it stood at a batch, read between its lines."""
    before = lines[0]
    for line in lines:
        spent = before["seconds"].get(part, 0.0)
        if line["iterations"] > iterations:
            share = max(0.0, (iterations - before["iterations"]) / (line["iterations"] - before["iterations"]))
            return spent + share * (line["seconds"].get(part, 0.0) - spent)
        before = line
    return lines[-1]["seconds"].get(part, 0.0)
