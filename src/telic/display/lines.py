"""Plain log lines, in the format of the seed: ``Epoch: 0, Batch: 50, accuracy: 0.9123457``."""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO

import numpy as np

from telic.loop.ports import State
from telic.train.state import TrainState


class Stream(Protocol):
    """Where lines go."""

    def write(self, text: str, /) -> Any: ...


def format_value(name: str, value: Any) -> str:
    """Give a metric's value as text: 7 decimals, NaN and infinities by name.

    Raises:
      ValueError: The value is no scalar.
    """
    if np.ndim(value) != 0:
        raise ValueError(
            f"metric {name!r} is not a scalar (shape {np.shape(value)}), so it cannot stand in a log line; log a mean "
            "of it, or write the line yourself with loop.log(message)"
        )
    number = float(value)
    if np.isnan(number):
        return "NaN"
    if np.isinf(number):
        return "Inf" if number > 0 else "-Inf"
    return f"{number:.7f}"


def _is_count(name: str, value: Any) -> bool:
    return name == "rejected" and float(value).is_integer()


def format_line(epoch: int, iteration: int, metrics: Mapping[str, Any]) -> str:
    """Give one line; metrics that are no scalars are left out, since the line is not where they are read."""
    shown = (
        f"{name}: {int(value) if _is_count(name, value) else format_value(name, value)}"
        for name, value in metrics.items()
        if np.ndim(value) == 0
    )
    return ", ".join([f"Epoch: {epoch}, Batch: {iteration}", " ".join(shown)]).rstrip(", ")


class Tally:
    """Says how many of the planned updates a run made: ``updates 9,980 of 10,000 planned, 20 rejected``.

    Attach `on_start` to "started"; `line` reads two numbers of the device, so it is for the end of a run.
    """

    _RECORD = "updates_before"

    def on_start(self, state: State) -> None:
        """Note what the state that the run starts from has behind it."""
        before = _counted(state)
        if state.steps == 0 and before is not None and any(before):
            state.handler_state[self._RECORD] = list(before)

    def line(self, state: State) -> str | None:
        """Give the line; None where the step makes no updates."""
        now = _counted(state)
        if now is None:
            return None
        before = state.handler_state.get(self._RECORD, (0, 0))
        updates, rejected = (n - b for n, b in zip(now, before, strict=True))
        planned = state.steps if state.max_steps is None else state.max_steps
        return f"updates {updates:,} of {planned:,} planned" + (f", {rejected:,} rejected" if rejected else "")

    def rejected(self, state: State) -> bool:
        """Say whether anything was rejected."""
        now = _counted(state)
        return now is not None and now[1] > state.handler_state.get(self._RECORD, (0, 0))[1]


def _counted(state: State) -> tuple[int, int] | None:
    """Give (updates, rejected) of a training state, None of any other."""
    match state.step_state:
        case TrainState() as held:
            return int(held.updates), int(held.rejections.total)
        case _:
            return None


class UpdatesLog:
    """Handler that ends a run's log with the updates it made, of how many planned."""

    def __init__(self, stream: Stream | None = None):
        self._stream = stream
        self._tally = Tally()

    def on_start(self, state: State) -> None:
        """Note where the run starts."""
        self._tally.on_start(state)

    def on_end(self, state: State) -> None:
        """Write the line."""
        line = self._tally.line(state)
        if line is not None:
            (self._stream or sys.stdout).write(line + "\n")


class MessageLog:
    """Handler that writes what a message function makes of the state.

    A message function that fails is warned of once, and training goes on.
    """

    def __init__(self, message: Callable[[Any], Any], stream: Stream | None = None):
        self._message = message
        self._stream = stream
        self._warned = False

    def __call__(self, state: State) -> None:
        """Write one message."""
        try:
            text = str(self._message(state))
        except Exception as error:
            # A log line is never worth a training run; the first failure is told, with its cause.
            if not self._warned:
                self._warned = True
                warnings.warn(f"the log message failed: {type(error).__name__}: {error}", stacklevel=2)
            return
        stream = self._stream or sys.stdout
        stream.write(text if text.endswith("\n") else text + "\n")


class MetricLog:
    """Handler that writes the metrics of the epoch so far, without ever waiting for the device.

    A line is written at the next firing, when its values have long been there; it carries its own iteration. At the
    end of an epoch the values are read exactly.
    """

    def __init__(self, stream: TextIO | Stream | None = None):
        self._stream = stream
        self._pending: tuple[int, int, Callable[[], dict[str, Any]]] | None = None

    def on_iteration(self, state: State) -> None:
        """Note this moment, and write the one before."""
        self._write()
        self._pending = (state.epoch, state.iteration, state.metrics.later())

    def on_epoch_end(self, state: State) -> None:
        """Write the whole epoch."""
        noted = self._pending
        if noted is not None and (noted[0], noted[1] + 1) != (state.epoch, state.iteration):
            self._write()
        self._pending = (state.epoch, max(0, state.iteration - 1), state.metrics.later())
        self._write()

    def close(self) -> None:
        """Write the line that is noted, where an error ended the run before the next one; harmless otherwise."""
        self._write()

    def _write(self) -> None:
        if self._pending is None:
            return
        epoch, iteration, read = self._pending
        self._pending = None
        stream = self._stream or sys.stdout
        stream.write(format_line(epoch, iteration, read()) + "\n")
