"""Metrics of scores and probabilities: area under the ROC curve, calibration, perplexity."""

from typing import Any

import jax
import jax.numpy as jnp

from telic.artifacts import TokenScores
from telic.errors import ShapeError
from telic.mean import Mean, wide
from telic.metrics.base import TARGETS_AND_PREDICTION, Reads, StatisticsMetric
from telic.metrics.labels import (
    bin_sums,
    check_same_shape,
    is_integer,
    log_likelihoods,
    masses,
    mean_of,
    safe_ratio,
    target_ids,
)
from telic.metrics.tokens import token_field, token_nll
from telic.types import Array


def auc(
    name: str = "auc",
    *,
    bins: int = 1000,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make the area under the ROC curve from histograms of the positives' and the negatives' scores.

    Scores in one bin count as equal: a pair of a positive and a negative there counts one half. So the value is exact
    for scores that are rounded to the bins, and otherwise off by at most half the share of such pairs. Where either
    class puts no more than 2/bins of its mass in any bin, as with fairly even scores, that is at most 1/bins; scores
    that crowd into a few bins need more bins. It is 0 while a class is missing.

    Args:
      name: Under which the value is reported.
      bins: Bins over [0, 1], of equal width. Scores outside count in the first and last.
      from_logits: The scores are logits: their sigmoid is binned.
      reads: Where targets (1 is positive) and scores, of one shape, come from.
    """
    _check_bins(name, bins)

    def statistics(targets: Any, prediction: Any, *, weights: Any = None) -> dict[str, Array]:
        check_same_shape(name, targets, prediction)
        scores = wide(prediction)
        scores = jax.nn.sigmoid(scores) if from_logits else scores
        mass = _poisoned(masses(weights, scores), scores)
        index = jnp.clip(jnp.floor(scores * bins), 0, bins - 1).astype(jnp.int32)
        positive = jnp.asarray(targets) == 1
        return {
            "positives": bin_sums(index, jnp.where(positive, mass, 0), bins),
            "negatives": bin_sums(index, jnp.where(positive, 0, mass), bins),
        }

    def finish(sums: dict[str, Array]) -> Array:
        positives = safe_ratio(sums["positives"], sums["positives"].sum())
        negatives = safe_ratio(sums["negatives"], sums["negatives"].sum())
        below = jnp.cumsum(negatives) - negatives
        return (positives * (below + negatives / 2)).sum()

    return StatisticsMetric(name=name, statistics=statistics, finish=finish, reads=reads, mode="max")


def expected_calibration_error(
    name: str = "expected_calibration_error",
    *,
    bins: int = 15,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make the mean distance between confidence and accuracy, over bins of confidence and by their mass.

    With ``reads=TokenScores`` it is that of the tokens: of their `confidence` and whether they are `correct`.

    Args:
      name: Under which the value is reported.
      bins: Bins over (0, 1], of equal width, each with its upper edge.
      from_logits: The scores are logits: their softmax, or sigmoid, is the probability.
      reads: Where targets and probabilities come from: ids [...] or one-hot targets with probabilities
        [..., classes], or targets 0 and 1 with probabilities of the same shape, [batch] or [..., 1]; then the
        confidence is that of the likelier of the two.
    Source: Guo et al. 2017, On Calibration of Modern Neural Networks, eq. 3.
    """
    _check_bins(name, bins)

    def decide(targets: Any, prediction: Any) -> tuple[Array, Array]:
        if is_integer(prediction):
            raise TypeError(f"{name}: prediction must be probabilities or logits, got {jnp.result_type(prediction)}")
        scores = wide(prediction)
        same = jnp.shape(targets) == scores.shape
        if (same and scores.ndim <= 1) or scores.shape[-1:] == (1,):
            check_same_shape(name, targets, prediction)
            positive = jax.nn.sigmoid(scores) if from_logits else scores
            return jnp.maximum(positive, 1 - positive), (positive > 0.5) == jnp.asarray(targets)
        if scores.ndim == 0:
            raise ShapeError(f"{name}: prediction must hold one probability per class, [..., classes], got a scalar")
        probabilities = jax.nn.softmax(scores, axis=-1) if from_logits else scores
        ids = target_ids(name, targets, prediction)
        return probabilities.max(axis=-1), jnp.argmax(probabilities, axis=-1) == ids

    def statistics(*args: Any, weights: Any = None) -> dict[str, Array]:
        match args:
            case (TokenScores() as scores,):
                confidence, correct = (
                    wide(token_field(name, scores, "confidence")),
                    token_field(name, scores, "correct"),
                )
                weights = scores.mask
            case _:
                confidence, correct = decide(*args)
        mass = masses(weights, confidence)
        confidence = jnp.where(mass != 0, confidence, 0)
        index = jnp.clip(jnp.ceil(confidence * bins) - 1, 0, bins - 1).astype(jnp.int32)
        gap = _poisoned(mass, confidence) * (confidence - correct)
        return {"gap": bin_sums(index, gap, bins), "mass": mass.sum()}

    def finish(sums: dict[str, Array]) -> Array:
        return safe_ratio(jnp.abs(sums["gap"]).sum(), sums["mass"])

    return StatisticsMetric(name=name, statistics=statistics, finish=finish, reads=reads, mode="min")


def perplexity(
    name: str = "perplexity", *, ignore: int | None = None, reads: Reads = TARGETS_AND_PREDICTION
) -> StatisticsMetric:
    """Make exp of the mean negative log-likelihood per token, in nats; NaN without data.

    With ``reads=TokenScores`` the tokens and their weights are those of an evaluation. Of names, one is that of the
    negative log-likelihood itself: a `Mean` over tokens, or one number per token. Two are token ids [...] and logits
    [..., vocabulary]; an id outside the vocabulary gives NaN unless its weight is 0 or it is ignored.

    Args:
      name: Under which the value is reported.
      ignore: Target id that marks tokens to leave out, such as -100. None leaves out none: use weights.
      reads: Where the arguments come from; one name for the negative log-likelihood.
    """

    def statistics(*args: Any, weights: Any = None) -> Mean:
        match args:
            case (TokenScores() as scores,):
                return token_nll(scores)
            case (Mean() as nll,):
                return nll
            case (nll,):
                return Mean.of(nll, weights)
            case (targets, logits):
                nll = -log_likelihoods(name, targets, logits)
                return mean_of(nll, weights, keep=None if ignore is None else jnp.asarray(targets) != ignore)
            case _:
                raise TypeError(
                    f"{name} reads the negative log-likelihood, or token ids and logits; got {len(args)} arguments"
                )

    return StatisticsMetric(
        name=name, statistics=statistics, finish=lambda mean: jnp.exp(mean.measured()), reads=reads, mode="min"
    )


def _check_bins(metric: str, bins: int) -> None:
    if bins < 1:
        raise ValueError(f"{metric}: bins must be at least 1, got {bins}")


def _poisoned(mass: Array, scores: Array) -> Array:
    """Give the masses, NaN where a score that counts is NaN: such a score has no bin."""
    return jnp.where((mass != 0) & jnp.isnan(scores), jnp.nan, mass)
