"""How a step runs: traced, compiled and dispatched with its metrics, its state donated.

The only place that jits training and evaluation.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.contract import Result, as_result
from telic.driver.carrying import Packing, Parts
from telic.driver.kept import Recent
from telic.driver.pacing import Pace
from telic.driver.reading import Reading
from telic.driver.shapes import Signature, check_admissible, differences, signature_of
from telic.driver.slabs import Run, slab_of
from telic.driver.states import check_same, owned, settle
from telic.driver.tracing import check_constants, check_options, knows_option, unwritten, uses_convolution
from telic.errors import ContractError, NonFiniteError
from telic.loop.ports import CountsAttempts, Meter, Placement, Reducer, Reported, StepProgram
from telic.types import Batch, PyTree

GROUP_BYTES = 4 * 2**20
"""Host memory of the batches of one dispatch, at most."""

MAX_WIDTH = 128
"""Iterations of one dispatch, at most."""

_REGION_ANALYSIS = "xla_cpu_copy_insertion_use_region_analysis"
"""XLA option that saves the copies which keeping old state beside new costs inside a loop, on the CPU."""

_HEALTH_EVERY = 16
"""Iterations between looks at the step's health; each look is at values that are already there."""

_log = logging.getLogger("telic.loop")


class Listener(Protocol):
    """Is told when a program is being compiled, and when it is."""

    def compiling(self, what: str) -> None: ...

    def compiled(self, what: str, seconds: float) -> None: ...


@dataclass(frozen=True)
class DriverOptions:
    """How to run a step.

    Attributes:
      jit: Compile the step. Without it every operation runs by itself, which is for debugging only.
      strict: Allow one batch shape and one smaller last batch; a third shape raises.
      fuse: Run several iterations in one dispatch where no handler needs the host between them. The bits are the same.
      compiler_options: Handed to XLA.
      listener: Is told of compilations.
      meter: Counts the time that the host waits for the device.
    """

    jit: bool = True
    strict: bool = True
    fuse: bool = True
    compiler_options: Mapping[str, Any] | None = None
    listener: Listener | None = None
    meter: Meter | None = None


def compile_step(program: StepProgram, state: PyTree, batch: Batch, placement: Placement) -> Any:
    """Compile one step that gives its state away, on shapes and without running it: to be asked for its memory.

    Args:
      program: The step.
      state: Arrays or their shapes.
      batch: A batch of all processes, or its shapes.
      placement: Where they lie.
    """
    shapes = tree.shape_structs((state, batch))
    where = placement.shardings(shapes[0])
    if where is not None:
        lies = (where, placement.rows(batch))
        shapes = jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, lies)
    with placement.on_mesh():
        step = jax.jit(lambda s, b: as_result(program.step(s, b)).state, donate_argnums=0, out_shardings=where)
        return step.lower(*shapes).compile()


class StepDriver:
    """Runs one step program over batches, with the metrics of a loop.

    Args:
      program: The pure step.
      reducers: Metrics by name.
      placement: Where batches live.
      options: How to run.
      scopes: Sets of accumulators, each emptied on its own: "epoch", and "interval" where somebody logs intervals.
      reported: Gives reducers for what the step reports by itself.
      probes: Functions of the step's outputs by name, that `probe` computes.
      carries: Whether the step's state changes: False in evaluation, whose state is neither donated nor returned.
    """

    def __init__(
        self,
        program: StepProgram,
        reducers: Mapping[str, Reducer],
        placement: Placement,
        options: DriverOptions,
        *,
        scopes: tuple[str, ...] = ("epoch",),
        carries: bool = True,
        reported: Reported | None = None,
        probes: Mapping[str, Callable[[Any], PyTree]] | None = None,
    ):
        check_options(options.compiler_options or {})
        self._program = program
        self._asked = dict(reducers)
        self._placement = placement
        self._options = options
        self._scopes = scopes
        self._carries = carries
        self._reported = reported
        self._probes = dict(probes or {})
        self._probe_programs: dict[tuple[tuple[str, ...], Signature], Callable[..., Any]] = {}
        self._compiled: Any = None
        self._traced: Any = None
        self._reducers: dict[str, Reducer] = {}
        self._state: PyTree = None
        self._unwritten: tuple[bool, ...] | None = None
        self._parts = Parts([], None)
        self._accumulators: dict[str, PyTree] = {}
        self._empty: PyTree = None
        self._health: deque[tuple[int, Any]] = deque(maxlen=2 * _HEALTH_EVERY)
        self._recent: Recent | None = None
        self._signatures: list[Signature] = []
        self._first: Signature | None = None
        self._generation = 0
        self._since_check = 0
        self._room = 1
        self._loops = False
        self._pace = Pace(options.meter)
        self._numbers: dict[int, Any] = {}
        self._step: Callable[..., Any] = self._body
        self._flush: Callable[..., Any] = self._flushed
        self._compute: Callable[..., Any] = self._values
        self._copied: Callable[..., Any] = tree.copy_leaves
        self._plan: Callable[..., Any] = self._planned
        self._traced_once: Callable[..., Result] = self._call
        if options.jit:
            # The program that runs takes the step as `start` traced it, and does not go through its Python again.
            self._traced_once = jax.jit(self._call)
            self._plan = jax.jit(self._plan)
            self._flush = jax.jit(self._flushed, donate_argnums=0)
            self._compute = jax.jit(self._values)
            # In one dispatch; leaf by leaf it takes as long as several small steps.
            self._copied = jax.jit(tree.copy_leaves)

    def _compile_options(self, *, loops: bool) -> dict[str, Any] | None:
        chosen = dict(self._options.compiler_options or {})
        if loops and jax.default_backend() == "cpu" and knows_option(_REGION_ANALYSIS):
            chosen.setdefault(_REGION_ANALYSIS, True)
        return chosen or None

    # -- what the loop sees --------------------------------------------------------------------------------------

    @property
    def step_state(self) -> PyTree:
        """The state after the last batch."""
        return self._state

    @step_state.setter
    def step_state(self, value: PyTree) -> None:
        if self._state is not None and value is not self._state:
            if self._options.strict:
                check_same(self._state, value, "a handler's step_state")
            if self._recent is not None:
                self._recent.replaced(self._state, value)
            value = self._placement.settle(owned(value, self._state))
        self._state = value

    @property
    def generation(self) -> int:
        """Moments so far: it grows with each dispatch and each reset, and metrics can be read in the latest only."""
        return self._generation

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics carried."""
        return tuple(self._reducers)

    def start(self, step_state: PyTree, batch: Batch, accumulators: Mapping[str, PyTree] | None = None) -> None:
        """Trace the step on a first batch and build empty accumulators; nothing is compiled or consumed.

        Raises:
          ContractError: The step changes the structure, shape or dtype of its own state.
        """
        # The run's own shape, also where a run that goes on begins with its smaller last batch.
        self._first = signature_of(batch)
        whole = self._placement.whole(batch)
        shapes = tree.shape_structs(self._canonical(whole))
        traced, result = self._trace(step_state, shapes, whole)
        if self._carries:
            settled = settle(step_state, result.state)
            if settled is not step_state:
                step_state = settled
                traced, result = self._trace(step_state, shapes, whole)
            check_same(step_state, result.state, "the step")
        found = {} if self._reported is None else self._reported(result, self._asked)
        self._reducers = {**self._asked, **found}
        for name, probe in self._probes.items():
            _check_probe(name, probe, result)
        self._empty = {name: r.init(result, shapes) for name, r in self._reducers.items()}
        self._accumulators = {"index": self._placement.spread(jnp.zeros((), jnp.int32))}
        for scope in self._scopes:
            self.reset(scope)
        if accumulators is not None:
            self._accumulators |= accumulators
        self._state, self._traced = step_state, traced
        self._unwritten = None
        if self._carries:
            nothing = (False,) * len(jax.tree.leaves(step_state))
            self._unwritten = nothing if traced is None else unwritten(traced, step_state)
        self._parts = Parts(step_state, self._unwritten)
        # Where nothing is checked, no batch is asked for again.
        watches = self._carries and jax.eval_shape(self._program.health, step_state) is not None
        # Of several processes each has a share, and the rows of an attempt may be in none of them.
        if watches and isinstance(self._program, CountsAttempts) and self._placement.processes.count == 1:
            self._recent = Recent(self._program)
        if self._options.jit:
            self._choose_program(traced, shapes)

    def _trace(self, step_state: PyTree, shapes: PyTree, batch: Batch) -> tuple[Any, Result]:
        """Trace the step alone: (its program or, of a step that cannot be traced, None; the shapes of its result)."""
        state, index = _structs(step_state), jax.ShapeDtypeStruct((), jnp.int32)
        window = jax.eval_shape(self._plan, state, [shapes]) if getattr(self._program, "plans", False) else None
        try:
            return jax.make_jaxpr(self._traced_once, return_shape=True)(state, shapes, index, window)
        except jax.errors.JAXTypeError:
            if self._options.jit:
                raise
        # What runs as plain Python shows its results by running once more.
        return None, tree.shape_structs(self._call(state, batch, 0, window))

    def _choose_program(self, traced: Any, shapes: PyTree) -> None:
        """Choose one program for the run, from what the step is made of and never from the clock.

        A loop over several batches, with a trip count that is data: one executable for every length, so that how
        iterations are grouped never changes a bit. Convolution gradients are the exception: XLA runs them about four
        times slower inside a loop on the CPU, so such a step runs straight-line, one batch at a time.
        """
        check_constants(traced, self._program)
        convolves = jax.default_backend() == "cpu" and uses_convolution(traced)
        self._loops = not convolves
        if self._loops and self._placement.processes.count > 1:
            # What several processes dispatch must be the same.
            self._pace.agree = self._placement.processes.agree
        size = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        self._room = max(1, min(MAX_WIDTH, GROUP_BYTES // max(1, size)))
        options: dict[str, Any] = {"compiler_options": self._compile_options(loops=self._loops)}
        where = self._pinned()
        if where is not None:
            options["out_shardings"] = where
        self._step = jax.jit(self._group if self._loops else self._body, donate_argnums=(0, 1), **options)

    def _pinned(self) -> Any:
        """Pin what the programs of a run give: the state where it lies, the rest everywhere. None on one device.

        Otherwise XLA would choose, and a state that comes back elsewhere is another program's.
        """
        everywhere = self._placement.pins(0)
        if everywhere is None:
            return None
        moving, _ = self._parts.split(self._state)
        self._flush = jax.jit(
            self._flushed, donate_argnums=0, out_shardings=(self._placement.pins(self._state), everywhere)
        )
        return (self._placement.pins(moving), everywhere, everywhere, everywhere)

    @property
    def width(self) -> int:
        """Iterations the next dispatch may run, at most."""
        if not self._loops or not self._options.fuse:
            return 1
        return self._pace.width(self._room, self._program.period)

    @property
    def stacked(self) -> bool:
        """Whether the program takes batches stacked, several at a time."""
        return self._loops

    def room(self, signature: Signature) -> int:
        """Give how many batches of a shape are kept together. The smaller last batch is the only one of its shape."""
        return self._room if signature == self._first else 1

    def restart(self, step_state: PyTree) -> None:
        """Start over with another state of the same shapes: accumulators are emptied, programs are kept."""
        self._state = step_state
        self._accumulators["index"] = self._placement.spread(jnp.zeros((), jnp.int32))
        for scope in self._scopes:
            self.reset(scope)

    def advance(self, batches: Run | Sequence[Batch], *, epoch: int, iteration: int, window: Any = None) -> None:
        """Run batches of one shape in one dispatch."""
        if not isinstance(batches, Run):
            room = self.room(signature_of(batches[0])) if self._loops else len(batches)
            batches = Run(slab_of(batches, room, stacked=self._loops), 0, len(batches))
        slab, count = batches.slab, len(batches)
        is_new = slab.signature not in self._signatures
        if is_new:
            self._admit(batches[0], slab.signature, epoch, iteration)
        placed = slab.place(self._placement)
        moving, still = self._parts.split(self._state)
        arguments: tuple[Any, ...] = (moving, self._accumulators, still)
        if self._loops:
            arguments += (placed, self._number(batches.start), self._number(batches.stop), window)
        else:
            arguments += (placed[batches.start], window)
        if is_new:
            self._compile(arguments)
        self._generation += 1
        if self._recent is not None:
            self._recent.add(self._generation, batches, self._state)
        began = time.perf_counter()
        moving, self._accumulators, health, slab.ticket = self._step(*arguments)
        self._state = self._parts.join(moving, self._state)
        if health is not None:
            self._health.append((self._generation, health))
            self._since_check += count
        if self._loops or self._options.meter is not None:
            if is_new:
                self._pace.started(slab.ticket)
            else:
                self._pace.follow(slab.ticket, count, began)
        if self._recent is None:
            batches.release()

    def _number(self, number: int) -> Any:
        """Give a number of batches as an array on the device: put there once, explicitly."""
        if number not in self._numbers:
            self._numbers[number] = self._placement.put(np.int32(number), fresh=True)
        return self._numbers[number]

    @property
    def compiled(self) -> Any:
        """The program of the run's own batches, to be asked for its memory and its costs; None before the first."""
        return self._compiled

    @property
    def traced(self) -> Any:
        """The step alone as it was traced, to be asked what it is made of; None before `start`."""
        return self._traced

    @property
    def unwritten(self) -> tuple[bool, ...] | None:
        """For each leaf of the state whether the step hands it on as it is: no batch can change it."""
        return self._unwritten

    def probe(
        self, names: Sequence[str], batch: Batch, *, epoch: int, iteration: int, window: Any = None
    ) -> dict[str, Any]:
        """Give what probes see of the step on a batch, from the state it will start from; the state stays as it is.

        The step runs once more for it, in a program of its own from which everything the probes do not read is
        dropped. The program that trains is the one of a run without probes, so its bits are too.
        """
        signature = signature_of(batch)
        if signature not in self._signatures and signature != self._first and self._options.strict:
            check_admissible(batch, self._first or signature, self._signatures, epoch=epoch, iteration=iteration)
        placed = self._placement.put(batch, fresh=False)
        key = (tuple(names), signature)
        if key not in self._probe_programs:
            self._probe_programs[key] = self._make_probe(key[0], self._state, placed, window)
        values = self._probe_programs[key](self._state, placed, self._accumulators["index"], window)
        return {name: values[name] for name in names}

    def _make_probe(self, names: tuple[str, ...], state: PyTree, batch: Batch, window: Any) -> Callable[..., Any]:
        def seen(state: PyTree, batch: Batch, index: Any, window: Any) -> dict[str, Any]:
            result = self._call(state, batch, index, window)
            outputs = result.state if result.outputs is None else result.outputs
            return {name: self._probes[name](outputs) for name in names}

        if not self._options.jit:
            return seen
        # Each of several processes reads them by itself.
        where = self._placement.pins(0) if self._placement.processes.count > 1 else None
        program = jax.jit(seen, compiler_options=self._compile_options(loops=False), out_shardings=where)
        listener, what, began = self._options.listener, f"the probe {', '.join(names)}", time.perf_counter()
        if listener is not None:
            listener.compiling(what)
        program.lower(state, batch, self._accumulators["index"], window).compile()
        if listener is not None:
            listener.compiled(what, time.perf_counter() - began)
        return program

    def plan(self, batches: Sequence[Batch]) -> Any:
        """Give what the step plans for a window of these batches."""
        placed = [self._placement.put(batch, fresh=False) for batch in batches]
        return self._plan(self._state, placed)

    def flush(self) -> None:
        """Close a window that is not full."""
        self._state, health = self._flush(self._state)
        if health is not None:
            self._health.append((self._generation, health))

    def compute(self, scope: str) -> "Reading":
        """Give a function that computes and fetches a scope's metrics as they are now."""
        return Reading(self, scope, self._generation)

    def accumulators(self, scope: str) -> PyTree:
        """Give a scope's accumulators."""
        return self._accumulators[scope]

    def saved(self, scope: str) -> dict[str, list[Any]]:
        """Give copies of a scope's accumulators, by metric, as lists of arrays."""
        return {name: jax.tree.leaves(tree.copy_leaves(acc)) for name, acc in self._accumulators[scope].items()}

    def restore(self, scope: str, saved: Mapping[str, list[Any]]) -> None:
        """Fill a scope's accumulators with what `saved` gave.

        Raises:
          ContractError: The metrics are not those of the run that saved them; the first difference is named.
        """
        remedy = "attach the metrics of the run that is continued, or continue it from the end of an epoch"
        if set(saved) != set(self._reducers):
            raise ContractError(
                f"this run computes the metrics {', '.join(self._reducers) or 'none'}, and the epoch it continues "
                f"began with {', '.join(saved) or 'none'}: {remedy}"
            )
        made: dict[str, PyTree] = {}
        for name, empty in self._empty.items():
            leaves, structure = jax.tree.flatten(empty)
            shapes = [(jnp.shape(x), x.dtype) for x in leaves]
            if [(jnp.shape(x), x.dtype) for x in saved[name]] != shapes:
                raise ContractError(f"the metric {name!r} was saved with other shapes than it has now: {remedy}")
            made[name] = jax.tree.unflatten(structure, [jnp.array(x, copy=True) for x in saved[name]])
        self._accumulators[scope] = self._placement.spread(made)

    def reset(self, scope: str) -> None:
        """Empty a scope's accumulators; what was shown of them and not read is past."""
        self._generation += 1
        self._accumulators[scope] = self._placement.spread(self._copied(self._empty))

    def check(self, *, wait: bool) -> None:
        """Raise when the step's health says that the run must end.

        Without `wait` it looks every few iterations, at a value that was dispatched an interval ago: the host never
        waits for the device, and what the run computes does not depend on when it looks.
        """
        if not self._health or (not wait and self._since_check < _HEALTH_EVERY):
            return
        self._since_check = 0
        # Where dispatches are waited for, all but the newest few are done.
        behind = 0 if wait else self._pace.ahead if self._loops else _HEALTH_EVERY - 1
        generation, latest = self._health[max(0, len(self._health) - 1 - behind)]
        try:
            self._program.check_health(jax.device_get(latest), self._state)
        except NonFiniteError as error:
            if self._recent is not None:
                error.batch = self._recent.of_attempt(error.attempt)
            raise
        if self._recent is not None:
            self._recent.forget(generation)

    # -- the program ---------------------------------------------------------------------------------------------

    def _call(self, state: PyTree, batch: Batch, index: Any, window: Any) -> Result:
        with self._on_mesh():
            if not self._carries:
                return as_result(self._program.step(state, batch, index))
            planned = () if window is None else (window,)
            return as_result(self._program.step(state, batch, *planned))

    def _group(
        self,
        moving: list[Any],
        accumulators: Mapping[str, PyTree],
        still: list[Any],
        batches: Batch,
        start: Any,
        stop: Any,
        window: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """Run stacked batches from one to before another: what is compiled where the step may stand in a loop."""
        packing = Packing((moving, dict(accumulators)))

        def one(i: Any, carry: Any) -> Any:
            moving, accumulators = packing.unpack(carry)
            batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
            return packing.pack(self._one(moving, accumulators, still, batch, window))

        carry = jax.lax.fori_loop(start, stop, one, packing.pack((moving, dict(accumulators))))
        moving, accumulators = packing.unpack(carry)
        return moving, accumulators, self._health_of(moving, still), accumulators["index"] + 0

    def _body(
        self,
        moving: list[Any],
        accumulators: Mapping[str, PyTree],
        still: list[Any],
        batch: Batch,
        window: Any = None,
    ) -> tuple[Any, Any, Any, Any]:
        """Run one batch by itself: what is compiled where the step must not stand in a loop."""
        moving, accumulators = self._one(moving, accumulators, still, batch, window)
        return moving, accumulators, self._health_of(moving, still), accumulators["index"] + 0

    def _health_of(self, moving: list[Any], still: list[Any]) -> PyTree:
        return self._program.health(self._parts.state(moving, still)) if self._carries else None

    def _one(
        self, moving: list[Any], accumulators: Mapping[str, PyTree], still: list[Any], batch: Batch, window: Any
    ) -> tuple[list[Any], Any]:
        """Step and metrics of one batch."""
        index = accumulators["index"]
        result = self._traced_once(self._parts.state(moving, still), batch, index, window)
        after: dict[str, Any] = {"index": index + 1}
        for scope in self._scopes:
            old = accumulators[scope]
            new = {name: r.update(old[name], result, batch) for name, r in self._reducers.items()}
            new = jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
            if result.accepted is not None:
                kept = tree.select(result.accepted, new, old)
                new = {name: new[name] if r.always else kept[name] for name, r in self._reducers.items()}
            after[scope] = new
        return (self._parts.split(result.state)[0] if self._carries else []), after

    def _planned(self, state: PyTree, batches: Sequence[Batch]) -> Any:
        # Most steps need no more than the batch in hand.
        plan: Callable[..., Any] | None = getattr(self._program, "window_of", None)
        with self._on_mesh():
            return None if plan is None else plan(state, batches)

    def _on_mesh(self) -> AbstractContextManager[Any]:
        # Without a compiler there is nobody to tell where arrays lie.
        return self._placement.on_mesh() if self._options.jit else nullcontext()

    def _flushed(self, state: PyTree) -> tuple[PyTree, PyTree]:
        with self._on_mesh():
            after = self._program.flush(state)
        return after, self._program.health(after)

    def _values(self, accumulators: PyTree) -> dict[str, Any]:
        return {name: r.compute(accumulators[name]) for name, r in self._reducers.items()}

    def read(self, scope: str) -> dict[str, Any]:
        """Start computing a scope's metrics and give them as device values."""
        return self._compute(self._placement.local(self._accumulators[scope]))

    def _canonical(self, batch: Batch) -> Batch:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), batch)

    def _admit(self, batch: Batch, signature: Signature, epoch: int, iteration: int) -> None:
        """Admit a batch shape, or say why not."""
        if signature != self._first and self._options.strict:
            check_admissible(batch, self._first or signature, self._signatures, epoch=epoch, iteration=iteration)
        if self._signatures and self._options.jit:
            before = self._signatures[-1]
            _log.info(
                "batch %d of epoch %d is compiled for again (program %d): %s",
                iteration,
                epoch,
                len(self._signatures) + 1,
                "; ".join(differences(batch, before, signature)),
                extra={"telic": {"epoch": epoch, "iteration": iteration, "programs": len(self._signatures) + 1}},
            )
        self._signatures.append(signature)

    def _compile(self, arguments: tuple[Any, ...]) -> None:
        """Compile the program for a new batch shape, and announce it."""
        if not self._options.jit:
            return
        listener = self._options.listener
        what = "the step" if self._signatures[-1] == self._first else "the smaller last batch"
        began = time.perf_counter()
        if listener is not None:
            listener.compiling(what)
        step: Any = self._step
        compiled = step.lower(*arguments).compile()
        if self._compiled is None or self._signatures[-1] == self._first:
            self._compiled = compiled
        if listener is not None:
            listener.compiled(what, time.perf_counter() - began)


def _structs(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x if tree.is_array(x) else jnp.asarray(x), state)


def _check_probe(name: str, probe: Callable[[Any], PyTree], result: Result) -> None:
    """Trace a probe before anything compiles.

    Raises:
      ContractError: It reads an output the step lacks, or gives something that is no tree of arrays.
    """
    outputs = result.state if result.outputs is None else result.outputs
    try:
        jax.eval_shape(probe, outputs)
    except KeyError as error:
        known = ", ".join(map(str, outputs)) if isinstance(outputs, Mapping) else "no names"
        raise ContractError(
            f"probe {name!r} reads {error.args[0]!r}, which the step's outputs lack. There: {known}. Gradients are "
            "there unless each microbatch is run twice (replay) or batches are sliced (microbatch=)"
        ) from error
    except TypeError as error:
        error.add_note(f"raised while probe {name!r} was traced: it must give arrays, or a tree of them")
        raise
