"""A diffusion process: a noise schedule, what the network gives, and how much each noise level counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from telic.errors import ShapeError, unknown_name
from telic.mean import wide
from telic.objectives.diffusion.predictions import Epsilon, FlowVelocity, Karras, Prediction, Velocity
from telic.objectives.diffusion.schedules import EDM, Discrete, Flow, Schedule
from telic.objectives.diffusion.weightings import MinSNR, Weighting, output_weight
from telic.types import Array


@dataclass(frozen=True)
class Process:
    """How data become noise, and what a network learns of the way back.

    Args:
      schedule: Noise levels over time.
      prediction: What the network's output means.
      weighting: How much each noise level counts; None counts the output's own error alike at all of them.
    Example:
      >>> import jax.numpy as jnp
      >>> flow = as_process("flow")
      >>> flow.noised(jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.array([0.25]))
      Array([[0.25, 0.25]], dtype=float32)
    """

    schedule: Schedule
    prediction: Prediction
    weighting: Weighting | None = None

    def __post_init__(self) -> None:
        if isinstance(self.prediction, Epsilon) and isinstance(self.schedule, Discrete):
            last = self.schedule.alphas_cumprod[-1]
            if last == 0:
                raise ValueError(
                    "with zero terminal SNR the last step is pure noise, which a network that gives the noise cannot "
                    "turn into data; use Velocity() or Data() as the prediction"
                )

    def noised(self, data: Any, noise: Any, t: Any) -> Array:
        """Give the noisy sample alpha · data + sigma · noise.

        Args:
          data: [batch, ...].
          noise: Standard normal, of the data's shape.
          t: Times, [batch].
        """
        alpha, sigma = self.marginal(t, data)
        return alpha * data + sigma * noise

    def target(self, data: Any, noise: Any, t: Any) -> Array:
        """Give what the network should give: arguments as for `noised`."""
        alpha, sigma = self.marginal(t, data)
        return self.prediction.target(data, noise, alpha, sigma)

    def network_inputs(self, x: Any, t: Any) -> tuple[Array, Array]:
        """Give what the network reads: the sample, scaled, and the number that tells the time."""
        alpha, sigma = self.marginal(t, x)
        return x * self.prediction.input_scale(alpha, sigma), self.schedule.network_time(t)

    def estimates(self, x: Any, output: Any, t: Any) -> tuple[Array, Array]:
        """Give (data, noise) as a network's output says they are in the noisy sample x."""
        alpha, sigma = self.marginal(t, x)
        return self.prediction.estimates(x, output, alpha, sigma)

    def weight(self, t: Any) -> Array:
        """Give the weight of the squared error of the network's output at some times."""
        alpha, sigma = self.schedule.marginal(t)
        return output_weight(self.weighting, self.prediction, alpha, sigma)

    def losses(self, output: Any, data: Any, noise: Any, t: Any) -> Array:
        """Give each example's loss: the weighted squared error of the output, the mean over its elements.

        Args:
          output: What the network gave, [batch, ...].
          data: As given to `noised`.
          noise: As given to `noised`.
          t: Times, [batch].
        Returns:
          Losses, [batch], in at least float32.
        Raises:
          ShapeError: The output's shape is not the data's.
        """
        if jnp.shape(output) != jnp.shape(data):
            raise ShapeError(
                f"the network must give an array of its input's shape, {jnp.shape(data)}, got {jnp.shape(output)}; "
                "its last layer needs as many channels as the data"
            )
        error = (wide(output) - wide(self.target(data, noise, t))) ** 2
        return error.mean(axis=tuple(range(1, error.ndim))) * self.weight(t)

    def marginal(self, t: Any, like: Any) -> tuple[Array, Array]:
        """Give (alpha, sigma) at times [batch], shaped to broadcast against an array [batch, ...]."""
        alpha, sigma = self.schedule.marginal(t)
        shape = jnp.shape(t) + (1,) * (jnp.ndim(like) - jnp.ndim(t))
        return alpha.reshape(shape), sigma.reshape(shape)

    def posterior(self, data: Any, x: Any, t: Any, before: Any) -> tuple[Array, Array]:
        """Give (mean, variance) of the sample at an earlier, less noisy time, given the data and a noisy sample.

        Args:
          data: [batch, ...].
          x: The sample at times `t`.
          t: Times, [batch].
          before: Earlier times, [batch]; None is the data's end.
        Source: Ho et al. 2020 eq. 7, for any pair of times and any schedule.
        """
        here = self.marginal(t, x)
        ends = (jnp.ones_like(here[0]), jnp.zeros_like(here[1]))
        return posterior(data, x, here, ends if before is None else self.marginal(before, x))


def posterior(data: Any, x: Any, here: tuple[Any, Any], there: tuple[Any, Any]) -> tuple[Array, Array]:
    """Give (mean, variance) of the sample at `there`, (alpha, sigma), given the data and the sample at `here`."""
    (alpha, sigma), (alpha_there, sigma_there) = here, there
    ratio = alpha / alpha_there
    step = sigma**2 - ratio**2 * sigma_there**2
    mean = (ratio * sigma_there**2 * x + alpha_there * step * data) / sigma**2
    return mean, sigma_there**2 * step / sigma**2


PROCESSES: Mapping[str, Callable[[], Process]] = MappingProxyType(
    {
        "ddpm": lambda: Process(Discrete.linear(), Epsilon()),
        "cosine": lambda: Process(Discrete.cosine(), Epsilon()),
        "min_snr": lambda: Process(Discrete.cosine(), Velocity(), MinSNR()),
        "zero_snr": lambda: Process(Discrete.scaled_linear().zero_terminal_snr(), Velocity()),
        "edm": lambda: Process(EDM(), Karras()),
        "flow": lambda: Process(Flow(), FlowVelocity()),
    }
)
"""Usual processes by name."""


def as_process(given: str | Process) -> Process:
    """Give a process by its name, or the one given.

    Raises:
      ValueError: There is no such process.
      TypeError: It is neither a name nor a Process.
    """
    match given:
        case Process():
            return given
        case str():
            if given not in PROCESSES:
                raise unknown_name("diffusion process", given, PROCESSES)
            return PROCESSES[given]()
        case _:
            raise TypeError(
                f"a process is a name or Process(schedule, prediction, weighting), got {given!r} "
                f"({type(given).__name__})"
            )
