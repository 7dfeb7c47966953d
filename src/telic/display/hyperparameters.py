"""The learning rate that a training state uses, without waiting for the device."""

from typing import Any

import jax.numpy as jnp

from telic.optimizers import hyperparams
from telic.train.state import TrainState

_RATE, _SCALE = "learning_rate", "learning_rate_scale"


def learning_rates(step_state: Any) -> dict[str, Any]:
    """Give the learning rate of the last update by name, with all that multiplies it: float32 scalars on the device.

    They are arrays of their own, so that they outlive the state, whose buffers the next step takes. Where several
    optimizers have one, each comes as ``learning_rate[where]``. Optimizers that do not keep their rate by name, such as
    those of Optax, give none.

    Args:
      step_state: Whatever the step carries; only a TrainState has a rate.
    """
    match step_state:
        case TrainState() as held:
            found = hyperparams(held.opt_state)
        case _:
            return {}
    made: dict[str, Any] = {}
    for name, value in found.items():
        if name != _RATE and not name.startswith(f"{_RATE}["):
            continue
        rate = _single(value) * held.rate_factor
        scale = found.get(name.replace(_RATE, _SCALE, 1))
        made[name] = rate if scale is None else rate * _single(scale)
    return made


def _single(value: Any) -> Any:
    # A cast that changes nothing costs as much as one that does.
    return value if value.dtype == jnp.float32 else value.astype(jnp.float32)
