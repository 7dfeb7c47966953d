"""Guidance without a classifier: away from what the network gives without the condition."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from telic.types import Array


@dataclass(frozen=True)
class Guidance:
    """How strongly samples follow their condition.

    Args:
      scale: 1 gives the conditional samples; above it they follow the condition more and vary less.
      interval: Noise levels sigma / alpha, (low, high), between which it acts; outside one evaluation is saved.
      rescale: Part by which the guided output takes the standard deviation of the conditional one, 0 to 1.
    Source: Ho and Salimans 2022; Kynkäänniemi et al. 2024 for the interval; Lin et al. 2024 for the rescaling.
    """

    scale: float
    interval: tuple[float, float] = (0.0, float("inf"))
    rescale: float = 0.0

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low < high:
            raise ValueError(f"Guidance.interval is (low, high) noise levels sigma / alpha, got {self.interval!r}")
        if not 0 <= self.rescale <= 1:
            raise ValueError(f"Guidance.rescale must be in [0, 1], got {self.rescale!r}")

    @property
    def is_everywhere(self) -> bool:
        """Whether it acts at every noise level."""
        return self.interval == (0.0, float("inf"))

    def acts(self, ratio: Any) -> Array:
        """Say whether it acts at a noise level sigma / alpha."""
        low, high = self.interval
        return (ratio >= low) & (ratio <= high)

    def mix(self, conditional: Any, unconditional: Any) -> Array:
        """Give the guided output of two."""
        mixed = guided(conditional, unconditional, self.scale)
        return rescaled(mixed, conditional, self.rescale) if self.rescale else mixed


def guided(conditional: Any, unconditional: Any, scale: float) -> Array:
    """Give unconditional + scale · (conditional - unconditional)."""
    return unconditional + scale * (conditional - unconditional)


def rescaled(mixed: Any, conditional: Any, part: float) -> Array:
    """Give the guided output with the conditional one's standard deviation, by a part; each example on its own."""
    axes = tuple(range(1, jnp.ndim(mixed)))

    def std(x: Any) -> Array:
        return jnp.std(x, axis=axes, keepdims=True, ddof=1)

    return part * mixed * (std(conditional) / std(mixed)) + (1 - part) * mixed
