"""A rate that is changed in a run's settings reaches the optimizer, whose state holds the one it was begun with."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from telic.loop.state import LoopState
from telic.optimizers import hyperparams, set_hyperparams
from telic.train.state import TrainState

_RECORD = "initial_rates"


class ChangedRates:
    """Puts the optimizer's own rates into the state of a run that goes on, where they are not those of its last start.

    What a plateau or another handler made of a rate stays as long as the settings say what they said.

    Args:
      optimizer: The optimizer as the settings have it now.
    """

    def __init__(self, optimizer: optax.GradientTransformation):
        self._optimizer = optimizer

    def __call__(self, state: LoopState) -> LoopState | None:
        """Compare and put, when the run starts."""
        held: Any = state.step_state
        if not isinstance(held, TrainState):
            return None
        now = self._initial(held)
        before: Mapping[str, float] = state.handler_state.get(_RECORD, now)
        state.handler_state[_RECORD] = now
        changed = {name: rate for name, rate in now.items() if name in before and before[name] != rate}
        if not changed:
            return None
        opt_state = set_hyperparams(held.opt_state, **changed)
        return state.replace(step_state=held.replace(opt_state=opt_state))

    def _initial(self, held: TrainState) -> dict[str, float]:
        """Give the rates that a fresh state would have; those that follow a schedule have no say in it."""
        # Leaves without elements: names and ranks are what an optimizer looks at, and nothing is allocated.
        params = jax.tree.map(lambda x: np.zeros((0,) * np.ndim(x), x.dtype), held.variables["params"])
        found = hyperparams(self._optimizer.init(params))
        return {
            name: float(rate) for name, rate in found.items() if _scale_of(name) not in found and not _is_scale(name)
        }


def _scale_of(name: str) -> str:
    word, bracket, where = name.partition("[")
    return f"{word}_scale{bracket}{where}"


def _is_scale(name: str) -> bool:
    return name.partition("[")[0].endswith("_scale")
