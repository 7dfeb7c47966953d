"""Which experts a token goes to, and what is counted of it.

B batch, T time, E experts, k experts per token.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic.models.decoder.config import Experts
from telic.types import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RouterStatistics:
    """Sums over the tokens of each row, per layer: they add up over rows, microbatches and devices.

    Padding (segment 0) is in none of them. All are in at least float32; `probabilities` and `z` are differentiable.

    Attributes:
      counts: How often each expert was chosen, [layers, batch, experts]. Sums to top_k · tokens.
      probabilities: Sum of the tokens' shares of each expert, [layers, batch, experts]: the softmax, or sigmoid scores
        divided by their sum. Sums to tokens.
      z: Sum of squared log-sum-exps of the router's logits, [layers, batch].
      tokens: Tokens counted, [batch].
    """

    counts: Any
    probabilities: Any
    z: Any
    tokens: Any


def route(logits_BTE: Array, experts: Experts, bias_E: Array | None = None) -> tuple[Array, Array, Array]:
    """Choose each token's experts.

    Args:
      logits_BTE: Router logits in at least float32.
      experts: How to score and choose.
      bias_E: Added to the scores to choose, and to nothing else.
    Returns:
      The chosen experts, int [batch, time, k]; their weights, [batch, time, k]; the token's shares of all experts,
      [batch, time, experts], which sum to one.
    """
    if experts.scoring == "softmax":
        scores = shares = jax.nn.softmax(logits_BTE, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits_BTE)
        shares = scores / (scores.sum(-1, keepdims=True) + 1e-20)
    ranked = jax.lax.stop_gradient(scores)
    if bias_E is not None:
        ranked = ranked + bias_E.astype(ranked.dtype)
    if experts.num_groups > 1:
        ranked = _within_best_groups(ranked, experts)
    chosen = jax.lax.top_k(ranked, experts.top_k)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return chosen, weights * experts.scale, shares


def _within_best_groups(ranked_BTE: Array, experts: Experts) -> Array:
    """Rule out experts of all but the best groups."""
    grouped = ranked_BTE.reshape(*ranked_BTE.shape[:-1], experts.num_groups, -1)
    of_group = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
    best = jax.nn.one_hot(jax.lax.top_k(of_group, experts.top_groups)[1], experts.num_groups, dtype=bool).any(-2)
    return jnp.where(best[..., None], grouped, -jnp.inf).reshape(ranked_BTE.shape)


def statistics_of(
    logits_BTE: Array, chosen_BTk: Array, shares_BTE: Array, counted_BT: Array | None
) -> dict[str, Array]:
    """Sum what `RouterStatistics` holds over the counted tokens of each row, for one layer."""
    dtype = logits_BTE.dtype
    times = jax.nn.one_hot(chosen_BTk, logits_BTE.shape[-1], dtype=dtype).sum(-2)
    squares = jax.nn.logsumexp(logits_BTE, axis=-1) ** 2
    if counted_BT is not None:
        times, shares_BTE = (jnp.where(counted_BT[..., None], x, 0) for x in (times, shares_BTE))
        squares = jnp.where(counted_BT, squares, 0)
    return {"counts": times.sum(1), "probabilities": shares_BTE.sum(1), "z": squares.sum(1)}
