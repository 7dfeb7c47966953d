"""Keys and values kept while a text is continued token by token."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far. All rows write the same slot: prompts end together, padded on the left.

    Attributes:
      keys: [layers, batch, slots, kv_heads, width].
      values: The same.
      valid: Slots that hold a token, bool [batch, slots]; padding and slots to come are False.
      lengths: Tokens so far, without padding, int32 [batch]: the next token's position.
      used: Slots written so far, int32 scalar.
    """

    keys: Any
    values: Any
    valid: Any
    lengths: Any
    used: Any

    @staticmethod
    def of(own: tuple[Array, Array], valid: Array, *, slots: int) -> "Cache":
        """Start from the keys and values of prompts, [layers, batch, time, kv_heads, width], with room for `slots`."""
        room = slots - valid.shape[1]
        keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0))) for x in own)
        return Cache(
            keys=keys,
            values=values,
            valid=jnp.pad(valid, ((0, 0), (0, room))),
            lengths=valid.sum(1).astype(jnp.int32),
            used=jnp.asarray(valid.shape[1], jnp.int32),
        )

    def seen(self) -> Array:
        """Give the slots that the next token sees, itself included: bool [batch, slots]."""
        return self.valid | (jnp.arange(self.valid.shape[1]) == self.used)

    def extended(self, own: tuple[Array, Array]) -> "Cache":
        """Give the cache with one more token per row; `own` are its keys and values, [layers, batch, 1, ...]."""
        at = (0, 0, self.used, 0, 0)
        keys, values = (
            jax.lax.dynamic_update_slice(old, new.astype(old.dtype), at)
            for old, new in zip((self.keys, self.values), own, strict=True)
        )
        return Cache(keys, values, self.seen(), self.lengths + 1, self.used + 1)
