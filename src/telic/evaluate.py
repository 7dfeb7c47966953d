"""Passes over data that is not trained on: every example once, compiled once, the training state untouched."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from telic import tree
from telic.contract import Objective, owns_statistics, reduce_statistics
from telic.errors import DataError
from telic.loop.ports import Driver, StepProgram
from telic.mean import Mean, wide
from telic.train import statistics as statistic
from telic.types import PyTree


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


class EvaluationDriver(Driver, Protocol):
    """A driver whose state does not change and can be exchanged."""

    def start(self, step_state: PyTree, batch: Any) -> None:
        """Trace the step and build empty accumulators."""
        ...

    def restart(self, step_state: PyTree) -> None:
        """Start over with another state of the same shapes."""
        ...


class EvaluationPass:
    """One data set, one set of metrics, one compiled program, run as often as wanted.

    Args:
      program: An evaluation step.
      batches: The whole data set, readable any number of times.
      make_driver: Gives a driver for the bound program; called once.
    """

    def __init__(
        self,
        program: StepProgram,
        batches: Iterable[Any],
        make_driver: Callable[[StepProgram], EvaluationDriver],
    ):
        self._program = program
        self._batches = batches
        self._make_driver = make_driver
        self._driver: EvaluationDriver | None = None

    def run(self, given: Any) -> dict[str, Any]:
        """Give the metrics of the whole data set for some weights.

        Args:
          given: What the program adopts: a TrainState or variables. Neither is changed or donated.
        Raises:
          DataError: There are no batches.
        """
        driver = self._driver
        state: Any = None
        for iteration, batch in enumerate(self._batches):
            if iteration == 0:
                program = self._program.bind(batch)
                state = program.adopt(batch, given)
                if driver is None:
                    driver = self._make_driver(program)
                    driver.start(state, batch)
                    self._driver = driver
                else:
                    driver.restart(state)
            if driver is not None:
                driver.advance([batch], epoch=0, iteration=iteration, fresh=False)
        if state is None or driver is None:
            raise DataError("the validation data had no batches; check its length, or leave validation out")
        values = driver.compute("epoch")()
        driver.restart(None)
        return dict(values)
