"""Small decoders with random weights, for tests; nothing is compiled to make them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.models import Decoder, DecoderConfig


def random_decoder(scale: float = 0.3, **config: Any) -> tuple[Decoder, Any]:
    """Give a decoder and variables in which every leaf is random, norms and biases too, so that none goes unnoticed."""
    decoder = Decoder(DecoderConfig(**config))
    tokens = np.zeros((1, 2), np.int32)
    shapes = jax.eval_shape(lambda key: decoder.init_variables(key, tokens), jax.random.key(0))
    rng = np.random.default_rng(1)

    def draw(path: Any, leaf: Any) -> jax.Array:
        centre = 1.0 if tree.path_name(path).endswith("/scale") else 0.0
        return jnp.asarray(centre + scale * rng.normal(size=leaf.shape), leaf.dtype)

    return decoder, jax.tree_util.tree_map_with_path(draw, shapes)
