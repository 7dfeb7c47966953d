import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as reference

from telic import metrics
from telic.errors import ShapeError
from tests.unit.metrics.running import Weighted, in_pieces, measure

REFERENCES = {
    "mean_absolute_error": reference.mean_absolute_error,
    "mean_squared_error": reference.mean_squared_error,
    "root_mean_squared_error": reference.root_mean_squared_error,
    "r2": reference.r2_score,
}


def draw(*shape, offset=0.0, seed=0):
    rng = np.random.default_rng(seed)
    targets = (rng.normal(size=shape) + offset).astype(np.float32)
    prediction = (targets + 0.5 * rng.normal(size=shape)).astype(np.float32)
    return targets, prediction, rng.uniform(0, 2, shape[0]).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_errors_are_sklearns(name, weighted):
    """Catches means of batches, a mean of roots, and spread measured around batch means."""
    targets, prediction, weights = draw(100)
    weights = weights if weighted else None
    expected = REFERENCES[name](targets, prediction, sample_weight=weights)
    value = measure(metrics.as_metric(name), *in_pieces(targets, prediction, weights))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["mean_absolute_error", "mean_squared_error", "r2"])
def test_errors_of_several_outputs_are_sklearns(name):
    """Catches outputs pooled into one spread."""
    targets, prediction, weights = draw(100, 3)
    targets, prediction = targets * [1, 2, 3], prediction * [1, 2, 3]
    expected = REFERENCES[name](targets, prediction, sample_weight=weights)
    value = measure(metrics.as_metric(name), *in_pieces(targets, prediction, weights))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_r2_of_targets_far_from_zero():
    """Catches a difference of sums of squares, which in float32 has no digits left for targets near 1,000."""
    targets, prediction, weights = draw(100, offset=1000.0)
    expected = reference.r2_score(targets.astype(float), prediction.astype(float), sample_weight=weights)
    value = measure(metrics.as_metric("r2"), *in_pieces(targets, prediction, weights))
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_r2_of_constant_targets():
    """Catches a division by zero spread; the values are scikit-learn's."""
    same, off = np.ones(3), np.array([1.0, 1.0, 2.0])
    assert float(measure(metrics.r2(), (same, same))) == reference.r2_score(same, same)
    assert float(measure(metrics.r2(), (same, off))) == reference.r2_score(same, off)
    metric = metrics.r2()
    assert float(metric.compute(metric.init(same, same))) == 0


def test_r2_drops_rows_without_weight():
    """Catches 0 * NaN from a padded row."""
    targets, prediction, _ = draw(10)
    expected = measure(metrics.r2(), (targets, prediction))
    padded = (np.append(targets, np.nan), np.append(prediction, np.nan))
    assert float(measure(metrics.r2(), Weighted(padded, np.append(np.ones(10), 0)))) == float(expected)


@pytest.mark.parametrize("name", REFERENCES)
def test_errors_do_not_broadcast(name):
    """Catches (n,) against (n, 1), an n by n table of errors."""
    with pytest.raises(ShapeError, match=r"same shape, got \(4,\) and \(4, 1\); write prediction\[..., 0\]"):
        metrics.as_metric(name).init(jnp.ones(4), jnp.ones((4, 1)))


def test_unsigned_integers_do_not_wrap():
    """Catches 1 - 2 = 255 of uint8 images."""
    batch = (jnp.array([2], jnp.uint8), jnp.array([1], jnp.uint8))
    assert float(measure(metrics.mean_absolute_error(), batch)) == 1


def test_float64_is_kept():
    """Catches float64 targets measured in float32."""
    with jax.enable_x64(True):
        targets, prediction, weights = draw(100, offset=1e6)
        targets, prediction = targets.astype(np.float64), targets + np.linspace(-1e-3, 1e-3, 100)
        weights = weights.astype(np.float64)
        for name, score in REFERENCES.items():
            expected = score(targets, prediction, sample_weight=weights)
            value = measure(metrics.as_metric(name), *in_pieces(targets, prediction, weights))
            np.testing.assert_allclose(value, expected, rtol=1e-12)
