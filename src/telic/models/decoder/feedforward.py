"""The MLP of a block."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import linen as nn

from telic.models.decoder.config import DecoderConfig
from telic.types import Array

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "silu": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "relu": jax.nn.relu,
    }
)
"""Activations by the name that `DecoderConfig.activation` gives."""


class MLP(nn.Module):
    """Two projections with an activation between, and a gate where the config has one.

    Attributes:
      config: The decoder's architecture.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        spread = nn.initializers.normal(c.init_std)
        ending = nn.initializers.normal(c.init_std / math.sqrt(2 * c.num_layers))
        act = ACTIVATIONS[c.activation]

        def project(name: str) -> Any:
            return nn.Dense(c.ff_width, use_bias=c.mlp_bias, kernel_init=spread, name=name)(x)

        inner = act(project("gate")) * project("up") if c.gated else act(project("up"))
        down: Any = nn.Dense(c.d_model, use_bias=c.mlp_bias, kernel_init=ending, name="down")
        return down(inner)
