"""One run of a loop: where it starts, what it is made of, and how it ends.

A generator that gives the state after each epoch and returns the final one.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from telic import tree
from telic.compose.fitting import Budget, fitted
from telic.compose.metering import Metering, Reporter, Unmetered, unreported
from telic.compose.processes import check_same_start, heard, together
from telic.compose.programs import may_read_gradients, started, with_loss
from telic.compose.resume import Session
from telic.compose.saving import Saving
from telic.compose.signals import Unsaved
from telic.compose.validation import begin
from telic.data import as_source
from telic.data.batches import as_stateful
from telic.data.dataset import DataPartition, Dataset
from telic.display.recorder import Recorder, write_batch
from telic.driver import DriverOptions, Feeder, Listener, StepDriver
from telic.errors import NonFiniteError
from telic.loop import events as ev
from telic.loop.attachments import Attachment, Plan
from telic.loop.cursor import is_closed, settled
from telic.loop.engine import Engine
from telic.loop.ports import Draws, Placement, Position, Source, StepProgram, View
from telic.loop.reducers import Reducer, reported
from telic.loop.state import LoopState
from telic.train.evaluation import EvalStep
from telic.train.state import TrainState
from telic.train.step import TrainStep
from telic.types import Batch, PyTree


@dataclass(frozen=True)
class Parts:
    """What a loop was given before it runs.

    Attributes:
      program: The step.
      attachments: Handlers.
      reducers: Metrics by name.
      probes: Functions of the step's outputs by name.
      events: Names of events the user registered.
      placement: Where batches live.
      listener: Is told of compilations.
      fuse: Run several iterations in one dispatch.
      saving: Where the run is saved, and when.
      flushers: Write out what handlers have not yet written, before each save.
      closers: Run when the run ends, also by an error.
      folder: Directory the run writes to, when there is one.
      recorders: Handlers that write the metrics; those of a run's directory want it on the clock.
      profile: Takes the report of where the time went; None counts nothing.
      memory: Slice batches into microbatches whose step fits; None leaves the step as it is.
    """

    program: StepProgram
    attachments: tuple[Attachment, ...]
    reducers: Mapping[str, Reducer]
    probes: Mapping[str, Callable[[Any], PyTree]]
    events: tuple[str, ...]
    placement: Placement
    listener: Listener | None
    fuse: bool
    saving: Saving | None
    flushers: tuple[Callable[[], None], ...]
    closers: tuple[Callable[[], None], ...]
    folder: Path | None
    recorders: tuple[Recorder, ...] = ()
    profile: Reporter | None = None
    memory: Budget | None = None


@dataclass(frozen=True)
class Request:
    """What one call of `run` asks for.

    Attributes:
      previous: State of an earlier run to go on from.
      given: The step's own state to start from, when there is no earlier run.
      epochs: Epochs in all.
      steps: Updates in all.
      iterations: Batches per epoch at most.
      strict: Allow one batch shape and one smaller last batch.
      jit: Compile the step.
      debug: Log every event.
      compiler_options: Handed to XLA.
    """

    previous: LoopState | None = None
    given: Any = None
    epochs: int | None = None
    steps: int | None = None
    iterations: int | None = None
    strict: bool = True
    jit: bool = True
    debug: bool = False
    compiler_options: Mapping[str, Any] = field(default_factory=dict[str, Any])


def run_loop(parts: Parts, data: Any, request: Request) -> Generator[LoopState, None, LoopState]:
    """Run a loop over data."""
    session = None if parts.saving is None else Session(parts.saving, parts.flushers, placement=parts.placement)
    parts = together(parts)
    metering = _metering(parts, session)
    source = as_source(data, partition=DataPartition(*parts.placement.partition))
    if isinstance(parts.program, EvalStep):
        source = parts.placement.joined_source(source)
    source = metering.source(source)
    closing = ExitStack()
    closing.callback(source.close)
    try:
        if session is not None:
            session.open()
            session.check_source(source)
            if session.saved is not None:
                over = _finished(parts, session, source, request)
                if over is not None:
                    return over
                request = replace(request, previous=session.going_on(session.cursor()), given=None)
        engine = _begin(parts, data, source, session, request, metering, closing)
        yield from engine.stream()
        if session is not None:
            with metering.part("checkpoint"):
                session.finish(engine.state)
        if isinstance(parts.program, TrainStep):
            parts.program.warn_if_idle(engine.state.step_state)
        engine.state.read_accumulators = None
        return engine.state
    except NonFiniteError as error:
        folder = parts.folder if session is None else session.saving.config.directory
        if folder is not None and error.batch is not None:
            _save_batch(error, folder / "nonfinite_batch.npz")
        raise
    except jax.errors.JaxRuntimeError as error:
        metering.explain(error)
        raise
    finally:
        # First the thread that reads, then what it reads.
        closing.close()
        # Also when the run ends by an error, which fires no event.
        for close in parts.closers:
            close()
        if session is not None:
            session.close()
        metering.close()


def _metering(parts: Parts, session: Session | None) -> Unmetered:
    """Give what puts a run on the clock, where somebody asked for it."""
    recorders = [recorder for recorder in parts.recorders if recorder.metered]
    if parts.profile is None and not recorders:
        return Unmetered()
    folder = parts.folder if session is None else session.saving.config.directory
    metering = Metering(parts.profile or unreported, folder, is_saved=session is not None)
    for recorder in recorders:
        recorder.totals = metering.totals
    return metering


def _finished(parts: Parts, session: Session, source: Source, request: Request) -> LoopState | None:
    """Say where a saved run stands; give its state when all that was asked for is done."""
    previous = session.cursor()
    session.check_kind(previous, request.epochs, request.steps)
    over = session.is_over(request.epochs, request.steps)
    session.announce(previous, request.epochs, request.steps, over=over)
    example = session.example()
    if not over or example is None:
        return None
    # A run that is over opens no data: its shapes are in the checkpoint.
    program = parts.program.bind(example)
    parts.placement.learn(getattr(program, "objective", None))
    program, start = started(program, example, None, source)
    start = session.fill(parts.placement.settle(start), program, over=True)
    previous.step_state = parts.placement.settle(start)
    previous.bind_model, previous.copier = program.model, tree.copy_leaves
    return previous


def _begin(
    parts: Parts,
    data: Any,
    source: Source,
    session: Session | None,
    request: Request,
    metering: Unmetered,
    closing: ExitStack,
) -> Engine:
    """Give the engine of a run that stands before its first batch."""
    previous = request.previous
    given = request.given if previous is None else previous.step_state
    skipped = 0
    if previous is None and request.steps is not None and isinstance(given, TrainState):
        previous, skipped = _counted(given, parts.program.period)
    saved = session is not None and session.saved is not None
    cursor = _cursor(previous, request)
    is_iterator = isinstance(data, Iterator) and as_stateful(data) is None
    if previous is not None and cursor.position is not None and not is_iterator:
        # Mid-epoch, and where an epoch reads on from the last one. A plain iterator stands where it was left.
        if cursor.iteration or isinstance(data, Dataset | Draws) or session is not None:
            source.set_state(cursor.position)
    source.begin(cursor.epoch, continuous=request.steps is not None)
    if isinstance(source, Draws):
        source.skip(skipped)
    else:
        for _ in range(skipped):
            source.next(View(given, cursor.epoch, cursor.iteration))
    cursor.position = source.get_state()
    first, ahead = _peek(source, cursor, given)
    if session is not None and saved:
        session.check_batch(first, read=bool(ahead))
        example = session.example()
        first = first if example is None else parts.placement.share(example)
        given = None
    check_same_start(parts, first, request)
    whole = parts.placement.whole(first)
    program = parts.program.bind(whole)
    parts.placement.learn(getattr(program, "objective", None))
    if parts.memory is not None and isinstance(program, TrainStep):
        program = fitted(program, whole, parts.memory, cursor, parts.placement)
    program, start = started(program, whole, given, source)
    start = parts.placement.settle(start)
    if session is not None:
        with metering.part("restore"):
            start = parts.placement.settle(session.fill(start, program)) if saved else start
        session.begin(program, start, whole)
    driver = _make_driver(parts, program, request, metering)
    driver.start(start, first)
    if session is not None:
        session.note_frozen(start, driver.unwritten)
    if cursor.iteration and cursor.accumulators is not None:
        driver.restore("epoch", cursor.accumulators)
    for name in driver.metric_names:
        cursor.metrics.added.pop(name, None)
    cursor.accumulators = None
    cursor.read_accumulators = lambda: driver.saved("epoch")
    cursor.step_state = driver.step_state
    cursor.bind_model = program.model
    cursor.copier = tree.copy_leaves
    begin(parts.attachments, cursor, driver.metric_names)
    leftover = "return" if isinstance(data, Dataset) else "keep" if isinstance(data, Iterator) else "drop"
    feeder = Feeder(
        source,
        parts.placement,
        driver.room,
        stacked=driver.stacked,
        # An iterator is somebody's own: nothing of it is read that is not used. How much a thread has read by the time
        # it is asked differs between processes, and what they dispatch must be the same.
        threaded=source.read_ahead
        and leftover != "keep"
        and parts.fuse
        and request.jit
        and parts.placement.processes.count == 1,
        epoch=cursor.epoch,
        ahead=ahead,
        meter=metering.meter,
    )
    closing.callback(feeder.close)
    return Engine(
        plan=Plan(metering.attachments((*heard(parts), *(() if session is None else session.attachments())))),
        driver=metering.driver(driver, program, first, cursor.total_iterations),
        source=source,
        state=cursor,
        period=program.period,
        clock=time.monotonic,
        agree=parts.placement.processes.agree,
        feed=feeder,
        midway=cursor.iteration > 0 and not is_closed(cursor.counts),
        plans=getattr(program, "plans", False),
        leftover=leftover,
        debug=request.debug,
        keeper=_keeper(parts) if session is None else metering.keeper(session),
        events=parts.events,
    )


def _keeper(parts: Parts) -> Unsaved | None:
    """Give what ends a run that is not saved. An evaluation ends with the training that it is a part of."""
    processes = parts.placement.processes
    return None if processes.count == 1 or isinstance(parts.program, EvalStep) else Unsaved(processes)


def _make_driver(parts: Parts, program: StepProgram, request: Request, metering: Unmetered) -> StepDriver:
    options = DriverOptions(
        jit=request.jit,
        # Of an evaluation by several processes some batches are shares and some are whole.
        strict=request.strict and (parts.placement.processes.count == 1 or not isinstance(program, EvalStep)),
        fuse=parts.fuse,
        compiler_options=request.compiler_options,
        listener=metering.listener(parts.listener),
        meter=metering.meter,
    )
    if isinstance(program, TrainStep):
        read = parts.probes or any(may_read_gradients(r) for r in parts.reducers.values())
        program = replace(program, expose_gradients=bool(read) or program.expose_gradients)
    return StepDriver(
        program,
        with_loss(parts.reducers, program),
        parts.placement,
        options,
        carries=not isinstance(program, EvalStep),
        reported=reported,
        probes=parts.probes,
    )


def _counted(state: TrainState, period: int) -> tuple[LoopState, int]:
    """Give a cursor for a bare TrainState in a run of steps, and the batches of the stream that it has used.

    Its attempts are the position in the stream, so that steps in all are counted from the first.
    """
    attempts = int(state.attempts)
    cursor = LoopState(step_state=state, iteration=attempts, total_iterations=attempts)
    for counts in (cursor.counts.total, cursor.counts.epoch):
        counts[ev.ITERATION_STARTED] = counts[ev.ITERATION_COMPLETED] = attempts
        counts[ev.STEP_COMPLETED] = attempts // period
    return cursor, attempts


def _peek(source: Source, cursor: LoopState, given: Any) -> tuple[Batch, deque[tuple[Batch, Position]]]:
    """Give a batch to learn shapes from, and the batches that are read ahead of their use."""
    if isinstance(source, Draws):
        return source.example(), deque()
    is_over = cursor.max_iteration is not None and cursor.iteration >= cursor.max_iteration
    try:
        first = source.next(View(given, cursor.epoch, cursor.iteration))
    except StopIteration:
        # The state was taken at the epoch's last batch: the shapes are those of the next epoch.
        is_over = True
        source.begin(cursor.epoch + 1)
        first = source.next(View(given, cursor.epoch + 1, 0))
    if is_over:
        source.set_state(cursor.position)
        source.begin(cursor.epoch)
        return first[0], deque()
    return first[0], deque([first])


def _cursor(previous: LoopState | None, request: Request) -> LoopState:
    """Give the state a run starts with: fresh, or where an earlier run stopped."""
    if previous is None:
        cursor = LoopState()
    else:
        cursor = settled(previous.keep())
        cursor.status = None
    cursor.max_epoch = request.epochs
    cursor.max_steps = request.steps
    cursor.max_iteration = request.iterations
    return cursor


def _save_batch(error: NonFiniteError, path: Path) -> None:
    """Save the batch an error carries, and say where; a disk that is full does not hide the error."""
    try:
        write_batch(path, error.batch, error.attempt)
    except OSError as failure:
        error.add_note(f"its batch could not be saved to {path}: {failure}")
    else:
        error.add_note(f"its batch is saved in {path}")
