"""Metrics of `TokenScores`: what an evaluation of a language model says of each token."""

import math
from typing import Any

import jax.numpy as jnp

from telic.artifacts import TokenScores
from telic.errors import ContractError
from telic.mean import Mean, spread_weights, wide
from telic.metrics.base import Reads, StatisticsMetric
from telic.metrics.labels import safe_ratio
from telic.types import Array


def token_nll(scores: TokenScores) -> Mean:
    """Give the negative log-likelihood per token, in nats: its sum over the tokens that count, and their weights."""
    return Mean.of(-wide(scores.log_probs), scores.mask)


def token_field(metric: str, scores: TokenScores, field: str) -> Array:
    """Give an optional field of token scores.

    Raises:
      ContractError: The evaluation left it out.
    """
    value = getattr(scores, field)
    if value is None:
        raise ContractError(
            f"metric {metric!r} reads TokenScores.{field}, which evaluate left out: return "
            f"TokenScores(log_probs, ..., {field}=...)"
        )
    return jnp.asarray(value)


def bits_per_byte(name: str = "bits_per_byte", *, reads: Reads = TokenScores) -> StatisticsMetric:
    """Make the negative log-likelihood in bits for each byte of text: comparable between tokenizers.

    Tokens that do not count add neither bits nor bytes; a token that stands for no byte, such as the end of a document,
    adds bits alone.

    Args:
      name: Under which the value is reported.
      reads: `TokenScores` with `num_bytes`.
    """

    def statistics(scores: Any, *, weights: Any = None) -> Mean:
        del weights
        num_bytes = wide(token_field(name, scores, "num_bytes"))
        if scores.mask is not None:
            mask = spread_weights(scores.mask, num_bytes)
            num_bytes = jnp.where(mask != 0, num_bytes, 0) * mask
        return Mean(token_nll(scores).total, num_bytes.sum())

    def finish(sums: Mean) -> Array:
        bits = safe_ratio(wide(sums.total), wide(sums.mass)) / math.log(2)
        return jnp.where(wide(sums.mass) > 0, bits, jnp.nan)

    return StatisticsMetric(name=name, statistics=statistics, finish=finish, reads=reads, mode="min")
