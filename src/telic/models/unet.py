"""A small U-Net for images, the convolutional denoiser: channels last throughout."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from telic.axes import BATCH_AXES, constrain
from telic.errors import ShapeError
from telic.models.dit import Condition
from telic.types import Array


class UNet(nn.Module):
    """A U-Net of residual blocks, with the noise level and a class scaling each of them.

    Its last layer starts at zero. Source: Ho et al. 2020, without attention; the scale and shift of Dhariwal and Nichol
    2021.

    Attributes:
      widths: Channels at each resolution; each one after the first halves the sides.
      blocks: Residual blocks at each resolution.
      groups: Groups of the group norms; must divide every width.
      classes: Number of classes, the one that means "no class" included; None for a model without them.
      dtype: Dtype of computation; None follows the inputs.
    """

    widths: tuple[int, ...] = (32, 64)
    blocks: int = 1
    groups: int = 8
    classes: int | None = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array, t: Array, label: Array | None = None) -> Array:
        """Give one value for each of the input's.

        Args:
          x: Noisy images [batch, height, width, channels]; the sides must be multiples of 2^(resolutions - 1).
          t: What tells the noise level, [batch].
          label: Class ids, int [batch], for a model with classes.
        Returns:
          An array of x's shape.
        Raises:
          ShapeError: The sides do not halve often enough, or the groups do not divide a width.
        """
        factor = 2 ** (len(self.widths) - 1)
        if x.ndim != 4 or x.shape[1] % factor or x.shape[2] % factor:
            raise ShapeError(
                f"a U-Net of {len(self.widths)} resolutions takes images [batch, height, width, channels] with sides "
                f"that are multiples of {factor}, got {x.shape}; pad them, or take fewer widths"
            )
        if any(width % self.groups for width in self.widths):
            raise ShapeError(f"groups={self.groups} must divide every width of {self.widths}")
        condition = nn.silu(
            Condition(4 * self.widths[0], self.classes, self.dtype or x.dtype, name="condition")(t, label)
        )
        hidden = nn.Conv(self.widths[0], (3, 3), dtype=self.dtype, name="first")(x)
        skips = [hidden]
        for level, width in enumerate(self.widths):
            if level:
                hidden = nn.Conv(width, (3, 3), (2, 2), dtype=self.dtype, name=f"down_{level}")(hidden)
                skips.append(hidden)
            for i in range(self.blocks):
                hidden = self._block(width, f"down_{level}_{i}")(hidden, condition)
                skips.append(hidden)
        hidden = self._block(self.widths[-1], "middle")(hidden, condition)
        for level, width in reversed(list(enumerate(self.widths))):
            for i in range(self.blocks + 1):
                hidden = jnp.concatenate([hidden, skips.pop()], axis=-1)
                hidden = self._block(width, f"up_{level}_{i}")(hidden, condition)
            if level:
                shape = (hidden.shape[0], 2 * hidden.shape[1], 2 * hidden.shape[2], hidden.shape[3])
                hidden = jax.image.resize(hidden, shape, "nearest")
                hidden = nn.Conv(self.widths[level - 1], (3, 3), dtype=self.dtype, name=f"up_{level}")(hidden)
        hidden = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype, name="norm")(hidden))
        zeros = nn.initializers.zeros
        return nn.Conv(x.shape[-1], (3, 3), dtype=self.dtype, kernel_init=zeros, name="out")(hidden)

    def _block(self, width: int, name: str) -> "ResidualBlock":
        return ResidualBlock(width, self.groups, self.dtype, name=name)


class ResidualBlock(nn.Module):
    """Two convolutions with a condition between: [batch, height, width, channels] → [batch, height, width, width]."""

    width: int
    groups: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Array, condition: Array) -> Array:
        x = constrain(x, BATCH_AXES)
        groups = self.groups if x.shape[-1] % self.groups == 0 else 1
        hidden = nn.silu(nn.GroupNorm(groups, dtype=self.dtype, name="norm_1")(x))
        hidden = nn.Conv(self.width, (3, 3), dtype=self.dtype, name="conv_1")(hidden)
        made = nn.Dense(2 * self.width, dtype=self.dtype, name="modulation")(condition)
        scale, shift = jnp.split(made[:, None, None], 2, axis=-1)
        hidden = nn.GroupNorm(self.groups, dtype=self.dtype, name="norm_2")(hidden) * (1 + scale) + shift
        hidden = nn.Conv(self.width, (3, 3), dtype=self.dtype, name="conv_2")(nn.silu(hidden))
        if x.shape[-1] != self.width:
            x = nn.Dense(self.width, dtype=self.dtype, name="skip")(x)
        return constrain(x + hidden, BATCH_AXES)
