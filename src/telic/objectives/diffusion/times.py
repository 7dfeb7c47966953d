"""Densities of training times in [0, 1], and the shift of times with resolution."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from telic.mean import wide
from telic.types import Array, Key


class TimeDensity(Protocol):
    """A density of times in [0, 1]."""

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        """Draw times."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Every time alike.

    Args:
      smallest: Lower end; the upper one is 1.
    """

    smallest: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.smallest < 1:
            raise ValueError(f"Uniform.smallest must be in [0, 1), got {self.smallest!r}")

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        # 1 - u lies in (0, 1]: the time of pure noise, where sampling starts, is trained, and that of the data is not.
        return self.of(1 - jax.random.uniform(key, shape))

    def of(self, unit: Any) -> Array:
        """Give the times of uniform draws in [0, 1]."""
        return self.smallest + (1 - self.smallest) * wide(unit)


@dataclass(frozen=True)
class LogitNormal:
    """Times whose logit is normal: most in the middle, where the task is hardest.

    Args:
      mean: Mean of the logit; above 0 trains nearer the noise.
      std: Standard deviation of the logit.
    Source: Esser et al. 2024 eq. 19.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ValueError(f"LogitNormal.std must be positive, got {self.std!r}")

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return self.of(jax.random.normal(key, shape))

    def of(self, unit_normal: Any) -> Array:
        """Give the times of standard normal draws."""
        return jax.nn.sigmoid(self.mean + self.std * wide(unit_normal))

    def density(self, t: Any) -> Array:
        """Give the density at some times in (0, 1)."""
        t = wide(t)
        z = (jnp.log(t) - jnp.log1p(-t) - self.mean) / self.std
        return jnp.exp(-(z**2) / 2) / (self.std * jnp.sqrt(2 * jnp.pi) * t * (1 - t))


@dataclass(frozen=True)
class Mode:
    """Times with a mode in the middle and some weight at both ends.

    Args:
      scale: How heavy the middle is; 0 is uniform. Above 2 / (π - 2) = 1.75 the times are no longer ordered.
    Source: Esser et al. 2024 eq. 20.
    """

    scale: float = 1.29

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return self.of(jax.random.uniform(key, shape))

    def of(self, unit: Any) -> Array:
        """Give the times of uniform draws in [0, 1]."""
        u = wide(unit)
        return 1 - u - self.scale * (jnp.cos(jnp.pi * u / 2) ** 2 - 1 + u)


def shifted(t: Any, shift: float, *, power: float = 1.0) -> Any:
    """Move times towards the noise: shift / (shift + (1/t - 1)^power).

    Args:
      t: Times in [0, 1], of NumPy or JAX.
      shift: Factor on the ratio of noise to data; 1 moves nothing.
      power: Exponent of that ratio.
    """
    if power == 1:
        # The same line without a division by the time, so that t = 0 stays 0 exactly.
        return shift * t / (1 + (shift - 1) * t)
    return shift / (shift + (1 / t - 1) ** power)
