"""Progress of a run: a live bar on a terminal, one plain line per epoch everywhere else."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from telic.display.lines import Tally
from telic.loop.ports import State

_REFRESH_SECONDS = 0.1
"""Metrics are asked of the device at most this often: a person cannot read faster, and each asking costs a dispatch."""

_VALIDATION = "validation_"


def printable(text: str) -> str:
    """Give text without control characters: a metric's name must not move the cursor or break a line."""
    return "".join(c if c.isprintable() else "?" for c in text)


def format_metrics(metrics: Mapping[str, Any]) -> str:
    """Give scalar metrics as ``loss 0.1234  accuracy 0.9871 | validation loss 0.1301``.

    Values of validation stand behind the bar, in the order of training. What is no scalar does not stand in a line.
    """
    values = {
        name: f"{float(value):.4g}"
        for name, value in metrics.items()
        if np.ndim(value) == 0 and not isinstance(value, str) and not np.iscomplexobj(value)
    }
    training = [name for name in values if not name.startswith(_VALIDATION)]
    same = [name for name in training if _VALIDATION + name in values]
    others = [name for name in values if name.startswith(_VALIDATION) and name.removeprefix(_VALIDATION) not in same]
    parts = "  ".join(f"{printable(name)} {values[name]}" for name in training)
    behind = [f"{printable(name)} {values[_VALIDATION + name]}" for name in same]
    behind += [f"{printable(name.removeprefix(_VALIDATION))} {values[name]}" for name in others]
    return parts + (f"{' | ' if parts else ''}validation {'  '.join(behind)}" if behind else "")


def format_seconds(seconds: float) -> str:
    """Give a duration as ``0.8 s``, ``8 s``, ``2:05`` or ``1:02:05``."""
    whole = round(seconds)
    if seconds < 2:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Shows how far a run is: attach it with ``loop.progress()``.

    On a terminal a live line shows the epoch, batches done, batches per second, the metrics of the epoch so far and
    the time left, and the seconds a compilation has taken. Each finished epoch leaves one line. Without a terminal
    (a pipe, a notebook, a dumb terminal) only those lines are written, so that the number of lines is bounded by the
    number of epochs. Nothing here waits for the device, but for the values at an epoch's end.

    Args:
      plain: True writes lines even on a terminal, False draws the bar whatever the output is; None looks.
      batches: Batches of an epoch, where known; otherwise the first epoch shows no time left.
      console: A rich Console; one on standard output by default.
      clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        plain: bool | None = None,
        batches: int | None = None,
        console: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._plain = plain
        self._batches = batches
        self._given_console = console
        self._clock = clock
        self._console: Any = console
        self._live: Any = None
        self._tally = Tally()
        self._sharing: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._compiling: tuple[str, float] | None = None
        self._asked: tuple[int, Callable[[], dict[str, Any]]] | None = None
        self._asked_at = 0.0
        self._shown = ""
        self._closed_epoch = -1
        self._epoch = ""
        self._done = 0
        self._total: int | None = None
        self._unit = "batches"
        self._rate: float | None = None
        self._mark: tuple[float, int] | None = None
        self._began: tuple[float, int] | None = None
        self._epoch_began = self._clock()
        self._length = self._batches

    # -- handlers ------------------------------------------------------------------------------------------------

    def on_start(self, state: State) -> None:
        """Open the display."""
        from rich.console import Console
        from rich.live import Live

        self.close()
        self._reset()
        # Made here, since standard output may have been exchanged after the loop was built.
        self._console = self._given_console or Console(file=sys.stdout, highlight=False)
        self._place(state)
        self._tally.on_start(state)
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        if live if self._plain is None else not self._plain:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=8, transient=True)
            self._live.start()

    def on_iteration(self, state: State) -> None:
        """Take note of a batch; show the metrics asked for at the last one that was noted."""
        now = self._clock()
        self._place(state)
        if self._began is None:
            self._began = self._mark = (now, self._done)
        if self._live is None or now - self._asked_at < _REFRESH_SECONDS:
            return
        if self._asked is not None:
            done, read = self._asked
            self._shown = format_metrics(read())
            # The values are there, so the device is done with those batches: its rate, not that of the dispatches.
            now, mark = self._clock(), self._mark or self._began
            if now > mark[0] and done > mark[1]:
                self._rate = (done - mark[1]) / (now - mark[0])
                self._mark = (now, done)
        self._asked_at = now
        self._asked = (self._done, state.metrics.later())

    def on_epoch_end(self, state: State) -> None:
        """Leave a line for the epoch, with its exact values."""
        if state.epoch == self._closed_epoch:
            return  # a halt from epoch_completed closes the epoch twice
        now = self._clock()
        self._closed_epoch, self._asked = state.epoch, None
        if state.max_iteration is None:
            self._length = state.iteration
        self._place(state)
        seconds = now - self._epoch_began
        self._epoch_began = now
        metrics = format_metrics(dict(state.metrics))
        self._write(f"{self._epoch}  {format_seconds(seconds)}  {metrics}".rstrip())
        self._mark = (self._clock(), self._done)

    def on_end(self, state: State) -> None:
        """Close the display."""
        if state.status == "halted":
            self._write(f"halted in {self._epoch}")
        line = self._tally.line(state) if self._tally.rejected(state) else None
        if line is not None:
            self._write(line)
        self.close()

    def share(self, stop: Callable[[], None]) -> Any:
        """Give the console to another live display of the run, or None while there is none; `stop` ends that one first.

        Args:
          stop: Called before this display gives the terminal back.
        """
        self._sharing.append(stop)
        return self._console

    def close(self) -> None:
        """Give the terminal back; harmless when it was given back already."""
        for stop in self._sharing:
            stop()
        self._sharing.clear()
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    # -- the driver's listener -----------------------------------------------------------------------------------

    def compiling(self, what: str) -> None:
        """Show that a program is being compiled, and for how long."""
        self._compiling = (what, self._clock())
        if self._live is None and self._console is not None:
            self._write(f"compiling {what} ...")

    def compiled(self, what: str, seconds: float) -> None:
        """Show how long it took."""
        self._compiling = None
        self._write(f"compiled {what} in {seconds:.1f} s")
        now = self._clock()
        self._epoch_began = max(self._epoch_began, now) if self._began is None else self._epoch_began

    # -- what is shown -------------------------------------------------------------------------------------------

    def _place(self, state: State) -> None:
        self._done = state.steps if state.max_steps is not None else state.total_iterations
        of = "" if state.max_epoch is None else f"/{state.max_epoch}"
        length = state.max_iteration or self._length
        if state.max_steps is not None:
            self._epoch, self._total, self._unit = "updates", state.max_steps, "updates"
        else:
            self._epoch, self._unit = f"epoch {state.epoch + 1}{of}", "batches"
            self._total = None if length is None or state.max_epoch is None else length * state.max_epoch

    def _write(self, line: str) -> None:
        if self._console is None:
            return
        if not self._console.is_terminal:
            # Nothing of rich is needed there, and it would take as long as a small step.
            print(line, file=self._console.file, flush=True)
            return
        # No markup, no wrapping: a name with brackets is a name, and a line stays a line for grep.
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _left(self) -> str:
        if self._total is None or self._began is None or self._done <= self._began[1]:
            return ""
        seconds_each = (self._clock() - self._began[0]) / (self._done - self._began[1])
        return f"{format_seconds(seconds_each * max(0, self._total - self._done))} left"

    def _render(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._compiling is not None:
            what, began = self._compiling
            return Text(f"compiling {what} ... {self._clock() - began:.0f} s", style="yellow")
        cells: list[Any] = [Text(self._epoch, style="bold")]
        if self._total is not None:
            cells.append(ProgressBar(total=self._total, completed=min(self._done, self._total), width=20))
        of = "" if self._total is None else f"/{self._total}"
        cells.append(Text(f"{self._done}{of} {self._unit}"))
        if self._rate is not None:
            cells.append(Text(f"{self._rate:.3g}/s", style="cyan"))
        if left := self._left():
            cells.append(Text(left, style="magenta"))
        cells.append(Text(self._shown, style="green"))
        grid = Table.grid(padding=(0, 1))
        for _ in cells:
            grid.add_column(no_wrap=True)
        grid.add_row(*cells)
        return grid
