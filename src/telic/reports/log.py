"""The lines of ``metrics.jsonl`` as values, each read once while the file only grows."""

import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

_MAX_BYTES = 64 * 2**20
_MARK_BYTES = 4096
_MAX_COUNT = 2**53
"""Batches and epochs beyond are no counts: a browser could not tell them apart."""


@dataclass(frozen=True)
class Line:
    """One line of ``metrics.jsonl``.

    Attributes:
      kind: "interval" or "epoch".
      epoch: The epoch, from 0.
      batches: Batches done over the run.
      seconds: Since this start of the run.
      metrics: Numbers by name; NaN and infinities among them.
      training: Learning rate, norm of the gradient.
      speed: Rates by the second, numbers alone.
      parts: Seconds of the host's time since the line before, by part.
      memory: Bytes in use.
    """

    kind: str
    epoch: int
    batches: int
    seconds: float
    metrics: Mapping[str, float]
    training: Mapping[str, float] = field(default_factory=dict[str, float])
    speed: Mapping[str, float] = field(default_factory=dict[str, float])
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    memory: Mapping[str, float] = field(default_factory=dict[str, float])


class Log:
    """A ``metrics.jsonl`` that may still be written.

    Read again, it parses what came since: a page or a terminal that follows a run of many lines does not read all of
    them every two seconds. A file that was written anew is noticed by the last line read, and read anew.

    Args:
      path: The file; it may be made later.
      max_bytes: Of a longer file only the newest so many bytes are read.
    """

    def __init__(self, path: Path, *, max_bytes: int = _MAX_BYTES):
        self._path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._lines: list[Line] = []
        self._bad = 0
        self._at = 0
        self._mark = b""

    def read(self) -> tuple[tuple[Line, ...], int]:
        """Give the lines that can be read, and how many cannot. Never raises."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    text = self._new(file)
            except OSError:
                self._forget()
                return (), 0
            whole, ends, rest = text.rpartition(b"\n")
            if ends:
                for row in whole.split(b"\n"):
                    self._take(row)
                self._at += len(whole) + 1
                self._mark = (whole + b"\n")[-_MARK_BYTES:]
            # The last line may just be being written.
            last = _line(rest)
            return (*self._lines, *([] if last is None else [last])), self._bad

    def _new(self, file: BinaryIO) -> bytes:
        """Give what came since the last look, from the beginning of a line on."""
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, self._at - len(self._mark)))
        if file.read(len(self._mark)) != self._mark or not 0 <= size - self._at <= self._max_bytes:
            self._forget()
        if size - self._at > self._max_bytes:
            # Where the beginning of a very long record is left out, so is the line that it ends in.
            self._at = size - self._max_bytes
            file.seek(self._at)
            self._at += len(file.readline(self._max_bytes))
        file.seek(self._at)
        return file.read(self._max_bytes)

    def _take(self, row: bytes) -> None:
        line = _line(row)
        if line is not None:
            self._lines.append(line)
        elif row.strip():
            self._bad += 1


def _line(row: bytes) -> Line | None:
    try:
        found: Any = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    record = cast(dict[str, Any], found)
    epoch, batches = _number(record.get("epoch")), _number(record.get("total_iterations"))
    if epoch is None or batches is None or not abs(epoch) + abs(batches) <= _MAX_COUNT:
        return None
    speed = record.get("speed")
    speed = cast(dict[str, Any], speed) if isinstance(speed, dict) else {}
    return Line(
        kind="epoch" if record.get("kind") == "epoch" else "interval",
        epoch=int(epoch),
        batches=int(batches),
        seconds=_number(record.get("seconds")) or 0.0,
        metrics=_numbers(record.get("metrics")),
        training=_numbers(record.get("training")),
        speed=_numbers(speed),
        parts=_numbers(speed.get("seconds")),
        memory=_numbers(speed.get("memory")),
    )


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    values = ((str(name), _number(value)) for name, value in cast(dict[Any, Any], found).items())
    return {name: value for name, value in values if value is not None}


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
