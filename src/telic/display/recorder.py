"""A record of a run on disk: one JSON object per line."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from telic import tree
from telic.display.hyperparameters import learning_rates
from telic.jsonable import as_json
from telic.loop.ports import State

_log = logging.getLogger("telic.display")

Totals = Callable[[], Mapping[str, Any]]
"""Gives what a run has done so far: ``iterations``, ``examples``, ``tokens``, ``step_seconds``, ``seconds`` by part;
its ``memory`` now; the ``flops`` of a batch on one device and that device's ``peak_flops``, where they are known."""


class Recorder:
    """Writes the metrics of a run as JSON lines: attach it with ``loop.record("metrics.jsonl")``.

    A line has ``kind`` ("interval" or "epoch"), ``epoch``, ``iteration`` (batches done in the epoch),
    ``total_iterations``, ``seconds`` since the start, and ``metrics``: those of the epoch so far, or of the whole epoch
    with the values of validation. Where the optimizer's rate has a name, and where a probe gives the norm of
    the gradient, ``training`` has them. A run that is on the clock has ``speed``: rates, utilisation, the split of the
    host's time and memory, since the line before. A line of an interval is written one interval late, so that nothing
    waits for the device. Each line is complete when it is on disk; a disk that is full ends the record and not the run.

    A run that starts at the beginning replaces the file; one that continues an earlier state keeps the lines up to
    where that state stands, so that the file reads as if nothing had happened.

    Args:
      path: The file; its folder is made when the run starts.
      metered: Wants the run to be on the clock, which then fills `totals`.
      probe: Name of the probe that gives the norm of the gradient; None records none.
      clock: Monotonic seconds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        metered: bool = False,
        probe: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._path = Path(path)
        self.metered = metered
        self.totals: Totals | None = None
        self._probe = probe
        self._clock = clock
        self._file: TextIO | None = None
        self._began = 0.0
        self._pending: tuple[dict[str, Any], Callable[[], dict[str, Any]], Mapping[str, Any]] | None = None
        self._before: Mapping[str, Any] = {}
        self._closed_epoch = -1

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def on_start(self, state: State) -> None:
        """Open the file, and drop what a continued run is about to do again."""
        self.close()
        self._began = self._clock()
        self._closed_epoch = -1
        self._before = {}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(self._path, state) if state.total_iterations else []
        self._file = self._path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

    def on_iteration(self, state: State) -> None:
        """Note this moment, and write the one before."""
        self._write_pending()
        place = self._place(state, "interval", state.iteration + 1)
        self._pending = (place, state.metrics.later(), self._training(state))

    def on_epoch_end(self, state: State) -> None:
        """Write the whole epoch."""
        self._write_pending()
        if state.epoch == self._closed_epoch:
            return  # a halt from epoch_completed closes the epoch twice
        self._closed_epoch = state.epoch
        place = self._place(state, "epoch", state.iteration)
        self._write(place, dict(state.metrics), self._training(state, probed=False))

    def flush(self) -> None:
        """Write what is noted and not written yet: before a checkpoint of the run, whose continuation will not."""
        self._write_pending()

    def close(self) -> None:
        """Close the file; harmless when it is closed already."""
        file, self._file, self._pending = self._file, None, None
        if file is not None:
            # What it could not write before it cannot write now.
            with suppress(OSError):
                file.close()

    def _place(self, state: State, kind: str, iteration: int) -> dict[str, Any]:
        place = {
            "kind": kind,
            "epoch": state.epoch,
            "iteration": iteration,
            "total_iterations": state.total_iterations,
            "seconds": round(self._clock() - self._began, 3),
        }
        return place if self.totals is None else place | {"speed": self._speed(self.totals())}

    def _speed(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Give what the run did since the line before, by the second, and where the time went."""
        before, self._before = self._before, totals
        spent = totals["step_seconds"] - before.get("step_seconds", 0.0)
        made: dict[str, Any] = {}
        for name, unit in (("iterations", "batches"), ("examples", "examples"), ("tokens", "tokens")):
            count = totals[name] - before.get(name, 0)
            if count and spent > 0:
                made[f"{unit}_per_second"] = _rounded(count / spent)
        flops, peak = totals.get("flops"), totals.get("peak_flops")
        if flops is not None and "batches_per_second" in made:
            achieved = flops * made["batches_per_second"]
            made["flops_per_second"] = _rounded(achieved)
            # A share of what nobody knows is not a number.
            made["utilisation"] = "unknown" if peak is None else _rounded(achieved / peak)
        earlier = before.get("seconds", {})
        parts = {part: value - earlier.get(part, 0.0) for part, value in totals["seconds"].items()}
        made["seconds"] = {part: round(value, 6) for part, value in parts.items() if value >= 5e-7}
        return made | ({"memory": totals["memory"]} if totals.get("memory") else {})

    def _training(self, state: State, *, probed: bool = True) -> dict[str, Any]:
        """Give what is of interest beside the metrics, on the device: nothing is waited for."""
        found: dict[str, Any] = learning_rates(state.step_state)
        if probed and self._probe is not None and self._probe in state.probes:
            found["gradient_norm"] = state.probes[self._probe]
        return found

    def _write_pending(self) -> None:
        if self._pending is not None:
            place, read, training = self._pending
            self._pending = None
            self._write(place, read(), training)

    def _write(self, place: dict[str, Any], metrics: dict[str, Any], training: Mapping[str, Any]) -> None:
        record = {**place, "metrics": metrics}
        if training:
            record["training"] = {name: float(value) for name, value in training.items()}
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(as_json(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            _log.warning("%s is not written any further, training goes on: %s", self._path, error)
            self.close()


def _rounded(rate: float) -> float:
    return float(f"{rate:.6g}")


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
