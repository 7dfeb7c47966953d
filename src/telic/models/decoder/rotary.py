"""Rotary positions: pairs of a head's entries turned by an angle that grows with the position.

B batch, T time, N heads, H width of a head. Entry i of the first half of a head is paired with entry i of the second.
"""

import math
from dataclasses import dataclass
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from telic.types import Array


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All angles divided by one factor.

    Args:
      factor: By how much the context is longer than trained, ≥ 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """The slow angles divided, the fast ones kept, with a ramp between.

    Args:
      factor: By how much the slow angles are divided, ≥ 1.
      low_frequency_factor: Wavelengths over original_length / this are divided whole.
      high_frequency_factor: Wavelengths under original_length / this are kept.
      original_length: Context that the model was trained with, in tokens.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                "Llama3Scaling needs 0 < low_frequency_factor < high_frequency_factor, got "
                f"{self.low_frequency_factor!r} and {self.high_frequency_factor!r}"
            )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Angles divided by how many turns they make over the original context, and attention sharpened.

    Args:
      factor: By how much the context is longer than trained, ≥ 1.
      original_length: Context that the model was trained with, in tokens.
      fast_turns: Angles that make more turns are kept.
      slow_turns: Angles that make fewer are divided whole.
      attention_factor: Factor on queries and on keys. None: 0.1 ln(factor) + 1.
      truncate: Whether the ends of the ramp are rounded to whole entries, outwards.
    Source: Peng et al. 2023, YaRN, section 3.
    """

    factor: float
    original_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        if not self.fast_turns > self.slow_turns > 0:
            raise ValueError(
                f"YarnScaling needs fast_turns > slow_turns > 0, got {self.fast_turns!r} and {self.slow_turns!r}"
            )

    @property
    def amplitude(self) -> float:
        """Factor on the rotated queries and keys."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


Scaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Base and scaling of rotary positions.

    Args:
      theta: Base of the angles.
      scaling: How angles are changed for longer contexts, or None.
    """

    theta: float = 10000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"theta must be a number > 0, got {self.theta!r}")


def frequencies(rotary: Rotary, width: int) -> np.ndarray:
    """Give the angle per position of each pair, in radians, float64 [width / 2]."""
    kept = rotary.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    match rotary.scaling:
        case None:
            return kept
        case LinearScaling(factor=factor):
            return kept / factor
        case Llama3Scaling() as s:
            wavelengths = 2 * np.pi / kept
            low, high = s.low_frequency_factor, s.high_frequency_factor
            share = np.clip((s.original_length / wavelengths - low) / (high - low), 0, 1)
            return share * kept + (1 - share) * kept / s.factor
        case YarnScaling() as s:
            first, last = (_entry_of(turns, s, rotary.theta, width) for turns in (s.fast_turns, s.slow_turns))
            if s.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, width - 1)
            # A ramp of no length is a step.
            ramp = np.clip((np.arange(width // 2) - first) / max(last - first, 1e-3), 0, 1)
            return (1 - ramp) * kept + ramp * kept / s.factor


def _entry_of(turns: float, scaling: YarnScaling, theta: float, width: int) -> float:
    """Give the entry whose angle makes this many turns over the original context."""
    return width * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotation(rotary: Rotary, width: int, positions: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Give the cosines and sines of a row of positions, in at least float32.

    Args:
      rotary: Base and scaling.
      width: Width of a head, even.
      positions: int [batch, time].
      dtype: Dtype of the hidden states.
    Returns:
      Two arrays [batch, time, 1, width / 2].
    """
    dtype = jnp.promote_types(dtype, jnp.float32)
    angles = positions[..., None, None].astype(dtype) * jnp.asarray(frequencies(rotary, width), dtype)
    amplitude = rotary.scaling.amplitude if isinstance(rotary.scaling, YarnScaling) else 1.0
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def rotate(x_BTNH: Array, cos: Array, sin: Array) -> Array:
    """Turn queries or keys [batch, time, heads, width] by their positions; the dtype stays."""
    first, second = jnp.split(x_BTNH.astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def _check_factor(factor: float) -> None:
    if not (math.isfinite(factor) and factor >= 1):
        raise ValueError(f"the factor of a scaling must be a number ≥ 1, got {factor!r}")
