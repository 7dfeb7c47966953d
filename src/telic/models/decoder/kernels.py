"""Attention over given queries, keys and values: who sees whom, and the functions that compute it.

B batch, T queries in time, S keys, N query heads, K key heads, G = N / K heads per group, H width of a head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from telic.errors import unknown_name
from telic.types import Array, Key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visible:
    """Which keys a query sees: those at or before it, of its own document, within the window.

    Attributes:
      segment_ids: Document of each token, int [batch, time]; None where each row is one document.
      valid: Slots of a cache that hold a token, bool [batch, slots]; None outside of decoding.
      start: Slot of the first query, int scalar; 0 outside of decoding.
      window: Number of keys a query sees, itself included; None for all, an array where layers differ under scan.
      is_cached: Whether keys are the slots of a cache. Static.
    """

    segment_ids: Any = None
    valid: Any = None
    start: Any = 0
    window: Any = None
    is_cached: bool = field(default=False, metadata={"static": True})

    def mask(self, num_queries: int, num_keys: int) -> Array:
        """Give who sees whom as bool [batch or 1, 1, queries, keys]."""
        query = self.start + jnp.arange(num_queries)[:, None]
        key = jnp.arange(num_keys)[None, :]
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        seen = seen[None, None]
        if self.segment_ids is not None:
            seen = seen & (self.segment_ids[:, None, :, None] == self.segment_ids[:, None, None, :])
        if self.valid is not None:
            seen = seen & self.valid[:, None, None, :]
        return seen


def dot_product(
    query: Array,
    key: Array,
    value: Array,
    *,
    visible: Visible,
    scale: float,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Key | None = None,
) -> Array:
    """Attend with `jax.nn.dot_product_attention`, or written out where that lacks something.

    It has no soft cap, no dropout, and takes its softmax in float32, which float64 must not.
    """
    if soft_cap is not None or dropout or query.dtype == jnp.float64:
        return einsum(
            query,
            key,
            value,
            visible=visible,
            scale=scale,
            soft_cap=soft_cap,
            dropout=dropout,
            dropout_key=dropout_key,
        )
    return jax.nn.dot_product_attention(query, key, value, scale=scale, **_options(visible, query, key))


def cudnn(
    query: Array,
    key: Array,
    value: Array,
    *,
    visible: Visible,
    scale: float,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Key | None = None,
) -> Array:
    """Attend with cuDNN's flash attention, which needs a GPU and float16 or bfloat16.

    Raises:
      ValueError: There is a soft cap or dropout, which it lacks.
    """
    del dropout_key
    if soft_cap is not None or dropout:
        raise ValueError("the cudnn kernel has neither soft cap nor dropout; use attention='einsum'")
    options = _options(visible, query, key)
    return jax.nn.dot_product_attention(query, key, value, scale=scale, implementation="cudnn", **options)


def _options(visible: Visible, query: Array, key: Array) -> dict[str, Any]:
    """Say who sees whom in the words of `jax.nn.dot_product_attention`; a mask only where there is no word."""
    window = visible.window
    if visible.is_cached or visible.segment_ids is not None or not (window is None or isinstance(window, int)):
        return {"mask": visible.mask(query.shape[1], key.shape[1])}
    return {"is_causal": True, "local_window_size": None if window is None else (window - 1, 0)}


def einsum(
    query: Array,
    key: Array,
    value: Array,
    *,
    visible: Visible,
    scale: float,
    soft_cap: float | None = None,
    dropout: float = 0.0,
    dropout_key: Key | None = None,
) -> Array:
    """Attend written out, softmax in at least float32: any dtype, soft cap and dropout."""
    logits = _logits(query, key, scale)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    mask = visible.mask(query.shape[1], key.shape[1])[:, :, None]
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(logits.dtype).min), axis=-1)
    if dropout:
        kept = jax.random.bernoulli(_needed(dropout_key), 1 - dropout, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout), 0)
    mixed_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(value.dtype), value)
    return mixed_BTKGH.reshape(query.shape)


def _logits(query: Array, key: Array, scale: float) -> Array:
    """Give scaled products [batch, key heads, group, queries, keys] in at least float32."""
    batch, time, heads, width = query.shape
    query_BTKGH = query.reshape(batch, time, key.shape[2], heads // key.shape[2], width)
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.einsum("BTKGH,BSKH->BKGTS", query_BTKGH, key, preferred_element_type=wide) * scale


def largest_logits(query: Array, key: Array, *, visible: Visible, scale: float) -> Array:
    """Give each query head's largest logit over the pairs that see each other, before any cap: [heads]."""
    mask = visible.mask(query.shape[1], key.shape[1])[:, :, None]
    if visible.segment_ids is not None:
        mask = mask & (visible.segment_ids != 0)[:, None, None, :, None]
    logits = jnp.where(mask, _logits(jax.lax.stop_gradient(query), jax.lax.stop_gradient(key), scale), -jnp.inf)
    return logits.max(axis=(0, 3, 4)).reshape(-1)


def _needed(key: Key | None) -> Key:
    if key is None:
        raise ValueError("attention dropout needs a key; pass key= in training")
    return key


attention_kernels: Mapping[str, Callable[..., Array]] = MappingProxyType(
    {"cudnn": cudnn, "dot_product": dot_product, "einsum": einsum}
)
"""Attention kernels by name. A kernel of your own is a function of their signature, given as
``DecoderConfig(attention=function)``: ``(query [batch, queries, heads, width], key, value [batch, keys, kv_heads,
width], *, visible, scale, soft_cap, dropout, dropout_key) -> [batch, queries, heads, width]``."""


def kernel_of(attention: str | Callable[..., Array]) -> Callable[..., Array]:
    """Give the kernel of a name, or the function itself.

    Raises:
      ValueError: No kernel has that name.
    """
    if not isinstance(attention, str):
        return attention
    if attention not in attention_kernels:
        raise unknown_name("attention kernel", attention, attention_kernels)
    return attention_kernels[attention]
