"""The handlers that show a run or keep a record of it: lines, progress, pictures, run directories, trackers."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from telic.compose.attaching import Attaching
from telic.compose.programs import described
from telic.compose.recording import RunFile
from telic.compose.rehearsal import placed
from telic.display import Curves, MessageLog, MetricLog, Progress, Recorder
from telic.display.figures import Confusion
from telic.display.lines import Stream, UpdatesLog
from telic.display.plots import CharacterPlot, NotebookChart, Picture, Plot, check_notebook, is_notebook
from telic.loop import events as ev
from telic.loop.attachments import Attachment
from telic.loop.filters import Filter, always, at_hand, every
from telic.loop.state import LoopState
from telic.trackers import Tracking, as_group
from telic.train.step import TrainStep

_EVERY_TEN = every(10)

_GRADIENT_NORM = "gradient_norm"


class Showing(Attaching):
    """What people and other programs see of a run; no handler here changes what is computed."""

    def log(
        self,
        message: Callable[[LoopState], Any] | int = 50,
        *,
        event: str | Sequence[str] = ev.ITERATION_COMPLETED,
        filter: Filter = always,
        device: Stream | None = None,
    ) -> Self:
        """Write log lines.

        Args:
          message: A function that makes a line of the state; or a whole number n, which writes the metrics every n
            batches of an epoch and at its end.
          event: When a message function is called.
          filter: At which firings.
          device: Anything with write(text); standard output by default.
        """
        if device is not None and not callable(getattr(device, "write", None)):
            raise TypeError(f"device must have write(text), got {device!r}")
        if callable(message):
            return self.handle_event(event, MessageLog(message, device), filter, name="log")
        if isinstance(message, bool) or not isinstance(message, int) or message < 1:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise ValueError(f"log takes a message function or a positive number of batches, got {message!r}")
        lines = MetricLog(device)
        self.handle_event(ev.ITERATION_COMPLETED, lines.on_iteration, every(message, per_epoch=True), name="log")
        self._at_epoch_end(lines.on_epoch_end, "log")
        self._closers.append(lines.close)
        return self

    def log_updates(self, device: Stream | None = None) -> Self:
        """End the log of a run with the updates made, of how many planned, and how many attempts were rejected.

        Args:
          device: Anything with write(text); standard output by default.
        """
        lines = UpdatesLog(device)
        self.handle_event(ev.STARTED, lines.on_start, name="log_updates")
        for end in (ev.COMPLETED, ev.HALTED, ev.INTERRUPTED):
            self._attachments.append(Attachment(end, lines.on_end, always, "log_updates", late=True))
        return self

    def progress(self, *, plain: bool | None = None, batches: int | None = None) -> Self:
        """Show how far a run is: on a terminal a live line, everywhere else one line per epoch.

        Args:
          plain: True writes lines even on a terminal, False draws the live line anywhere; None looks.
          batches: Batches of an epoch, where known: the first epoch then shows the time left too.
        Raises:
          ValueError: It is no number of batches.
        """
        if batches is not None and (type(batches) is not int or batches < 1):
            raise ValueError(f"batches is the number of batches of an epoch, 1 or more, got {batches!r}")
        shown = Progress(plain=plain, batches=batches)
        self.handle_event(ev.STARTED, shown.on_start, name="progress")
        self.handle_event(ev.ITERATION_COMPLETED, shown.on_iteration, at_hand, name="progress")
        self._at_epoch_end(shown.on_epoch_end, "progress")
        self.handle_event([ev.COMPLETED, ev.HALTED, ev.INTERRUPTED], shown.on_end, name="progress")
        self._listener = shown
        self._closers.append(shown.close)
        return self

    def record(
        self,
        path: str | os.PathLike[str],
        *,
        interval: int = 50,
        config: Mapping[str, Any] | None = None,
        gradient_norm: bool = False,
    ) -> Self:
        """Keep a record of the run in a directory: ``run.json`` says what it is, ``metrics.jsonl`` what it measured.

        ``telic report``, ``telic watch`` and ``telic board`` show it. A run from the beginning replaces it, a continued
        one keeps its lines up to that position. Recording once more in the same place replaces how it is recorded.

        Args:
          path: The run's directory; or a file whose name ends in ``.jsonl``, for the metrics alone.
          interval: Batches between lines of metrics; each epoch's end has one too, with those of validation.
          config: What ``run.json`` keeps as its settings: nested mappings of plain values, without secrets.
          gradient_norm: Keep the norm of the gradient with each line, before the optimizer clips it; under accumulation
            that of the window so far. It is a probe, so the step runs once more for it.
        Raises:
          ValueError: The norm of the gradient is asked of a step that has none, `config` comes with a file, or the
            directory is a file.
        """
        self._check_idle()
        place = placed(path)
        is_file = place.suffix == ".jsonl"
        if not is_file and place.exists() and not place.is_dir():
            raise ValueError(f"record keeps a run in a directory, and {os.fspath(path)!r} is a file: give another path")
        if config is not None and is_file:
            raise ValueError(f"config= is kept in run.json of a directory, and {place.name} is a file: give its folder")
        if gradient_norm and not isinstance(self._program, TrainStep):
            raise ValueError("gradient_norm=True needs a step made of an objective; a bare step has its own loop.probe")
        recorder = Recorder(
            place if is_file else place / "metrics.jsonl",
            metered=not is_file,
            probe=_GRADIENT_NORM if gradient_norm else None,
        )
        self._forget_record(recorder.path)
        if gradient_norm and _GRADIENT_NORM not in self._probes:
            self.probe(_gradient_norm, every(interval, per_epoch=True), _GRADIENT_NORM)
        self._folder = recorder.path.parent
        if not is_file:
            about = RunFile(place, self._program, config)
            self._run_files[place] = about
            self.handle_event(ev.STARTED, about.on_start, name="record")
            for end in (ev.COMPLETED, ev.HALTED, ev.INTERRUPTED):
                self._attachments.append(Attachment(end, about.on_end, always, "record", late=True))
            self._closers.append(about.close)
        self._recorders[recorder.path] = recorder
        self.handle_event(ev.STARTED, recorder.on_start, name="record")
        self.handle_event(ev.ITERATION_COMPLETED, recorder.on_iteration, every(interval, per_epoch=True), name="record")
        self._at_epoch_end(recorder.on_epoch_end, "record")
        self._closers.append(recorder.close)
        self._flushers.append(recorder.flush)
        return self

    def _forget_record(self, path: Path) -> None:
        """Detach what records in a place already, so that two never write one file."""
        gone: list[Any] = [self._recorders.pop(path, None)]
        if path.name == "metrics.jsonl":
            gone.append(self._run_files.pop(path.parent, None))
        owners = [owner for owner in gone if owner is not None]

        def stays(call: Any) -> bool:
            return all(getattr(call, "__self__", None) is not owner for owner in owners)

        self._attachments = [a for a in self._attachments if stays(a.handler)]
        self._closers = [close for close in self._closers if stays(close)]
        self._flushers = [flush for flush in self._flushers if stays(flush)]

    def track(self, tracker: Any, *, interval: int = 50, config: Mapping[str, Any] | None = None) -> Self:
        """Give the metrics to one or several trackers: ``train/<name>`` and ``validation/<name>`` by the update.

        A tracker that fails or hangs neither slows nor ends the run; a warning says what it missed.

        Args:
          tracker: A `telic.trackers.Tracker`, such as ``telic.trackers.TensorBoard("runs/first")``, or a list of them.
          interval: Updates between calls; the values of an epoch's end are given besides.
          config: What the run is, for the tracker to show; nested mappings of plain values.
        Raises:
          TypeError: It is no tracker.
        """
        self._check_idle()
        trackers = as_group(tracker)
        if trackers is None:
            return self
        given = dict(config or {})
        tracking = Tracking(trackers, lambda: {**described(self._program), **given})
        self.handle_event(ev.STARTED, tracking.on_start, name="track")
        self.handle_event(ev.STEP_COMPLETED, tracking.on_step, every(interval), name="track")
        self._at_epoch_end(tracking.on_end, "track")
        self.handle_event([ev.COMPLETED, ev.HALTED, ev.INTERRUPTED], tracking.on_end, name="track")
        self._closers.append(tracking.close)
        self._flushers.append(tracking.flush)
        return self

    def curves(self, path: str | os.PathLike[str], *, title: str = "") -> Self:
        """Draw the metrics of all epochs so far, training and validation, anew at each epoch's end.

        Args:
          path: The picture; its suffix says the format, such as ``.png``.
          title: Text above the panels.
        Raises:
          ValueError: The suffix is no format of pictures.
        """
        self._check_idle()
        self._at_epoch_end(Curves(placed(path), title=title), "curves")
        return self

    def confusion(
        self,
        path: str | os.PathLike[str],
        *,
        metric: str = "confusion_matrix",
        names: Sequence[str] | None = None,
    ) -> Self:
        """Draw a confusion matrix anew at each epoch's end.

        Args:
          path: The picture; its suffix says the format, such as ``.png``.
          metric: Name of a `telic.metrics.confusion_matrix` of this loop, or ``validation_<name>`` of one.
          names: Name of each class; by default its number.
        Raises:
          ValueError: The suffix is no format of pictures.
        """
        self._check_idle()
        record = self._record_name("confusion", metric, None)
        self._at_epoch_end(Confusion(placed(path), metric, record, names=names), record)
        return self

    def plot(
        self,
        *metrics: str,
        filter: Filter = _EVERY_TEN,
        log_x: bool = False,
        log_y: bool = False,
        title: str = "",
        notebook: bool | None = None,
    ) -> Self:
        """Plot metrics against the batches done while the loop runs: each call of it is one picture.

        In a notebook that is a Vega-Lite chart, updated in its place (``pip install "telic[plot]"``); on a terminal a
        plot of characters, redrawn in its place; where output is piped, one plot when the run ends. A run that is
        continued goes on with the curves it had.

        Args:
          *metrics: Names of metrics of this loop, or of those that `validate` records; by default the loss.
          filter: At which iterations a point is added. At an epoch's end there is one in any case.
          log_x: Logarithmic axis of batches.
          log_y: Logarithmic axis of values.
          title: Text above.
          notebook: True draws a chart, False characters; None looks where it runs.
        Raises:
          ImportError: In a notebook, altair is not installed.
        """
        self._check_idle()
        for metric in metrics:
            if not isinstance(metric, str):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
                raise TypeError(f"plot takes names of metrics, plot('loss', 'validation_loss'), got {metric!r}")
        chosen = metrics or ("loss",)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"plot names a metric twice: {', '.join(chosen)}")
        picture: Picture
        if is_notebook() if notebook is None else notebook:
            check_notebook()
            picture = NotebookChart(log_x=log_x, log_y=log_y, title=title)
        else:
            picture = CharacterPlot(log_x=log_x, log_y=log_y, title=title, beside=self._progress)
        made = Plot(chosen, self._record_name("plot", chosen[0], None), picture)
        self._attachments.append(Attachment(ev.STARTED, made.on_start, always, made.record, late=True))
        self.handle_event(ev.ITERATION_COMPLETED, made.on_iteration, filter, name=made.record)
        self._at_epoch_end(made.on_epoch_end, made.record)
        self._closers.insert(0, made.close)
        self._flushers.append(made.flush)
        return self

    def _progress(self) -> Progress | None:
        return self._listener if isinstance(self._listener, Progress) else None


def _gradient_norm(outputs: Any) -> Any:
    return outputs["gradient_norm"]
