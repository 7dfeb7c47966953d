"""Shape checks and class decisions that the metrics of classification share."""

from typing import Any

import jax.numpy as jnp

from telic.errors import ShapeError
from telic.mean import Mean, spread_weights, wide
from telic.types import Array


def check_same_shape(metric: str, targets: Any, prediction: Any) -> None:
    """Raise ShapeError unless targets and prediction have one shape, saying what to write."""
    want, got = jnp.shape(targets), jnp.shape(prediction)
    if want == got:
        return
    if got == (*want, 1):
        todo = "write prediction[..., 0] or targets[..., None]"
    elif want == (*got, 1):
        todo = "write targets[..., 0] or prediction[..., None]"
    else:
        todo = "give one target per predicted value"
    raise ShapeError(f"{metric}: targets and prediction must have the same shape, got {want} and {got}; {todo}")


def is_integer(x: Any) -> bool:
    """Say whether an array holds integers or booleans."""
    dtype = jnp.result_type(x)
    return bool(jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_))


def target_ids(metric: str, targets: Any, scores: Any) -> Array:
    """Give class ids, scores.shape[:-1], from ids or from one-hot targets of the scores' shape.

    Args:
      metric: Name for error messages.
      targets: Integer ids of shape scores.shape[:-1], or one-hot of the scores' shape.
      scores: One score per class, [..., classes].
    Raises:
      ShapeError: The targets have another shape.
      TypeError: The ids are not integers.
    """
    want, got = jnp.shape(scores), jnp.shape(targets)
    if got == want:
        return jnp.argmax(jnp.asarray(targets), axis=-1)
    if got != want[:-1]:
        todo = "; write targets[..., 0]" if got == (*want[:-1], 1) else ""
        raise ShapeError(
            f"{metric}: for a prediction of shape {want}, targets must be class ids of shape {want[:-1]} or one-hot "
            f"of shape {want}, got {got}{todo}"
        )
    if not is_integer(targets):
        raise TypeError(
            f"{metric}: class ids must be integers, got {jnp.result_type(targets)}; write targets.astype(int), or give "
            f"one-hot targets of shape {want}"
        )
    return jnp.asarray(targets).astype(jnp.promote_types(jnp.result_type(targets), jnp.int32))


def binary_threshold(threshold: float | None, from_logits: bool) -> float:
    """Give the score above which an example is positive: as given, else 0 for logits and 0.5 for probabilities."""
    if threshold is not None:
        return threshold
    return 0.0 if from_logits else 0.5


def check_num_classes(metric: str, num_classes: int) -> None:
    """Raise ValueError unless there are at least two classes."""
    if num_classes < 2:
        raise ValueError(f"{metric}: num_classes must be at least 2, got {num_classes}")


def class_ids(metric: str, targets: Any, prediction: Any, num_classes: int) -> tuple[Array, Array]:
    """Give (target ids, predicted ids) of one shape, from scores [..., num_classes] or from integer ids.

    Raises:
      ShapeError: The prediction's last dimension is not `num_classes`, or the targets do not fit it.
    """
    if is_integer(prediction) and is_integer(targets) and jnp.shape(prediction) == jnp.shape(targets):
        return jnp.asarray(targets), jnp.asarray(prediction)
    if not jnp.shape(prediction) or jnp.shape(prediction)[-1] != num_classes:
        raise ShapeError(
            f"{metric}: prediction must hold num_classes={num_classes} scores in its last dimension, or be integer "
            f"class ids of the targets' shape {jnp.shape(targets)}, got {jnp.shape(prediction)} "
            f"({jnp.result_type(prediction)})"
        )
    return target_ids(metric, targets, prediction), jnp.argmax(jnp.asarray(prediction), axis=-1)


def one_hot(ids: Array, num_classes: int) -> Array:
    """Give booleans [..., num_classes]; an id outside [0, num_classes) is in no class."""
    return jnp.asarray(ids)[..., None] == jnp.arange(num_classes)


def masses(weights: Any, values: Any) -> Array:
    """Give the mass of each value in the values' shape: 1, or its weight."""
    values = jnp.asarray(values)
    if weights is None:
        return jnp.ones(values.shape, wide(jnp.zeros((), bool)).dtype)
    return spread_weights(weights, values)


def bin_sums(index: Array, mass: Array, bins: int) -> Array:
    """Sum masses by bin, [bins]: in a fixed order, so that two runs give the same bits.

    Args:
      index: Bin of each value, integer; values outside [0, bins) are in none.
      mass: Mass of each value, same shape.
      bins: Number of bins.
    """
    hits = index.reshape(-1)[:, None] == jnp.arange(bins)
    return jnp.where(hits, mass.reshape(-1)[:, None], 0).sum(axis=0)


def safe_ratio(numerator: Any, denominator: Any) -> Array:
    """Give numerator / denominator, and 0 where the denominator is 0."""
    return jnp.where(denominator != 0, numerator / jnp.where(denominator != 0, denominator, 1), 0)


def mean_of(values: Any, weights: Any, *, keep: Any = None) -> Mean:
    """Give the mean of values over those kept: weight 0 where `keep` is False."""
    if keep is None:
        return Mean.of(values, weights)
    return Mean.of(values, masses(weights, values) * keep)


def log_likelihoods(metric: str, targets: Any, logits: Any) -> Array:
    """Give log softmax(logits) at the target, float32 or wider, [...]; NaN where the id is outside the classes.

    Raises:
      ShapeError: Targets are not ids of shape logits.shape[:-1].
    """
    logits = wide(logits)
    if jnp.shape(targets) != logits.shape[:-1]:
        raise ShapeError(
            f"{metric}: targets must be token ids of shape {logits.shape[:-1]} for logits of shape {logits.shape}, got "
            f"{jnp.shape(targets)}"
        )
    ids = target_ids(metric, targets, logits)
    known = (ids >= 0) & (ids < logits.shape[-1])
    # Relative to the highest logit before anything is subtracted: logits near 1,000 keep their digits.
    return jnp.where(known, _log_softmax_at(logits, jnp.where(known, ids, 0)), jnp.nan)


def _log_softmax_at(logits: Array, ids: Array) -> Array:
    logits = logits - logits.max(axis=-1, keepdims=True)
    taken = jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0]
    return taken - jnp.log(jnp.exp(logits).sum(axis=-1))
