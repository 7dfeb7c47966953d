"""The public loop: a step, metrics and handlers, run over data."""

import copy as copying
import inspect
import os
import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from jax.sharding import Mesh

from telic.checkpoints import Checkpoints
from telic.compose.caching import cache_directory, compile_cache_in
from telic.compose.describing import drawing, loop_line
from telic.compose.fitting import Budget
from telic.compose.judging import Judging
from telic.compose.metering import Reporter, as_reporter
from telic.compose.runs import Parts, Request, run_loop
from telic.compose.saving import as_saving
from telic.compose.showing import Showing
from telic.compose.validation import Validation, check_average, check_evaluated, validations_of
from telic.display.plots import Plot
from telic.errors import TelicError, closest
from telic.loop import events as ev
from telic.loop.attachments import Attachment
from telic.loop.engine import check_totals
from telic.loop.ports import Placement
from telic.loop.state import LoopState
from telic.placement import check_mesh, placement_for
from telic.shard import Layout, MeshSpec
from telic.trackers import Tracking
from telic.train.evaluation import EvalStep


class Loop(Showing, Judging):
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

    def drive(
        self,
        *,
        fuse: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        profile: bool | Reporter | None = None,
        compile_cache: bool | str | os.PathLike[str] | None = None,
        memory: Budget | None = None,
        placement: Placement | None = None,
        mesh: MeshSpec | Mesh | None = None,
        layout: Layout | None = None,
    ) -> Self:
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
          mesh: The same for a step of your own, which no trainer has placed: a `MeshSpec`, or a mesh with its axes.
          layout: Where on that mesh the parts of the state lie.
        """
        self._check_idle()
        check_mesh(mesh, layout)
        if mesh is not None:
            placement = placement_for(mesh, layout)
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
    ) -> Self:
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

    def from_state(self, state: LoopState) -> Self:
        """Continue from a state that an earlier run returned. `epochs=` and `steps=` of `run` are totals."""
        self._check_idle()
        if not isinstance(state, LoopState):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"from_state takes a LoopState, got {type(state).__name__}; pass others as run(state=...)")
        self._resume = state
        return self

    def copy(self) -> Self:
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
        stream = self._stream(data, *(o[name] for name in known))
        # One that is still open when Python ends is closed before the modules it needs are gone.
        weakref.finalize(stream, _close, weakref.ref(stream))
        return stream

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


def _close(stream: "weakref.ref[Generator[LoopState, None, LoopState]]") -> None:
    """Close a stream that is there still and not at work in another thread."""
    left = stream()
    if left is not None and inspect.getgeneratorstate(left) != inspect.GEN_RUNNING:
        left.close()


def _exhausted(stream: Generator[LoopState, None, LoopState]) -> LoopState:
    """Run a stream to its end and give what it returns."""
    while True:
        try:
            next(stream)
        except StopIteration as stop:
            return stop.value
