"""Passes over data that is not trained on: every example once, compiled once, the training state untouched."""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.artifacts import ArtifactSink, Scalars, find_artifact
from telic.contract import Objective, as_result, has_evaluation, owns_statistics, reduce_statistics
from telic.errors import DataError
from telic.loop.ports import Agree, Placement, StepProgram
from telic.mean import Mean, wide
from telic.metrics.base import is_host
from telic.train import statistics as statistic
from telic.train.evaluation import EvalStep
from telic.types import Batch, PyTree

_NOT_TRACED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""What tracing raises where an evaluation looks at values: it works on the host."""

_log = logging.getLogger("telic.loop")


@dataclass(frozen=True)
class ObjectiveLoss:
    """Metric that pools an objective's statistics and reduces them once: the loss of all examples together.

    Statistics that cannot be pooled (`Rows`) give the mean of the batches' values, weighted by their rows.
    """

    objective: Objective
    name: str = "loss"
    mode: Any = "min"
    reads: Any = ("statistics", "batch")

    def init(self, *args: Any) -> PyTree:
        """Give empty statistics."""
        statistics, batch = args
        return statistic.zeros(jax.eval_shape(self._of, statistics, batch))

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Add one batch's statistics."""
        del weights
        statistics, batch = args
        return statistic.add(acc, self._of(statistics, batch))

    def _of(self, statistics: Any, batch: Any) -> PyTree:
        """Give what is pooled: (statistics, None), or (None, the batch's value weighted by its rows)."""
        if not (statistic.has_rows(statistics) or statistic.is_scalar(statistics)):
            return statistic.canonical(statistics, own=owns_statistics(self.objective)), None
        value, has_data = reduce_statistics(self.objective, statistics)
        mass = jnp.where(has_data, wide(tree.leading_dimension(batch) or 1), 0)
        return None, Mean(value * mass, mass)

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Add two sets of statistics."""
        return statistic.add(a, b)

    def compute(self, acc: PyTree) -> Any:
        """Reduce the pooled statistics; without data there is no loss, and the value is NaN."""
        pooled, by_rows = acc
        if by_rows is not None:
            return by_rows.measured()
        value, has_data = statistic.reduce(self.objective, pooled)
        return jnp.where(has_data, value, jnp.nan)


class EvaluationDriver(Protocol):
    """What an evaluation asks of a driver, whose state does not change and can be exchanged."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics carried."""
        ...

    def start(self, step_state: PyTree, batch: Any) -> None:
        """Trace the step and build empty accumulators."""
        ...

    def restart(self, step_state: PyTree) -> None:
        """Start over with another state of the same shapes."""
        ...

    def advance(self, batches: Sequence[Batch], *, epoch: int, iteration: int) -> None:
        """Run batches of one shape."""
        ...

    def compute(self, scope: str) -> Callable[[], Mapping[str, Any]]:
        """Give a function that computes and fetches the metrics accumulated in a scope."""
        ...


@dataclass(frozen=True)
class Preview:
    """Where an evaluation shows what its objective previews.

    Attributes:
      sink: Takes the artifacts, on process 0.
      name: What their names begin with, such as ``validation_``.
    """

    sink: ArtifactSink
    name: str


class EvaluationPass:
    """One data set, one set of metrics, one compiled program, run as often as wanted.

    Metrics that read outputs or artifacts are computed in the program, with the loss. Those that work on the host get
    what they read gathered, batch by batch, on process 0.

    Args:
      program: An evaluation step.
      batches: The whole data set, readable any number of times.
      reducers: Metrics by name.
      make_driver: Gives a driver for the bound program and the metrics that are computed in it; called once.
      placement: Where batches live, and how what is computed from them comes back to the host.
      agree: One value for all processes.
      preview: Where the objective's preview goes; None shows nothing.
      what: What is evaluated, in errors.
    """

    def __init__(
        self,
        program: StepProgram,
        batches: Iterable[Any],
        reducers: Mapping[str, Any],
        make_driver: Callable[[StepProgram, Mapping[str, Any]], EvaluationDriver],
        *,
        placement: Placement,
        agree: Agree,
        preview: Preview | None = None,
        what: str = "the evaluation",
    ):
        self._program = program
        self._batches = _Opened(placement.joined(batches))
        self._reducers = dict(reducers)
        self._make_driver = make_driver
        self._placement = placement
        self._agree = agree
        self._preview = preview
        self._what = what
        self._driver: EvaluationDriver | None = None
        self._host: _HostMetrics | None = None
        self._score: Callable[[Any, Any, Any], Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values, once the first batch was seen."""
        driver = () if self._driver is None else self._driver.metric_names
        return (*driver, *(() if self._host is None else self._host.names))

    @property
    def knows_names(self) -> bool:
        """Whether `names` are all: an evaluation that is not traced may report more when it runs."""
        return self._host is not None and self._host.traced

    def prepare(self, given: Any) -> None:
        """Look at the first batch and trace what a pass computes: raises what it would, and compiles nothing.

        The batch is kept for the next pass, so that nothing is read twice.

        Args:
          given: As for `run`.
        """
        with _Told(self._what) as told:
            batch = self._batches.first()
            told.batch = 0
            self._start(batch, given)
            if self._driver is not None:
                self._driver.restart(None)

    def run(self, given: Any, *, step: int = 0) -> dict[str, Any]:
        """Give the metrics of the whole data set for some weights, and show the preview.

        Args:
          given: What the program adopts: a TrainState or variables. Neither is changed or donated.
          step: Updates so far: previews are numbered by it.
        Raises:
          DataError: There are no batches.
        """
        program: Any = None
        state: Any = None
        first: Any = None
        with _Told(self._what) as told:
            for iteration, batch in enumerate(self._batches):
                told.batch = iteration
                if iteration == 0:
                    program, state = self._start(batch, given)
                    # Placed now: a loader may write its memory again before the pass is over.
                    first = None if self._preview is None else self._placement.put(batch, fresh=False)
                if self._driver is not None:
                    self._driver.advance([batch], epoch=0, iteration=iteration)
                if self._host is not None and self._host.reads_any:
                    self._host.update(state, self._placement.put(batch, fresh=False), iteration)
            told.batch = None
            if self._driver is None or self._host is None or state is None:
                raise DataError("the validation data had no batches; check its length, or leave validation out")
            values = {**self._driver.compute("epoch")(), **self._agree(self._host.compute())}
            self._driver.restart(None)
            if self._preview is not None:
                self._show(self._preview, program, state, first, step)
        return values

    def _start(self, batch: Batch, given: Any) -> tuple[Any, Any]:
        """Give the program bound to a first batch, and its state; build the driver where there is none yet."""
        whole = self._placement.whole(batch)
        program: Any = self._program.bind(whole)
        self._placement.learn(getattr(program, "objective", None))
        state = self._placement.settle(program.adopt(whole, given))
        if self._driver is None or self._host is None:
            traced = is_traced(program, state, whole)
            host = {name: r for name, r in self._reducers.items() if is_host(r.metric)}
            if not traced:
                host |= {name: r for name, r in self._reducers.items() if isinstance(r.metric.reads, type)}
                program = dataclasses.replace(program, scores=False)
            driver = self._make_driver(program, {n: r for n, r in self._reducers.items() if n not in host})
            driver.start(state, batch)
            self._host = _HostMetrics(program, host, self._placement, traced=traced)
            self._host.start(state, whole)
            self._driver = driver
            scored = getattr(program, "scored", None)
            self._score = jax.jit(_knowing_mesh(self._placement, scored)) if traced and scored is not None else scored
            return program, state
        self._driver.restart(state)
        self._host.restart()
        return program, state

    def _show(self, preview: Preview, program: Any, state: Any, batch: Batch, step: int) -> None:
        """Make the objective's preview, gather it, and give it to the sink on process 0."""
        scored = None if self._host is None else self._host.first_scored
        if scored is None and has_evaluation(program.objective) and self._score is not None:
            scored = self._score(state, batch, np.uint32(0))
        shown = program.preview(state, batch, scored)
        gathered = [self._placement.gather(artifact) for artifact in shown]
        if not self._placement.leads:
            return
        for name, artifact in _named(preview.name, gathered):
            preview.sink.artifact(name, artifact, step)


def _knowing_mesh(placement: Placement, function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function that is traced knowing the mesh."""

    def traced(*arguments: Any) -> Any:
        with placement.on_mesh():
            return function(*arguments)

    return traced


class _HostMetrics:
    """The metrics of an evaluation that work on the host, and those of an evaluation that cannot be traced."""

    def __init__(self, program: Any, reducers: Mapping[str, Any], placement: Placement, *, traced: bool):
        self._program = program
        self._reducers = dict(reducers)
        self._placement = placement
        self.traced = traced
        self._accumulators: dict[str, Any] = {}
        self._empty: dict[str, Any] = {}
        self._scalars: dict[str, Mean] = {}
        self.first_scored: Any = None
        self._read = jax.jit(_knowing_mesh(placement, self._arguments))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values; those of `Scalars` that are pooled here are known after the first batch."""
        return (*self._reducers, *self._scalars)

    @property
    def reads_any(self) -> bool:
        """Whether there is anything to do for a batch."""
        return bool(self._reducers) or not self.traced

    def start(self, state: Any, batch: Batch) -> None:
        """Check what the metrics read and make them empty."""
        for name, reducer in self._reducers.items():
            if self.traced or not isinstance(reducer.metric.reads, type):
                kinds = jax.eval_shape(self._arguments, state, batch, 0)
                args, _ = self._given(name, reducer, kinds)
                self._empty[name] = reducer.metric.init(*args)
        self.restart()

    def restart(self) -> None:
        """Forget every batch."""
        self.first_scored = None
        self._accumulators = dict(self._empty)
        self._scalars = {}

    def update(self, state: Any, batch: Batch, index: int) -> None:
        """Add one batch: gathered in every process, pooled on process 0."""
        values = self._read(state, batch, np.uint32(index))
        if not self.traced:
            scored = self._program.scored(state, batch, np.uint32(index))
            values["artifacts"] = self._program.artifacts_of(scored)
            if index == 0:
                self.first_scored = scored
        values = self._placement.gather(values)
        if not self._placement.leads:
            return
        for name, reducer in self._reducers.items():
            args, weights = self._given(name, reducer, values)
            if name not in self._accumulators:
                self._accumulators[name] = reducer.metric.init(*args)
            given = {} if weights is None else {"weights": weights}
            self._accumulators[name] = reducer.metric.update(self._accumulators[name], *args, **given)
        if not self.traced:
            self._pool_scalars(values["artifacts"], tree.leading_dimension(batch) or 1)

    def compute(self) -> dict[str, Any]:
        """Give the values, on process 0."""
        if not self._placement.leads:
            return {}
        values = {name: r.metric.compute(self._accumulators[name]) for name, r in self._reducers.items()}
        values |= {name: float(mean.measured()) for name, mean in self._scalars.items()}
        return {name: _plain(value) for name, value in values.items()}

    def _arguments(self, state: Any, batch: Batch, index: Any) -> dict[str, Any]:
        """Give what the metrics read of a batch: artifacts once each, and the arguments of the others by name."""
        kinds = [r.metric.reads for r in self._reducers.values() if isinstance(r.metric.reads, type)]
        others = {n: r for n, r in self._reducers.items() if not isinstance(r.metric.reads, type)}
        values: dict[str, Any] = {}
        if kinds and self.traced:
            found = self._program.artifacts_of(self._program.scored(state, batch, index))
            values["artifacts"] = tuple(a for a in found if isinstance(a, tuple(kinds)))
        if others:
            result = as_result(self._program.step(state, batch, index))
            values |= {f"arguments of {name}": r.arguments(result, batch) for name, r in others.items()}
        return values

    def _given(self, name: str, reducer: Any, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
        kind = reducer.metric.reads
        if isinstance(kind, type):
            return (find_artifact(values["artifacts"], kind, f"metric {name!r}"),), None
        return values[f"arguments of {name}"]

    def _pool_scalars(self, artifacts: tuple[Any, ...], rows: int) -> None:
        for name, value in ((n, v) for a in artifacts if isinstance(a, Scalars) for n, v in a.values.items()):
            mean = value if isinstance(value, Mean) else Mean(np.float64(value) * rows, np.float64(rows))
            self._scalars[name] = self._scalars[name].merge(mean) if name in self._scalars else mean


class _Opened:
    """Batches whose first may be looked at: the next pass goes on from there, so that none is read twice."""

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches
        self._open: tuple[Any, Iterator[Any]] | None = None

    def first(self) -> Batch:
        """Open the data and give its first batch.

        Raises:
          DataError: There is none.
        """
        self._open = None
        iterator = iter(self._batches)
        for batch in iterator:
            # In memory of its own: it may be long until the pass.
            batch = jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, batch)
            self._open = batch, iterator
            return batch
        raise DataError("the validation data had no batches; check its length, or leave validation out")

    def __iter__(self) -> Iterator[Batch]:
        opened, self._open = self._open, None
        if opened is None:
            yield from self._batches
        else:
            yield opened[0]
            yield from opened[1]


class _Told:
    """Says in a note of every error which evaluation, and which batch of it, it came from."""

    def __init__(self, what: str):
        self._what = what
        self.batch: int | None = None

    def __enter__(self) -> "_Told":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            where = "" if self.batch is None else f", batch {self.batch}"
            error.add_note(f"raised in {self._what}{where}")


def is_traced(program: Any, state: Any, batch: Batch) -> bool:
    """Say whether an objective's evaluation can be compiled; one that works on the host runs as it is."""
    if not (isinstance(program, EvalStep) and program.scores and has_evaluation(program.objective)):
        return True
    try:
        jax.eval_shape(program.scored, state, tree.shape_structs(batch), np.uint32(0))
    except _NOT_TRACED as error:
        _log.info(
            "%s.evaluate works on the host (%s), so it is not compiled: each of its operations runs by itself",
            type(program.objective).__name__,
            type(error).__name__,
        )
        return False
    except TypeError as error:
        if "not a valid JAX type" not in str(error):
            raise
        _log.info("%s.evaluate gives what is no array, so it is not compiled", type(program.objective).__name__)
        return False
    return True


def _named(prefix: str, artifacts: list[Any]) -> Iterator[tuple[str, Any]]:
    """Give artifacts with names: ``<prefix>image_grid``, and numbers where there are several of a type."""
    kinds = [type(a) for a in artifacts]
    for i, artifact in enumerate(artifacts):
        word = "".join(f"_{c.lower()}" if c.isupper() else c for c in kinds[i].__name__).strip("_")
        number = f"_{kinds[: i + 1].count(kinds[i])}" if kinds.count(kinds[i]) > 1 else ""
        yield f"{prefix}{word}{number}", artifact


def _plain(value: Any) -> Any:
    """Give a metric's value as a float where it is one number, its arrays in NumPy."""
    fetched = jax.device_get(value)
    is_number = isinstance(fetched, np.ndarray | np.generic) and np.ndim(fetched) == 0 and not np.iscomplexobj(fetched)
    return float(fetched) if is_number else fetched
