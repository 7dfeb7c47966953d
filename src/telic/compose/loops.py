"""The public loop: a step, metrics and handlers, run over data."""

import copy as copying
import inspect
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

from telic import losses
from telic import metrics as metric_table
from telic.artifacts import ArtifactSink
from telic.checkpoints import Checkpoints
from telic.compose.caching import cache_directory, compile_cache_in
from telic.compose.describing import drawing, loop_line
from telic.compose.fitting import Budget
from telic.compose.metering import Reporter, as_reporter
from telic.compose.programs import as_program, described, has_loss
from telic.compose.recording import RunFile
from telic.compose.rehearsal import placed
from telic.compose.resume import Saving, as_saving
from telic.compose.runs import Parts, Request, run_loop
from telic.compose.validation import Validation, check_average, check_evaluated, validations_of
from telic.contract import Objective
from telic.data import DataPartition, as_validation
from telic.display import Curves, MessageLog, MetricLog, Progress, Recorder
from telic.display.figures import Confusion
from telic.display.lines import Stream, UpdatesLog
from telic.display.plots import CharacterPlot, NotebookChart, Picture, Plot, check_notebook, is_notebook
from telic.display.previews import as_previews
from telic.driver import Listener
from telic.errors import ContractError, TelicError, closest
from telic.handlers import Checkpoint, EarlyStop, Monitor, ReduceRate, as_mode, record_name
from telic.loop import events as ev
from telic.loop.engine import Attachment, Handler, check_totals
from telic.loop.filters import Filter, always, as_filter, at_hand, every
from telic.loop.ports import Placement, StepProgram
from telic.loop.reducers import RESERVED, Reducer
from telic.loop.serialize import serialize_state
from telic.loop.state import LoopState
from telic.loop.status import HALT_LOOP
from telic.metrics.base import Metric
from telic.objectives import as_objective
from telic.placement import SingleDevice
from telic.trackers import Tracking, as_group
from telic.train.evaluation import EvalStep
from telic.train.step import TrainStep
from telic.types import PyTree

_EVERY_TEN = every(10)

_GRADIENT_NORM = "gradient_norm"


class Loop:
    """A run waiting to happen: a step, metrics and handlers.

    Methods attach to this loop and return it, so that they chain; `copy` forks it. Nothing runs, compiles or opens
    before `run`.

    Args:
      step: ``(state, batch) -> state`` or `telic.Result`, or a step with an initialiser such as `telic.train_step`
        gives.
      init: ``batch -> state`` for a bare step function; the batch is the first one.
      output_transform: What `run` makes of the final LoopState; None returns it.
    Example:
      >>> import numpy as np
      >>> loop = Loop(lambda total, batch: total + batch.sum(), lambda batch: 0.0)
      >>> float(loop.run([np.ones(3), np.ones(2)], strict=False).step_state)
      5.0
    """

    def __init__(
        self,
        step: Any,
        init: Callable[[Any], Any] | None = None,
        *,
        output_transform: Callable[[LoopState], Any] | None = None,
    ):
        self._program = as_program(step, init)
        self._output_transform = output_transform
        self._metrics: dict[str, Reducer] = {}
        self._attachments: list[Attachment] = []
        self._resume: LoopState | None = None
        self._running = False
        self._placement: Placement = SingleDevice()
        self._listener: Listener | None = None
        self._closers: list[Callable[[], None]] = []
        self._driver_options: dict[str, Any] = {}
        self._saving: Saving | None = None
        self._flushers: list[Callable[[], None]] = []
        self._folder: Path | None = None
        self._events: tuple[str, ...] = ()
        self._probes: dict[str, Callable[[Any], PyTree]] = {}
        self._recorders: dict[Path, Recorder] = {}
        self._run_files: dict[Path, RunFile] = {}

    # -- attaching -----------------------------------------------------------------------------------------------

    def metric(
        self,
        metric: str | Metric | Callable[..., Any],
        name: str | None = None,
        *,
        reduce: Any = "mean",
        reads: Any = None,
    ) -> "Loop":
        """Compute a metric over each epoch.

        Args:
          metric: A name from `telic.metrics` or `telic.losses`, a `Metric`, a function of what it reads that gives
            per-example values, a scalar or a Mean, or a metric of clu, metrax or ``flax.nnx``.
          name: Name in results; by default the metric's own.
          reduce: "mean" by mass, "running_average" over batches, "running_sum", "last", or ``(fold, initial)``.
          reads: Names of outputs (``"prediction"``), batch fields (``"batch.mask"``), or a function of the outputs
            that returns the arguments as a tuple. By default targets and prediction.
        Raises:
          ValueError: The name is unknown, or already attached.
        """
        self._check_idle()
        made = _as_metric(metric, name, reduce=reduce, reads=reads)
        if made.name in self._metrics:
            raise ValueError(f"this loop has a metric named {made.name!r} already; give another name=")
        if made.name == "loss" and has_loss(self._program):
            raise ValueError("this loop reports its objective's loss as 'loss'; give your metric another name=")
        if made.name in RESERVED:
            raise ValueError(f"a metric may not be named {made.name!r}: log lines use that name themselves")
        self._metrics[made.name] = Reducer(made.name, made)
        return self

    def handle_event(
        self, event: str | Sequence[str], handler: Handler, filter: Filter = always, *, name: str | None = None
    ) -> "Loop":
        """Run a handler at an event.

        Args:
          event: One event, a list of them, or "all": those of the loop and those registered so far.
          handler: ``(LoopState) -> None | status | LoopState | (status, LoopState)``.
          filter: Which firings it answers to, such as ``telic.every(100)``.
          name: How errors call it; by default the function's own name.
        Raises:
          ValueError: An event is unknown.
          TypeError: The handler is not callable, or the filter is no filter.
        """
        self._check_idle()
        if not callable(handler):
            raise TypeError(f"a handler is a function of the LoopState, got {handler!r}")
        label = name or getattr(handler, "__qualname__", type(handler).__name__)
        chosen = as_filter(filter)
        for one in self._resolve(event):
            if chosen.uses_last and one in self._events:
                raise ValueError(f"{one!r} is fired by handlers, so nobody knows its last firing: leave telic.last out")
            self._attachments.append(Attachment(one, handler, chosen, label))
        return self

    def register_event(self, name: str) -> "Loop":
        """Add an event of your own: handlers attach to it by name, and a handler fires it with ``state.fire(name)``.

        Firing runs its handlers at once, counted and filtered like those of every event. A halt among their answers
        holds as if the handler that fired had given it.

        Args:
          name: Any text that is no event yet.
        """
        self._check_idle()
        self._events = (*self._events, ev.check_event_name(name, self._events))
        return self

    def probe(
        self,
        fn: Callable[[Any], PyTree],
        filter: Filter,
        name: str | None = None,
        *,
        to: Callable[[Any, LoopState], Any] | None = None,
    ) -> "Loop":
        """Look inside the step now and then: histograms, norms of gradients by layer, activations.

        `fn` is compiled, and runs only at the iterations that the filter names; what it gives stands in
        ``state.probes[name]`` at ``iteration_completed`` and until the next iteration, on the device. The step runs
        once more for it, so a firing costs about a step; iterations at which it does not fire cost nothing, and the
        run has the bits of one without probes.

        Args:
          fn: Function of the step's outputs (``outputs["prediction"]``, ``["targets"]``, ``["loss"]``,
            ``["gradients"]``, a tree like ``params``, ...; the new state of a bare step) that gives a tree of arrays.
          filter: A filter of counts alone, such as ``telic.every(100)``.
          name: Name in `LoopState.probes`; by default the function's own.
          to: ``(values, state)``, called at each firing with NumPy arrays; its answer is that of a handler.
        Raises:
          ValueError: The name is taken, or the filter reads the clock or the state.
        """
        self._check_idle()
        if not callable(fn):
            raise TypeError(f"a probe is a function of the step's outputs, got {fn!r}")
        label = name or getattr(fn, "__name__", "<lambda>")
        if label == "<lambda>":
            raise ValueError("a probe made from a lambda has no name of its own: give name=")
        if label in self._probes:
            raise ValueError(f"this loop has a probe named {label!r} already; give another name=")
        chosen = as_filter(filter)
        if not chosen.is_static:
            raise ValueError(
                f"probe {label!r} needs a filter of counts alone (every, once, before, after, first, last, always): it "
                "is chosen before the iteration runs, and every_seconds and when are asked after it"
            )
        if to is not None and not callable(to):
            raise TypeError(f"to must be a function (values, state), got {to!r}")
        self._probes[label] = fn
        handler = _Delivery(label, to)
        self._attachments.append(Attachment(ev.ITERATION_COMPLETED, handler, chosen, f"probe {label}", probe=label))
        return self

    def _resolve(self, event: str | Sequence[str]) -> tuple[str, ...]:
        return ev.resolve_events(event, (*ev.EVENTS, *self._events))

    def log(
        self,
        message: Callable[[LoopState], Any] | int = 50,
        *,
        event: str | Sequence[str] = ev.ITERATION_COMPLETED,
        filter: Filter = always,
        device: Stream | None = None,
    ) -> "Loop":
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

    def log_updates(self, device: Stream | None = None) -> "Loop":
        """End the log of a run with the updates made, of how many planned, and how many attempts were rejected.

        Args:
          device: Anything with write(text); standard output by default.
        """
        lines = UpdatesLog(device)
        self.handle_event(ev.STARTED, lines.on_start, name="log_updates")
        for end in (ev.COMPLETED, ev.HALTED, ev.INTERRUPTED):
            self._attachments.append(Attachment(end, lines.on_end, always, "log_updates", late=True))
        return self

    def progress(self, *, plain: bool | None = None, batches: int | None = None) -> "Loop":
        """Show how far a run is: on a terminal a live line, everywhere else one line per epoch.

        Args:
          plain: True writes lines even on a terminal, False draws the live line anywhere; None looks.
          batches: Batches of an epoch, where known: the first epoch then shows the time left too.
        """
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
    ) -> "Loop":
        """Keep a record of the run in a directory: ``run.json`` says what it is, ``metrics.jsonl`` what it measured.

        ``telic report``, ``telic watch`` and ``telic board`` show it. A run from the beginning replaces it, a continued
        one keeps its lines up to that position. Recording once more in the same place replaces how it is recorded.

        Args:
          path: The run's directory; or a file whose name ends in ``.jsonl``, for the metrics alone.
          interval: Batches between lines of metrics; each epoch's end has one too, with those of validation.
          config: What ``run.json`` keeps as its settings: nested mappings of plain values, without secrets.
          gradient_norm: Keep the norm of the gradient with each line. It is a probe, so the step runs once more for it.
        Raises:
          ValueError: The norm of the gradient is asked of a step that has none, or `config` comes with a file.
        """
        self._check_idle()
        place = placed(path)
        is_file = place.suffix == ".jsonl"
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

    def track(self, tracker: Any, *, interval: int = 50, config: Mapping[str, Any] | None = None) -> "Loop":
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

    def curves(self, path: str | os.PathLike[str], *, title: str = "") -> "Loop":
        """Draw the metrics of all epochs so far, training and validation, anew at each epoch's end.

        Args:
          path: The picture; its suffix says the format, such as ``.png``.
          title: Text above the panels.
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
    ) -> "Loop":
        """Draw a confusion matrix anew at each epoch's end.

        Args:
          path: The picture; its suffix says the format, such as ``.png``.
          metric: Name of a `telic.metrics.confusion_matrix` of this loop, or ``validation_<name>`` of one.
          names: Name of each class; by default its number.
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
    ) -> "Loop":
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

    def _at_epoch_end(self, handler: Handler, name: str) -> None:
        """Attach a handler late, so that it sees what the epoch's other handlers recorded."""
        for end in (ev.EPOCH_COMPLETED, ev.EPOCH_HALTED):
            self._attachments.append(Attachment(end, handler, always, name, late=True))

    def validate(
        self,
        data: Any,
        *,
        model: Any = None,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        name: str | None = None,
        averaged: bool = False,
        limit: int | None = None,
        metrics: Sequence[Any] = (),
        preview: bool | str | os.PathLike[str] | ArtifactSink = False,
    ) -> "Loop":
        """Evaluate on other data and record ``validation_<metric>`` beside the training metrics.

        Every metric of this loop is computed as it is in training, and the objective's loss as ``validation_loss``; of
        an objective with an `evaluate` also the metrics that read its artifacts, and its `Scalars`. Training state and
        keys are untouched; the program is compiled once. A loop may have any number of validations, each with data,
        name, event and filter of its own.

        Args:
          data: Batches that can be read many times, or a Dataset, whose `val` is used.
          model: What to evaluate; by default this loop's own objective. An Objective, an evaluation step, or a model.
          event: When to evaluate.
          filter: At which firings.
          name: Name of a further data set: ``validation_<name>_<metric>``.
          averaged: Evaluate the averaged weights.
          limit: Batches per pass at most; needed for data without an end.
          metrics: Metrics of this validation alone: names, Metrics or functions.
          preview: Where the objective's `preview` goes, once per evaluation: a directory, an `ArtifactSink`, or True
            for ``previews`` in the run's directory. Trackers of the loop get it too.
        Raises:
          ValueError: A validation of that name is attached already.
        """
        self._check_idle()
        program = self._evaluation(model, averaged)
        prefix = "validation_" if name is None else f"validation_{name}_"
        if any(v.prefix == prefix for v in validations_of(self._attachments)):
            had = "without a name" if name is None else f"named {name!r}"
            raise ValueError(f"this loop has a validation {had} already; give another name=")
        own: dict[str, Reducer] = {}
        for metric in metrics:
            made = _as_metric(metric, None, reduce="mean", reads=None)
            if made.name in own:
                raise ValueError(f"two metrics of this validation are named {made.name!r}; rename one")
            own[made.name] = Reducer(made.name, made)
        evaluation = Validation(
            reducers=lambda: self.reducers,
            program=program,
            batches=as_validation(data, partition=DataPartition(*self._placement.partition), limit=limit),
            prefix=prefix,
            placement=self._placement,
            own=own,
            sink=as_previews(placed(preview) if isinstance(preview, str | os.PathLike) else preview),
        )
        return self.handle_event(event, evaluation, filter, name="validate")

    def monitor(
        self,
        metric: str,
        action: Handler,
        name: str | None = None,
        *,
        mode: Literal["min", "max"] | None = None,
        improved: Callable[[float, float], Any] | None = None,
        trigger: Callable[[float], Any] | None = None,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        patience: int | None = None,
        min_delta: float = 0.0,
        cooldown: int = 0,
    ) -> "Loop":
        """Act when a metric has not improved for some events in a row.

        Args:
          metric: Name of a metric of this loop, or of one that `validate` records.
          action: ``(LoopState) -> answer``, a handler of its own.
          name: Name of the record in `LoopState.handler_state`; by default made of the metric.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          improved: ``(current, best) -> bool``, instead of a mode.
          trigger: ``(current) -> bool``, instead of improvement: the action runs when it holds.
          event: When to look.
          filter: At which firings.
          patience: The action runs at this event in a row without improvement, counted from 1; 3 by default. With
            `trigger`, at this event in a row where it holds; 1 by default. 0 is the same as 1.
          min_delta: An improvement is more than this.
          cooldown: Events after an action that are not counted.
        Raises:
          ValueError: The name is taken, or nothing says which direction is better.
        """
        self._check_idle()
        record = self._record_name("monitor", metric, name)
        if patience is None:
            patience = 3 if trigger is None else 1
        chosen = as_mode(mode, metric, self._mode_of(metric)) if improved is None and trigger is None else mode
        watch = Monitor(
            metric,
            action,
            record,
            mode=chosen,
            improved=improved,
            trigger=trigger,
            patience=patience,
            min_delta=min_delta,
            cooldown=cooldown,
            awaits=self._awaits(record, metric),
        )
        return self.handle_event(event, watch, filter, name=record)

    def early_stop(
        self,
        metric: str,
        *,
        mode: Literal["min", "max"] | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        name: str | None = None,
    ) -> "Loop":
        """End the run when a metric has not improved for some events in a row.

        Args:
          metric: Name of a metric of this loop, or of one that `validate` records.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          patience: The run ends at this event in a row without improvement, counted from 1; 0 is the same as 1.
          min_delta: An improvement is more than this.
          restore_best: Give back the step state of the best event, whoever ended the run. Needs the memory of a second
            state, and makes saved states as much larger.
          event: When to look.
          filter: At which firings.
          name: Name of the record in `LoopState.handler_state`.
        """
        self._check_idle()
        record = self._record_name("early_stop", metric, name)
        stop = EarlyStop(record, HALT_LOOP, restore_best)
        watch = Monitor(
            metric,
            stop,
            record,
            mode=as_mode(mode, metric, self._mode_of(metric)),
            patience=patience,
            min_delta=min_delta,
            awaits=self._awaits(record, metric),
            on_best=stop.on_best,
        )
        self.handle_event(event, watch, filter, name=record)
        self.handle_event(ev.STARTED, stop.on_started, name=record)
        return self.handle_event((ev.COMPLETED, ev.HALTED), stop.on_end, name=record)

    def reduce_lr_on_plateau(
        self,
        metric: str,
        *,
        factor: float = 0.1,
        patience: int = 3,
        mode: Literal["min", "max"] | None = None,
        min_lr: float | None = None,
        min_factor: float | None = None,
        cooldown: int = 0,
        min_delta: float = 0.0,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        name: str | None = None,
    ) -> "Loop":
        """Multiply the learning rate by a factor when a metric has not improved for some events in a row.

        Args:
          metric: Name of a metric of this loop, or of one that `validate` records.
          factor: In (0, 1).
          patience: The rate is lowered at this event in a row without improvement, counted from 1.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          min_lr: The rate does not go below; needs an optimizer whose rate has a name in its state.
          min_factor: The product of all reductions does not go below.
          cooldown: Events after a reduction that are not counted.
          min_delta: An improvement is more than this.
          event: When to look.
          filter: At which firings.
          name: Name of the record in `LoopState.handler_state`.
        """
        self._check_idle()
        record = self._record_name("reduce_lr", metric, name)
        watch = Monitor(
            metric,
            ReduceRate(record, factor, min_lr, min_factor),
            record,
            mode=as_mode(mode, metric, self._mode_of(metric)),
            patience=patience,
            min_delta=min_delta,
            cooldown=cooldown,
            awaits=self._awaits(record, metric),
        )
        return self.handle_event(event, watch, filter, name=record)

    def checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        criteria: str | None = None,
        mode: Literal["min", "max"] | None = None,
        keep_last: int | Literal["all"] | None = None,
        keep_best: int | Literal["all"] = 1,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        file_pattern: str | Callable[[LoopState], str] = "checkpoint_{epoch}_{iteration}",
        compress: bool = False,
        name: str | None = None,
    ) -> "Loop":
        """Write the loop state to files: at each event, or when a metric improves.

        A file holds what `telic.serialize_state` gives after all other handlers of the event have run; read it with
        `telic.deserialize_state` and go on with `from_state`.

        Args:
          directory: Where files go; made when the run starts.
          criteria: Name of a metric: a file is written when it is better than ever before in this directory.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          keep_last: Newest files that stay, or "all". Without criteria 2; with criteria 0, and any other number writes
            each event besides the improvements.
          keep_best: Best files that stay, or "all"; of equal scores the oldest is the best.
          event: When to write.
          filter: At which firings.
          file_pattern: File name with ``{epoch}``, ``{iteration}``, ``{total_iterations}`` and ``{steps}``, or a
            function of the state; one plain name, which cannot leave the directory.
          compress: Compress the files with zlib.
          name: Name of the record in `LoopState.handler_state`.
        """
        self._check_idle()
        if criteria is None and mode is not None:
            raise ValueError(f"mode={mode!r} says which value of criteria= is better: give criteria as well")
        record = self._record_name("checkpoint", criteria, name)
        if keep_last is None:
            keep_last = 2 if criteria is None else 0
        saver = Checkpoint(
            placed(directory),
            lambda state: serialize_state(state, compress=compress),
            record,
            pattern=file_pattern,
            metric=criteria,
            mode=None if criteria is None else as_mode(mode, criteria, self._mode_of(criteria)),
            keep_last=keep_last,
            keep_best=keep_best,
            awaits=None if criteria is None else self._awaits(record, criteria),
        )
        self.handle_event(ev.STARTED, saver.prepare, name=record)
        chosen = as_filter(filter)
        for one in self._resolve(event):
            # Late, so that the file holds what the event's other handlers remember.
            self._attachments.append(Attachment(one, saver, chosen, record, late=True))
        return self

    def _record_name(self, kind: str, metric: str | None, name: str | None) -> str:
        return record_name(kind, metric, name, filter(None, map(_record_of, self._attachments)))

    def _mode_of(self, metric: str) -> Literal["min", "max"] | None:
        """Give the direction that a metric of this loop, or the one that a validation computes again, carries."""
        plain = metric in self._metrics
        found = [metric] if plain else [m for m in self._metrics if metric == f"validation_{m}"]
        if not found and metric.startswith("validation_"):
            found = [m for m in self._metrics if metric.endswith(f"_{m}")]
        return self._metrics[max(found, key=len)].metric.mode if found else None

    def _awaits(self, record: str, metric: str) -> Callable[[], bool]:
        """Give a test whether a validation that runs before a handler, and has not run yet, may record a metric."""

        def awaits() -> bool:
            readers = [(i, a) for i, a in enumerate(self._attachments) if _record_of(a) == record]
            return any(
                metric.startswith(v.handler.prefix)
                and not v.handler.has_run
                and any(a.event != v.event or a.late or j < i for i, a in readers)
                for j, v in enumerate(self._attachments)
                if isinstance(v.handler, Validation)
            )

        return awaits

    def _evaluation(self, model: Any, averaged: bool) -> StepProgram:
        if model is None:
            if not isinstance(self._program, TrainStep):
                raise ContractError(
                    "this loop's step is not built from an objective, so say what to evaluate: "
                    "validate(data, model=...)"
                )
            return self._program.evaluation(averaged=averaged)
        if isinstance(model, EvalStep):
            if averaged and not model.averaged:
                model = replace(model, averaged=True)
            return model
        return EvalStep(model if isinstance(model, Objective) else as_objective(None, model), averaged=averaged)

    def drive(
        self,
        *,
        fuse: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        profile: bool | Reporter | None = None,
        compile_cache: bool | str | os.PathLike[str] | None = None,
        memory: Budget | None = None,
        placement: Placement | None = None,
    ) -> "Loop":
        """Say how the driver runs this loop.

        Args:
          fuse: Run several iterations in one dispatch where no handler needs the host between them. What is computed
            is the same to the bit.
          compiler_options: Handed to XLA.
          profile: True prints, when a run ends, where its time went and what a step costs; a function takes that
            report instead. A run with a directory has it there as ``profile.json`` too.
          compile_cache: Directory that keeps compiled programs for the next start; True for one in the user's cache
            directory. None leaves it to the environment variable ``TELIC_COMPILE_CACHE``, False keeps none.
          memory: Slice batches into the largest microbatches whose step fits; None leaves the step as it is.
          placement: Where batches and the state live, for validations attached from here on too; None leaves it: one
            device, or those of the trainer.
        """
        self._check_idle()
        as_reporter(profile)
        cache_directory(compile_cache)
        self._driver_options = {
            "fuse": bool(fuse),
            "compiler_options": dict(compiler_options or {}),
            "profile": profile,
            "compile_cache": compile_cache,
            "memory": memory,
        }
        if placement is not None:
            self._placement = placement
        return self

    def save(
        self,
        checkpoints: Checkpoints,
        *,
        checkpoint_every: int | None = None,
        resume: Literal["auto", "never", "must"] = "auto",
    ) -> "Loop":
        """Save the run to a directory, and continue from there: started again, it goes on where it was ended.

        Args:
          checkpoints: Where, and which checkpoints stay.
          checkpoint_every: Updates between checkpoints; by default what `checkpoints` says.
          resume: "auto" continues when there is a checkpoint, "must" insists on one, "never" begins anew and sets
            those there are aside.
        """
        self._check_idle()
        self._saving = as_saving(checkpoints, checkpoint_every, resume)
        return self

    def from_state(self, state: LoopState) -> "Loop":
        """Continue from a state that an earlier run returned. `epochs=` and `steps=` of `run` are totals."""
        self._check_idle()
        if not isinstance(state, LoopState):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"from_state takes a LoopState, got {type(state).__name__}; pass others as run(state=...)")
        self._resume = state
        return self

    def copy(self) -> "Loop":
        """Give a loop with the same step, metrics and handlers, to which more can be attached on its own."""
        twin = copying.copy(self)
        twin._metrics = dict(self._metrics)
        twin._closers = list(self._closers)
        twin._flushers = list(self._flushers)
        twin._probes = dict(self._probes)
        twin._recorders = dict(self._recorders)
        twin._run_files = dict(self._run_files)
        # Validation computes the metrics of its own loop, so the copy gets its own.
        twin._attachments = [
            replace(a, handler=a.handler.of(lambda: twin.reducers)) if isinstance(a.handler, Validation) else a
            for a in self._attachments
        ]
        twin._running = False
        return twin

    @property
    def reducers(self) -> Mapping[str, Reducer]:
        """The metrics attached, by name."""
        return dict(self._metrics)

    def _check_idle(self) -> None:
        if self._running:
            raise TelicError("this loop is running: attach before run, or attach to loop.copy() and run that")

    def __repr__(self) -> str:
        return loop_line(self._program, self._metrics, self._attachments)

    def describe(self) -> str:
        """Draw this loop: its events in the order a run fires them, each with its handlers and their filters.

        Returns:
          Lines to print.
        Example:
          >>> loop = Loop(lambda total, batch: total + batch.sum(), lambda batch: 0.0).log(10)
          >>> print(loop.describe().splitlines()[6])
          │  │  ├─ iteration_started
        """
        return drawing(self._program, self._metrics, self._probes, self._attachments, self._events)

    # -- running -------------------------------------------------------------------------------------------------

    def run(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        iterations: int | None = None,
        state: Any = None,
        strict: bool = True,
        jit: bool = True,
        debug: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Reduce batches into a state.

        Args:
          data: A Dataset, an iterable of batches, or a function ``(epoch) -> iterable``.
          epochs: Epochs in all, those already done included. Default 1.
          steps: Updates in all, of one continuous stream, instead of epochs.
          iterations: Batches per epoch at most.
          state: What to start from: a LoopState to continue, or the step's own state, full or (for variables) partial.
            It is copied, never consumed.
          strict: Allow one batch shape and one smaller last batch; a third shape raises.
          jit: Compile the step.
          debug: Log every event with what handlers answered and how long they took, what each dispatch ran, and what
            keeps iterations from being fused (logger ``telic.loop``, level INFO).
          compiler_options: Handed to XLA.
        Returns:
          The final LoopState, or what output_transform makes of it.
        Raises:
          DataError: The data is empty or exhausted.
          ShapeError: A batch has a shape that strict does not allow.
          ContractError: Step, handler or metric break their contract; raised before anything compiles where it can be.
          NonFiniteError: The budget of rejected attempts is used up.
        """
        stream = self._stream(data, epochs, steps, iterations, state, strict, jit, debug, compiler_options)
        final = _exhausted(stream)
        return final if self._output_transform is None else self._output_transform(final)

    def stream(self, data: Any, **options: Any) -> Iterator[LoopState]:
        """Run, giving the LoopState after each epoch, for those who own the loop. Takes the options of `run`."""
        known = [p for p in inspect.signature(self.run).parameters if p != "data"]
        for option in options:
            if option not in known:
                raise TypeError(
                    f"stream got an unknown option {option!r}.{closest(option, known)} Known: {', '.join(known)}"
                )
        defaults = {p.name: p.default for p in inspect.signature(self.run).parameters.values() if p.name != "data"}
        o = {**defaults, **options}
        return self._stream(data, *(o[name] for name in known))

    def _stream(
        self,
        data: Any,
        epochs: int | None,
        steps: int | None,
        iterations: int | None,
        state: Any,
        strict: bool,
        jit: bool,
        debug: bool,
        compiler_options: Mapping[str, Any] | None,
    ) -> Generator[LoopState, None, LoopState]:
        """The run as a generator; its return value is the final state."""
        check_totals(epochs, steps, iterations)
        if self._running:
            raise TelicError("this loop is running already; run loop.copy() for a second run")
        previous = state if isinstance(state, LoopState) else self._resume
        if isinstance(self._program, EvalStep) and isinstance(state, LoopState):
            # An evaluation reads the weights of a run; it does not continue the run.
            previous, state = None, state.step_state
        if previous is not None and state is not None and not isinstance(state, LoopState):
            raise ValueError("from_state and run(state=...) both give a start: use one")
        for validation in validations_of(self._attachments):
            check_average(validation.program, self._program)
            validation.open(self._directory, self._trackers())
        check_evaluated(self._metrics, self._program, validations_of(self._attachments))
        request = Request(
            previous=previous,
            given=None if previous is not None else state,
            epochs=1 if epochs is None and steps is None else epochs,
            steps=steps,
            iterations=iterations,
            strict=strict,
            jit=jit,
            debug=debug,
            compiler_options={**self._driver_options.get("compiler_options", {}), **(compiler_options or {})},
        )
        self._running = True
        try:
            with compile_cache_in(cache_directory(self._driver_options.get("compile_cache"))):
                return (yield from run_loop(self._parts(), data, request))
        finally:
            self._running = False

    @property
    def _directory(self) -> Path | None:
        """The directory this run writes to, where it has one."""
        return self._folder if self._saving is None else Path(self._saving.config.directory)

    def _plotted(self) -> list[Attachment]:
        """Give the handlers that put what validations record into plots, at the event where they do."""
        owners = (getattr(a.handler, "__self__", None) for a in self._attachments)
        plots = {id(x): x for x in owners if isinstance(x, Plot)}.values()
        return [
            Attachment(a.event, plot.on_evaluation, a.filter, plot.record, late=True)
            for a in self._attachments
            for plot in plots
            if isinstance(a.handler, Validation) and a.event not in (ev.EPOCH_COMPLETED, ev.EPOCH_HALTED)
        ]

    def _trackers(self) -> list[Tracking]:
        """Give the handlers that give previews to trackers, each once."""
        owners = (getattr(a.handler, "__self__", None) for a in self._attachments)
        return list({id(x): x for x in owners if isinstance(x, Tracking)}.values())

    def _parts(self) -> Parts:
        return Parts(
            program=self._program,
            attachments=(*self._attachments, *self._plotted()),
            reducers={
                name: r
                for name, r in self._metrics.items()
                if not r.is_of_evaluation or isinstance(self._program, EvalStep)
            },
            probes=dict(self._probes),
            events=self._events,
            placement=self._placement,
            listener=self._listener,
            fuse=self._driver_options.get("fuse", True),
            saving=self._saving,
            flushers=tuple(self._flushers),
            closers=tuple(self._closers),
            folder=self._folder,
            recorders=tuple(self._recorders.values()),
            profile=as_reporter(self._driver_options.get("profile")),
            memory=self._driver_options.get("memory"),
        )


@dataclass(frozen=True)
class _Delivery:
    """Handler that hands a probe's values to whoever asked for them."""

    probe: str
    to: Callable[[Any, LoopState], Any] | None

    def __call__(self, state: LoopState) -> Any:
        if self.to is None or self.probe not in state.probes:
            return None
        return self.to(jax.device_get(state.probes[self.probe]), state)


def _gradient_norm(outputs: Any) -> Any:
    return outputs["gradient_norm"]


def _exhausted(stream: Generator[LoopState, None, LoopState]) -> LoopState:
    """Run a stream to its end and give what it returns."""
    while True:
        try:
            next(stream)
        except StopIteration as stop:
            return stop.value


def _as_metric(metric: Any, name: str | None, *, reduce: Any, reads: Any) -> Metric:
    """Turn what a user gave into a Metric; a loss by name is a metric too."""
    is_loss = isinstance(metric, str) and (metric in losses.NAMES or metric in losses.ALIASES)
    if is_loss and metric not in metric_table.NAMES:
        return metric_table.as_metric(losses.get(metric), name or metric, reduce=reduce, reads=reads)
    return metric_table.as_metric(metric, name, reduce=reduce, reads=reads)


def _record_of(attachment: Attachment) -> str | None:
    """Give the name of the record that an attached handler keeps, if it watches a metric or writes checkpoints."""
    handler = attachment.handler
    owner = getattr(handler, "__self__", handler)
    return owner.record if isinstance(owner, Monitor | Checkpoint | Confusion | Plot) else None
