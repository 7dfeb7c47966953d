"""Normalisation of hidden states, computed in at least float32 and given back in the dtype of the input."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from telic.types import Array


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension and scale.

    Attributes:
      epsilon: Added to the mean square.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale: Any = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = _widen(x)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale.astype(wide.dtype)).astype(x.dtype)


class LayerNorm(nn.Module):
    """Subtract the mean over the last dimension, divide by the standard deviation, scale and shift.

    Attributes:
      epsilon: Added to the variance.
    """

    epsilon: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale: Any = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias: Any = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        wide = _widen(x)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (wide * scale.astype(wide.dtype) + bias.astype(wide.dtype)).astype(x.dtype)


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rms": RMSNorm, "layer": LayerNorm}
"""Norms by the name that `DecoderConfig.norm` gives."""


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
