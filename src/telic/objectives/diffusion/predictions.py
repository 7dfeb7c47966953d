"""What a network's output means: noise, data, a velocity, or the residual of a preconditioned denoiser.

Each of them is a line, ``data = skip · x + out · output``, so each can be turned into every other, and the squared
error of the output is that of the data times a factor that depends on the noise level alone.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp

from telic.types import Array


class Prediction(Protocol):
    """What a network's output means. alpha and sigma broadcast against the arrays."""

    def target(self, data: Any, noise: Any, alpha: Any, sigma: Any) -> Array:
        """Give the output that would be right."""
        ...

    def estimates(self, x: Any, output: Any, alpha: Any, sigma: Any) -> tuple[Array, Array]:
        """Give (data, noise) as an output says they are in a noisy sample."""
        ...

    def error_factor(self, alpha: Any, sigma: Any) -> Array:
        """Give the squared error of the output for a squared error 1 of the data."""
        ...

    def input_scale(self, alpha: Any, sigma: Any) -> Array:
        """Give the factor on the noisy sample before the network reads it."""
        ...


class _Unscaled:
    """A network that reads the noisy sample as it is."""

    def input_scale(self, alpha: Any, sigma: Any) -> Array:
        del sigma
        return jnp.ones_like(alpha)


@dataclass(frozen=True)
class Epsilon(_Unscaled):
    """The output is the noise. It says nothing of the data where there is only noise. Source: Ho et al. 2020."""

    def target(self, data: Any, noise: Any, alpha: Any, sigma: Any) -> Array:
        del data, alpha, sigma
        return noise

    def estimates(self, x: Any, output: Any, alpha: Any, sigma: Any) -> tuple[Array, Array]:
        return (x - sigma * output) / alpha, output

    def error_factor(self, alpha: Any, sigma: Any) -> Array:
        return (alpha / sigma) ** 2


@dataclass(frozen=True)
class Data(_Unscaled):
    """The output is the data."""

    def target(self, data: Any, noise: Any, alpha: Any, sigma: Any) -> Array:
        del noise, alpha, sigma
        return data

    def estimates(self, x: Any, output: Any, alpha: Any, sigma: Any) -> tuple[Array, Array]:
        return output, (x - alpha * output) / sigma

    def error_factor(self, alpha: Any, sigma: Any) -> Array:
        del sigma
        return jnp.ones_like(alpha)


@dataclass(frozen=True)
class Velocity(_Unscaled):
    """The output is alpha · noise - sigma · data, which is informative at every noise level.

    Source: Salimans and Ho 2022. Where alpha² + sigma² is not 1 both factors are divided by its root.
    """

    def target(self, data: Any, noise: Any, alpha: Any, sigma: Any) -> Array:
        norm = jnp.sqrt(alpha**2 + sigma**2)
        return (alpha * noise - sigma * data) / norm

    def estimates(self, x: Any, output: Any, alpha: Any, sigma: Any) -> tuple[Array, Array]:
        squared = alpha**2 + sigma**2
        norm = jnp.sqrt(squared)
        return (alpha * x / squared - sigma * output / norm), (sigma * x / squared + alpha * output / norm)

    def error_factor(self, alpha: Any, sigma: Any) -> Array:
        return (alpha**2 + sigma**2) / sigma**2


@dataclass(frozen=True)
class FlowVelocity(_Unscaled):
    """The output is noise - data: the direction of the straight line from data to noise. Source: Liu et al. 2023."""

    def target(self, data: Any, noise: Any, alpha: Any, sigma: Any) -> Array:
        del alpha, sigma
        return noise - data

    def estimates(self, x: Any, output: Any, alpha: Any, sigma: Any) -> tuple[Array, Array]:
        total = alpha + sigma
        return (x - sigma * output) / total, (x + alpha * output) / total

    def error_factor(self, alpha: Any, sigma: Any) -> Array:
        return ((alpha + sigma) / sigma) ** 2


@dataclass(frozen=True)
class Karras:
    """The output is the residual of a denoiser whose input and output have unit variance at every noise level.

    Args:
      sigma_data: Standard deviation of the data.
    Source: Karras et al. 2022 table 1.
    """

    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        if not self.sigma_data > 0:
            raise ValueError(f"Karras.sigma_data must be positive, got {self.sigma_data!r}")

    def coefficients(self, ratio: Any) -> tuple[Array, Array, Array]:
        """Give (c_skip, c_out, c_in) at a noise level sigma / alpha."""
        variance = ratio**2 + self.sigma_data**2
        root = jnp.sqrt(variance)
        return self.sigma_data**2 / variance, ratio * self.sigma_data / root, 1 / root

    def target(self, data: Any, noise: Any, alpha: Any, sigma: Any) -> Array:
        ratio = sigma / alpha
        skip, out, _ = self.coefficients(ratio)
        return (data - skip * (data + ratio * noise)) / out

    def estimates(self, x: Any, output: Any, alpha: Any, sigma: Any) -> tuple[Array, Array]:
        skip, out, _ = self.coefficients(sigma / alpha)
        data = skip * x / alpha + out * output
        return data, (x - alpha * data) / sigma

    def error_factor(self, alpha: Any, sigma: Any) -> Array:
        return 1 / self.coefficients(sigma / alpha)[1] ** 2

    def input_scale(self, alpha: Any, sigma: Any) -> Array:
        return self.coefficients(sigma / alpha)[2] / alpha
