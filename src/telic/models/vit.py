"""Vision transformers: an encoder over any subset of patches, and the predictor of a joint-embedding architecture.

Layouts: images [batch, height, width, channels] or videos [batch, frames, height, width, channels]; tokens
[batch, tokens, dim]; patch indices in raster order, int [batch, tokens].
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from numpy.typing import NDArray

from telic.axes import BATCH_AXES, constrain
from telic.errors import ShapeError
from telic.mean import wide
from telic.types import Array


class Attention(nn.Module):
    """Multi-head self-attention over all tokens: [batch, tokens, dim] → the same."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        batch, tokens, dim = x.shape
        qkv = nn.Dense(3 * dim, dtype=self.dtype, name="qkv")(x)
        q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, self.heads, dim // self.heads), 2, 0)
        # jax.nn.dot_product_attention computes in float32 at most; these few tokens need no kernel of their own.
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * (dim // self.heads) ** -0.5, k)
        weights = jax.nn.softmax(wide(scores), axis=-1).astype(v.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(dim, dtype=self.dtype, name="proj")(mixed.reshape(batch, tokens, dim))


class MLP(nn.Module):
    """Two dense layers with GELU between: [..., dim] → the same."""

    ratio: float = 4.0
    approximate: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        hidden = nn.Dense(int(x.shape[-1] * self.ratio), dtype=self.dtype, name="fc1")(x)
        hidden = nn.gelu(hidden, approximate=self.approximate)
        return nn.Dense(x.shape[-1], dtype=self.dtype, name="fc2")(hidden)


class Block(nn.Module):
    """A pre-norm transformer block: [batch, tokens, dim] → the same."""

    heads: int
    mlp_ratio: float = 4.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = constrain(x, BATCH_AXES)
        x = x + Attention(self.heads, self.dtype, name="attn")(nn.LayerNorm(dtype=self.dtype, name="norm1")(x))
        x = constrain(x, BATCH_AXES)
        hidden = nn.LayerNorm(dtype=self.dtype, name="norm2")(x)
        return constrain(x + MLP(self.mlp_ratio, dtype=self.dtype, name="mlp")(hidden), BATCH_AXES)


class ViT(nn.Module):
    """A vision transformer that encodes the patches it is asked for.

    Positions are fixed sines and cosines, added before patches are chosen, so a patch keeps its place whatever others
    there are. Source: Assran et al. 2023 (I-JEPA); agrees with its code, tests/golden/test_jepa_model.py.

    Attributes:
      patch: Side of a patch, in pixels.
      dim: Width of the features.
      depth: Number of blocks.
      heads: Attention heads.
      mlp_ratio: Hidden width of the MLPs over `dim`.
      tubelet: Frames of a patch; for videos.
      dtype: Dtype of computation; None follows the inputs.
      position_base: Longest wave of the positions over the shortest. The default is I-JEPA's, for large grids; on a few
        patches most of its waves are constants, and 20 tells the places apart.
    """

    patch: int = 4
    dim: int = 96
    depth: int = 4
    heads: int = 4
    mlp_ratio: float = 4.0
    tubelet: int = 2
    dtype: Any = None
    position_base: float = 10_000.0

    @nn.compact
    def __call__(self, x: Array, indices: Array | None = None) -> Array:
        """Encode images, or the patches of them that `indices` names.

        Args:
          x: Images or videos.
          indices: Patches, int [batch, tokens]; None takes all of them.
        Returns:
          Features, [batch, tokens, dim], layer-normed.
        """
        check_heads(self.dim, self.heads)
        grid = patch_grid(x.shape, self.patch, self.tubelet)
        tokens = nn.Dense(self.dim, dtype=self.dtype, name="patch_embed")(patchify(x, self.patch, self.tubelet))
        tokens = tokens + jnp.asarray(positions(self.dim, grid, base=self.position_base), tokens.dtype)
        if indices is not None:
            tokens = take(tokens, indices)
        for i in range(self.depth):
            tokens = Block(self.heads, self.mlp_ratio, self.dtype, name=f"blocks_{i}")(tokens)
        return nn.LayerNorm(dtype=self.dtype, name="norm")(tokens)


class ViTPredictor(nn.Module):
    """Predicts the features of some patches from those of others.

    Attributes:
      grid: Patches of an image, (rows, columns), or (frames, rows, columns) of a video.
      dim: Width inside.
      depth: Number of blocks.
      heads: Attention heads.
      mlp_ratio: Hidden width of the MLPs over `dim`.
      dtype: Dtype of computation; None follows the inputs.
    """

    grid: tuple[int, ...]
    dim: int = 48
    depth: int = 2
    heads: int = 4
    mlp_ratio: float = 4.0
    dtype: Any = None

    @nn.compact
    def __call__(self, context: Array, context_indices: Array, target_indices: Array) -> Array:
        """Predict features.

        Args:
          context: Features of the context patches, [batch, context, features].
          context_indices: Which patches they are, int [batch, context].
          target_indices: Patches to predict, int [batch, targets].
        Returns:
          Features of the target patches, [batch, targets, features].
        """
        check_heads(self.dim, self.heads)
        table = jnp.asarray(positions(self.dim, self.grid), context.dtype)
        known = nn.Dense(self.dim, dtype=self.dtype, name="embed")(context) + table[context_indices]
        token = self.param("mask_token", nn.initializers.truncated_normal(0.02), (self.dim,))
        wanted = token.astype(known.dtype) + table[target_indices]
        x = jnp.concatenate([known, wanted.astype(known.dtype)], axis=1)
        for i in range(self.depth):
            x = Block(self.heads, self.mlp_ratio, self.dtype, name=f"blocks_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(context.shape[-1], dtype=self.dtype, name="proj")(x[:, context.shape[1] :])


def patch_grid(shape: tuple[int, ...], patch: int, tubelet: int = 1) -> tuple[int, ...]:
    """Give how many patches an image or video has along each axis.

    Raises:
      ShapeError: It has another rank, or patches do not divide it.
    """
    if len(shape) not in (4, 5):
        raise ShapeError(
            f"images are [batch, height, width, channels] and videos [batch, frames, height, width, channels], got "
            f"{shape}; add the axis that is missing, as with images[..., None]"
        )
    sides = (tubelet,) * (len(shape) - 4) + (patch, patch)
    if any(n % side for n, side in zip(shape[1:-1], sides, strict=True)):
        raise ShapeError(f"patches of {sides} do not divide an input of {shape[1:-1]}; crop, pad or take another patch")
    return tuple(n // side for n, side in zip(shape[1:-1], sides, strict=True))


def patchify(x: Array, patch: int, tubelet: int = 1) -> Array:
    """Cut images or videos into patches: [batch, patches, pixels of a patch · channels], in raster order."""
    grid = patch_grid(x.shape, patch, tubelet)
    sides = (tubelet,) * (x.ndim - 4) + (patch, patch)
    split = [n for pair in zip(grid, sides, strict=True) for n in pair]
    x = x.reshape(x.shape[0], *split, x.shape[-1])
    axes = [0, *range(1, 2 * len(grid), 2), *range(2, 2 * len(grid) + 1, 2), 2 * len(grid) + 1]
    return x.transpose(axes).reshape(x.shape[0], math.prod(grid), -1)


def unpatchify(tokens: Array, grid: tuple[int, ...], patch: int, tubelet: int = 1) -> Array:
    """Put patches together again: the inverse of `patchify`."""
    sides = (tubelet,) * (len(grid) - 2) + (patch, patch)
    rank = len(grid)
    x = tokens.reshape(tokens.shape[0], *grid, *sides, -1)
    axes = [0, *(a for i in range(rank) for a in (1 + i, 1 + rank + i)), 1 + 2 * rank]
    return x.transpose(axes).reshape(x.shape[0], *(n * s for n, s in zip(grid, sides, strict=True)), -1)


def positions(dim: int, grid: tuple[int, ...], *, base: float = 10_000.0) -> NDArray[np.float64]:
    """Give sine-cosine positions of a grid, float64 [patches, dim]: an equal part of `dim` for each axis.

    Two axes share it in halves, as in MAE and I-JEPA; of three, time takes what the halves of a third leave.

    Args:
      dim: Width.
      grid: Patches along each axis.
      base: Longest wave over the shortest, which is 2π patches; more than 1.
    Raises:
      ShapeError: The width cannot be shared, or the grid has another number of axes.
      ValueError: `base` is not more than 1.
    """
    if not 1 < base < math.inf:
        raise ValueError(f"the base of positions must be a finite number over 1, such as 10000 or 20, got {base!r}")
    parts = [dim // 2] * 2 if len(grid) == 2 else [dim - 2 * (dim // 3 // 2 * 2), *[dim // 3 // 2 * 2] * 2]
    if len(grid) not in (2, 3) or any(part % 2 for part in parts):
        raise ShapeError(
            f"positions of a grid of {len(grid)} axes need a width that is a multiple of 4 (of 2 in a video), got "
            f"dim={dim}"
        )
    where = np.meshgrid(*(np.arange(n, dtype=np.float64) for n in grid), indexing="ij")
    # The reference lays the columns' part before the rows'.
    order = [*range(len(grid) - 2), len(grid) - 1, len(grid) - 2]
    return np.concatenate([_waves(where[axis].ravel(), parts[axis], base) for axis in order], axis=1)


def _waves(at: NDArray[np.float64], dim: int, base: float) -> NDArray[np.float64]:
    frequencies = 1.0 / base ** (np.arange(dim // 2, dtype=np.float64) / (dim / 2))
    angles = at[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def take(tokens: Array, indices: Array) -> Array:
    """Give the tokens that indices name: [batch, n, dim] and int [batch, m] → [batch, m, dim]."""
    return jnp.take_along_axis(tokens, indices[..., None], axis=1)


def check_heads(dim: int, heads: int) -> None:
    """Raise unless heads divide a width."""
    if heads < 1 or dim % heads:
        raise ShapeError(f"heads={heads} must divide dim={dim}; take a multiple")
