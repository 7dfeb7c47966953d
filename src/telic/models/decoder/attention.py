"""One attention block: projections, norms and rotation of heads, a kernel, and the way back.

B batch, T time, N query heads, K key heads, H width of a head.
"""

import math
from typing import Any

import jax
from flax import linen as nn

from telic.models.decoder import kernels
from telic.models.decoder.config import DecoderConfig
from telic.models.decoder.kernels import Visible
from telic.models.decoder.norms import RMSNorm
from telic.models.decoder.rotary import rotate
from telic.types import Array


class Attention(nn.Module):
    """Grouped-query self-attention.

    Attributes:
      config: The decoder's architecture.
      train: Whether attention dropout draws.
    """

    config: DecoderConfig
    train: bool

    @nn.compact
    def __call__(
        self, x: Array, turn: tuple[Array, Array] | None, visible: Visible, *, past: Any = None, wants_max: bool = False
    ) -> tuple[Array, tuple[Array, Array], Array | None]:
        """Attend within a row, or to the slots of a cache.

        Args:
          x: Normed hidden states, [batch, time, d_model].
          turn: Cosines and sines of the positions, or None without rotary positions.
          visible: Who sees whom.
          past: Keys and values of a cache, each [batch, slots, kv_heads, width], or None.
          wants_max: Whether to give the largest logit of each head.
        Returns:
          The branch [batch, time, d_model], the tokens' own keys and values, the largest logits [heads] or None.
        """
        c = self.config
        width = c.head_width
        spread = nn.initializers.normal(c.init_std)
        ending = nn.initializers.normal(c.init_std / math.sqrt(2 * c.num_layers))

        def project(name: str, heads: int) -> Array:
            flat: Any = nn.Dense(heads * width, use_bias=c.qkv_bias, kernel_init=spread, name=name)(x)
            return flat.reshape(*x.shape[:-1], heads, width)

        query_BTNH, key_BTKH, value_BTKH = (
            project("query", c.num_heads),
            project("key", c.kv_heads),
            project("value", c.kv_heads),
        )
        if c.qk_norm:
            query_BTNH = RMSNorm(c.norm_epsilon, name="query_norm")(query_BTNH)
            key_BTKH = RMSNorm(c.norm_epsilon, name="key_norm")(key_BTKH)
        if turn is not None:
            query_BTNH, key_BTKH = rotate(query_BTNH, *turn), rotate(key_BTKH, *turn)
        own = key_BTKH, value_BTKH
        if past is not None:
            slot = (0, visible.start, 0, 0)
            key_BTKH, value_BTKH = (
                jax.lax.dynamic_update_slice(old, new.astype(old.dtype), slot)
                for old, new in zip(past, own, strict=True)
            )
        scale = 1 / math.sqrt(width) if c.attention_scale is None else c.attention_scale
        dropout = c.attention_dropout if self.train else 0.0
        mixed = kernels.kernel_of(c.attention)(
            query_BTNH,
            key_BTKH,
            value_BTKH,
            visible=visible,
            scale=scale,
            soft_cap=c.attention_soft_cap,
            dropout=dropout,
            dropout_key=self.make_rng("dropout") if dropout else None,
        )
        largest = kernels.largest_logits(query_BTNH, key_BTKH, visible=visible, scale=scale) if wants_max else None
        back: Any = nn.Dense(c.d_model, use_bias=c.output_bias, kernel_init=ending, name="output")
        return back(mixed.reshape(*x.shape[:-1], c.num_heads * width)), own, largest
