"""Curves of a run while it runs: a live Vega-Lite chart in a notebook, a plot of characters elsewhere.

Attach it with ``loop.plot("loss")``.
"""

import importlib.util
import math
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from telic.display.characters import draw_characters
from telic.display.progress import Progress
from telic.errors import ContractError, closest
from telic.loop.ports import State

Series = Mapping[str, Sequence[Sequence[float]]]
"""Points of each metric: the batches done, and the values."""

_MOST_POINTS = 1000
"""Points of one metric; when there are as many, every second is dropped."""

_REFRESH_SECONDS = 0.5
"""A picture is drawn at most this often; at the end of an epoch and of a run it is drawn whatever the time."""


class Picture(Protocol):
    """Where a plot is drawn."""

    def open(self) -> None: ...

    def show(self, series: Series) -> None: ...

    def close(self, series: Series) -> None: ...


class Plot:
    """Draws metrics against the batches done, as a run goes on.

    A point is the metric over the epoch so far, read one firing late, so that nothing waits for the device; at an
    epoch's end values are exact, and those of validation have a point for each evaluation. The points are part of the
    run's state: one that is continued goes on with the curve it had.

    Args:
      metrics: Names in `LoopState.metrics`.
      record: Unique name of the record in `LoopState.handler_state`.
      picture: Where it is drawn.
      clock: Monotonic seconds.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        record: str,
        picture: Picture,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.metrics = tuple(metrics)
        self.record = record
        self._picture = picture
        self._clock = clock
        self._state: State | None = None
        self._pending: tuple[int, Callable[[], dict[str, Any]]] | None = None
        self._added: dict[str, Any] = {}
        self._drawn = -math.inf
        self._is_open = False

    def on_start(self, state: State) -> None:
        """Begin a picture, with the points of the run that is continued."""
        self._state, self._pending, self._drawn, self._added = state, None, -math.inf, {}
        state.handler_state[self.record] = dict(self._points())
        self._picture.open()
        self._is_open = True
        if any(x for x, _ in self._points().values()):
            self._draw()

    def on_iteration(self, state: State) -> None:
        """Note this moment, add the one before, and draw where the last picture is old."""
        self._state = state
        self.flush()
        self._pending = (state.total_iterations, state.metrics.later())
        if self._clock() - self._drawn >= _REFRESH_SECONDS:
            self._draw()

    def on_evaluation(self, state: State) -> None:
        """Add what an evaluation recorded just now, which is on the host; nothing else is read."""
        self._state = state
        self.flush()
        added = dict(state.metrics.added)
        self._add(state.total_iterations, added)
        self._added |= added

    def on_epoch_end(self, state: State) -> None:
        """Add the epoch's own values and draw.

        Raises:
          ContractError: A metric is not there, nor was it ever; those there are are named.
        """
        self._state = state
        self.flush()
        values = dict(state.metrics)
        self._add(state.total_iterations, values)
        for name in self.metrics:
            if name not in values and not self._points()[name][0] and not name.startswith("validation_"):
                raise ContractError(
                    f"plot reads the metric {name!r}, which is not there.{closest(name, values)} At this event: "
                    f"{', '.join(values) or 'none'}"
                )
        self._draw()

    def flush(self) -> None:
        """Add what is noted: before a checkpoint of the run, and before the next point."""
        if self._pending is not None:
            at, read = self._pending
            self._pending = None
            self._add(at, read())

    def close(self) -> None:
        """Draw once more and leave the picture as it is; harmless when that was done."""
        if self._is_open:
            self._is_open = False
            self.flush()
            self._picture.close(self._points())

    def _points(self) -> dict[str, list[list[float]]]:
        held = {} if self._state is None else self._state.handler_state.get(self.record, {})
        return {name: held.get(name, [[], []]) for name in self.metrics}

    def _add(self, at: int, values: Mapping[str, Any]) -> None:
        """Add a point to each metric that has a new value; the record is a new one, as states that were kept hold it.

        Raises:
          ValueError: A metric is no scalar.
        """
        points = self._points()
        for name in self.metrics:
            if name not in values:
                continue
            value = values[name]
            if np.ndim(value) != 0:
                raise ValueError(
                    f"plot reads {name!r}, which is not a scalar (shape {np.shape(value)}); plot a mean of it"
                )
            if value is self._added.get(name):
                # What an evaluation recorded stays among the metrics until the epoch ends: it has one point.
                continue
            xs, ys = (list(part) for part in points[name])
            if xs and xs[-1] == at:
                xs, ys = xs[:-1], ys[:-1]
            xs, ys = [*xs, at], [*ys, float(value)]
            if len(xs) > _MOST_POINTS:
                xs, ys = xs[::2], ys[::2]
            points[name] = [xs, ys]
        if self._state is not None:
            self._state.handler_state[self.record] = points

    def _draw(self) -> None:
        self._drawn = self._clock()
        self._picture.show(self._points())


class NotebookChart:
    """A Vega-Lite chart in a notebook, made by altair and updated in its place.

    Args:
      log_x: Logarithmic axis of batches.
      log_y: Logarithmic axis of values.
      title: Text above.
    """

    def __init__(self, *, log_x: bool = False, log_y: bool = False, title: str = ""):
        self._log = (log_x, log_y)
        self._title = title
        self._id = ""

    def open(self) -> None:
        """Show an empty chart."""
        self._id = f"telic-plot-{uuid.uuid4().hex}"
        self._publish({}, update=False)

    def show(self, series: Series) -> None:
        """Put the points in the chart's place."""
        self._publish(series, update=True)

    def close(self, series: Series) -> None:
        """Leave the last points."""
        self._publish(series, update=True)

    def _publish(self, series: Series, *, update: bool) -> None:
        from IPython.display import display, update_display

        bundle = self.bundle(series)
        if update:
            update_display(bundle, raw=True, display_id=self._id)
        else:
            display(bundle, raw=True, display_id=self._id)

    def bundle(self, series: Series) -> dict[str, Any]:
        """Give the chart by MIME type: Vega-Lite, and characters for readers without it."""
        import altair as alt

        drawn = _drawable(series, self._log)
        rows = [
            {"batch": x, "metric": name, "value": y}
            for name, (xs, ys) in drawn.items()
            for x, y in zip(xs, ys, strict=True)
        ]
        names = list(series)
        scales: list[Any] = [alt.Scale(type="log") if log else alt.Scale(zero=False) for log in self._log]
        one = len(names) <= 1
        chart: Any = (
            alt.Chart(alt.Data(values=rows), title=self._title, width=460, height=260)
            .mark_line(point=len(rows) < 60)
            .encode(
                x=alt.X("batch:Q", scale=scales[0], title="batches"),
                y=alt.Y("value:Q", scale=scales[1], title=names[0] if one and names else "value"),
                color=alt.Color("metric:N", sort=names, legend=None if one else alt.Legend(title=None)),
                tooltip=["metric:N", "batch:Q", "value:Q"],
            )
        )
        text = draw_characters(series, log_x=self._log[0], log_y=self._log[1], title=self._title)
        if alt.renderers.active != "default":
            return {**dict(chart._repr_mimebundle_(None, None) or {}), "text/plain": text}
        spec = chart.to_dict()
        # Readers know this version; what is used here has been the same since the fourth.
        spec["$schema"] = "https://vega.github.io/schema/vega-lite/v5.json"
        return {"application/vnd.vegalite.v5+json": spec, "text/plain": text}


class CharacterPlot:
    """A plot of characters: on a terminal redrawn in its place, elsewhere written once, when the run ends.

    Args:
      log_x: Logarithmic axis of batches.
      log_y: Logarithmic axis of values.
      title: Text above.
      beside: Gives the progress display of the run, to share the terminal with; None where there is none.
      console: Console to draw on; by default one of standard output.
    """

    def __init__(
        self,
        *,
        log_x: bool = False,
        log_y: bool = False,
        title: str = "",
        beside: Callable[[], Progress | None] | None = None,
        console: Any = None,
    ):
        self._options: dict[str, Any] = {"log_x": log_x, "log_y": log_y, "title": title}
        self._beside = beside
        self._given = console
        self._console: Any = None
        self._live: Any = None

    def open(self) -> None:
        """Take a place on the terminal."""
        from rich.console import Console
        from rich.live import Live

        self._stop()
        progress = None if self._beside is None else self._beside()
        shared = None if progress is None else progress.share(self._stop)
        self._console = self._given or shared or Console(file=sys.stdout, highlight=False)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def show(self, series: Series) -> None:
        """Redraw, on a terminal."""
        if self._live is not None:
            self._live.update(self._text(series), refresh=True)

    def close(self, series: Series) -> None:
        """Leave the plot, where it has a point."""
        self._stop()
        if self._console is not None and any(xs for xs, _ in series.values()):
            self._console.print(self._text(series), soft_wrap=True)
        self._console = None

    def _text(self, series: Series) -> Any:
        from rich.text import Text

        width = 72 if self._live is None else max(30, min(100, self._console.width - 2))
        return Text(draw_characters(series, width=width, **self._options))

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def is_notebook() -> bool:
    """Say whether this program runs in a Jupyter kernel; IPython is not loaded to find out."""
    module = sys.modules.get("IPython")
    shell: Any = None if module is None else module.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def check_notebook() -> None:
    """Raise unless a chart can be drawn in a notebook.

    Raises:
      ImportError: altair or IPython is not installed.
    """
    missing = [name for name in ("altair", "IPython") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"a chart in a notebook needs {' and '.join(missing)}: pip install 'telic[plot]', or plot characters with "
            "loop.plot(..., notebook=False)"
        )


def _drawable(series: Series, log: tuple[bool, bool]) -> dict[str, tuple[list[float], list[float]]]:
    """Drop points that have no place on the axes: NaN, infinities, and on a log axis what is not positive."""
    drawn: dict[str, tuple[list[float], list[float]]] = {}
    for name, (xs, ys) in series.items():
        kept = [
            (x, y)
            for x, y in zip(xs, ys, strict=True)
            if math.isfinite(y) and (not log[0] or x > 0) and (not log[1] or y > 0)
        ]
        drawn[name] = [x for x, _ in kept], [y for _, y in kept]
    return drawn
