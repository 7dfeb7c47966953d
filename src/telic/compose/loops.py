"""The public loop: a step, metrics and handlers, run over data."""

import copy as copying
import inspect
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from telic import losses, tree
from telic import metrics as metric_table
from telic.contract import Objective
from telic.data import as_source, as_validation
from telic.display.lines import MessageLog, MetricLog, Stream
from telic.driver import DriverOptions, Listener, StepDriver
from telic.errors import ContractError, TelicError
from telic.evaluate import EvaluationPass, ObjectiveLoss
from telic.loop import events as ev
from telic.loop.engine import Attachment, Engine, Handler, Plan, check_totals
from telic.loop.filters import Filter, always, as_filter, every
from telic.loop.ports import Placement, StepProgram, View
from telic.loop.reducers import RESERVED, Reducer, reported
from telic.loop.state import LoopState
from telic.metrics.base import Metric
from telic.objectives import as_objective
from telic.placement import SingleDevice, one_process
from telic.train.evaluation import EvalStep
from telic.train.step import TrainStep
from telic.types import Batch, PyTree


@dataclass(frozen=True, eq=False)
class RawStep:
    """A step of the user's own, ``(state, batch) -> state | Result``, as a `StepProgram`."""

    fn: Callable[[Any, Any], Any]
    make: Callable[[Any], Any] | None = None
    period: int = 1

    def bind(self, example: Batch) -> "RawStep":
        """Give the step itself: it learns nothing from shapes."""
        del example
        return self

    def init(self, batch: Batch) -> PyTree:
        """Give the state of the user's init.

        Raises:
          ContractError: There is none, and no state was given.
        """
        if self.make is None:
            raise ContractError("this loop has no init: give telic.Loop(step, init), or run(data, state=...)")
        return tree.copy_leaves(self.make(batch))

    def adopt(self, batch: Batch, given: PyTree) -> PyTree:
        """Give a copy of the caller's state, so that it is not consumed."""
        del batch
        return tree.copy_leaves(given)

    def step(self, state: PyTree, batch: Batch, window: Any = None) -> Any:
        """Call the user's step."""
        del window
        return self.fn(state, batch)

    def flush(self, state: PyTree) -> PyTree:
        """Give the state as it is."""
        return state

    def health(self, state: PyTree) -> PyTree:
        """Give None: nothing is watched."""
        del state

    def check_health(self, health: PyTree, state: PyTree) -> None:
        """Do nothing."""

    def model(self, state: PyTree) -> Any:
        """Give None: there is no model."""
        del state


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
        self._program = _as_program(step, init)
        self._output_transform = output_transform
        self._metrics: dict[str, Reducer] = {}
        self._attachments: list[Attachment] = []
        self._resume: LoopState | None = None
        self._running = False
        self._placement: Placement = SingleDevice()
        self._listener: Listener | None = None
        self._driver_options: dict[str, Any] = {}

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
          metric: A name from `telic.metrics` or `telic.losses`, a `Metric`, or a function of what it reads that gives
            per-example values, a scalar or a Mean.
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
        if made.name in RESERVED:
            raise ValueError(f"a metric may not be named {made.name!r}: log lines use that name themselves")
        self._metrics[made.name] = Reducer(made.name, made)
        return self

    def handle_event(
        self, event: str | Sequence[str], handler: Handler, filter: Filter = always, *, name: str | None = None
    ) -> "Loop":
        """Run a handler at an event.

        Args:
          event: One event, a list of them, or "all".
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
        for one in ev.resolve_events(event):
            self._attachments.append(Attachment(one, handler, as_filter(filter), label))
        return self

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
        for end in (ev.EPOCH_COMPLETED, ev.EPOCH_HALTED):
            # Late, so that the line shows what the epoch's other handlers recorded.
            self._attachments.append(Attachment(end, lines.on_epoch_end, always, "log", late=True))
        return self

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
    ) -> "Loop":
        """Evaluate on other data and record ``validation_<metric>`` beside the training metrics.

        Every metric of this loop is computed as it is in training, and the objective's loss as ``validation_loss``.
        Training state and keys are untouched; the program is compiled once.

        Args:
          data: Batches that can be read many times, or a Dataset, whose `val` is used.
          model: What to evaluate; by default this loop's own objective. An Objective, an evaluation step, or a model.
          event: When to evaluate.
          filter: At which firings.
          name: Name of a further data set: ``validation_<name>_<metric>``.
          averaged: Evaluate the averaged weights.
          limit: Batches per pass at most; needed for data without an end.
        """
        self._check_idle()
        program = self._evaluation(model, averaged)
        evaluation = _Validation(
            loop=self,
            program=program,
            batches=as_validation(data, limit=limit),
            prefix="validation_" if name is None else f"validation_{name}_",
        )
        return self.handle_event(event, evaluation, filter, name="validate")

    def _evaluation(self, model: Any, averaged: bool) -> StepProgram:
        if model is None:
            if not isinstance(self._program, TrainStep):
                raise ContractError(
                    "this loop's step is not built from an objective, so say what to evaluate: validate(data, model=...)"
                )
            return self._program.evaluation(averaged=averaged)
        if isinstance(model, EvalStep):
            return model
        return EvalStep(model if isinstance(model, Objective) else as_objective(None, model), averaged=averaged)

    def drive(self, *, fuse: bool = True, compiler_options: Mapping[str, Any] | None = None) -> "Loop":
        """Say how the driver runs this loop.

        Args:
          fuse: Run several iterations in one dispatch where no handler needs the host between them. What is computed
            is the same to the bit.
          compiler_options: Handed to XLA.
        """
        self._check_idle()
        self._driver_options = {"fuse": bool(fuse), "compiler_options": dict(compiler_options or {})}
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
        twin._attachments = list(self._attachments)
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
        handlers: dict[str, int] = {}
        for a in self._attachments:
            handlers[a.event] = handlers.get(a.event, 0) + 1
        return f"Loop(metrics={list(self._metrics)}, handlers={handlers})"

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
          debug: Log every event and what handlers answered.
          compiler_options: Handed to XLA.
        Returns:
          The final LoopState, or what output_transform makes of it.
        Raises:
          DataError: The data is empty or exhausted.
          ShapeError: A batch has a shape that strict does not allow.
          ContractError: Step, handler or metric break their contract; raised before anything compiles where it can be.
          NonFiniteError: The budget of rejected attempts is used up.
        """
        final: LoopState | None = None
        stream = self._stream(data, epochs, steps, iterations, state, strict, jit, debug, compiler_options)
        while True:
            try:
                next(stream)
            except StopIteration as stop:
                final = stop.value
                break
        return final if self._output_transform is None else self._output_transform(final)

    def stream(self, data: Any, **options: Any) -> Iterator[LoopState]:
        """Run, giving the LoopState after each epoch, for those who own the loop. Takes the options of `run`."""
        known = [p for p in inspect.signature(self.run).parameters if p != "data"]
        for option in options:
            if option not in known:
                raise TypeError(f"stream got an unknown option {option!r}; known: {', '.join(known)}")
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
    ) -> Any:
        """The run as a generator; its return value is the final state."""
        check_totals(epochs, steps, iterations)
        if self._running:
            raise TelicError("this loop is running already; run loop.copy() for a second run")
        if epochs is None and steps is None:
            epochs = 1
        previous = state if isinstance(state, LoopState) else self._resume
        if previous is not None and state is not None and not isinstance(state, LoopState):
            raise ValueError("from_state and run(state=...) both give a start: use one")
        given = previous.step_state if previous is not None else state
        self._running = True
        source = as_source(data)
        try:
            cursor = _cursor(previous, epochs, steps, iterations)
            if previous is not None and cursor.position is not None and cursor.iteration:
                source.set_state(cursor.position)
            else:
                source.begin(cursor.epoch, continuous=steps is not None)
            first = source.next(View(given, cursor.epoch, cursor.iteration))
            program = self._program.bind(first[0])
            start = program.init(first[0]) if given is None else program.adopt(first[0], given)
            driver = self._make_driver(program, strict=strict, jit=jit, compiler_options=compiler_options)
            driver.start(start, first[0])
            cursor.step_state = driver.step_state
            cursor.bind_model = program.model
            cursor.copier = tree.copy_leaves
            engine = Engine(
                plan=Plan(tuple(self._attachments)),
                driver=driver,
                source=source,
                state=cursor,
                period=program.period,
                clock=time.monotonic,
                agree=one_process,
                ahead=deque([first]),
                plans=getattr(program, "plans", False),
                debug=debug,
            )
            yield from engine.stream()
            return engine.state
        finally:
            self._running = False
            source.close()

    def _make_driver(
        self, program: StepProgram, *, strict: bool, jit: bool, compiler_options: Mapping[str, Any] | None
    ) -> StepDriver:
        merged = {**self._driver_options.get("compiler_options", {}), **(compiler_options or {})}
        fuse = self._driver_options.get("fuse", True)
        options = DriverOptions(jit=jit, strict=strict, fuse=fuse, compiler_options=merged, listener=self._listener)
        return StepDriver(
            program,
            _bound(self._metrics, program),
            self._placement,
            options,
            carries=not isinstance(program, EvalStep),
            reported=reported,
        )


@dataclass
class _Validation:
    """Handler that evaluates and records under its prefix."""

    loop: Loop
    program: StepProgram
    batches: Iterable[Any]
    prefix: str
    _pass: EvaluationPass | None = field(default=None, repr=False)

    def __call__(self, state: LoopState) -> None:
        if self._pass is None:
            # The metrics are those of the loop when it first validates: all that were attached before the run.
            reducers = dict(self.loop._metrics)
            objective = getattr(self.program, "objective", None)
            if objective is not None and "loss" not in reducers and getattr(objective, "has_loss", True):
                reducers["loss"] = Reducer("loss", ObjectiveLoss(objective))
            self._pass = evaluation_pass(self.program, reducers, self.batches, self.loop._placement)
        values = self._pass.run(state.step_state)
        state.metrics.add({self.prefix + name: value for name, value in values.items()})


def evaluation_pass(
    program: StepProgram, reducers: Mapping[str, Reducer], batches: Iterable[Any], placement: Placement
) -> EvaluationPass:
    """Give an evaluation of a data set; each batch shape of it is one program."""

    def make_driver(bound: StepProgram) -> StepDriver:
        return StepDriver(bound, reducers, placement, DriverOptions(strict=False), carries=False, reported=reported)

    return EvaluationPass(program, batches, make_driver)


def _as_program(step: Any, init: Callable[[Any], Any] | None) -> StepProgram:
    if isinstance(step, TrainStep | EvalStep | RawStep):
        if init is not None:
            raise TypeError("this step has an initialiser of its own: leave init out")
        return step
    if not callable(step):
        raise TypeError(f"Loop takes a step function (state, batch) -> state, got {step!r}")
    if init is not None and not callable(init):
        raise TypeError(f"init must be a function of the first batch, got {init!r}; pass a state as run(state=...)")
    return RawStep(step, init)


def _as_metric(metric: Any, name: str | None, *, reduce: Any, reads: Any) -> Metric:
    """Turn what a user gave into a Metric; a loss by name is a metric too."""
    if isinstance(metric, str) and metric not in metric_table.NAMES and metric in losses.NAMES:
        return metric_table.as_metric(losses.get(metric), name or metric, reduce=reduce, reads=reads)
    return metric_table.as_metric(metric, name, reduce=reduce, reads=reads)


def _bound(reducers: Mapping[str, Reducer], program: StepProgram) -> dict[str, Reducer]:
    """Give the loop's metrics, the objective's loss first where the step has an objective."""
    objective = getattr(program, "objective", None)
    own: dict[str, Reducer] = {}
    has_loss = getattr(objective, "has_loss", True)
    if isinstance(objective, Objective) and "loss" not in reducers and has_loss:
        own["loss"] = Reducer("loss", ObjectiveLoss(objective))
    return own | dict(reducers)


def _cursor(previous: LoopState | None, epochs: int | None, steps: int | None, iterations: int | None) -> LoopState:
    """Give the state a run starts with: fresh, or where an earlier run stopped."""
    if previous is None:
        cursor = LoopState()
    else:
        cursor = previous.keep()
        if cursor.epoch in cursor.history and cursor.status == ev.HALTED:
            # The epoch in which the loop halted is closed: the next one is the next.
            cursor.epoch += 1
            cursor.iteration = 0
        cursor.status = None
    cursor.max_epoch = epochs
    cursor.max_steps = steps
    cursor.max_iteration = iterations
    return cursor
