"""Evaluation inside a run: the loop's own metrics over other data, under names of their own."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from telic.compose.programs import reads_gradients, with_loss
from telic.driver import DriverOptions, StepDriver
from telic.errors import ContractError
from telic.evaluate import EvaluationPass
from telic.loop.ports import Placement, StepProgram
from telic.loop.reducers import Reducer, reported
from telic.loop.state import LoopState
from telic.train.evaluation import EvalStep
from telic.train.step import TrainStep


@dataclass
class Validation:
    """Handler that evaluates and records under its prefix.

    Attributes:
      reducers: Gives the metrics of the loop, as they are when it evaluates.
      program: The evaluation step.
      batches: The data, readable any number of times.
      prefix: What the names of its values begin with.
      placement: Where batches live.
    """

    reducers: Callable[[], Mapping[str, Reducer]]
    program: StepProgram
    batches: Iterable[Any]
    prefix: str
    placement: Placement
    _pass: EvaluationPass | None = field(default=None, repr=False)
    _metrics: dict[str, Reducer] = field(default_factory=dict[str, Reducer], repr=False)

    @property
    def has_run(self) -> bool:
        """Whether it has evaluated anything yet."""
        return self._pass is not None

    def of(self, reducers: Callable[[], Mapping[str, Reducer]]) -> "Validation":
        """Give the same validation for another loop's metrics."""
        return Validation(reducers, self.program, self.batches, self.prefix, self.placement)

    def __call__(self, state: LoopState) -> None:
        if self._pass is None or self._metrics != self.reducers():
            # The metrics are all those attached before the run; one attached between runs makes a new program.
            self._metrics = dict(self.reducers())
            # There are no gradients in an evaluation.
            reducers = {name: r for name, r in self._metrics.items() if not reads_gradients(r)}
            self._pass = evaluation_pass(self.program, with_loss(reducers, self.program), self.batches, self.placement)
        values = self._pass.run(state.step_state)
        state.metrics.add({self.prefix + name: value for name, value in values.items()})


def check_average(evaluation: StepProgram, training: StepProgram) -> None:
    """Refuse to evaluate averaged weights where training keeps none, before anything runs.

    Raises:
      ContractError: The trained objective has no EMASpec.
    """
    wanted = isinstance(evaluation, EvalStep) and evaluation.averaged
    if wanted and isinstance(training, TrainStep) and training.objective.ema is None:
        raise ContractError(
            f"averaged=True evaluates the moving average of the weights, and {type(training.objective).__name__} keeps "
            "none: set objective.ema = telic.EMASpec(decay=0.999) before training, or leave averaged out"
        )


def evaluation_pass(
    program: StepProgram, reducers: Mapping[str, Reducer], batches: Iterable[Any], placement: Placement
) -> EvaluationPass:
    """Give an evaluation of a data set; each batch shape of it is one program."""

    def make_driver(bound: StepProgram) -> StepDriver:
        return StepDriver(bound, reducers, placement, DriverOptions(strict=False), carries=False, reported=reported)

    return EvaluationPass(program, batches, make_driver)
