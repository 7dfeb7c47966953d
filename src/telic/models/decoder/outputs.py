"""What a decoder gives beside logits: hidden states with what was seen on the way, and the head that reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from telic.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HiddenStates:
    """What one forward pass gives an objective; the logits are `Head.logits` of `hidden`.

    Attributes:
      hidden: Hidden states after the final norm, [batch, time, d_model].
      state: Whole collections other than ``params`` that changed. A decoder changes none by itself.
      router: `RouterStatistics` of a mixture of experts, or None.
      qk_max: Largest attention logit of each head by the path of its block under ``params``, each [heads] or [layers,
        heads]: what `Aux.qk_stats` takes. None unless asked for.
    """

    hidden: Any
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    router: Any = None
    qk_max: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Head:
    """What turns hidden states into logits: ``scale · cap(hidden @ kernel + bias)``.

    Attributes:
      kernel: [d_model, vocab]; the embedding transposed where the head is tied.
      bias: [vocab], or None.
      soft_cap: Bound c of the cap ``c · tanh(x / c)``; None for no cap. Static.
      scale: Factor on the capped products. Static.
    """

    kernel: Any
    bias: Any = None
    soft_cap: float | None = field(default=None, metadata={"static": True})
    scale: float = field(default=1.0, metadata={"static": True})

    def logits(self, hidden: Array) -> Array:
        """Give logits, [..., vocab], in at least float32, of hidden states [..., d_model]."""
        dtype = jnp.promote_types(jnp.promote_types(hidden.dtype, self.kernel.dtype), jnp.float32)
        logits = jnp.matmul(hidden, self.kernel, preferred_element_type=dtype)
        if self.bias is not None:
            logits = logits + self.bias.astype(dtype)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits if self.scale == 1.0 else logits * self.scale
