"""The learning-rate range test: train with a rate that grows, look where the loss falls fastest.

Source: Smith 2017, "Cyclical learning rates for training neural networks" (the test); the suggestion, at the steepest
descent of the smoothed loss, is the usual reading of its curve.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telic.compose.names import make_trainer
from telic.contract import Objective
from telic.display.figures import check_format
from telic.display.rates import draw_rates
from telic.errors import ContractError
from telic.loop import events as ev
from telic.loop.state import LoopState
from telic.loop.status import HALT_LOOP, Status
from telic.metrics.function import last
from telic.optimizers import hyperparams, set_hyperparams
from telic.types import Key

_RATE = "learning_rate"
_LOSS = "last_loss"
_WARM_UP = 5
"""Steps before divergence is looked for: the first smoothed losses rest on too few values."""

_MAX_REJECTED = 3
"""Rejected attempts in a row that end the test."""


@dataclass(frozen=True)
class RangeTest:
    """What a learning-rate range test measured.

    Attributes:
      rates: Learning rate of each step.
      losses: Loss of each step's batch, before the update with that rate.
      smoothed: The losses, smoothed.
      suggestion: Rate to train with; None when the loss never fell.
      diverged: Whether the loss ran away before the highest rate.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    diverged: bool

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw loss against rate, the suggestion marked; the format is that of the path's suffix.

        Raises:
          ValueError: The suffix is no format of pictures.
        """
        check_format(path)
        draw_rates(self.rates, self.losses, self.smoothed, path, suggestion=self.suggestion)

    def __str__(self) -> str:
        low, high = (self.rates[0], self.rates[-1]) if self.rates else (math.nan, math.nan)
        end = ", where the loss ran away" if self.diverged else ""
        said = "the loss never fell: no suggestion" if self.suggestion is None else f"suggestion {self.suggestion:.3g}"
        return f"{len(self.rates)} steps from {low:.3g} to {high:.3g}{end}; {said}"


def find_learning_rate(
    model: Any,
    loss: Any = None,
    optimizer: Any = "adam",
    *,
    data: Any,
    low: float = 1e-6,
    high: float = 10.0,
    steps: int = 200,
    smoothing: float = 0.9,
    divergence: float = 4.0,
    key: int | Key = 0,
    **options: Any,
) -> RangeTest:
    """Suggest a learning rate: train for some steps while the rate grows from `low` to `high`, and see where it helps.

    The suggestion is the rate at which the smoothed loss falls fastest. It is a good start for the peak of a schedule,
    no more: a long run may want less. Nothing given is changed; the weights it trains are its own.

    Args:
      model: A model, as for `telic.trainer`; or an Objective, without a loss.
      loss: A loss by name, a loss function, or an objective function of four arguments.
      optimizer: A name, or an optimizer of `telic.optimizers` whose rate is a number; a schedule is refused.
      data: Batches to train on, as for `run`; read again from the beginning when there are fewer than steps.
      low: First rate.
      high: Rate of the last step. The rate grows by the same factor at each.
      steps: Updates, at most.
      smoothing: Share of the past in each smoothed loss, in [0, 1).
      divergence: The test ends when the smoothed loss is this many times its best, or when the loss is not finite.
      key: Seed or PRNG key.
      **options: Those of `telic.Trainer`.
    Raises:
      ValueError: A bound makes no sense.
      ContractError: The optimizer's rate is not in its state by name, or follows a schedule.
    Example:
      >>> import jax.numpy as jnp
      >>> model = (lambda key, x: {"w": jnp.zeros(())}, lambda params, x: params["w"] * x)
      >>> batch = (jnp.arange(4.0), 3 * jnp.arange(4.0))
      >>> found = find_learning_rate(model, "mean_squared_error", "sgd", data=[batch], low=1e-4, high=1.0, steps=40)
      >>> 1e-3 < found.suggestion < 0.5
      True
    """
    _check_bounds(low, high, steps, smoothing, divergence)
    ramp = _Ramp(low, (high / low) ** (1 / (steps - 1)), smoothing, divergence)
    if isinstance(model, Objective):
        if loss is not None:
            raise TypeError(f"an Objective has its own loss: leave loss out, got {loss!r}")
        model, loss = None, model
    trainer = make_trainer(model, loss, optimizer, key, {"max_rejected": _MAX_REJECTED + 1, **options})
    loop = trainer.loop(log=0).metric(last(_LOSS, reads=("loss",)))
    loop.handle_event(ev.STARTED, ramp.on_start).handle_event(ev.STEP_COMPLETED, ramp.on_step)
    loop.run(data, steps=steps)
    return RangeTest(
        tuple(ramp.rates),
        tuple(ramp.losses),
        tuple(ramp.smoothed),
        suggested(ramp.rates, ramp.smoothed),
        ramp.diverged,
    )


def suggested(rates: Sequence[float], smoothed: Sequence[float]) -> float | None:
    """Give the rate where the smoothed loss falls fastest, before its minimum; None when it never falls."""
    end = int(np.argmin(smoothed)) + 1 if smoothed else 0
    if end < 3:
        return None
    slopes = np.gradient(np.asarray(smoothed[:end]), np.log(np.asarray(rates[:end])))
    at = int(np.argmin(slopes))
    return float(rates[at]) if slopes[at] < 0 else None


@dataclass
class _Ramp:
    """Handler that sets the rate of each update and notes the loss it gave."""

    low: float
    factor: float
    smoothing: float
    divergence: float
    rates: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    smoothed: list[float] = field(default_factory=list[float])
    diverged: bool = False
    _step: int = 0
    _sum: float = 0.0
    _rejected: int = 0
    _in_a_row: int = 0

    def on_start(self, state: LoopState) -> None:
        found = hyperparams(state.step_state.opt_state)
        if not any(name.split("[")[0] == _RATE for name in found):
            raise ContractError(
                f"the optimizer's state names no {_RATE} (it has {', '.join(found) or 'no names'}): "
                "give an optimizer by name or of telic.optimizers, or one made by optax.inject_hyperparams"
            )
        self._set(state)

    def on_step(self, state: LoopState) -> Status | None:
        rejected = int(state.step_state.rejections.total)
        was_rejected, self._rejected = rejected > self._rejected, rejected
        self._in_a_row = self._in_a_row + 1 if was_rejected else 0
        if self._in_a_row >= _MAX_REJECTED:
            self.diverged = True
            return HALT_LOOP
        if not was_rejected:
            self._note(float(state.metrics[_LOSS]))
            if self.diverged:
                return HALT_LOOP
        self._step += 1
        self._set(state)
        return None

    def _note(self, loss: float) -> None:
        if not math.isfinite(loss):
            self.diverged = True
            return
        self.rates.append(self.low * self.factor**self._step)
        self.losses.append(loss)
        self._sum = self.smoothing * self._sum + (1 - self.smoothing) * loss
        self.smoothed.append(self._sum / (1 - self.smoothing ** len(self.losses)))
        best = min(self.smoothed)
        # A loss may be negative, so that its rise is measured against how far it fell.
        limit = best + (self.divergence - 1) * max(abs(best), self.smoothed[0] - best)
        self.diverged = len(self.losses) > _WARM_UP and self.smoothed[-1] > limit

    def _set(self, state: LoopState) -> None:
        step_state = state.step_state
        rate = self.low * self.factor**self._step
        try:
            opt_state = set_hyperparams(step_state.opt_state, **{_RATE: rate})
        except ValueError as error:
            raise ContractError(f"the learning rate cannot be set: {error}") from error
        state.step_state = step_state.replace(opt_state=opt_state)


def _check_bounds(low: float, high: float, steps: int, smoothing: float, divergence: float) -> None:
    if not 0 < low < high or not math.isfinite(high):
        raise ValueError(f"the rate grows from low to high, 0 < low < high: got low={low!r}, high={high!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 10:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"steps must be a whole number of at least 10, got {steps!r}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing!r}")
    if not divergence > 1:
        raise ValueError(f"divergence must be more than 1, got {divergence!r}")
