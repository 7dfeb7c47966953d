"""Lowering the learning rate when a metric stands still."""

import logging
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from telic.errors import ContractError
from telic.loop.ports import State
from telic.optimizers import hyperparams, set_hyperparams
from telic.train.state import TrainState
from telic.types import Array, PyTree

_log = logging.getLogger("telic.handlers")

_NOT_LINEAR = (
    contrib.COCOBState,
    contrib.DAdaptAdamWState,
    contrib.DoGState,
    contrib.DoWGState,
    contrib.MechanicState,
    contrib.MomoAdamState,
    contrib.MomoState,
    contrib.ProdigyState,
    contrib.SAMState,
    contrib.ScheduleFreeState,
    optax.LookaheadState,
    optax.ScaleByBacktrackingLinesearchState,
    optax.ScaleByZoomLinesearchState,
)
"""States of optimizers whose update is no multiple of the learning rate, or that read their own steps back from the
parameters: scaling what they give is not scaling their rate."""


@dataclass(frozen=True, eq=False)
class ReduceRate:
    """Action of a monitor that multiplies the learning rate by a factor.

    The rate is changed by name where the optimizer holds one (those of `telic.optimizers`, and
    `optax.inject_hyperparams`); a rate that follows a schedule is scaled by its ``learning_rate_scale``. For any other
    optimizer the factor goes to `TrainState.rate_factor`, which multiplies its updates.

    Args:
      record: Name of the monitor's record; ``"factor"`` in it is the product of all reductions.
      factor: In (0, 1).
      min_lr: No rate goes below; needs a rate with a name.
      min_factor: The product of all reductions does not go below.
    """

    record: str
    factor: float = 0.1
    min_lr: float | None = None
    min_factor: float | None = None

    def __post_init__(self) -> None:
        for name, value, most in (("factor", self.factor, 1.0), ("min_factor", self.min_factor, 1.0)):
            if value is not None and not 0 < value < most:
                raise ValueError(f"{self.record}: {name} must be between 0 and {most:g}, got {value!r}")
        if self.min_lr is not None and not self.min_lr >= 0:
            raise ValueError(f"{self.record}: min_lr must be 0 or more, got {self.min_lr!r}")

    def check(self, state: State) -> None:
        """Find out at a run's start whether the rate can be lowered.

        Raises:
          ContractError: The state is no TrainState, or no rate of it can be lowered; the text says which and why.
        """
        held = self._held(state)
        if self._lower_named(held.opt_state, 1.0) is None:
            self._lower_factor(held, 1.0)

    def _held(self, state: State) -> TrainState:
        held = state.step_state
        if not isinstance(held, TrainState):
            raise ContractError(
                f"{self.record} lowers the learning rate of a TrainState, but this loop's state is a "
                f"{type(held).__name__}; lower the rate of your own step with loop.monitor(metric, action)"
            )
        return held

    def __call__(self, state: State) -> None:
        """Lower the rate once.

        Raises:
          ContractError: The state is no TrainState, or no rate of it can be lowered; the text says which and why.
        """
        held = self._held(state)
        record = state.handler_state[self.record]
        before = float(record.get("factor", 1.0))
        after = before * self.factor
        if self.min_factor is not None:
            after = max(after, self.min_factor)
        ratio = self.factor if after == before * self.factor else after / before
        opt_state = self._lower_named(held.opt_state, ratio)
        if opt_state is not None:
            state.step_state = held.replace(opt_state=opt_state)
        else:
            state.step_state = held.replace(rate_factor=self._lower_factor(held, ratio))
        state.handler_state[self.record] = {**record, "factor": after}
        _log.info("%s: learning rate times %g after epoch %d", self.record, ratio, state.epoch)

    def _lower_named(self, opt_state: PyTree, ratio: float) -> PyTree | None:
        """Give the optimizer state with its named rates lowered, or None when it has none that can be set."""
        held = hyperparams(opt_state)
        new: dict[str, Any] = {}
        for key, value in held.items():
            name, bracket, where = key.partition("[")
            if not name.endswith("learning_rate"):
                continue
            scale = f"{name}_scale{bracket}{where}"
            if scale in held:
                # The schedule gives `value`; its factor is what lasts.
                floor = 0.0 if self.min_lr is None else self.min_lr / float(value) if float(value) > 0 else 0.0
                new[scale] = _lowered(float(held[scale]), ratio, floor)
            elif _is_set_by_schedule(opt_state, key):
                return None
            else:
                new[key] = _lowered(float(value), ratio, self.min_lr or 0.0)
        return set_hyperparams(opt_state, **new) if new else None

    def _lower_factor(self, held: TrainState, ratio: float) -> Array:
        if self.min_lr is not None:
            raise ContractError(
                f"{self.record}: min_lr needs an optimizer whose learning rate has a name in its state, such as those "
                "of telic.optimizers; for others give min_factor"
            )
        for node in jax.tree.leaves(held.opt_state, is_leaf=lambda x: isinstance(x, _NOT_LINEAR)):
            if isinstance(node, _NOT_LINEAR):
                raise ContractError(
                    f"{self.record} cannot lower the rate of an optimizer with a {type(node).__name__}: scaling its "
                    "updates is not scaling its rate. Use an optimizer of telic.optimizers, or wrap this one with "
                    "optax.inject_hyperparams so that its rate has a name"
                )
        old = held.rate_factor
        new = jnp.asarray(float(old) * ratio, old.dtype)
        return jax.device_put(new, old.sharding) if old.committed else new


def _lowered(old: float, ratio: float, floor: float) -> float:
    """Give a rate times a ratio, not below a floor; a rate that is below already stays."""
    return min(old, max(old * ratio, floor))


def _is_set_by_schedule(opt_state: PyTree, key: str) -> bool:
    """Say whether a named rate follows a schedule that would set it back."""
    try:
        set_hyperparams(opt_state, **{key: 0.0})
    except ValueError:
        # The name is known, so a refusal means a schedule.
        return True
    return False
