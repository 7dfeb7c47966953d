"""How a step runs: traced, compiled and dispatched with its metrics, its state donated.

The only place that jits training and evaluation.
"""

import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.contract import as_result
from telic.errors import CaptureError, CaptureWarning, ContractError, ShapeError
from telic.loop.ports import Placement, Reducer, Reported, StepProgram
from telic.types import Batch, PyTree

LARGE_CONSTANT_BYTES = 2**20
"""A constant in the program above this size is warned about."""

_HEALTH_EVERY = 16
"""Iterations between looks at the step's health; each look is at values that are already there."""

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
      compiler_options: Handed to XLA.
      listener: Is told of compilations.
    """

    jit: bool = True
    strict: bool = True
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
    ):
        self._program = program
        self._asked = dict(reducers)
        self._placement = placement
        self._options = options
        self._scopes = scopes
        self._carries = carries
        self._reported = reported
        self._reducers: dict[str, Reducer] = {}
        self._state: PyTree = None
        self._accumulators: dict[str, PyTree] = {}
        self._empty: PyTree = None
        self._health: deque[Any] = deque(maxlen=2 * _HEALTH_EVERY)
        self._signatures: list[Signature] = []
        self._generation = 0
        self._since_check = 0
        self._step: Callable[..., Any] = self._body
        self._flush: Callable[..., Any] = program.flush
        self._compute: Callable[..., Any] = self._values
        if options.jit:
            donated = (0, 1) if carries else (1,)
            self._step = jax.jit(
                self._body, donate_argnums=donated, compiler_options=dict(options.compiler_options or {}) or None
            )
            self._flush = jax.jit(program.flush, donate_argnums=0)
            self._compute = jax.jit(self._values)

    # -- what the loop sees --------------------------------------------------------------------------------------

    @property
    def step_state(self) -> PyTree:
        """The state after the last batch."""
        return self._state

    @step_state.setter
    def step_state(self, value: PyTree) -> None:
        if self._state is not None and self._options.strict:
            _check_same(self._state, value, "a handler's step_state")
        self._state = value

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics carried."""
        return tuple(self._reducers)

    def start(self, step_state: PyTree, batch: Batch, accumulators: Mapping[str, PyTree] | None = None) -> None:
        """Trace the step on a first batch and build empty accumulators; nothing is compiled or consumed.

        Raises:
          ContractError: The step changes the structure, shape or dtype of its own state.
        """
        shapes = tree.shape_structs(self._canonical(batch))
        result = jax.eval_shape(lambda s, b: as_result(self._call(s, b, 0)), _structs(step_state), shapes)
        if self._carries:
            step_state = self._settle(step_state, result.state, shapes)
            result = jax.eval_shape(lambda s, b: as_result(self._call(s, b, 0)), _structs(step_state), shapes)
        found = {} if self._reported is None else self._reported(result, self._asked)
        self._reducers = {**self._asked, **found}
        self._empty = {name: r.init(result, shapes) for name, r in self._reducers.items()}
        self._accumulators = {"index": jnp.zeros((), jnp.int32)}
        for scope in self._scopes:
            self.reset(scope)
        if accumulators is not None:
            self._accumulators |= accumulators
        self._state = step_state

    def restart(self, step_state: PyTree) -> None:
        """Start over with another state of the same shapes: accumulators are emptied, programs are kept."""
        self._state = step_state
        self._accumulators["index"] = jnp.zeros((), jnp.int32)
        for scope in self._scopes:
            self.reset(scope)

    def advance(self, batch: Batch, *, epoch: int, iteration: int, fresh: bool) -> None:
        """Run one batch."""
        signature = _signature(batch)
        if signature not in self._signatures:
            self._new_shape(batch, signature, epoch, iteration)
        batch = self._placement.put(batch, fresh=fresh)
        self._generation += 1
        state, self._accumulators, health = self._step(self._state, self._accumulators, batch)
        if self._carries:
            self._state = state
        if health is not None:
            self._health.append(health)
            self._since_check += 1

    def flush(self) -> None:
        """Close a window that is not full."""
        self._state = self._flush(self._state)

    def compute(self, scope: str) -> "Reading":
        """Give a function that computes and fetches a scope's metrics as they are now."""
        return Reading(self, scope, self._generation)

    def accumulators(self, scope: str) -> PyTree:
        """Give a scope's accumulators."""
        return self._accumulators[scope]

    def reset(self, scope: str) -> None:
        """Empty a scope's accumulators."""
        self._accumulators[scope] = tree.copy_leaves(self._empty)

    def check(self, *, wait: bool) -> None:
        """Raise when the step's health says that the run must end.

        Without `wait` it looks every few iterations, at a value that was dispatched an interval ago: the host never
        waits for the device, and what the run computes does not depend on when it looks.
        """
        if not self._health or (not wait and self._since_check < _HEALTH_EVERY):
            return
        self._since_check = 0
        latest = self._health[-1] if wait else self._health[max(0, len(self._health) - _HEALTH_EVERY)]
        self._program.check_health(jax.device_get(latest), self._state)

    # -- the program ---------------------------------------------------------------------------------------------

    def _call(self, state: PyTree, batch: Batch, index: Any) -> Any:
        return self._program.step(state, batch) if self._carries else self._program.step(state, batch, index)

    def _body(self, state: PyTree, accumulators: Mapping[str, PyTree], batch: Batch) -> tuple[Any, Any, Any]:
        """Step and metrics of one batch: what is compiled."""
        index = accumulators["index"]
        result = as_result(self._call(state, batch, index))
        after: dict[str, Any] = {"index": index + 1}
        for scope in self._scopes:
            old = accumulators[scope]
            new = {name: r.update(old[name], result, batch) for name, r in self._reducers.items()}
            new = jax.tree.map(lambda n, o: jnp.asarray(n, o.dtype), new, old)
            if result.accepted is not None:
                new = tree.select(result.accepted, new, old)
            after[scope] = new
        if not self._carries:
            return None, after, None
        return result.state, after, self._program.health(result.state)

    def _values(self, accumulators: PyTree) -> dict[str, Any]:
        return {name: r.compute(accumulators[name]) for name, r in self._reducers.items()}

    def read(self, scope: str) -> dict[str, Any]:
        """Start computing a scope's metrics and give them as device values."""
        return self._compute(self._accumulators[scope])

    def _canonical(self, batch: Batch) -> Batch:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.asarray(x).dtype), batch)

    def _settle(self, state: PyTree, after: PyTree, batch: PyTree) -> PyTree:
        """Give a first state in the dtypes the step produces, where Python scalars left them open."""
        _check_structure(state, after)
        weak = {
            name
            for name, leaf in tree.named_leaves(state).items()
            if not tree.is_array(leaf) or getattr(leaf, "weak_type", False)
        }

        def settle(path: Any, leaf: Any, new: Any) -> Any:
            return jnp.asarray(leaf, new.dtype) if tree.path_name(path) in weak else leaf

        state = jax.tree_util.tree_map_with_path(settle, state, after)
        again = jax.eval_shape(lambda s, b: as_result(self._call(s, b, 0)).state, _structs(state), batch)
        _check_same(state, again, "the step")
        return state

    def _new_shape(self, batch: Batch, signature: Signature, epoch: int, iteration: int) -> None:
        """Admit a batch shape, or say why not; compile its program and announce it."""
        if self._signatures and self._options.strict:
            self._refuse_or_admit(batch, signature, epoch, iteration)
        listener = self._options.listener
        what = "the step" if not self._signatures else "the smaller last batch"
        self._signatures.append(signature)
        if not self._options.jit:
            return
        began = time.perf_counter()
        if listener is not None:
            listener.compiling(what)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._canonical(batch))
        traced = self._step.trace(self._state, self._accumulators, shapes)  # pyright: ignore[reportFunctionMemberAccess]
        check_constants(traced.jaxpr, self._program)
        traced.lower().compile()
        if listener is not None:
            listener.compiled(what, time.perf_counter() - began)

    def _refuse_or_admit(self, batch: Batch, signature: Signature, epoch: int, iteration: int) -> None:
        """Under strict, admit one smaller last batch and nothing else.

        Raises:
          ShapeError: Another shape came; batch, epoch, leaf and both shapes are named.
        """
        first = self._signatures[0]
        smaller = (
            len(self._signatures) == 1
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
                    + (", and one smaller last batch was seen already" if len(self._signatures) > 1 else "")
                    + f". {remedy}"
                )


class Reading:
    """Metrics of a scope at one moment, computed when called. Borrowed: only the latest moment can be read."""

    def __init__(self, driver: StepDriver, scope: str, generation: int):
        self._driver = driver
        self._scope = scope
        self._generation = generation

    def _start(self) -> dict[str, Any]:
        if self._driver._generation != self._generation:
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
    found: list[Any] = []
    seen: set[int] = set()
    todo = [closed]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, jax.extend.core.ClosedJaxpr):
            found += [c for c in item.consts if hasattr(c, "nbytes")]
            todo.append(item.jaxpr)
        elif isinstance(item, jax.extend.core.Jaxpr):
            for eqn in item.eqns:
                found += [
                    v.val for v in eqn.invars if isinstance(v, jax.extend.core.Literal) and hasattr(v.val, "nbytes")
                ]
                todo += list(eqn.params.values())
        elif isinstance(item, tuple | list):
            todo += list(item)
    return found


def _structs(state: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x if tree.is_array(x) else jnp.asarray(x), state)


def _signature(batch: Batch) -> Signature:
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


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
