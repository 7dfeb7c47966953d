"""Metrics: values over examples that come in batches, the same however they were batched.

A metric is four pure functions over trees of arrays, ``init``, ``update``, ``merge`` and ``compute``, with the names of
what it reads. `as_metric` makes one from a name or a plain function; the functions here make the built-in ones with
options. Nothing is loaded until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telic.metrics.base import HostMetric, Metric, Mode, Reads, StatisticsMetric
    from telic.metrics.classification import (
        accuracy,
        confusion_matrix,
        f1,
        false_negatives,
        false_positives,
        precision,
        recall,
        sensitivity,
        specificity,
        token_accuracy,
        top_k_accuracy,
        true_negatives,
        true_positives,
    )
    from telic.metrics.function import FunctionMetric, Reduce, last, mean, sum
    from telic.metrics.names import NAMES, as_metric
    from telic.metrics.probability import auc, expected_calibration_error, perplexity
    from telic.metrics.regression import (
        R2,
        mean_absolute_error,
        mean_squared_error,
        r2,
        root_mean_squared_error,
    )
    from telic.metrics.representations import (
        LinearProbe,
        RowsMetric,
        fit_linear_probe,
        frechet_distance,
        gaussian_distance,
        gaussian_of,
        knn_accuracy,
        knn_labels,
        linear_probe,
        recall_at_k,
    )
    from telic.metrics.tokens import bits_per_byte

__all__ = [
    "NAMES",
    "R2",
    "FunctionMetric",
    "HostMetric",
    "LinearProbe",
    "Metric",
    "Mode",
    "Reads",
    "Reduce",
    "RowsMetric",
    "StatisticsMetric",
    "accuracy",
    "as_metric",
    "auc",
    "bits_per_byte",
    "confusion_matrix",
    "expected_calibration_error",
    "f1",
    "false_negatives",
    "false_positives",
    "fit_linear_probe",
    "frechet_distance",
    "gaussian_distance",
    "gaussian_of",
    "knn_accuracy",
    "knn_labels",
    "last",
    "linear_probe",
    "mean",
    "mean_absolute_error",
    "mean_squared_error",
    "perplexity",
    "precision",
    "r2",
    "recall",
    "recall_at_k",
    "root_mean_squared_error",
    "sensitivity",
    "specificity",
    "sum",
    "token_accuracy",
    "top_k_accuracy",
    "true_negatives",
    "true_positives",
]

_MODULES = {
    "base": ("HostMetric", "Metric", "Mode", "Reads", "StatisticsMetric"),
    "function": ("FunctionMetric", "Reduce", "last", "mean", "sum"),
    "names": ("NAMES", "as_metric"),
    "probability": ("auc", "expected_calibration_error", "perplexity"),
    "regression": ("R2", "mean_absolute_error", "mean_squared_error", "r2", "root_mean_squared_error"),
    "representations": (
        "LinearProbe",
        "RowsMetric",
        "fit_linear_probe",
        "frechet_distance",
        "gaussian_distance",
        "gaussian_of",
        "knn_accuracy",
        "knn_labels",
        "linear_probe",
        "recall_at_k",
    ),
    "tokens": ("bits_per_byte",),
    "classification": (
        "accuracy",
        "confusion_matrix",
        "f1",
        "false_negatives",
        "false_positives",
        "precision",
        "recall",
        "sensitivity",
        "specificity",
        "token_accuracy",
        "top_k_accuracy",
        "true_negatives",
        "true_positives",
    ),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
