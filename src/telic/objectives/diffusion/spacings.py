"""Where a sampler evaluates: steps of a discrete schedule, or noise levels between two ends. Falling, without the 0."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telic.errors import unknown_name

Levels = NDArray[np.float64]
Steps = NDArray[np.int64]


def leading(total: int, num_steps: int, *, offset: int = 0) -> Steps:
    """Give multiples of total // num_steps, the data's end included: the noisiest step is left out."""
    _check(total, num_steps)
    return (np.arange(num_steps) * (total // num_steps))[::-1].astype(np.int64) + offset


def trailing(total: int, num_steps: int) -> Steps:
    """Give equal strides from the noisiest step down, which zero terminal SNR needs. Source: Lin et al. 2024."""
    _check(total, num_steps)
    return np.round(np.arange(total, 0, -total / num_steps)[:num_steps]).astype(np.int64) - 1


def linspace(total: int, num_steps: int) -> Steps:
    """Give steps from the noisiest to the data's end, both included."""
    _check(total, num_steps)
    return np.round(np.linspace(0, total - 1, num_steps))[::-1].astype(np.int64)


DISCRETE: Mapping[str, Callable[[int, int], Steps]] = MappingProxyType(
    {"leading": leading, "trailing": trailing, "linspace": linspace}
)
"""Spacings of whole steps by name."""


def karras(num_steps: int, low: float, high: float, *, rho: float = 7.0) -> Levels:
    """Give levels whose rho-th roots lie evenly. Source: Karras et al. 2022 eq. 5."""
    roots = np.linspace(high ** (1 / rho), low ** (1 / rho), num_steps)
    return roots**rho


def exponential(num_steps: int, low: float, high: float) -> Levels:
    """Give levels whose logarithms lie evenly."""
    return np.exp(np.linspace(np.log(high), np.log(low), num_steps))


def polyexponential(num_steps: int, low: float, high: float, *, rho: float = 1.0) -> Levels:
    """Give levels whose logarithms lie on a power of a line. Source: k-diffusion."""
    ramp = np.linspace(1, 0, num_steps) ** rho
    return np.exp(ramp * (np.log(high) - np.log(low)) + np.log(low))


def uniform(num_steps: int, low: float, high: float) -> Levels:
    """Give levels that lie evenly."""
    return np.linspace(high, low, num_steps)


LEVELS: Mapping[str, Callable[..., Levels]] = MappingProxyType(
    {"karras": karras, "exponential": exponential, "polyexponential": polyexponential, "uniform": uniform}
)
"""Spacings of noise levels by name."""


def noise_levels(
    name: str, num_steps: int, low: float, high: float, also: Iterable[str] = (), *, rho: float = 7.0
) -> Levels:
    """Give falling noise levels by the name of their spacing.

    Args:
      name: A key of `LEVELS`.
      num_steps: How many.
      low: The last one.
      high: The first one.
      also: Other names that the caller knows, for the error.
      rho: Exponent of "karras".
    Raises:
      ValueError: The name is unknown, or there are no steps.
    """
    if name not in LEVELS:
        raise unknown_name("timestep spacing", name, {*LEVELS, *also})
    if num_steps < 1:
        raise ValueError(f"a sampler takes at least one step, got {num_steps}")
    options: dict[str, Any] = {"rho": rho} if name == "karras" else {}
    return LEVELS[name](num_steps, low, high, **options)


def _check(total: int, num_steps: int) -> None:
    if not 1 <= num_steps <= total:
        raise ValueError(
            f"a sampler of a schedule of {total} steps takes 1 to {total} of them, got {num_steps}; "
            "train with more steps, or sample with fewer"
        )
