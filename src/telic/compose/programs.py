"""Steps as the engine runs them: a user's own function, and what a run makes of a train step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from telic import tree
from telic.contract import Objective
from telic.errors import ContractError, check_call
from telic.evaluate import ObjectiveLoss, is_traced
from telic.loop.ports import Source, StepProgram
from telic.loop.reducers import Reducer
from telic.train.evaluation import EvalStep
from telic.train.state import TrainState
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


def as_program(step: Any, init: Callable[[Any], Any] | None) -> StepProgram:
    """Give what a user passed to Loop as a step the engine runs.

    Raises:
      TypeError: It is no step, or has an initialiser already.
    """
    if isinstance(step, TrainStep | EvalStep | RawStep):
        if init is not None:
            raise TypeError("this step has an initialiser of its own: leave init out")
        return step
    if not callable(step):
        raise TypeError(f"Loop takes a step function (state, batch) -> state, got {step!r}")
    if init is not None and not callable(init):
        raise TypeError(f"init must be a function of the first batch, got {init!r}; pass a state as run(state=...)")
    check_call("the step of a Loop", step, ("state", "batch"))
    if init is not None:
        check_call("the init of a Loop", init, ("batch",))
    return RawStep(step, init)


def started(program: StepProgram, batch: Batch, given: PyTree, source: Source) -> tuple[StepProgram, PyTree]:
    """Give the program of a run and the state it starts with; windows of `Terms` are planned where they can be."""
    if not isinstance(program, TrainStep):
        start = program.init(batch) if given is None else program.adopt(batch, given)
        if isinstance(program, EvalStep) and not is_traced(program, start, batch):
            program = replace(program, scores=False)
        return program, start
    if isinstance(given, TrainState) and given.window.planned is not None:
        program = replace(program, plans=True)
    start = program.init(batch) if given is None else program.adopt(batch, given)
    if not program.plans and source.read_ahead and program.can_plan(start, batch):
        program = replace(program, plans=True)
        start = program.open(start, batch)
    return program, start


def with_loss(reducers: Mapping[str, Reducer], program: StepProgram) -> dict[str, Reducer]:
    """Give the loop's metrics, the objective's loss first where the step has an objective."""
    objective = getattr(program, "objective", None)
    own: dict[str, Reducer] = {}
    if isinstance(objective, Objective) and has_loss(program):
        own["loss"] = Reducer("loss", ObjectiveLoss(objective))
    return own | dict(reducers)


def reads_gradients(reducer: Reducer) -> bool:
    """Say whether a metric reads the step's gradients by name."""
    reads = reducer.metric.reads
    return isinstance(reads, tuple) and any(name.split(".")[0] == "gradients" for name in reads)


def may_read_gradients(reducer: Reducer) -> bool:
    """Say whether a metric reads gradients, or may: a function of the outputs does not say what it reads."""
    return not isinstance(reducer.metric.reads, tuple | type) or reads_gradients(reducer)


def has_loss(program: Any) -> bool:
    """Say whether a step has an objective with a loss: an evaluator may do without."""
    objective = getattr(program, "objective", None)
    return isinstance(objective, Objective) and getattr(objective, "has_loss", True)


def described(program: StepProgram) -> dict[str, Any]:
    """Give what a program is, in plain values, for people who compare runs."""
    versions = {name: metadata.version(name) for name in ("telic", "jax", "flax", "optax")}
    if not isinstance(program, TrainStep):
        return {"versions": versions}
    return {
        "versions": versions,
        "objective": type(program.objective).__name__,
        "accumulate": program.accumulate,
        "microbatch": program.microbatch,
        "nonfinite": program.nonfinite,
        "precision": {name: str(value) for name, value in vars(program.policy).items()},
    }
