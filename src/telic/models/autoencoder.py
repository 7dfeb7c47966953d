"""A simple autoencoder of images, and its latents as a diffusion model reads them."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from telic.errors import ShapeError
from telic.models.vit import patch_grid, patchify, unpatchify
from telic.types import Array, Key, Variables


class Autoencoder(nn.Module):
    """Patches of an image, each to a few numbers and back, with some of its surroundings.

    Layouts: images [batch, height, width, channels]; latents [batch, height / patch, width / patch, latents].

    Attributes:
      patch: Side of a patch, in pixels.
      latents: Numbers for each patch.
      width: Channels inside.
      channels: Channels of the images.
      dtype: Dtype of computation; None follows the inputs.
    """

    patch: int = 4
    latents: int = 4
    width: int = 64
    channels: int = 1
    dtype: Any = None

    def setup(self) -> None:
        """Name the layers of both halves."""
        self.embed = nn.Dense(self.width, dtype=self.dtype)
        self.mix = nn.Conv(self.width, (3, 3), dtype=self.dtype)
        self.to_latents = nn.Dense(self.latents, dtype=self.dtype)
        self.from_latents = nn.Conv(self.width, (3, 3), dtype=self.dtype)
        self.unmix = nn.Conv(self.width, (3, 3), dtype=self.dtype)
        self.to_pixels = nn.Dense(self.patch**2 * self.channels, dtype=self.dtype)

    def __call__(self, x: Array) -> Array:
        """Give the images of the images' latents: what is compared with the images in training."""
        return self.decode(self.encode(x))

    def encode(self, x: Array) -> Array:
        """Give the latents of images.

        Raises:
          ShapeError: The images have another number of channels, or patches do not divide them.
        """
        grid = patch_grid(x.shape, self.patch)
        if len(grid) != 2 or x.shape[-1] != self.channels:
            raise ShapeError(f"this autoencoder takes images [batch, height, width, {self.channels}], got {x.shape}")
        hidden = nn.gelu(self.embed(patchify(x, self.patch))).reshape(x.shape[0], *grid, self.width)
        return self.to_latents(hidden + nn.gelu(self.mix(hidden)))

    def decode(self, latents: Array) -> Array:
        """Give the images of latents."""
        hidden = nn.gelu(self.from_latents(latents))
        pixels = self.to_pixels(hidden + nn.gelu(self.unmix(hidden)))
        grid = latents.shape[1:3]
        return unpatchify(pixels.reshape(latents.shape[0], math.prod(grid), -1), grid, self.patch)


@dataclass(frozen=True, eq=False)
class Latents:
    """A trained autoencoder as `DiffusionObjective(autoencoder=)` takes it: latents of mean 0 and variance 1.

    Attributes:
      module: The `Autoencoder`, or a module with its methods.
      variables: Its weights, and under "latents" the mean and standard deviation of what it encodes to.
    """

    module: Any
    variables: Variables

    @staticmethod
    def of(module: Any, variables: Variables, images: Any) -> "Latents":
        """Measure the latents of some images, by channel.

        Args:
          module: The autoencoder.
          variables: Its weights.
          images: As many as to tell a mean, [n, height, width, channels].
        """
        held = {"params": variables["params"]}
        found = jnp.asarray(module.apply(held, jnp.asarray(images), method="encode"))
        axes = tuple(range(found.ndim - 1))
        scale = jnp.maximum(found.std(axis=axes), 1e-6)
        return Latents(module, {**held, "latents": {"mean": found.mean(axis=axes), "std": scale}})

    def encode(self, variables: Variables, images: Any, *, key: Key) -> Array:
        """Give the standardised latents of images; nothing is drawn."""
        del key
        found: Any = self.module.apply({"params": variables["params"]}, images, method="encode")
        return (found - variables["latents"]["mean"]) / variables["latents"]["std"]

    def decode(self, variables: Variables, latents: Any) -> jax.Array:
        """Give the images of standardised latents."""
        scaled = latents * variables["latents"]["std"] + variables["latents"]["mean"]
        return self.module.apply({"params": variables["params"]}, scaled, method="decode")
