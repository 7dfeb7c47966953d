"""Metrics of the seed: golden axon_metrics_losses, rtol 1e-5, atol 1e-6 in float32."""

import numpy as np
import pytest

from telic import metrics
from tests.golden import load
from tests.unit.metrics.running import measure

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
CASES = {case["name"]: case for case in load("axon_metrics_losses")["cases"]}
BINARY = (
    "false_negatives",
    "false_positives",
    "precision",
    "recall",
    "sensitivity",
    "specificity",
    "true_negatives",
    "true_positives",
)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_metrics_of_one_batch(case):
    """Catches a definition that is not the seed's, such as another threshold or axis."""
    given, expected = case["in"], case["out"]["metrics"]
    rows = {name: (name, "binary", "binary_probability") for name in BINARY}
    rows["accuracy"] = ("accuracy", "one_hot", "probabilities")
    rows["accuracy_binary"] = ("accuracy", "binary", "binary_probability")
    rows["mean_absolute_error"] = ("mean_absolute_error", "target", "prediction")
    rows["top_2"] = (None, "one_hot", "probabilities")
    assert set(rows) == set(expected)
    for key, (name, targets, prediction) in rows.items():
        metric = metrics.top_k_accuracy(k=2) if name is None else metrics.as_metric(name)
        value = measure(metric, (given[targets], given[prediction]))
        np.testing.assert_allclose(value, expected[key], err_msg=key, **CLOSE)


def running(metric, targets, prediction):
    """The values after each batch; batch k holds the rows [0..k]."""
    acc, values = metric.init(targets[:1], prediction[:1]), []
    for k in range(len(targets)):
        acc = metric.update(acc, targets[: k + 1], prediction[: k + 1])
        values.append(metric.compute(acc))
    return np.array(values)


def test_running_average(case):
    """Catches a mean by mass where every batch must count alike: the batches grow, so the two differ."""
    given, expected = case["in"], case["out"]["running_average"]
    by_name = metrics.as_metric("mean_absolute_error", reduce="running_average")
    by_function = metrics.as_metric(lambda t, p: abs(t - p).mean(), "mae", reduce="running_average")
    for metric in (by_name, by_function):
        np.testing.assert_allclose(running(metric, given["target"], given["prediction"]), expected, **CLOSE)
    by_mass = running(metrics.as_metric("mean_absolute_error"), given["target"], given["prediction"])
    assert not np.allclose(by_mass, expected, **CLOSE)


def test_running_sum(case):
    """Catches counts that are averaged, or restarted with each batch."""
    given, expected = case["in"], case["out"]["running_sum"]
    by_reduction = metrics.as_metric("true_positives", reduce="running_sum")
    for metric in (metrics.as_metric("true_positives"), by_reduction):
        np.testing.assert_array_equal(running(metric, given["binary"], given["binary_probability"]), expected)
