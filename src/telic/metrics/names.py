"""The metrics that have a name, and how anything becomes a metric."""

from collections.abc import Callable
from typing import Any

from telic.errors import unknown_name
from telic.metrics import adapters, classification, function, probability, regression, representations, tokens
from telic.metrics.base import TARGETS_AND_PREDICTION, Metric, Reads, Renamed, as_reads, check_name, is_host
from telic.metrics.function import FunctionMetric, Reduce, batch_value

NAMES: dict[str, Callable[..., Metric]] = {
    "accuracy": classification.accuracy,
    "auc": probability.auc,
    "bits_per_byte": tokens.bits_per_byte,
    "confusion_matrix": classification.confusion_matrix,
    "expected_calibration_error": probability.expected_calibration_error,
    "f1": classification.f1,
    "false_negatives": classification.false_negatives,
    "false_positives": classification.false_positives,
    "knn_accuracy": representations.knn_accuracy,
    "last": function.last,
    "linear_probe": representations.linear_probe,
    "mean": function.mean,
    "mean_absolute_error": regression.mean_absolute_error,
    "mean_squared_error": regression.mean_squared_error,
    "perplexity": probability.perplexity,
    "precision": classification.precision,
    "r2": regression.r2,
    "recall": classification.recall,
    "recall_at_k": representations.recall_at_k,
    "root_mean_squared_error": regression.root_mean_squared_error,
    "sensitivity": classification.sensitivity,
    "specificity": classification.specificity,
    "sum": function.sum,
    "token_accuracy": classification.token_accuracy,
    "top_k_accuracy": classification.top_k_accuracy,
    "top_k_categorical_accuracy": classification.top_k_accuracy,
    "true_negatives": classification.true_negatives,
    "true_positives": classification.true_positives,
}
"""Metrics by name; each function makes one with its default options: ``NAMES["auc"](bins=200)``."""

_NEED_READS = ("last", "mean", "sum")


def as_metric(x: Any, name: str | None = None, *, reduce: Reduce = "mean", reads: Any = None) -> Metric:
    """Make a metric from a name, a plain function or a metric.

    Args:
      x: A name of `NAMES`; a function of what the metric reads; a metric; a metric class of clu or metrax; or a metric
        of ``flax.nnx``.
      name: Under which the value is reported. None takes the name given, the function's or the metric's own.
      reduce: How batches are joined, see `FunctionMetric`. For a name or a metric, "mean" leaves it as it is, over all
        examples; anything else joins the values it has on each batch alone: "running_average" of "precision" is the
        mean of the batches' precisions.
      reads: Where the arguments come from: names, a function, or for metrics of other libraries a mapping of their
        parameters to names. None keeps the metric's own, or ``("targets", "prediction")``.
    Raises:
      ValueError: No metric has this name, or a function without a name of its own was given none.
      TypeError: `x` is nothing of these, or the name is no string.
    Example:
      >>> as_metric("accuracy", "acc").name
      'acc'
      >>> as_metric("acuracy")
      Traceback (most recent call last):
      ...
      ValueError: unknown metric 'acuracy'. Did you mean 'accuracy'? Known: ...
    """
    if name is not None:
        check_name(name)
    if adapters.is_foreign(x):
        return _reduced(adapters.as_foreign(x, name, reads), reduce)
    sources = None if reads is None else as_reads(reads)
    match x:
        case str():
            metric = _by_name(x, name or x, sources)
        case type():
            raise TypeError(f"give an instance of a metric, not the class: {x.__name__}(...)")
        case Metric():
            metric = x if name is None and sources is None else _renamed(x, name, sources)
        case _ if callable(x):
            return FunctionMetric(
                x, name or _function_name(x), sources if sources is not None else TARGETS_AND_PREDICTION, None, reduce
            )
        case _:
            raise TypeError(
                f"a metric is a name such as 'accuracy', a function, or a Metric (init, update, merge, compute), got "
                f"{x!r} ({type(x).__name__})"
            )
    return _reduced(metric, reduce)


def _reduced(metric: Metric, reduce: Reduce) -> Metric:
    if reduce == "mean":
        return metric
    if is_host(metric):
        raise ValueError(
            f"metric {metric.name!r} works on the host, on all examples at once: leave reduce={reduce!r} out"
        )
    return FunctionMetric(batch_value(metric), metric.name, metric.reads, metric.mode, reduce, of_metric=True)


def _by_name(x: str, name: str, reads: Reads | None) -> Metric:
    if x not in NAMES:
        raise unknown_name("metric", x, NAMES)
    if x == "confusion_matrix":
        raise ValueError(
            "the confusion matrix needs the number of classes: write metrics.confusion_matrix(num_classes=...)"
        )
    if x in _NEED_READS and reads is None:
        raise ValueError(f"metric {x!r} must be told what it reads: as_metric({x!r}, reads='prediction')")
    return NAMES[x](name) if reads is None else NAMES[x](name, reads=reads)


def _renamed(metric: Metric, name: str | None, reads: Reads | None) -> Metric:
    inner = metric.metric if isinstance(metric, Renamed) else metric
    return Renamed(inner, metric.name if name is None else name, metric.reads if reads is None else reads)


def _function_name(fn: Callable[..., Any]) -> str:
    found = getattr(fn, "__name__", None)
    if not isinstance(found, str) or found == "<lambda>":
        raise ValueError(f"must provide name for a metric made from {fn!r}, which has none of its own: name='...'")
    return found
