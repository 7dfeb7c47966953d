"""One block: attention and MLP, each normed before and added after."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from telic.axes import BATCH_AXES, constrain
from telic.models.decoder.attention import Attention
from telic.models.decoder.config import DecoderConfig
from telic.models.decoder.feedforward import MLP
from telic.models.decoder.kernels import Visible
from telic.models.decoder.mixture import MixtureOfExperts
from telic.models.decoder.norms import NORMS
from telic.types import Array

HIDDEN_AXES = (BATCH_AXES, "sequence")
"""Axes of a mesh that hidden states [batch, time, d_model] lie over: XLA then gathers the weights of each layer."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Surroundings:
    """What all blocks of one pass read beside the hidden states.

    Attributes:
      turn: Cosines and sines of the positions, or None.
      visible: Who sees whom, without the window.
      counted: Tokens that count in the router's statistics, bool [batch, time]; None counts all.
    """

    turn: Any
    visible: Visible
    counted: Any = None


class Block(nn.Module):
    """One block of a decoder.

    Attributes:
      config: The decoder's architecture.
      window: The layer's sliding window; None where it has none, or where it comes with each call.
      train: Whether dropout draws.
      wants_keys: Whether to give the tokens' own keys and values.
      wants_max: Whether to give each head's largest attention logit.
    """

    config: DecoderConfig
    window: int | None = None
    train: bool = False
    wants_keys: bool = False
    wants_max: bool = False

    @nn.compact
    def __call__(self, x: Array, around: Surroundings, window: Any = None, past: Any = None) -> tuple[Array, Any]:
        """Give the next hidden states and {keys, router, largest}, each None where not wanted.

        Args:
          x: Hidden states, [batch, time, d_model].
          around: What all blocks read.
          window: The layer's window as a scalar, where layers differ under scan.
          past: This layer's keys and values of a cache, or None.
        """
        c = self.config
        norm = NORMS[c.norm]
        drop = nn.Dropout(c.residual_dropout, deterministic=not self.train)
        visible = dataclasses.replace(around.visible, window=self.window if window is None else window)
        branch, own, largest = Attention(c, self.train, name="attention")(
            norm(c.norm_epsilon, name="attention_norm")(x), around.turn, visible, past=past, wants_max=self.wants_max
        )
        x = constrain(x + drop(branch), *HIDDEN_AXES)
        inner = norm(c.norm_epsilon, name="mlp_norm")(x)
        router: Any = None
        if c.experts is None:
            branch = MLP(c, name="mlp")(inner)
        else:
            branch, router = MixtureOfExperts(c, name="experts")(inner, around.counted)
        keys = own if self.wants_keys else None
        return constrain(x + drop(branch), *HIDDEN_AXES), {"keys": keys, "router": router, "largest": largest}
