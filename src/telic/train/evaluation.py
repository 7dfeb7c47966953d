"""The evaluation step: an objective's loss, outputs and artifacts in inference, with keys of its own."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from telic import ema, tree
from telic.artifacts import Scalars, kind_of
from telic.contract import Objective, Result, Step, as_artifacts, call_preview, has_evaluation, reduce_statistics
from telic.errors import ContractError
from telic.mean import Mean
from telic.precision import Policy
from telic.train.attempt import RESERVED_METRICS, cast_batch, cast_variables, loss_in, outputs_of
from telic.train.state import TrainState
from telic.types import Batch, PyTree, Variables

_EVAL = 0x45_56_41_4C
_PREVIEW = 0x50_52_45_56


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class EvalState:
    """What an evaluation reads and never changes.

    Attributes:
      variables: Weights to evaluate.
      averaged: The variables with the moving average laid over, or None.
      step: Accepted microbatches of the training they come from, int32.
      updates: Its updates, int32: schedules in a loss read them.
    """

    variables: Any
    averaged: Any
    step: Any
    updates: Any

    @staticmethod
    def of(variables: Variables) -> "EvalState":
        """Give the state of bare variables."""
        zero = jnp.zeros((), jnp.int32)
        return EvalState(tree.as_plain(variables), None, zero, zero)


@dataclass(frozen=True, eq=False)
class EvalStep:
    """A pure evaluation step. Its state is what `EvalState` holds, which it never changes.

    Attributes:
      objective: Whose loss and outputs are computed.
      policy: Dtypes to compute in.
      averaged: Evaluate a TrainState's averaged weights instead of the live ones.
      scores: Put the artifacts of the objective's own `evaluate`, where it has one, into the outputs of `step`.
    """

    objective: Objective
    policy: Policy = field(default_factory=Policy)
    averaged: bool = False
    scores: bool = True
    period: int = 1

    def bind(self, example: Batch) -> "EvalStep":
        """Give this step with the shapes its objective learns from a first batch."""
        return dataclasses.replace(self, objective=self.objective.bind(example))

    def init(self, batch: Batch) -> EvalState:
        """Give the weights the objective holds.

        Raises:
          ContractError: It holds none: an evaluation needs weights.
        """
        self._check_bare("an evaluator's own weights")
        bound = self.bind(batch).objective
        if bound.held_variables() is None:
            raise ContractError(
                "an evaluator needs weights: pass run(data, state=variables), a TrainState or a LoopState"
            )
        return EvalState.of(bound.initializer(jax.random.key(0)))

    def adopt(self, batch: Batch, given: Any) -> EvalState:
        """Give the state for a TrainState's weights, or for a mapping of collections."""
        del batch
        match given:
            case EvalState():
                return given
            case TrainState():
                average = ema.averaged(given.variables, given.ema)
                variables = given.averaged if self.averaged else given.variables
                return EvalState(variables, average, given.microbatches, given.updates)
            case Mapping() if "params" in given:
                self._check_bare("variables")
                return EvalState.of(given)
            case _:
                shown = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
                raise TypeError(f"state= takes variables {{'params': ...}}, a TrainState or a LoopState, got {shown}")

    def _check_bare(self, what: str) -> None:
        if self.averaged:
            raise ContractError(
                f"averaged=True needs the TrainState that holds the moving average, and was given {what}: pass "
                "state=train_state, or state=train_state.averaged without averaged="
            )

    def step(self, state: EvalState | Variables, batch: Batch, index: Any = 0) -> Result:
        """Give the outputs of one batch; `index` counts batches and drives the key of objectives that draw."""
        held, step = self._moment(state, index)
        statistics, aux = loss_in(self.policy, self.objective, held.variables, batch, step)
        value, _ = reduce_statistics(self.objective, statistics)
        outputs = outputs_of(value, statistics, aux, self.policy)
        if self.scores and has_evaluation(self.objective):
            outputs["artifacts"] = self.artifacts_of(self.scored(state, batch, index))
            outputs["metrics"] = _with_scalars(self.objective, outputs["metrics"], outputs["artifacts"])
        return Result(state, outputs)

    def scored(self, state: EvalState | Variables, batch: Batch, index: Any = 0) -> Any:
        """Give what the objective's `evaluate` returns for one batch, as it is."""
        held, step = self._moment(state, index)
        step = dataclasses.replace(step, averaged=self._cast(step.averaged))
        return self.objective.evaluate(self._cast(held.variables), cast_batch(self.policy, batch), step)

    def artifacts_of(self, scored: Any) -> tuple[Any, ...]:
        """Give what `evaluate` returned as a tuple of artifacts, checked."""
        return as_artifacts(scored, f"{type(self.objective).__name__}.evaluate")

    def preview(self, state: EvalState | Variables, batch: Batch, scored: Any) -> tuple[Any, ...]:
        """Give what the objective shows of a batch; its key is the same at every event."""
        held, step = self._moment(state, 0, _PREVIEW)
        step = dataclasses.replace(step, averaged=self._cast(step.averaged))
        shown = cast_batch(self.policy, batch)
        return call_preview(self.objective, self._cast(held.variables), shown, step, scored)

    def _moment(self, state: EvalState | Variables, index: Any, purpose: int = _EVAL) -> tuple[EvalState, Step]:
        held = state if isinstance(state, EvalState) else EvalState.of(state)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), purpose), jnp.asarray(index, jnp.uint32))
        step = Step(
            step=held.step,
            key=key,
            updates=held.updates,
            train=False,
            averaged=held.averaged,
            precision=self.policy,
        )
        return held, step

    def _cast(self, variables: Any) -> Any:
        return None if variables is None else cast_variables(self.policy, variables)

    def flush(self, state: Any) -> Any:
        """Give the state as it is: evaluation has no windows."""
        return state

    def health(self, state: Any) -> PyTree:
        """Give None: nothing is watched."""
        del state

    def check_health(self, health: PyTree, state: Any) -> None:
        """Do nothing."""

    def model(self, state: Any) -> Any:
        """Give the usable model, when the objective was built from one."""
        build = getattr(self.objective, "model_of", None)
        return None if build is None else build(state.variables if isinstance(state, EvalState) else state)


def _with_scalars(objective: Objective, metrics: Mapping[str, Any], artifacts: tuple[Any, ...]) -> dict[str, Any]:
    """Add the `Scalars` of an evaluation to what a loss reports.

    Raises:
      ContractError: A name is taken, or a value is neither a Mean nor a scalar.
    """
    found, who = dict(metrics), f"{type(objective).__name__}.evaluate"
    for name, value in ((n, v) for a in artifacts if isinstance(a, Scalars) for n, v in a.values.items()):
        if name in found or name in RESERVED_METRICS:
            raise ContractError(
                f"{who} gives a scalar {name!r}, and the loss or the trainer reports that name already: choose another"
            )
        if not isinstance(value, Mean) and jax.tree.structure(value) != jax.tree.structure(0.0):
            raise ContractError(f"{who}: Scalars[{name!r}] must be a Mean or a scalar, got {kind_of(value)}")
        found[name] = value
    return found
