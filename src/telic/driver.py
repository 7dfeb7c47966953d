"""How a step runs: traced, compiled and dispatched with its metrics, its state donated.

The only place that jits training and evaluation.
"""

import functools
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.contract import Result, as_result
from telic.errors import CaptureError, CaptureWarning, ContractError, NonFiniteError, ShapeError
from telic.loop.ports import CountsAttempts, Placement, Reducer, Reported, StepProgram
from telic.types import Batch, PyTree

LARGE_CONSTANT_BYTES = 2**20
"""A constant in the program above this size is warned about."""

GROUP_BYTES = 4 * 2**20
"""Host memory of the batches of one dispatch, at most."""

MAX_WIDTH = 32
"""Iterations of one dispatch, at most."""

GROUP_SECONDS = 0.05
"""A dispatch is kept about this short, so that a handler, a signal or an error is never far."""

_IN_FLIGHT = 3
"""Dispatches that may wait for the device before the host waits for the first of them: bounds memory."""

_REGION_ANALYSIS = "xla_cpu_copy_insertion_use_region_analysis"
"""XLA option that saves the copies which keeping old state beside new costs inside a loop, on the CPU."""

_HEALTH_EVERY = 16
"""Iterations between looks at the step's health; each look is at values that are already there."""

KEPT_BYTES = 256 * 2**20
"""Memory of the batches that are kept until their health is read, at most; those of the newest dispatch always are."""

_log = logging.getLogger("telic.loop")

Signature = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]


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
    """

    jit: bool = True
    strict: bool = True
    fuse: bool = True
    compiler_options: Mapping[str, Any] | None = None
    listener: Listener | None = None


def build_state(build: Callable[..., PyTree], *arguments: Any) -> PyTree:
    """Build a state in one compiled program, its arguments (held arrays among them) passed as data."""
    return jax.jit(build)(*arguments)


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
        self._reducers: dict[str, Reducer] = {}
        self._state: PyTree = None
        self._accumulators: dict[str, PyTree] = {}
        self._empty: PyTree = None
        self._health: deque[tuple[int, Any]] = deque(maxlen=2 * _HEALTH_EVERY)
        self._recent: _Recent | None = None
        self._signatures: list[Signature] = []
        self._first: Signature | None = None
        self._generation = 0
        self._since_check = 0
        self._width = 1
        self._loops = False
        self._pace: float | None = None
        self._dispatched = 0.0
        self._in_flight: deque[Any] = deque()
        self._counts: dict[int, Any] = {}
        self._step: Callable[..., Any] = self._body
        self._flush: Callable[..., Any] = self._flushed
        self._compute: Callable[..., Any] = self._values
        self._plan: Callable[..., Any] = getattr(program, "window_of", _no_plan)
        if options.jit:
            self._plan = jax.jit(self._plan)
            self._flush = jax.jit(self._flushed, donate_argnums=0)
            self._compute = jax.jit(self._values)

    def _compile_options(self, *, loops: bool) -> dict[str, Any] | None:
        chosen = dict(self._options.compiler_options or {})
        if loops and jax.default_backend() == "cpu" and _knows_option(_REGION_ANALYSIS):
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
                _check_same(self._state, value, "a handler's step_state")
            if self._recent is not None:
                self._recent.replaced(self._state, value)
            value = _owned(value, self._state)
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
        self._first = _signature(batch)
        shapes = tree.shape_structs(self._canonical(batch))
        traced, result = self._trace(step_state, shapes)
        if self._carries:
            settled = _settle(step_state, result.state)
            if settled is not step_state:
                step_state = settled
                traced, result = self._trace(step_state, shapes)
            _check_same(step_state, result.state, "the step")
        found = {} if self._reported is None else self._reported(result, self._asked)
        self._reducers = {**self._asked, **found}
        for name, probe in self._probes.items():
            _check_probe(name, probe, result)
        self._empty = {name: r.init(result, shapes) for name, r in self._reducers.items()}
        self._accumulators = {"index": jnp.zeros((), jnp.int32)}
        for scope in self._scopes:
            self.reset(scope)
        if accumulators is not None:
            self._accumulators |= accumulators
        self._state = step_state
        if self._carries and isinstance(self._program, CountsAttempts):
            self._recent = _Recent(self._program)
        if self._options.jit:
            self._choose_program(traced, shapes)

    def _trace(self, step_state: PyTree, shapes: PyTree) -> tuple[Any, Result]:
        """Trace the step alone: (its program, the shapes of its result)."""
        state = _structs(step_state)
        window = jax.eval_shape(self._plan, state, [shapes]) if getattr(self._program, "plans", False) else None
        call = jax.make_jaxpr(lambda s, b, w: as_result(self._call(s, b, 0, w)), return_shape=True)
        return call(state, shapes, window)

    def _choose_program(self, traced: Any, shapes: PyTree) -> None:
        """Choose one program for the run, from what the step is made of and never from the clock.

        A loop over several batches, with a trip count that is data: one executable for every length, so that how
        iterations are grouped never changes a bit. Convolution gradients are the exception: XLA runs them about four
        times slower inside a loop on the CPU, so such a step runs straight-line, one batch at a time.
        """
        donated = (0, 1) if self._carries else (1,)
        check_constants(traced, self._program)
        convolves = jax.default_backend() == "cpu" and _uses_convolution(traced)
        self._loops = self._carries and not convolves
        if not self._loops:
            options = self._compile_options(loops=False)
            self._step = jax.jit(self._body, donate_argnums=donated, compiler_options=options)
            return
        self._step = jax.jit(self._group, donate_argnums=donated, compiler_options=self._compile_options(loops=True))
        size = sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        self._width = max(1, min(MAX_WIDTH, GROUP_BYTES // max(1, size)))

    @property
    def width(self) -> int:
        """Iterations the next dispatch may run, at most."""
        if not self._loops or not self._options.fuse:
            return 1
        if self._pace is None:
            return 1
        return max(1, min(self._width, int(GROUP_SECONDS / max(self._pace, 1e-9))))

    def stacks(self, first: Batch) -> Callable[[Batch], bool]:
        """Give a test for batches of the first one's shape, which one dispatch may run with it."""
        signature = _signature(first)
        return lambda other: _signature(other) == signature

    def restart(self, step_state: PyTree) -> None:
        """Start over with another state of the same shapes: accumulators are emptied, programs are kept."""
        self._state = step_state
        self._accumulators["index"] = jnp.zeros((), jnp.int32)
        for scope in self._scopes:
            self.reset(scope)

    def advance(self, batches: Sequence[Batch], *, epoch: int, iteration: int, fresh: bool, window: Any = None) -> None:
        """Run batches of one shape in one dispatch."""
        signature = _signature(batches[0])
        is_new = signature not in self._signatures
        if is_new:
            self._admit(batches[0], signature, epoch, iteration)
        arguments: tuple[Any, ...]
        if self._loops:
            # The smaller last batch has a program of width 1: there is only one of it.
            room = self._width if signature == self._first else 1
            arguments = (self._placement.put(_stacked(batches, room), fresh=True), self._count_of(len(batches)), window)
        else:
            arguments = (self._placement.put(batches[0], fresh=fresh), window)
        if is_new:
            self._compile(arguments)
        self._generation += 1
        if self._recent is not None:
            self._recent.add(self._generation, batches, self._state)
        state, self._accumulators, health, ticket = self._step(self._state, self._accumulators, *arguments)
        if self._carries:
            self._state = state
        if health is not None:
            self._health.append((self._generation, health))
            self._since_check += len(batches)
        if self._loops:
            self._keep_pace(ticket, len(batches), is_new)

    def _count_of(self, count: int) -> Any:
        """Give a number of iterations as an array on the device: put there once, explicitly."""
        if count not in self._counts:
            self._counts[count] = jax.device_put(np.int32(count))
        return self._counts[count]

    def _keep_pace(self, ticket: Any, count: int, is_new: bool) -> None:
        """Wait for a dispatch some way back, and measure how long an iteration takes in the steady state.

        The measure chooses only how many iterations the next dispatch runs, which does not change bits. The first
        dispatch after the compilation is waited for, so that a slow step is known to be slow before it is grouped.
        """
        if is_new:
            jax.block_until_ready(ticket)
            self._dispatched = time.perf_counter()
            return
        self._in_flight.append(ticket)
        if self._pace is not None and len(self._in_flight) <= _IN_FLIGHT:
            self._dispatched = time.perf_counter()
            return
        jax.block_until_ready(self._in_flight.popleft())
        now = time.perf_counter()
        seconds = (now - self._dispatched) / count
        self._pace = seconds if self._pace is None else 0.7 * self._pace + 0.3 * seconds
        self._dispatched = now

    def probe(
        self, names: Sequence[str], batch: Batch, *, epoch: int, iteration: int, window: Any = None
    ) -> dict[str, Any]:
        """Give what probes see of the step on a batch, from the state it will start from; the state stays as it is.

        The step runs once more for it, in a program of its own from which everything the probes do not read is
        dropped. The program that trains is the one of a run without probes, so its bits are too.
        """
        signature = _signature(batch)
        if signature not in self._signatures and signature != self._first and self._options.strict:
            self._refuse_or_admit(batch, signature, epoch, iteration)
        placed = self._placement.put(batch, fresh=False)
        key = (tuple(names), signature)
        if key not in self._probe_programs:
            self._probe_programs[key] = self._make_probe(key[0], self._state, placed, window)
        values = self._probe_programs[key](self._state, placed, self._accumulators["index"], window)
        return {name: values[name] for name in names}

    def _make_probe(self, names: tuple[str, ...], state: PyTree, batch: Batch, window: Any) -> Callable[..., Any]:
        def seen(state: PyTree, batch: Batch, index: Any, window: Any) -> dict[str, Any]:
            result = as_result(self._call(state, batch, index, window))
            outputs = result.state if result.outputs is None else result.outputs
            return {name: self._probes[name](outputs) for name in names}

        if not self._options.jit:
            return seen
        program = jax.jit(seen, compiler_options=self._compile_options(loops=False))
        listener, what, began = self._options.listener, f"the probe {', '.join(names)}", time.perf_counter()
        if listener is not None:
            listener.compiling(what)
        program.lower(state, batch, self._accumulators["index"], window).compile()
        if listener is not None:
            listener.compiled(what, time.perf_counter() - began)
        return program

    def memory(self) -> dict[str, int] | None:
        """Give the bytes of the compiled step by kind (arguments, outputs, temporaries, ...), or None where unknown."""
        analysis = None if self._compiled is None else self._compiled.memory_analysis()
        if analysis is None:
            return None
        return {
            "arguments": int(analysis.argument_size_in_bytes),
            "outputs": int(analysis.output_size_in_bytes),
            "temporaries": int(analysis.temp_size_in_bytes),
            "outputs that reuse arguments": int(analysis.alias_size_in_bytes),
            "program": int(analysis.generated_code_size_in_bytes),
        }

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
        self._accumulators[scope] = made

    def reset(self, scope: str) -> None:
        """Empty a scope's accumulators; what was shown of them and not read is past."""
        self._generation += 1
        self._accumulators[scope] = tree.copy_leaves(self._empty)

    def check(self, *, wait: bool) -> None:
        """Raise when the step's health says that the run must end.

        Without `wait` it looks every few iterations, at a value that was dispatched an interval ago: the host never
        waits for the device, and what the run computes does not depend on when it looks.
        """
        if not self._health or (not wait and self._since_check < _HEALTH_EVERY):
            return
        self._since_check = 0
        # Where dispatches are waited for, all but the newest few are done.
        behind = 0 if wait else _IN_FLIGHT if self._loops else _HEALTH_EVERY - 1
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

    def _call(self, state: PyTree, batch: Batch, index: Any, window: Any = None) -> Any:
        if not self._carries:
            return self._program.step(state, batch, index)
        return self._program.step(state, batch) if window is None else self._program.step(state, batch, window)

    def _group(
        self, state: PyTree, accumulators: Mapping[str, PyTree], batches: Batch, count: Any, window: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """Run the first `count` of stacked batches: what is compiled where the step may stand in a loop."""

        def one(i: Any, carry: Any) -> Any:
            state, accumulators, _ = carry
            batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
            return self._one(state, accumulators, batch, window)

        start = (state, dict(accumulators), self._program.health(state))
        state, accumulators, health = jax.lax.fori_loop(0, count, one, start)
        return state, accumulators, health, accumulators["index"] + 0

    def _body(
        self, state: PyTree, accumulators: Mapping[str, PyTree], batch: Batch, window: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """Run one batch by itself: what is compiled where the step must not stand in a loop."""
        state, accumulators, health = self._one(state, accumulators, batch, window)
        return state, accumulators, health, accumulators["index"] + 0

    def _one(
        self, state: PyTree, accumulators: Mapping[str, PyTree], batch: Batch, window: Any
    ) -> tuple[Any, Any, Any]:
        """Step and metrics of one batch."""
        index = accumulators["index"]
        result = as_result(self._call(state, batch, index, window))
        after: dict[str, Any] = {"index": index + 1}
        for scope in self._scopes:
            old = accumulators[scope]
            new = {name: r.update(old[name], result, batch) for name, r in self._reducers.items()}
            new = jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
            if result.accepted is not None:
                kept = tree.select(result.accepted, new, old)
                new = {name: new[name] if r.always else kept[name] for name, r in self._reducers.items()}
            after[scope] = new
        if not self._carries:
            return None, after, None
        return result.state, after, self._program.health(result.state)

    def _flushed(self, state: PyTree) -> tuple[PyTree, PyTree]:
        after = self._program.flush(state)
        return after, self._program.health(after)

    def _values(self, accumulators: PyTree) -> dict[str, Any]:
        return {name: r.compute(accumulators[name]) for name, r in self._reducers.items()}

    def read(self, scope: str) -> dict[str, Any]:
        """Start computing a scope's metrics and give them as device values."""
        return self._compute(self._accumulators[scope])

    def _canonical(self, batch: Batch) -> Batch:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), batch)

    def _admit(self, batch: Batch, signature: Signature, epoch: int, iteration: int) -> None:
        """Admit a batch shape, or say why not."""
        if signature != self._first and self._options.strict:
            self._refuse_or_admit(batch, signature, epoch, iteration)
        if self._signatures and self._options.jit:
            before = self._signatures[-1]
            _log.info(
                "batch %d of epoch %d is compiled for again (program %d): %s",
                iteration,
                epoch,
                len(self._signatures) + 1,
                "; ".join(_differences(batch, before, signature)),
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
        self._compiled = step.lower(self._state, self._accumulators, *arguments).compile()
        if listener is not None:
            listener.compiled(what, time.perf_counter() - began)

    def _refuse_or_admit(self, batch: Batch, signature: Signature, epoch: int, iteration: int) -> None:
        """Under strict, admit one smaller last batch and nothing else.

        Raises:
          ShapeError: Another shape came; batch, epoch, leaf and both shapes are named.
        """
        first = signature if self._first is None else self._first
        smaller_seen = any(other != first for other in self._signatures)
        smaller = (
            not smaller_seen
            and signature[0] == first[0]
            and all(
                new[1] == old[1]
                and new[0][1:] == old[0][1:]
                and len(new[0]) == len(old[0]) > 0
                and new[0][0] < old[0][0]
                for new, old in zip(signature[1], first[1], strict=True)
            )
        )
        if smaller:
            return
        where = f"batch {iteration} of epoch {epoch}"
        remedy = (
            "Make batches of one shape (drop the remainder, or pad), cast before the loop, or run with strict=False "
            "and pay a compilation for each shape"
        )
        if signature[0] != first[0]:
            raise ShapeError(f"{where} has another structure: expected {first[0]}, got {signature[0]}. {remedy}")
        names = tree.leaf_names(batch) or ["batch"]
        for name, new, old in zip(names, signature[1], first[1], strict=True):
            if new != old:
                raise ShapeError(
                    f"{where}: leaf {name or 'batch'!r} has shape {new[0]} and dtype {new[1]}, the first batch had "
                    f"{old[0]} and {old[1]}"
                    + (", and one smaller last batch was seen already" if smaller_seen else "")
                    + f". {remedy}"
                )


class _Recent:
    """Batches whose health was not read yet: one of them may be what the run ends with."""

    def __init__(self, program: CountsAttempts):
        self._program = program
        self._groups: deque[tuple[int, list[tuple[int, Batch]], int]] = deque()
        self._next: int | None = None
        self._bytes = 0

    def add(self, generation: int, batches: Sequence[Batch], state: PyTree) -> None:
        """Keep the batches of a dispatch; `state` is the one before it."""
        if self._next is None:
            self._next = int(jax.device_get(self._program.attempts_made(state)))
        group: list[tuple[int, Batch]] = []
        for batch in batches:
            group.append((self._next, batch))
            self._next += self._program.num_attempts(batch)
        size = sum(int(getattr(x, "nbytes", 0)) for x in jax.tree.leaves(list(batches)))
        self._groups.append((generation, group, size))
        self._bytes += size
        while self._bytes > KEPT_BYTES and len(self._groups) > 1:
            self._drop()

    def forget(self, generation: int) -> None:
        """Drop the batches of the dispatches up to one."""
        while self._groups and self._groups[0][0] <= generation:
            self._drop()

    def replaced(self, before: PyTree, after: PyTree) -> None:
        """Take note that a handler gave another state: its attempts may be counted from elsewhere."""
        if self._program.attempts_made(before) is not self._program.attempts_made(after):
            self._next = None

    def of_attempt(self, attempt: int) -> Batch | None:
        """Give the microbatch of an attempt as NumPy arrays, or None when it is not kept."""
        for _, group, _ in reversed(self._groups):
            for first, batch in reversed(group):
                if first <= attempt < first + self._program.num_attempts(batch):
                    part = self._program.attempt_batch(batch, attempt - first)
                    return jax.tree.map(_on_host, part)
        return None

    def _drop(self) -> None:
        self._bytes -= self._groups.popleft()[2]


class Reading:
    """Metrics of a scope at one moment, computed when called. Borrowed: only the latest moment can be read."""

    def __init__(self, driver: StepDriver, scope: str, generation: int):
        self._driver = driver
        self._scope = scope
        self._generation = generation

    def _start(self) -> dict[str, Any]:
        if self._driver.generation != self._generation:
            raise ContractError(
                "these metrics belong to an earlier moment and were not read then: a LoopState is borrowed until its "
                "handler returns; keep a copy with state.keep()"
            )
        return self._driver.read(self._scope)

    def __call__(self) -> dict[str, Any]:
        """Compute now and wait for the values."""
        return to_host(self._start())

    def later(self) -> Callable[[], dict[str, Any]]:
        """Start computing now; the function given waits for the values when it is called."""
        values = self._start()
        return lambda: to_host(values)


def _on_host(leaf: Any) -> Any:
    if jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(jax.device_get(leaf))


def to_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fetch values: floats for scalars, NumPy arrays and trees of them for the rest."""
    fetched = jax.device_get(dict(values))
    return {
        name: float(v) if isinstance(v, np.ndarray | np.generic) and np.ndim(v) == 0 and not np.iscomplexobj(v) else v
        for name, v in fetched.items()
    }


def check_constants(closed: Any, program: Any) -> None:
    """Look through a traced program, sub-programs included, for arrays compiled in as constants.

    Raises:
      CaptureError: A captured array is one of the model's own weights.
    """
    held = {id(x) for x in jax.tree.leaves(getattr(program, "held_leaves", lambda: ())())}
    for constant in _constants(closed):
        size = getattr(constant, "nbytes", 0)
        if id(constant) in held:
            raise CaptureError(
                f"the program captures the model's own weights ({constant.dtype}{list(constant.shape)}) as constants: "
                "they would never be trained. Read them from `variables`, and return them from held_variables"
            )
        if size > LARGE_CONSTANT_BYTES:
            warnings.warn(
                f"an array of {size / 2**20:.1f} MiB ({constant.dtype}{list(constant.shape)}) is compiled into the "
                "program as a constant. Return it from held_variables, or pass frozen={'name': tree} to supervised",
                CaptureWarning,
                stacklevel=2,
            )


def _constants(closed: Any) -> list[Any]:
    """Give the arrays that a traced program, sub-programs included, holds as constants."""
    found: list[Any] = []
    for program in _programs(closed):
        found += [c for c in getattr(program, "consts", ()) if hasattr(c, "nbytes")]
        literals = (v for eqn in program.eqns for v in eqn.invars if isinstance(v, jax.extend.core.Literal))
        found += [v.val for v in literals if hasattr(v.val, "nbytes")]
    return found


def _programs(closed: Any) -> Iterator[Any]:
    """Give a traced program and its sub-programs. With JAX 0.12 a closed program and an open one are one class."""
    seen: set[int] = set()
    todo: list[Any] = [closed]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
            yield item
            todo += [value for eqn in item.eqns for value in eqn.params.values()]
        elif isinstance(item, tuple | list):
            todo += list(item)


def _no_plan(state: PyTree, batches: Sequence[Batch]) -> None:
    """Plan nothing: most steps need no more than the batch in hand."""


def _stacked(batches: Sequence[Batch], room: int) -> Batch:
    """Give batches stacked along a first dimension of `room`, in memory of their own.

    Rows past the last batch are never read.
    """

    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.Array):
            padded = [*leaves, *[leaves[0]] * (room - len(leaves))]
            return jnp.stack(padded)
        out = np.empty((room, *np.shape(leaves[0])), np.asarray(leaves[0]).dtype)
        for i, leaf in enumerate(leaves):
            out[i] = leaf
        # What memory held before can overflow when the array is cast, and JAX casts all of it.
        out[len(leaves) :] = 0
        return out

    return jax.tree.map(stack, *batches)


def _uses_convolution(closed: Any) -> bool:
    """Say whether a traced program, sub-programs included, holds a convolution."""
    return any(eqn.primitive.name == "conv_general_dilated" for p in _programs(closed) for eqn in p.eqns)


@functools.cache
def _knows_option(name: str) -> bool:
    """Say whether this XLA knows a compile option."""
    try:
        jax.jit(lambda x: x, compiler_options={name: True}).lower(jnp.zeros(())).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _structs(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x if tree.is_array(x) else jnp.asarray(x), state)


def _signature(batch: Batch) -> Signature:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple([(x.shape, x.dtype) if hasattr(x, "dtype") else ((), type(x)) for x in leaves])


def _differences(batch: Batch, before: Signature, after: Signature) -> list[str]:
    """Say what changed from one batch shape to another, leaf by leaf."""
    if before[0] != after[0]:
        return [f"the structure was {before[0]} and is {after[0]}"]
    names = tree.leaf_names(batch) or ["batch"]
    return [
        f"leaf {name or 'batch'!r} was {old[1]}{list(old[0])} and is {new[1]}{list(new[0])}"
        for name, old, new in zip(names, before[1], after[1], strict=True)
        if old != new
    ]


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


def _settle(state: PyTree, after: PyTree) -> PyTree:
    """Give a first state in the dtypes the step produces, where Python scalars left them open."""
    _check_structure(state, after)
    leaves, structure = jax.tree.flatten(state)
    is_open = [not tree.is_array(leaf) or getattr(leaf, "weak_type", False) for leaf in leaves]
    if not any(is_open):
        return state
    new = [
        jnp.asarray(leaf, like.dtype) if loose else leaf
        for leaf, like, loose in zip(leaves, structure.flatten_up_to(after), is_open, strict=True)
    ]
    return structure.unflatten(new)


def _owned(value: PyTree, current: PyTree) -> PyTree:
    """Give a state whose arrays may be donated: those of the current state as they are, each once, the rest copied."""
    free = {id(leaf) for leaf in jax.tree.leaves(current) if isinstance(leaf, jax.Array)}

    def own(leaf: Any) -> Any:
        if id(leaf) in free:
            free.remove(id(leaf))
            return leaf
        # The dtype is given so that a Python number does not stay weakly typed, which would compile again.
        return jnp.array(leaf, jnp.result_type(leaf), copy=True)

    return jax.tree.map(own, value)


def _check_structure(before: PyTree, after: PyTree) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        a, b = set(tree.leaf_names(before)), set(tree.leaf_names(after))
        detail = (
            f"missing: {sorted(a - b) or 'nothing'}, new: {sorted(b - a) or 'nothing'}"
            if a != b
            else f"{jax.tree.structure(before)} became {jax.tree.structure(after)}"
        )
        raise ContractError(f"the step must return a state of the structure it was given; {detail}")


def _check_same(before: PyTree, after: PyTree, what: str) -> None:
    _check_structure(before, after)
    new = tree.named_leaves(after)
    for name, old in tree.named_leaves(before).items():
        a, b = (jnp.shape(old), old.dtype), (jnp.shape(new[name]), jnp.result_type(new[name]))
        if a != b:
            raise ContractError(
                f"{what} changes leaf {name or 'state'!r} from {a[1]}{list(a[0])} to {b[1]}{list(b[0])}: a state must "
                "keep its shapes and dtypes; start it in the dtype the step gives, or cast inside the step"
            )
