"""Accuracy, and ratios of counts: precision, recall, F1, specificity, the confusion matrix.

Unless a metric says otherwise it reads ``("targets", "prediction")`` and takes weights of the decisions' shape or its
leading part. Counts are kept as `Sum`, exact to 2**48 in float32; a ratio whose denominator is 0 is 0.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from telic.artifacts import TokenScores
from telic.errors import ShapeError, unknown_name
from telic.mean import Mean
from telic.metrics.base import TARGETS_AND_PREDICTION, Mode, Reads, StatisticsMetric
from telic.metrics.labels import (
    binary_threshold,
    check_num_classes,
    check_same_shape,
    class_ids,
    is_integer,
    masses,
    mean_of,
    one_hot,
    safe_ratio,
    target_ids,
)
from telic.metrics.tokens import token_field
from telic.types import Array

Average: TypeAlias = Literal["macro", "micro", "weighted"] | None
"""How values of classes become one: their mean, that of the pooled counts, their mean by support; None keeps them."""

_AVERAGES = ("macro", "micro", "weighted")


def _correct(metric: str, targets: Any, prediction: Any, threshold: float | None, from_logits: bool) -> Array:
    shape = jnp.shape(prediction)
    same = jnp.shape(targets) == shape
    if same and threshold is None and is_integer(prediction):
        return jnp.asarray(prediction) == jnp.asarray(targets)
    if same and (threshold is not None or len(shape) <= 1 or shape[-1] == 1):
        positive = jnp.asarray(prediction) > binary_threshold(threshold, from_logits)
        return positive == jnp.asarray(targets)
    if threshold is not None or len(shape) == 0 or shape[-1] == 1 or jnp.shape(targets) == (*shape, 1):
        check_same_shape(metric, targets, prediction)
    return jnp.argmax(jnp.asarray(prediction), axis=-1) == target_ids(metric, targets, prediction)


def accuracy(
    name: str = "accuracy",
    *,
    from_logits: bool = False,
    threshold: float | None = None,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make the share of right decisions.

    What a decision is follows from the shapes:

    - prediction [..., classes] and integer targets [...]: the class of the highest score (the first of equals);
    - prediction and one-hot targets, both [..., classes] with classes > 1: highest score against highest target;
    - both [batch], or both [..., 1]: whether the score is above the threshold, against targets 0 and 1;
    - integer prediction of the targets' shape: ids that are equal.

    Args:
      name: Under which the value is reported.
      from_logits: The scores are logits, so the threshold is 0. Without meaning for an argmax.
      threshold: Decide each score by itself, above this, whatever the shape: for several labels per example.
      reads: Where targets and prediction come from.
    Raises:
      ShapeError: When traced, for shapes that fit none of these, such as (n,) against (n, 1).
    Example:
      >>> metric = accuracy()
      >>> targets, prediction = jnp.array([1, 0]), jnp.array([[0.2, 0.8], [0.4, 0.6]])
      >>> float(metric.compute(metric.update(metric.init(targets, prediction), targets, prediction)))
      0.5
    """

    def statistics(targets: Any, prediction: Any, *, weights: Any = None) -> Mean:
        return mean_of(_correct(name, targets, prediction, threshold, from_logits), weights)

    return StatisticsMetric(name=name, statistics=statistics, finish=Mean.measured, reads=reads, mode="max")


def token_accuracy(
    name: str = "token_accuracy", *, ignore: int | None = None, reads: Reads = TARGETS_AND_PREDICTION
) -> StatisticsMetric:
    """Make the share of tokens whose highest logit is the target.

    With ``reads=TokenScores`` it is the share of tokens that an evaluation calls `correct`.

    Args:
      name: Under which the value is reported.
      ignore: Target id that marks tokens to leave out, such as -100. None leaves out none: use weights.
      reads: Where token ids [batch, time] and logits [batch, time, vocabulary] come from.
    """

    def statistics(*args: Any, weights: Any = None) -> Mean:
        if isinstance(args[0], TokenScores):
            return mean_of(token_field(name, args[0], "correct"), args[0].mask)
        targets, prediction = args
        if jnp.shape(targets) != jnp.shape(prediction)[:-1]:
            raise ShapeError(
                f"{name}: targets must be token ids of shape {jnp.shape(prediction)[:-1]} for logits of shape "
                f"{jnp.shape(prediction)}, got {jnp.shape(targets)}"
            )
        ids = target_ids(name, targets, prediction)
        right = jnp.argmax(jnp.asarray(prediction), axis=-1) == ids
        return mean_of(right, weights, keep=None if ignore is None else ids != ignore)

    return StatisticsMetric(name=name, statistics=statistics, finish=Mean.measured, reads=reads, mode="max")


def top_k_accuracy(
    name: str = "top_k_accuracy", *, k: int = 5, reads: Reads = TARGETS_AND_PREDICTION
) -> StatisticsMetric:
    """Make the share of examples whose target is among the k highest scores.

    Of equal scores the class with the lower index counts as higher, so k=1 is `accuracy`, and a constant prediction
    is not right for all classes. A NaN score counts as highest, as in an argmax, and a target whose score is NaN is
    a miss.

    Args:
      name: Under which the value is reported.
      k: How many classes may be named; at most the number of classes.
      reads: Where targets (ids [...], or one-hot) and scores [..., classes] come from.
    Raises:
      ValueError: k < 1; or, when traced, k is more than the number of classes.
    """
    if k < 1:
        raise ValueError(f"{name}: k must be at least 1, got {k}")

    def statistics(targets: Any, prediction: Any, *, weights: Any = None) -> Mean:
        scores = jnp.asarray(prediction)
        if scores.ndim == 0:
            raise ShapeError(f"{name}: prediction must hold one score per class, [..., classes], got a scalar")
        classes = scores.shape[-1]
        if k > classes:
            raise ValueError(
                f"{name}: k={k} is more than the {classes} classes of the prediction, so every answer would be right; "
                f"use metrics.top_k_accuracy(k=...) with k < {classes}"
            )
        ids = target_ids(name, targets, scores)
        known = (ids >= 0) & (ids < classes)
        own = jnp.take_along_axis(scores, jnp.where(known, ids, 0)[..., None], axis=-1)
        earlier = jnp.arange(classes) < ids[..., None]
        ahead = ~(scores <= own) | ((scores == own) & earlier)
        return mean_of(known & (ahead.sum(axis=-1) < k), weights)

    return StatisticsMetric(name=name, statistics=statistics, finish=Mean.measured, reads=reads, mode="max")


def _counts(
    metric: str, num_classes: int | None, threshold: float | None, from_logits: bool
) -> Callable[..., dict[str, Array]]:
    """Make the statistics tp, fp, fn, tn: scalars for a binary decision, [num_classes] each otherwise."""
    if num_classes is not None:
        check_num_classes(metric, num_classes)
        if threshold is not None:
            raise ValueError(f"{metric}: threshold is for binary decisions; with num_classes the highest score decides")

    def statistics(targets: Any, prediction: Any, *, weights: Any = None) -> dict[str, Array]:
        if num_classes is None:
            shape = jnp.shape(prediction)
            if shape and jnp.shape(targets) == shape[:-1] and shape[-1] > 1:
                raise ShapeError(
                    f"{metric}: a prediction of shape {shape} for targets of shape {jnp.shape(targets)} has several "
                    f"classes; make the metric with num_classes={shape[-1]}, or give one of them: prediction[..., 1]"
                )
            check_same_shape(metric, targets, prediction)
            actual = jnp.asarray(targets) == 1
            named = jnp.asarray(prediction) > binary_threshold(threshold, from_logits)
            mass = masses(weights, actual)
            axes = tuple(range(mass.ndim))
        else:
            target, predicted = class_ids(metric, targets, prediction, num_classes)
            mass = masses(weights, target)[..., None]
            actual, named = one_hot(target, num_classes), one_hot(predicted, num_classes)
            axes = tuple(range(mass.ndim - 1))
        return {
            "tp": (mass * (named & actual)).sum(axes),
            "fp": (mass * (named & ~actual)).sum(axes),
            "fn": (mass * (~named & actual)).sum(axes),
            "tn": (mass * (~named & ~actual)).sum(axes),
        }

    return statistics


def _ratio(
    name: str,
    ratio: Callable[[dict[str, Array]], tuple[Array, Array]],
    *,
    num_classes: int | None,
    average: Average,
    threshold: float | None,
    from_logits: bool,
    reads: Reads,
) -> StatisticsMetric:
    if average not in (None, *_AVERAGES):
        raise unknown_name("average", average, _AVERAGES)

    def finish(counts: dict[str, Array]) -> Array:
        if num_classes is None:
            return safe_ratio(*ratio(counts))
        if average == "micro":
            return safe_ratio(*ratio({k: v.sum() for k, v in counts.items()}))
        values = safe_ratio(*ratio(counts))
        if average == "macro":
            return values.mean()
        if average == "weighted":
            support = counts["tp"] + counts["fn"]
            return safe_ratio((values * support).sum(), support.sum())
        return values

    statistics = _counts(name, num_classes, threshold, from_logits)
    return StatisticsMetric(name=name, statistics=statistics, finish=finish, reads=reads, mode="max")


def _precision(c: dict[str, Array]) -> tuple[Array, Array]:
    return c["tp"], c["tp"] + c["fp"]


def _recall(c: dict[str, Array]) -> tuple[Array, Array]:
    return c["tp"], c["tp"] + c["fn"]


def _specificity(c: dict[str, Array]) -> tuple[Array, Array]:
    return c["tn"], c["tn"] + c["fp"]


def _f1(c: dict[str, Array]) -> tuple[Array, Array]:
    return 2 * c["tp"], 2 * c["tp"] + c["fp"] + c["fn"]


def precision(
    name: str = "precision",
    *,
    num_classes: int | None = None,
    average: Average = "macro",
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make tp / (tp + fp): the share of named positives that are positive; 0 when none was named.

    Args:
      name: Under which the value is reported.
      num_classes: None decides each score by a threshold, targets and prediction having one shape; a target is positive
        when it is 1. A number takes scores [..., num_classes] or integer ids as prediction, and integer ids or
        one-hot targets; each class in turn is the positive one. An id outside the classes is in none.
      average: With `num_classes`: "macro" is the mean over all classes, a class that never occurs counting 0; "micro"
        pools the counts; "weighted" weighs by the mass of each class's targets; None gives [num_classes].
      threshold: Above which a score is positive. None means 0.5, or 0 for logits.
      from_logits: The scores are logits.
      reads: Where targets and prediction come from.
    Raises:
      ValueError: num_classes < 2, an unknown average, or both num_classes and threshold.
      ShapeError: When traced, for shapes that do not fit.
    """
    return _ratio(
        name, _precision, num_classes=num_classes, average=average, threshold=threshold, from_logits=from_logits,
        reads=reads,
    )  # fmt: skip


def recall(
    name: str = "recall",
    *,
    num_classes: int | None = None,
    average: Average = "macro",
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make tp / (tp + fn): the share of positives that were named; 0 when there is none.

    Arguments as for `precision`.
    """
    return _ratio(
        name, _recall, num_classes=num_classes, average=average, threshold=threshold, from_logits=from_logits,
        reads=reads,
    )  # fmt: skip


def sensitivity(
    name: str = "sensitivity",
    *,
    num_classes: int | None = None,
    average: Average = "macro",
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make `recall` under its medical name."""
    return recall(
        name, num_classes=num_classes, average=average, threshold=threshold, from_logits=from_logits, reads=reads
    )


def specificity(
    name: str = "specificity",
    *,
    num_classes: int | None = None,
    average: Average = "macro",
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make tn / (tn + fp): the share of negatives that were not named; 0 when there is none.

    Arguments as for `precision`.
    """
    return _ratio(
        name, _specificity, num_classes=num_classes, average=average, threshold=threshold, from_logits=from_logits,
        reads=reads,
    )  # fmt: skip


def f1(
    name: str = "f1",
    *,
    num_classes: int | None = None,
    average: Average = "macro",
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make 2 tp / (2 tp + fp + fn): the harmonic mean of precision and recall; 0 when nothing is positive or named.

    Arguments as for `precision`.
    """
    return _ratio(
        name, _f1, num_classes=num_classes, average=average, threshold=threshold, from_logits=from_logits, reads=reads
    )


def _count(
    name: str, which: str, mode: Mode, *, threshold: float | None, from_logits: bool, reads: Reads
) -> StatisticsMetric:
    counts = _counts(name, None, threshold, from_logits)

    def statistics(targets: Any, prediction: Any, *, weights: Any = None) -> Array:
        return counts(targets, prediction, weights=weights)[which]

    return StatisticsMetric(name=name, statistics=statistics, finish=jnp.asarray, reads=reads, mode=mode)


def true_positives(
    name: str = "true_positives",
    *,
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make the mass of positives that were named; a float, counted exactly and rounded once when read."""
    return _count(name, "tp", "max", threshold=threshold, from_logits=from_logits, reads=reads)


def true_negatives(
    name: str = "true_negatives",
    *,
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make the mass of negatives that were not named; a float, counted exactly and rounded once when read."""
    return _count(name, "tn", "max", threshold=threshold, from_logits=from_logits, reads=reads)


def false_positives(
    name: str = "false_positives",
    *,
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make the mass of negatives that were named; a float, counted exactly and rounded once when read."""
    return _count(name, "fp", "min", threshold=threshold, from_logits=from_logits, reads=reads)


def false_negatives(
    name: str = "false_negatives",
    *,
    threshold: float | None = None,
    from_logits: bool = False,
    reads: Reads = TARGETS_AND_PREDICTION,
) -> StatisticsMetric:
    """Make the mass of positives that were not named; a float, counted exactly and rounded once when read."""
    return _count(name, "fn", "min", threshold=threshold, from_logits=from_logits, reads=reads)


def confusion_matrix(
    name: str = "confusion_matrix", *, num_classes: int, reads: Reads = TARGETS_AND_PREDICTION
) -> StatisticsMetric:
    """Make the mass of examples by target (row) and predicted class (column), [num_classes, num_classes].

    Args:
      name: Under which the value is reported.
      num_classes: Number of classes. Memory of a batch is examples times classes; an id outside them is not counted.
      reads: Where targets and prediction come from; forms as for `precision` with `num_classes`.
    """
    check_num_classes(name, num_classes)

    def statistics(targets: Any, prediction: Any, *, weights: Any = None) -> Array:
        target, predicted = class_ids(name, targets, prediction, num_classes)
        mass = masses(weights, target).reshape(-1, 1)
        rows = mass * one_hot(target.reshape(-1), num_classes)
        columns = one_hot(predicted.reshape(-1), num_classes).astype(rows.dtype)
        # Full precision: accelerators otherwise multiply float32 with fewer bits, and counts stop being whole.
        return jnp.matmul(rows.T, columns, precision="highest")

    return StatisticsMetric(name=name, statistics=statistics, finish=jnp.asarray, reads=reads)
