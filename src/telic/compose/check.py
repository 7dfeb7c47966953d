"""Trying everything a run will do once, before it is left alone: `Trainer.check`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.compose.attaching import listed
from telic.compose.fitting import Budget, fitted
from telic.compose.loops import Loop
from telic.compose.validation import evaluation_pass
from telic.data import as_source, as_validation
from telic.data.dataset import DataPartition, Dataset
from telic.driver import DriverOptions, StepDriver
from telic.errors import ContractError, DataError
from telic.evaluate import ObjectiveLoss
from telic.loop.ports import Draws, Placement, Processes, View
from telic.loop.reducers import Reducer, reported
from telic.loop.serialize import deserialize_state, serialize_state
from telic.loop.state import LoopState
from telic.placement import SingleDevice
from telic.profiling import byte_text, memory_of
from telic.train.state import TrainState
from telic.train.step import TrainStep
from telic.types import Batch, PyTree

T = TypeVar("T")


class CheckReport(str):
    """What `Trainer.check` found: text to print, one line for each thing that was tried.

    Attributes:
      failures: The lines that tell of a failure; empty when all is well.
    """

    failures: tuple[str, ...]

    def __new__(cls, lines: Sequence[str], failures: Sequence[str]) -> "CheckReport":
        """Join the lines."""
        made = super().__new__(cls, "\n".join(lines))
        made.failures = tuple(failures)
        return made

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


@dataclass
class _Findings:
    processes: Processes
    lines: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])

    def attempt(self, what: str, act: Callable[[], tuple[str, T]], *, same: bool = False) -> T | None:
        """Do one thing and note what it gave, or how it failed.

        What failed in one process failed in all.

        Args:
          what: What it is called.
          act: Gives what is said of it, and its value.
          same: All processes must say the same.
        """
        said, value, failure = "", None, None
        try:
            said, value = act()
        except Exception as error:  # everything that fails is a line of the report, which is what was asked for
            notes = " ".join(getattr(error, "__notes__", ()))
            failure = f"{type(error).__name__}: {error}{' ' + notes if notes else ''}"
        failed: list[str] = []
        for index, (other, found) in enumerate(self.processes.exchange(f"the check of {what}", [said, failure])):
            if found is None and same and other != said and failure is None:
                found = f"it has {other}, and this process {said}"
            if found is not None:
                where = f" in process {index}" if self.processes.count > 1 else ""
                failed.append(f"{what:12s} FAILED{where}: {found}")
        self.failures += failed
        self.lines += failed or [f"{what:12s} {said}"]
        return None if failed else value


def check_training(
    step: TrainStep,
    data: Any,
    *,
    metrics: Sequence[Any] = (),
    memory: Budget | None = None,
    placement: Placement | None = None,
) -> CheckReport:
    """Try one attempt, one validation batch, every metric, and a save with its restore; then stop.

    Nothing outside is changed: the step builds a state of its own, no handler runs, no file is written.

    Args:
      step: The step of the trainer.
      data: What `fit` will be given. An iterator is refused: it would lose its first batch.
      metrics: Metrics to compute, as for `fit`.
      memory: Slice batches into microbatches whose step fits; None leaves the step as it is.
      placement: Where batches and the state live; None takes one device.
    """
    where = SingleDevice() if placement is None else placement
    found = _Findings(where.processes)
    batch = found.attempt("data", lambda: _first_batch(data, DataPartition(*where.partition)), same=True)
    if batch is None:
        return _report(found)
    if memory is not None:
        unsliced, budget = step, memory
        sliced = found.attempt("microbatch", lambda: _sliced(unsliced, where.whole(batch), budget, where))
        if sliced is None:
            return _report(found)
        step = sliced
    reducers = found.attempt("metrics", lambda: _reducers(step, metrics))
    if reducers is None:
        return _report(found)
    driver = found.attempt("step", lambda: _started(step, batch, reducers, where))
    if driver is None:
        return _report(found)
    state = found.attempt("attempt", lambda: _attempted(driver, step, batch, where))
    found.attempt("values", lambda: _values("the attempt", driver.compute("epoch")()))
    if state is not None:
        found.attempt("validation", lambda: _validated(step, data, batch, reducers, state, where))
        found.attempt("save", lambda: _saved(state))
        found.attempt("memory", lambda: _memory(state, batch, driver, where))
    return _report(found)


def _sliced(step: TrainStep, batch: Batch, memory: Budget, where: Placement) -> tuple[str, TrainStep]:
    fit = fitted(step.bind(batch), batch, memory, LoopState(), where)
    rows = tree.leading_dimension(batch)
    return f"{fit.microbatch or rows} of {rows} rows at once fit {byte_text(memory.limit(where))}", fit


def _report(found: _Findings) -> CheckReport:
    count = len(found.failures)
    last = "all is well" if not count else f"{count} thing{'s' if count > 1 else ''} failed"
    return CheckReport([*found.lines, last], found.failures)


def _first_batch(data: Any, partition: DataPartition) -> tuple[str, Batch]:
    if isinstance(data, Iterator):
        raise DataError("an iterator would lose its first batch: pass a list, a Dataset or a function of the epoch")
    source = as_source(data, partition=partition)
    try:
        source.begin(0)
        batch = source.example() if isinstance(source, Draws) else source.next(View(None, 0, 0))[0]
        # In memory of its own: the source is closed before the batch is used.
        batch = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)
    finally:
        source.close()
    names = tree.leaf_names(batch) or ["batch"]
    shapes = [
        f"{name or 'batch'} {jnp.result_type(x)}{list(jnp.shape(x))}"
        for name, x in zip(names, jax.tree.leaves(batch), strict=True)
    ]
    return f"a first batch: {', '.join(shapes)}", batch


def _reducers(step: TrainStep, metrics: Sequence[Any]) -> tuple[str, dict[str, Reducer]]:
    loop = Loop(step)
    for metric in listed(metrics):
        loop.metric(metric)
    reducers = {"loss": Reducer("loss", ObjectiveLoss(step.objective)), **loop.reducers}
    return ", ".join(reducers), reducers


def _started(
    step: TrainStep, batch: Batch, reducers: Mapping[str, Reducer], placement: Placement
) -> tuple[str, StepDriver]:
    whole = placement.whole(batch)
    bound = step.bind(whole)
    placement.learn(bound.objective)
    state = placement.settle(bound.init(whole))
    # Those of artifacts and of the host belong to the validation.
    computed = {name: r for name, r in reducers.items() if not r.is_of_evaluation}
    driver = StepDriver(bound, computed, placement, DriverOptions(), reported=reported)
    driver.start(state, batch)
    count = sum(int(x.size) for x in jax.tree.leaves(bound.trained(state.variables)))
    return f"traced, {count:,} trainable parameters", driver


def _attempted(driver: StepDriver, step: TrainStep, batch: Batch, placement: Placement) -> tuple[str, TrainState]:
    driver.advance([batch], epoch=0, iteration=0)
    driver.flush()
    state: TrainState = driver.step_state
    driver.check(wait=True)
    record = state.rejections
    if int(record.total):
        names = step.bind(placement.whole(batch)).checked_names(state)
        bad = [n for n, ok in zip(names, jax.device_get(record.finite).tolist(), strict=True) if not ok]
        raise ContractError(f"the attempt was rejected; not finite: {', '.join(bad)}")
    if not int(state.updates):
        raise ContractError("the batch has no mass, so that nothing was committed; look at its weights")
    return "accepted, and an update committed", state


def _values(of: str, values: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    bad = [
        name
        for name, value in values.items()
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(value) if np.asarray(x).dtype.kind in "fc")
    ]
    if bad:
        raise ContractError(f"of {of}, not finite: {', '.join(bad)}")
    shown = [f"{n} {v:.4g}" if isinstance(v, float) else n for n, v in values.items()]
    return f"of {of}: {', '.join(shown)}", values


def _validated(
    step: TrainStep, data: Any, batch: Batch, reducers: Mapping[str, Reducer], state: TrainState, placement: Placement
) -> tuple[str, Any]:
    has_own = isinstance(data, Dataset) and data.val is not None
    partition = DataPartition(*placement.partition)
    batches = as_validation(data, partition=partition, limit=1) if has_own else [batch]
    values = evaluation_pass(step.evaluation(), dict(reducers), batches, placement).run(state)
    return _values("one batch of val" if has_own else "the training batch, as there is no val", values)


def _saved(state: TrainState) -> tuple[str, None]:
    held = jax.tree.map(_held, state)
    data = serialize_state(LoopState(step_state=held))
    back = deserialize_state(data, like=held).step_state
    names = tree.leaf_names(held)
    pairs = zip(names, jax.tree.leaves(held), jax.tree.leaves(back), strict=True)
    wrong = [name for name, a, b in pairs if _bits(a) != _bits(b)]
    if wrong:
        raise ContractError(f"read back with other bits: {', '.join(wrong)}")
    return f"{byte_text(len(data))} written, read back and compared: {len(names)} arrays are equal", None


def _held(leaf: Any) -> Any:
    """Give a leaf; of one that no process has whole, the parts that this one has."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return leaf
    return [shard.data for shard in leaf.addressable_shards]


def _bits(leaf: Any) -> tuple[Any, ...]:
    raw = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    host = np.asarray(raw)
    return leaf.dtype, host.shape, host.tobytes()


def _memory(state: TrainState, batch: Batch, driver: StepDriver, placement: Placement) -> tuple[str, None]:
    params = state.variables["params"]
    rows = {
        "parameters": params,
        "other variables": {name: value for name, value in state.variables.items() if name != "params"},
        "optimizer": state.opt_state,
        "average": state.ema,
        "window": state.window,
        "batch": placement.put(batch, fresh=False),
    }
    lines = [f"  {name:44s} {byte_text(_num_bytes(value)):>10s}" for name, value in rows.items()]
    memory = None if driver.compiled is None else memory_of(driver.compiled)
    if memory is None:
        lines.append("  the compiled step: unknown on this platform")
    else:
        program = {
            "state and batch": memory.argument_bytes,
            "scratch": memory.scratch_bytes,
            "results that reuse nothing": memory.result_bytes,
            "together": memory.peak_bytes,
        }
        lines += [f"  {f'compiled step, {name}':44s} {byte_text(value):>10s}" for name, value in program.items()]
    return "\n" + "\n".join(lines), None


def _num_bytes(values: PyTree) -> int:
    """Give the bytes of arrays on one device."""
    leaves = [x.addressable_shards[0].data for x in jax.tree.leaves(values) if isinstance(x, jax.Array)]
    return sum(int(getattr(x, "nbytes", 0)) for x in leaves)
