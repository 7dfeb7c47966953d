"""A record of a run on disk: one JSON object per line."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from telic import tree
from telic.jsonable import as_json
from telic.loop.ports import State


class Recorder:
    """Writes the metrics of a run as JSON lines: attach it with ``loop.record("metrics.jsonl")``.

    A line has ``kind`` ("interval" or "epoch"), ``epoch``, ``iteration`` (batches done in the epoch),
    ``total_iterations``, ``seconds`` since the start, and ``metrics``: those of the
    epoch so far, or of the whole epoch with the values of validation. A line of an interval is written one interval
    late, so that nothing waits for the device. Each line is complete when it is on disk.

    A run that starts at the beginning replaces the file; one that continues an earlier state keeps the lines up to
    where that state stands, so that the file reads as if nothing had happened.

    Args:
      path: The file; its folder is made when the run starts.
      clock: Monotonic seconds.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.monotonic):
        self._path = Path(path)
        self._clock = clock
        self._file: TextIO | None = None
        self._began = 0.0
        self._pending: tuple[dict[str, Any], Callable[[], dict[str, Any]]] | None = None
        self._closed_epoch = -1

    def on_start(self, state: State) -> None:
        """Open the file, and drop what a continued run is about to do again."""
        self.close()
        self._began = self._clock()
        self._closed_epoch = -1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(self._path, state) if state.total_iterations else []
        self._file = self._path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def on_iteration(self, state: State) -> None:
        """Note this moment, and write the one before."""
        self._write_pending()
        self._pending = (self._place(state, "interval", state.iteration + 1), state.metrics.later())

    def on_epoch_end(self, state: State) -> None:
        """Write the whole epoch."""
        self._write_pending()
        if state.epoch == self._closed_epoch:
            return  # a halt from epoch_completed closes the epoch twice
        self._closed_epoch = state.epoch
        self._write({**self._place(state, "epoch", state.iteration), "metrics": dict(state.metrics)})

    def flush(self) -> None:
        """Write what is noted and not written yet: before a checkpoint of the run, whose continuation will not."""
        self._write_pending()

    def close(self) -> None:
        """Close the file; harmless when it is closed already."""
        file, self._file, self._pending = self._file, None, None
        if file is not None:
            file.close()

    def _place(self, state: State, kind: str, iteration: int) -> dict[str, Any]:
        return {
            "kind": kind,
            "epoch": state.epoch,
            "iteration": iteration,
            "total_iterations": state.total_iterations,
            "seconds": round(self._clock() - self._began, 3),
        }

    def _write_pending(self) -> None:
        if self._pending is not None:
            place, read = self._pending
            self._pending = None
            self._write({**place, "metrics": read()})

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(as_json(record), allow_nan=False) + "\n")
            self._file.flush()


def write_batch(path: Path, batch: Any, attempt: int) -> None:
    """Write a batch as arrays that ``numpy.load(path, allow_pickle=False)`` reads: ``batch/<leaf>`` and ``attempt``.

    Dtypes that NumPy's format lacks, such as bfloat16, are written as float32. Leaves that are no arrays of numbers or
    text are left out, since they would have to be pickled.
    """
    arrays: dict[str, Any] = {"attempt": np.asarray(attempt)}
    for name, leaf in tree.named_leaves(batch).items():
        value = np.asarray(leaf)
        if value.dtype.kind == "V" and value.dtype.names is None:
            value = value.astype(np.float32)
        if not value.dtype.hasobject:
            arrays[f"batch/{name}" if name else "batch"] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    # Complete when it has its name.
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        np.savez(file, **arrays)
    partial.replace(path)


def _lines_until(path: Path, state: State) -> list[str]:
    """Give the complete lines of a record up to where a state stands.

    An epoch whose batches are done but which is still to be closed will be written when it is.
    """
    if not path.exists():
        return []
    kept: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break  # a line that a killed run left unfinished
        if record["total_iterations"] > state.total_iterations:
            break
        if record["kind"] == "epoch" and record["epoch"] >= state.epoch:
            break
        kept.append(line)
    return kept
