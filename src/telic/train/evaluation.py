"""The evaluation step: an objective's loss and outputs in inference, with keys of its own."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from telic import ema, tree
from telic.contract import Objective, Result, Step, reduce_statistics
from telic.errors import ContractError
from telic.precision import Policy
from telic.train.attempt import loss_in, outputs_of
from telic.train.state import TrainState
from telic.types import Batch, PyTree, Variables

_EVAL = 0x45_56_41_4C


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
    """

    objective: Objective
    policy: Policy = field(default_factory=Policy)
    averaged: bool = False
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
        held = state if isinstance(state, EvalState) else EvalState.of(state)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), _EVAL), jnp.asarray(index, jnp.uint32))
        step = Step(step=held.step, key=key, updates=held.updates, train=False, averaged=held.averaged)
        statistics, aux = loss_in(self.policy, self.objective, held.variables, batch, step)
        value, _ = reduce_statistics(self.objective, statistics)
        return Result(state, outputs_of(value, statistics, aux, self.policy))

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
