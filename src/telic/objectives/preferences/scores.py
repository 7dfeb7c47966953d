"""From log-probs of tokens to those of completions, and what is reported of pairs. Pure functions."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from telic.errors import ShapeError
from telic.mean import Mean, wide
from telic.objectives.preferences.losses import Pairs
from telic.types import Array


def completion_sums(token_log_probs: Any, mask: Any, *, tail_weight: float = 1.0) -> Array:
    """Sum the log-probs of each completion's tokens, nats, [pairs, 2].

    Args:
      token_log_probs: Of each token, [pairs, 2, time], chosen before rejected.
      mask: Tokens of the completions, [pairs, 2, time]; where it is 0 a log-prob may be anything.
      tail_weight: Weight of the tokens by which one completion of a pair is longer than the other, in [0, 1]; 1 sums
        all alike, less makes the sum depend less on length (https://arxiv.org/abs/2409.06411).
    Raises:
      ShapeError: The shapes are not [pairs, 2, time].
    """
    values, kept = wide(token_log_probs), jnp.asarray(mask) != 0
    if values.ndim != 3 or values.shape[1] != 2 or kept.shape != values.shape:
        raise ShapeError(
            f"log-probs and mask of pairs must both be [pairs, 2, time], got {values.shape} and {kept.shape}"
        )
    values = jnp.where(kept, values, 0)
    if tail_weight == 1:
        return values.sum(-1)
    shared = kept.sum(-1).min(-1)[:, None, None]
    return jnp.where(kept.cumsum(-1) <= shared, values, tail_weight * values).sum(-1)


def reward_metrics(pairs: Pairs, beta: float) -> Mapping[str, Mean]:
    """Give what DPO reports of pairs, as means over those that are kept.

    A reward is β times the log-ratio; ``reward_accuracy`` is the share of pairs whose chosen completion has the higher
    reward, and a tie counts as wrong.
    """
    pairs = jax.lax.stop_gradient(pairs)
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    values = {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": chosen > rejected,
        "log_prob_chosen": pairs.chosen,
        "log_prob_rejected": pairs.rejected,
    }
    return {name: Mean.of(value, pairs.mask) for name, value in values.items()}
