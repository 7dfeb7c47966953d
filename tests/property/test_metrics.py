"""The laws of a metric, for every built-in one: any batching gives the value of the whole, merging is associative."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telic import metrics
from telic.mean import Mean

ROWS, CLASSES = 12, 3
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def of_classes(rng):
    return rng.integers(0, CLASSES, ROWS), rng.normal(size=(ROWS, CLASSES)).astype(np.float32)


def binary(rng):
    return rng.integers(0, 2, ROWS), rng.uniform(size=ROWS).astype(np.float32)


def numbers(rng):
    return rng.normal(size=(2, ROWS)).astype(np.float32)


def tokens(rng):
    return rng.integers(0, CLASSES, (ROWS, 2)), rng.normal(size=(ROWS, 2, CLASSES)).astype(np.float32)


def one(rng):
    return (rng.normal(size=ROWS).astype(np.float32),)


def _row_means(targets, prediction):
    errors = jnp.abs(targets - prediction)
    return Mean(errors.sum(), errors.size)


BINARY = (
    "accuracy",
    "auc",
    "f1",
    "false_negatives",
    "false_positives",
    "precision",
    "recall",
    "sensitivity",
    "specificity",
    "true_negatives",
    "true_positives",
)
METRICS = {
    **{f"binary_{name}": (metrics.as_metric(name), binary) for name in BINARY},
    **{name: (metrics.as_metric(name), numbers) for name in metrics.NAMES if "error" in name and "calib" not in name},
    "r2": (metrics.r2(), numbers),
    "accuracy": (metrics.accuracy(), of_classes),
    "top_k_accuracy": (metrics.top_k_accuracy(k=2), of_classes),
    "confusion_matrix": (metrics.confusion_matrix(num_classes=CLASSES), of_classes),
    "f1_weighted": (metrics.f1(num_classes=CLASSES, average="weighted"), of_classes),
    "precision_macro": (metrics.precision(num_classes=CLASSES), of_classes),
    "recall_micro": (metrics.recall(num_classes=CLASSES, average="micro"), of_classes),
    "specificity_each": (metrics.specificity(num_classes=CLASSES, average=None), of_classes),
    "expected_calibration_error": (metrics.expected_calibration_error(from_logits=True), of_classes),
    "perplexity": (metrics.perplexity(), tokens),
    "token_accuracy": (metrics.token_accuracy(), tokens),
    "mean": (metrics.mean(reads="x"), one),
    "sum": (metrics.sum(reads="x"), one),
    "function": (metrics.as_metric(lambda t, p: jnp.abs(t - p), "e"), numbers),
    "function_number": (metrics.as_metric(lambda t, p: jnp.abs(t - p).mean(), "e"), numbers),
    "function_mean": (metrics.as_metric(_row_means, "e"), numbers),
}
BLIND_TO_WEIGHTS = ("function_number", "function_mean")

# One program per metric, whatever the batch: a batch of some rows is all of them with weight 0 for the others.
_UPDATES = {
    name: jax.jit(lambda acc, args, w, metric=metric: metric.update(acc, *args, weights=w))
    for name, (metric, _) in METRICS.items()
}
_MERGES = {name: jax.jit(metric.merge) for name, (metric, _) in METRICS.items()}


def test_every_name_is_here():
    """Catches a metric added to the table and not to these laws."""
    covered = {metric.name for metric, _ in METRICS.values()} | {"last", "top_k_categorical_accuracy"}
    # Those of artifacts are tested in tests/unit/metrics/test_representations.py and unit/compose/test_evaluation.py.
    covered |= {"bits_per_byte", "frechet_distance", "knn_accuracy", "linear_probe", "recall_at_k"}
    assert covered >= set(metrics.NAMES)


def spans(cuts):
    edges = [0, *sorted(cuts), ROWS]
    return list(itertools.pairwise(edges))


def weights_of(rng, a, b):
    """Sample weights of the rows [a, b), 0 elsewhere."""
    weights = rng.uniform(0, 2, ROWS).astype(np.float32)
    inside = (np.arange(ROWS) >= a) & (np.arange(ROWS) < b)
    return np.where(inside, weights, 0).astype(np.float32)


def accumulate(name, args, weights):
    metric, _ = METRICS[name]
    return _UPDATES[name](metric.init(*args), args, weights)


BY_WEIGHT = sorted(set(METRICS) - set(BLIND_TO_WEIGHTS))


@pytest.mark.parametrize("name", BY_WEIGHT)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, ROWS), max_size=4))
def test_any_batching_gives_the_value_of_the_whole(name, seed, cuts):
    """Catches means of means, ratios of batches, and rows without weight that count."""
    metric, draw = METRICS[name]
    args = draw(np.random.default_rng(seed))
    weights = weights_of(np.random.default_rng(seed + 1), 0, ROWS)
    whole = metric.compute(accumulate(name, args, weights))
    acc = metric.init(*args)
    for a, b in spans(cuts):
        acc = _UPDATES[name](acc, args, weights_of(np.random.default_rng(seed + 1), a, b))
    np.testing.assert_allclose(metric.compute(acc), whole, **CLOSE)


@pytest.mark.parametrize("name", BY_WEIGHT)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), cuts=st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)))
def test_merge_is_associative_and_empty_is_neutral(name, seed, cuts):
    """Catches accumulators whose merge depends on the grouping, and an empty one that changes the other."""
    metric, draw = METRICS[name]
    merge = _MERGES[name]
    args = draw(np.random.default_rng(seed))
    a, b, c = (accumulate(name, args, weights_of(np.random.default_rng(seed + 1), *s)) for s in spans(cuts))
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    np.testing.assert_allclose(metric.compute(left), metric.compute(right), **CLOSE)
    whole = accumulate(name, args, weights_of(np.random.default_rng(seed + 1), 0, ROWS))
    np.testing.assert_allclose(metric.compute(left), metric.compute(whole), **CLOSE)
    empty = metric.init(*args)
    for neutral in (merge(a, empty), merge(empty, a)):
        for got, want in zip(jax.tree.leaves(neutral), jax.tree.leaves(a), strict=True):
            np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.parametrize("name", METRICS)
def test_really_split_batches(name):
    """Catches what weights of 0 hide: masses and counts taken from shapes, without any weights."""
    metric, draw = METRICS[name]
    args = draw(np.random.default_rng(0))
    whole = metric.compute(metric.update(metric.init(*args), *args))
    parts = [metric.init(*args)]
    for a, b in [(0, 1), (1, 4), (4, ROWS)]:
        part = tuple(x[a:b] for x in args)
        parts.append(metric.update(metric.init(*part), *part))
    merged = parts[0]
    for part in parts[1:]:
        merged = metric.merge(merged, part)
    np.testing.assert_allclose(metric.compute(merged), whole, **CLOSE)


@pytest.mark.parametrize("name", METRICS)
def test_update_is_a_fixed_point_that_scans(name):
    """Catches an accumulator whose shape, dtype or weak type changes with an update, with or without weights."""
    metric, draw = METRICS[name]
    args = draw(np.random.default_rng(0))
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(jnp.asarray, args)]
    empty = metric.init(*structs)
    assert {leaf.dtype for leaf in jax.tree.leaves(empty)} == {jnp.dtype("float32")}
    weights = np.ones(ROWS, np.float32)

    def step(acc, _):
        return metric.update(metric.update(acc, *args), *args, weights=weights), None

    assert jax.eval_shape(lambda: step(empty, None)[0]) == jax.eval_shape(lambda: empty)
    scanned = jax.lax.scan(step, empty, length=2)[0]
    expected = empty
    for _ in range(2):
        expected, _ = step(expected, None)
    np.testing.assert_allclose(metric.compute(scanned), metric.compute(expected), **CLOSE)
