"""Policy-gradient losses of tokens, and what they are averaged over. Pure functions.

Shapes: ratios, log-probs and losses are [rows, time], advantages [rows] or [rows, time].
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from telic.errors import ShapeError, unknown_name
from telic.mean import Mean, wide
from telic.objectives.policy.ratios import masked, own_sums
from telic.types import Array

Aggregate = Literal["sequence_mean", "token_mean", "constant", "sequence_sum"]


@dataclass(frozen=True)
class Clip:
    """PPO's clipped surrogate: ``-min(r · A, clip(r, 1 - low, 1 + high) · A)``.

    Attributes:
      low: How far below 1 a ratio may go before it is clipped, in [0, 1).
      high: How far above 1, > 0; more than `low` leaves room for tokens that are rare yet ("clip higher", DAPO).
      dual: Bound, > 1, on the ratio at negative advantages: the loss there is at most ``dual · |A|``. None sets none.
    Source: Schulman 2017 (https://arxiv.org/abs/1707.06347), Ye 2019 for `dual` (https://arxiv.org/abs/1912.09729).
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1:
            raise ValueError(f"epsilon_low must be in [0, 1), got {self.low!r}")
        if not self.high > 0:
            raise ValueError(f"epsilon_high must be above 0, got {self.high!r}")
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual_clip bounds ratios that grew, so it must be above 1, got {self.dual!r}")

    def __call__(self, ratios: Array, log_probs: Array, advantages: Array) -> Array:
        """Give the loss of each token."""
        del log_probs
        capped = ratios if self.dual is None else jnp.where(advantages < 0, jnp.minimum(ratios, self.dual), ratios)
        return -jnp.minimum(capped * advantages, jnp.clip(ratios, 1 - self.low, 1 + self.high) * advantages)

    def clipped(self, ratios: Array, advantages: Array) -> dict[str, Array]:
        """Say for each token whether the clip took its gradient away, below and above, by the metric's name."""
        return {
            "clip_low": (ratios < 1 - self.low) & (advantages < 0),
            "clip_high": (ratios > 1 + self.high) & (advantages > 0),
        }


@dataclass(frozen=True)
class Cispo:
    """CISPO: REINFORCE whose importance weight is cut, so that every token keeps a gradient.

    ``-stop_gradient(min(r, high)) · A · log π``.

    Attributes:
      high: Largest weight, > 0. Weights are cut from above only.
    Source: MiniMax 2025 (https://arxiv.org/abs/2506.13585); golden grpo_trl.
    """

    high: float = 5.0

    def __post_init__(self) -> None:
        if not self.high > 0:
            raise ValueError(f"epsilon_high must be above 0, got {self.high!r}")

    def __call__(self, ratios: Array, log_probs: Array, advantages: Array) -> Array:
        """Give the loss of each token."""
        return -jax.lax.stop_gradient(jnp.minimum(ratios, self.high)) * advantages * log_probs

    def clipped(self, ratios: Array, advantages: Array) -> dict[str, Array]:
        """Say for each token whether its weight was cut where it would have pushed up, by the metric's name."""
        return {"clip_high": (ratios > self.high) & (advantages > 0)}


def token_advantages(advantages: Any, mask: Any) -> Array:
    """Give advantages [rows] or [rows, time] for each token, [rows, time].

    Raises:
      ShapeError: They fit neither form.
    """
    advantages, shape = wide(advantages), jnp.shape(mask)
    if advantages.shape == shape[:1]:
        return jnp.broadcast_to(advantages[:, None], shape)
    if advantages.shape != shape:
        raise ShapeError(
            f"advantages must be [rows] or [rows, time] of the mask's {shape}, got {advantages.shape}; give one number "
            "per completion"
        )
    return masked(advantages, mask)


def aggregate(losses: Any, mask: Any, *, over: Aggregate, max_tokens: int | None = None, segments: Any = None) -> Mean:
    """Give the losses of tokens as a `Mean`, so that a window of microbatches is exactly one batch.

    Sequences without a counted token are in none of the means.

    Args:
      losses: Loss of each token, [rows, time]; where the mask is 0 it may be anything.
      mask: Weight of each token, [rows, time].
      over: What each sequence or token weighs. "sequence_mean" averages the token means of sequences (GRPO);
        "token_mean" averages all tokens alike (DAPO); "constant" divides the sum by sequences · `max_tokens`, so that
        a long answer is not diluted (Dr. GRPO); "sequence_sum" averages the token sums of sequences.
      max_tokens: Longest completion, for "constant".
      segments: As in `telic.objectives.policy.ratios.own_sums`.
    """
    losses, weights = wide(losses), wide(mask)
    kept = jnp.where(weights != 0, losses, 0) * weights
    match over:
        case "token_mean":
            return Mean(kept.sum(), weights.sum())
        case "sequence_mean":
            lengths = own_sums(weights, segments)
            shares = jnp.where(weights != 0, kept / jnp.where(lengths > 0, lengths, 1), 0)
            return Mean(shares.sum(), num_sequences(weights, segments))
        case "sequence_sum":
            return Mean(kept.sum(), num_sequences(weights, segments))
        case "constant":
            if max_tokens is None or max_tokens < 1:
                raise ValueError(
                    f"over='constant' divides by the longest completion: give max_tokens of at least 1, got "
                    f"{max_tokens!r}"
                )
            return Mean(kept.sum(), num_sequences(weights, segments) * max_tokens)
        case _:
            raise unknown_name("aggregate", over, ("sequence_mean", "token_mean", "constant", "sequence_sum"))


def num_sequences(mask: Any, segments: Any = None) -> Array:
    """Give the number of sequences with a counted token, in at least float32."""
    counted = jnp.asarray(mask) != 0
    if segments is None:
        return wide(counted.any(-1)).sum()
    earlier = counted.cumsum(-1) - counted
    # The first counted token of each sequence: as many were counted before it as before its sequence.
    before = jnp.where(starts(segments), earlier, 0)
    return wide(counted & (earlier == jax.lax.cummax(before, axis=1))).sum()


def starts(segments: Any) -> Array:
    """Say which tokens are the first of their sequence, bool [rows, time]."""
    segments = jnp.asarray(segments)
    return jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
