"""A diffusion transformer: patches, with the noise level and a class modulating every block (adaLN-zero)."""

import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from telic.axes import BATCH_AXES, constrain
from telic.errors import ShapeError
from telic.models.vit import MLP, Attention, check_heads, patch_grid, patchify, positions, unpatchify
from telic.types import Array


class DiT(nn.Module):
    """A diffusion transformer over images or videos.

    Every block starts as the identity and the output as zero, so training starts from the loss of a constant. Source:
    Peebles and Xie 2023.

    Attributes:
      patch: Side of a patch, in pixels.
      dim: Width.
      depth: Number of blocks.
      heads: Attention heads.
      mlp_ratio: Hidden width of the MLPs over `dim`.
      classes: Number of classes, the one that means "no class" included; None for a model without them.
      tubelet: Frames of a patch; for videos.
      dtype: Dtype of computation; None follows the inputs.
    """

    patch: int = 4
    dim: int = 128
    depth: int = 4
    heads: int = 4
    mlp_ratio: float = 4.0
    classes: int | None = None
    tubelet: int = 2
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array, t: Array, label: Array | None = None) -> Array:
        """Give one value for each of the input's.

        Args:
          x: Noisy images [batch, height, width, channels] or videos [batch, frames, height, width, channels].
          t: What tells the noise level, [batch].
          label: Class ids, int [batch], for a model with classes.
        Returns:
          An array of x's shape.
        Raises:
          ShapeError: Patches do not divide the input, or a label came to a model without classes, or none to one with.
        """
        check_heads(self.dim, self.heads)
        grid = patch_grid(x.shape, self.patch, self.tubelet)
        # The time comes in float32 whatever the images are; the vector made of it follows the images.
        condition = Condition(self.dim, self.classes, self.dtype or x.dtype, name="condition")(t, label)
        tokens = nn.Dense(self.dim, dtype=self.dtype, name="patch_embed")(patchify(x, self.patch, self.tubelet))
        tokens = tokens + jnp.asarray(positions(self.dim, grid), tokens.dtype)
        for i in range(self.depth):
            tokens = DiTBlock(self.heads, self.mlp_ratio, self.dtype, name=f"blocks_{i}")(tokens, condition)
        shift, scale = jnp.split(_zero_dense(2 * self.dim, self.dtype, "final_modulation")(nn.silu(condition)), 2, -1)
        tokens = _modulate(_norm(self.dtype)(tokens), shift, scale)
        pixels = x.shape[-1] * math.prod(x.shape[1:-1]) // math.prod(grid)
        return unpatchify(_zero_dense(pixels, self.dtype, "out")(tokens), grid, self.patch, self.tubelet)


class DiTBlock(nn.Module):
    """A transformer block whose norms and residual branches a condition scales: [batch, tokens, dim] → the same."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array, condition: Array) -> Array:
        x = constrain(x, BATCH_AXES)
        made = _zero_dense(6 * x.shape[-1], self.dtype, "modulation")(nn.silu(condition))
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = jnp.split(made, 6, axis=-1)
        hidden = _modulate(_norm(self.dtype)(x), shift_1, scale_1)
        x = constrain(x + gate_1[:, None] * Attention(self.heads, self.dtype, name="attn")(hidden), BATCH_AXES)
        hidden = _modulate(_norm(self.dtype)(x), shift_2, scale_2)
        hidden = MLP(self.mlp_ratio, approximate=True, dtype=self.dtype, name="mlp")(hidden)
        return constrain(x + gate_2[:, None] * hidden, BATCH_AXES)


class Condition(nn.Module):
    """A vector for a noise level and a class: ([batch], int [batch] or None) → [batch, dim]."""

    dim: int
    classes: int | None = None
    dtype: Any = None

    @nn.compact
    def __call__(self, t: Array, label: Array | None = None) -> Array:
        if (label is None) != (self.classes is None):
            has = "no classes" if self.classes is None else f"{self.classes} classes"
            got = "none" if label is None else "some"
            raise ShapeError(
                f"a model of {has} got {got} of labels; set classes= to the number of them, plus one that means none"
            )
        waves = time_waves(t, 2 * (self.dim // 2)).astype(self.dtype or t.dtype)
        hidden = nn.silu(nn.Dense(self.dim, dtype=self.dtype, name="time_1")(waves))
        vector = constrain(nn.Dense(self.dim, dtype=self.dtype, name="time_2")(hidden), BATCH_AXES)
        if label is None or self.classes is None:
            return vector
        init = nn.initializers.normal(0.02)
        return vector + nn.Embed(self.classes, self.dim, dtype=self.dtype, embedding_init=init, name="label")(label)


def time_waves(t: Array, dim: int, *, max_period: float = 10_000.0) -> Array:
    """Give cosines and sines of a time at falling frequencies: [batch] → [batch, dim], in at least float32.

    Source: Ho et al. 2020.
    """
    t = t.astype(jnp.promote_types(t.dtype, jnp.float32))
    frequencies = jnp.exp(-math.log(max_period) * jnp.arange(dim // 2, dtype=t.dtype) / (dim // 2))
    angles = t[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _norm(dtype: Any) -> nn.LayerNorm:
    return nn.LayerNorm(use_bias=False, use_scale=False, dtype=dtype)


def _modulate(x: Array, shift: Array, scale: Array) -> Array:
    return x * (1 + scale[:, None]) + shift[:, None]


def _zero_dense(features: int, dtype: Any, name: str) -> nn.Dense:
    return nn.Dense(features, dtype=dtype, kernel_init=nn.initializers.zeros, name=name)
