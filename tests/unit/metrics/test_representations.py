"""Metrics of all rows at once: equal to scikit-learn's and to direct computation, however the rows were batched."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from telic import metrics
from telic.artifacts import Representations
from telic.errors import ContractError, ShapeError


def rows(n: int = 240, dim: int = 6, classes: int = 3, seed: int = 0) -> Representations:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, n)
    centres = random.normal(size=(classes, dim))
    features = (centres[labels] + 0.9 * random.normal(size=(n, dim))).astype(np.float32)
    return Representations(features, labels, (features + 0.9 * random.normal(size=(n, dim))).astype(np.float32))


def value(metric: Any, whole: Representations, *sizes: int) -> float:
    """Compute a metric over rows that come in batches of these sizes."""
    acc, start = metric.init(whole), 0
    for size in sizes or (len(whole.features),):
        part = [None if x is None else x[start : start + size] for x in (whole.features, whole.labels, whole.partners)]
        acc, start = metric.update(acc, Representations(*part)), start + size
    assert start == len(whole.features)
    return metric.compute(acc)


ALL = {
    "recall_at_k": metrics.recall_at_k(),
    "recall by label": metrics.recall_at_k(k=3, match="label", similarity="euclidean"),
    "knn_accuracy": metrics.knn_accuracy(k=5),
    "linear_probe": metrics.linear_probe(),
    "frechet_distance": metrics.frechet_distance(rows(seed=1).features),
}


@pytest.mark.parametrize("name", ALL)
def test_batches_do_not_matter(name: str) -> None:
    """Catches retrieval within each batch, which is easier the smaller the batch: the usual wrong number."""
    metric, whole = ALL[name], rows()
    expected = value(metric, whole)
    assert value(metric, whole, 1, 100, 39, 100) == pytest.approx(expected, rel=1e-9)
    parts = [metric.update(metric.init(whole), whole), metric.init(whole)]
    assert metric.compute(metric.merge(*parts)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("similarity", "k"), [("cosine", 1), ("dot", 3), ("euclidean", 5)])
def test_recall_is_that_of_sorting(similarity: Any, k: int) -> None:
    """Catches a rank that counts from 1 where it should from 0, or a query compared with the queries."""
    whole = rows()
    q, g = np.float64(whole.features), np.float64(whole.partners)
    if similarity == "cosine":
        q, g = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, g))
    alike = -((q[:, None] - g[None]) ** 2).sum(-1) if similarity == "euclidean" else q @ g.T
    order = np.argsort(-alike, axis=1)[:, :k]
    expected = np.mean([i in row for i, row in enumerate(order)])
    assert 0.1 < expected < 1
    assert value(metrics.recall_at_k(k=k, similarity=similarity), whole) == pytest.approx(expected)


def test_recall_by_label_leaves_the_query_out() -> None:
    """Catches a query that finds itself, which is a recall of 1 for any features."""
    whole = rows()
    x = whole.features / np.linalg.norm(whole.features, axis=1, keepdims=True)
    alike = x @ x.T
    np.fill_diagonal(alike, -np.inf)
    order = np.argsort(-alike, axis=1)[:, :2]
    expected = np.mean([(whole.labels[row] == whole.labels[i]).any() for i, row in enumerate(order)])
    assert value(metrics.recall_at_k(k=2, match="label"), whole) == pytest.approx(expected)
    alone = Representations(np.eye(3, dtype=np.float32), np.array([0, 1, 2]))
    assert value(metrics.recall_at_k(k=2, match="label"), alone) == 0.0


def test_collapsed_and_broken_features_find_nothing() -> None:
    """Catches an encoder that gives one vector, or NaN, and is told that it retrieves everything."""
    same = Representations(np.ones((8, 2), np.float32), np.arange(8) % 2, np.ones((8, 2), np.float32))
    assert value(metrics.recall_at_k(), same) == 0.0
    assert value(metrics.recall_at_k(k=8), same) == 1.0
    broken = np.full((8, 2), np.nan, np.float32)
    assert value(metrics.recall_at_k(), Representations(broken, np.arange(8), broken)) == 0.0
    one = np.eye(8, dtype=np.float32)
    one[3] = np.nan
    assert value(metrics.recall_at_k(), Representations(one, None, np.eye(8, dtype=np.float32))) == pytest.approx(7 / 8)


@pytest.mark.parametrize("k", [1, 5, 12])
def test_nearest_neighbours_are_those_of_scikit_learn(k: int) -> None:
    """Catches votes of the wrong rows: sorting in the wrong direction, or the row itself among its neighbours."""
    train, test = rows(), rows(60, seed=3)
    model = KNeighborsClassifier(k, metric="euclidean").fit(train.features, train.labels)
    ours = metrics.knn_labels(train.features, train.labels, test.features, k=k, similarity="euclidean")
    votes = np.sort(model.predict_proba(test.features), axis=1)
    decided = votes[:, -1] > votes[:, -2]
    assert decided.sum() > 40
    np.testing.assert_array_equal(ours[decided], model.predict(test.features)[decided])
    one_out = [
        metrics.knn_labels(np.delete(train.features, i, 0), np.delete(train.labels, i), train.features[i][None], k=k)[0]
        for i in range(20)
    ]
    np.testing.assert_array_equal(metrics.knn_labels(train.features, train.labels, None, k=k)[:20], one_out)


def test_a_tie_goes_to_the_nearest() -> None:
    """Catches a tie that goes to the class with the lowest number, so that class 0 wins what nobody won."""
    features = np.array([[0.0], [1.0], [2.0], [3.0]], np.float32)
    named = metrics.knn_labels(features, np.array([1, 0, 0, 1]), np.float32([[-0.1]]), k=4, similarity="euclidean")
    assert named.tolist() == [1]


def test_probe_is_scikit_learns_logistic_regression() -> None:
    """Catches a probe that stops early, or whose penalty is of another size: its accuracy then says little."""
    train, test = rows(200, dim=8, classes=4), rows(100, dim=8, classes=4, seed=5)
    ours = metrics.fit_linear_probe(train.features, train.labels, l2=1e-2)
    x = (np.float64(train.features) - ours.shift) / ours.scale
    theirs = LogisticRegression(C=1 / (1e-2 * len(x)), tol=1e-8, max_iter=2000).fit(x, train.labels)
    ours_weights, theirs_weights = (w - w.mean(axis=1, keepdims=True) for w in (ours.weights, theirs.coef_.T))
    np.testing.assert_allclose(ours_weights, theirs_weights, rtol=1e-3, atol=1e-4)
    expected = theirs.score((test.features - ours.shift) / ours.scale, test.labels)
    assert ours.accuracy(test.features, test.labels) == pytest.approx(expected)


def test_probe_of_degenerate_features() -> None:
    """Catches a division by a spread of zero, and collapsed features that score better than chance."""
    labels = np.arange(90) % 3
    probe = metrics.fit_linear_probe(np.ones((90, 4), np.float32), labels)
    assert np.isfinite(probe.weights).all()
    assert probe.accuracy(np.ones((90, 4)), labels) == pytest.approx(1 / 3)
    assert np.isnan(value(metrics.linear_probe(), Representations(np.ones((1, 2)), np.array([0]))))
    with pytest.raises(ValueError, match="finite features"):
        metrics.fit_linear_probe(np.full((3, 2), np.nan), np.arange(3))
    with pytest.raises(ShapeError, match=r"\[n, dim\]"):
        metrics.fit_linear_probe(np.ones(3), np.arange(3))


def test_frechet_distance_in_closed_form() -> None:
    """Catches the root of the product computed without its cross terms, and a mean that is left out."""
    random = np.random.default_rng(2)
    a, b = (random.normal(size=(4, 4)) for _ in range(2))
    cov_a, cov_b = a @ a.T, b @ b.T
    mean_a, mean_b = random.normal(size=4), random.normal(size=4)
    roots = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).astype(complex)).real.sum()
    expected = ((mean_a - mean_b) ** 2).sum() + np.trace(cov_a + cov_b) - 2 * roots
    assert metrics.gaussian_distance((mean_a, cov_a), (mean_b, cov_b)) == pytest.approx(expected, rel=1e-9)
    assert metrics.gaussian_distance((mean_a, cov_a), (mean_a, cov_a)) == pytest.approx(0, abs=1e-6)


def test_frechet_distance_of_features() -> None:
    """Catches statistics that cancel: features far from zero, whose products are huge beside their spread."""
    real, made = rows(seed=1).features.astype(np.float64) + 1e5, rows(seed=2).features.astype(np.float64) + 1e5
    expected = metrics.gaussian_distance(metrics.gaussian_of(made), metrics.gaussian_of(real))
    metric = metrics.frechet_distance(real)
    assert value(metric, Representations(made), 100, 140) == pytest.approx(expected, rel=1e-6)
    assert value(metrics.frechet_distance(metrics.gaussian_of(real)), Representations(real)) == pytest.approx(
        0, abs=1e-6
    )
    assert np.isnan(value(metric, Representations(made[:1])))
    with pytest.raises(ShapeError, match="features must be"):
        metric.update(metric.init(), Representations(np.ones((3, 2))))
    with pytest.raises(ShapeError, match="n ≥ 2"):
        metrics.frechet_distance(np.ones((1, 3)))


def test_features_of_another_artifact() -> None:
    """Catches a distance that insists on a field called features."""
    metric = metrics.frechet_distance(rows().features, features=lambda r: r.partners)
    whole = rows()
    expected = metrics.gaussian_distance(*(metrics.gaussian_of(x) for x in (whole.partners, whole.features)))
    assert value(metric, whole) == pytest.approx(expected, rel=1e-6)


def test_half_precision_features() -> None:
    """Catches NumPy arithmetic in bfloat16, which has eight bits."""
    whole = rows()
    half = Representations(jnp.asarray(whole.features, jnp.bfloat16), whole.labels, whole.partners)
    for metric in ALL.values():
        assert value(metric, half) == pytest.approx(value(metric, whole), abs=0.05)


def test_missing_fields_and_options_are_refused() -> None:
    """Catches a metric that fails after an epoch for a field that the evaluation never gives."""
    bare = Representations(np.ones((4, 2), np.float32))
    with pytest.raises(ContractError, match=r"Representations.labels, which evaluate left out"):
        metrics.knn_accuracy().init(bare)
    with pytest.raises(ContractError, match=r"Representations.partners"):
        metrics.recall_at_k().init(bare)
    for make in (
        lambda: metrics.recall_at_k(k=0),
        lambda: metrics.recall_at_k(match="other"),  # type: ignore[arg-type]
        lambda: metrics.knn_accuracy(similarity="l1"),  # type: ignore[arg-type]
        lambda: metrics.linear_probe(fit_share=1.0),
    ):
        with pytest.raises(ValueError, match="must be"):
            make()
    with pytest.raises(ValueError, match="works on the host"):
        metrics.as_metric("knn_accuracy", reduce="last")
    assert np.isnan(metrics.knn_accuracy().compute(()))
