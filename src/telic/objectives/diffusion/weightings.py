"""How much each noise level counts.

A weighting is a function of the signal-to-noise ratio that gives the weight of the squared error of the *data*. What
that means for the error of a network's output follows from what the output is (`Prediction.error_factor`): one place,
for every kind of output. No weighting at all counts the output's own error alike at every noise level.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp

from telic.mean import wide
from telic.objectives.diffusion.predictions import Prediction
from telic.types import Array


class Weighting(Protocol):
    """Weight of the squared error of the data estimate."""

    def __call__(self, snr: Any) -> Array:
        """Give the weight at a signal-to-noise ratio, alpha² / sigma²."""
        ...


@dataclass(frozen=True)
class SNR:
    """The signal-to-noise ratio: 1 for a network that gives the noise. Source: Ho et al. 2020, L_simple."""

    def __call__(self, snr: Any) -> Array:
        return wide(snr)


@dataclass(frozen=True)
class TruncatedSNR:
    """max(SNR, 1). Source: Salimans and Ho 2022."""

    def __call__(self, snr: Any) -> Array:
        return jnp.maximum(wide(snr), 1)


@dataclass(frozen=True)
class MinSNR:
    """min(SNR, gamma): for noise min(SNR, g)/SNR, for a velocity min(SNR, g)/(SNR + 1).

    Where there is no signal the weight is 1 for noise and 0 for a velocity: under zero terminal SNR a velocity network
    does not learn its last step, so train it with another weighting.

    Args:
      gamma: The largest ratio that counts.
    Source: Hang et al. 2023 section 3.4.
    """

    gamma: float = 5.0

    def __post_init__(self) -> None:
        if not self.gamma > 0:
            raise ValueError(f"MinSNR.gamma must be positive, got {self.gamma!r}")

    def __call__(self, snr: Any) -> Array:
        return jnp.minimum(wide(snr), self.gamma)


@dataclass(frozen=True)
class KarrasWeight:
    """(sigma² + sigma_data²) / (sigma · sigma_data)²: 1 for a preconditioned network. Source: Karras et al. 2022."""

    sigma_data: float = 0.5

    def __call__(self, snr: Any) -> Array:
        return wide(snr) + 1 / self.sigma_data**2


@dataclass(frozen=True)
class SoftMinSNR:
    """1 / (sigma² + sigma_data²), which is SNR at much noise and levels off at little. Source: Crowson et al. 2024."""

    sigma_data: float = 0.5

    def __call__(self, snr: Any) -> Array:
        snr = wide(snr)
        return snr / (1 + self.sigma_data**2 * snr)


@dataclass(frozen=True)
class CosMap:
    """2 / (π (1 - 2t + 2t²)) for a flow velocity at flow time t. Source: Esser et al. 2024 section 3.1."""

    def __call__(self, snr: Any) -> Array:
        t = 1 / (1 + jnp.sqrt(wide(snr)))
        return 2 / (jnp.pi * (1 - 2 * t + 2 * t**2)) / t**2


@dataclass(frozen=True)
class SigmaSqrt:
    """1 / t² for a flow velocity at flow time t. Source: diffusers, "sigma_sqrt"."""

    def __call__(self, snr: Any) -> Array:
        t = 1 / (1 + jnp.sqrt(wide(snr)))
        return t**-4


def output_weight(weighting: Weighting | None, prediction: Prediction, alpha: Any, sigma: Any) -> Array:
    """Give the weight of the squared error of a network's output: ones without a weighting."""
    if weighting is None:
        return jnp.ones_like(wide(alpha))
    weight, factor = weighting((alpha / sigma) ** 2), prediction.error_factor(alpha, sigma)
    # Where an error of the data does not show in the output both are 0, and their ratio's limit is 1.
    return jnp.where(factor > 0, weight / jnp.where(factor > 0, factor, 1), 1)
