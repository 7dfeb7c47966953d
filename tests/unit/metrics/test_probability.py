import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import sklearn.metrics as reference

from telic import metrics
from telic.errors import ShapeError
from telic.mean import Mean
from tests.unit.metrics.running import Weighted, in_pieces, measure


def draw(rows=300, seed=0):
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 2, rows)
    scores = np.clip(rng.uniform(size=rows) + 0.2 * (targets - 0.5), 0, 1).astype(np.float32)
    return targets, scores, rng.uniform(0, 2, rows).astype(np.float32)


# ---- area under the curve


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bins", [4, 64])
def test_auc_of_binned_scores_is_sklearns(bins, weighted):
    """Catches ties counted as won or lost, and means of the batches' areas."""
    targets, scores, weights = draw()
    weights = weights if weighted else None
    binned = np.minimum(np.floor(scores * bins), bins - 1) / bins
    expected = reference.roc_auc_score(targets, binned, sample_weight=weights)
    for prediction in (scores, binned):
        value = measure(metrics.auc(bins=bins), *in_pieces(targets, prediction, weights))
        np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("bins", [10, 100, 1000])
def test_auc_is_within_one_over_bins(bins):
    """Catches a bias larger than what the docs allow for evenly spread scores."""
    targets, scores, weights = draw(rows=20_000)
    expected = reference.roc_auc_score(targets, scores, sample_weight=weights)
    assert abs(float(measure(metrics.auc(bins=bins), *in_pieces(targets, scores, weights))) - expected) <= 1 / bins


def test_auc_is_within_half_the_share_of_tied_pairs():
    """Catches an error beyond the bound of the docs when scores crowd into one bin."""
    targets, scores, _ = draw()
    scores = scores / 10
    bins = 4
    index = np.floor(scores * bins).astype(int)
    share = [np.bincount(index[targets == c], minlength=bins) / (targets == c).sum() for c in (0, 1)]
    expected = reference.roc_auc_score(targets, scores)
    value = float(measure(metrics.auc(bins=bins), (targets, scores)))
    assert value == pytest.approx(0.5, abs=1e-6)
    assert abs(value - expected) <= 0.5 * (share[0] * share[1]).sum()


def test_auc_of_logits_and_edges():
    """Catches scores of 1 or above falling out of the histogram."""
    assert float(measure(metrics.auc(), (jnp.array([0, 1]), jnp.array([0.0, 1.0])))) == 1
    assert float(measure(metrics.auc(from_logits=True), (jnp.array([0, 1]), jnp.array([-50.0, 50.0])))) == 1
    assert float(measure(metrics.auc(), (jnp.array([1, 1]), jnp.array([0.0, 1.0])))) == 0
    with pytest.raises(ShapeError, match="same shape"):
        metrics.auc().init(jnp.ones(3), jnp.ones((3, 1)))
    with pytest.raises(ValueError, match="bins must be at least 1"):
        metrics.auc(bins=0)


def test_auc_of_nan_scores():
    """Catches NaN counted as the lowest score; a row without weight may be NaN."""
    batch = (jnp.array([0, 1, 1]), jnp.array([0.1, 0.9, np.nan]))
    assert np.isnan(measure(metrics.auc(), batch))
    assert float(measure(metrics.auc(), Weighted(batch, jnp.array([1.0, 1.0, 0.0])))) == 1


# ---- calibration


def by_hand(confidence, correct, weights, bins):
    """Guo et al. 2017, equation 3, bin by bin."""
    edges = np.linspace(0, 1, bins + 1)
    total = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if weights[inside].sum() > 0:
            accuracy = np.average(correct[inside], weights=weights[inside])
            mean = np.average(confidence[inside], weights=weights[inside])
            total += weights[inside].sum() / weights.sum() * abs(accuracy - mean)
    return total


@pytest.mark.parametrize("weighted", [False, True])
def test_calibration_error_of_classes(weighted):
    """Catches batches' errors averaged, and bins averaged without their mass."""
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(300, 4)).astype(np.float32), rng.integers(0, 4, 300)
    p = scipy.special.softmax(logits.astype(float), axis=-1)
    weights = rng.uniform(0, 2, 300).astype(np.float32) if weighted else np.ones(300, np.float32)
    expected = by_hand(p.max(-1), p.argmax(-1) == targets, weights, 15)
    given = weights if weighted else None
    value = measure(metrics.expected_calibration_error(), *in_pieces(targets, p, given))
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
    value = measure(metrics.expected_calibration_error(from_logits=True), *in_pieces(targets, logits, given))
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("column", [False, True])
def test_calibration_error_of_two_classes(column):
    """Catches a confidence below one half, or an (n,) by (n, 1) table."""
    targets, scores, weights = draw()
    expected = by_hand(np.maximum(scores, 1 - scores), (scores > 0.5) == targets, weights, 10)
    if column:
        targets, scores = targets[:, None], scores[:, None]
    value = measure(metrics.expected_calibration_error(bins=10), *in_pieces(targets, scores, weights))
    np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


def test_calibration_needs_probabilities():
    """Catches class ids taken for confidences."""
    with pytest.raises(TypeError, match="must be probabilities or logits, got int32"):
        metrics.expected_calibration_error().init(jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32))
    with pytest.raises(ShapeError, match=r"targets\[..., None\]"):
        metrics.expected_calibration_error().init(jnp.zeros(3, jnp.int32), jnp.zeros((3, 1)))


# ---- perplexity


def test_perplexity_is_exp_of_the_mean_over_tokens():
    """Catches the mean of batches' perplexities, and of means over unequal batches."""
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(12, 5, 7)).astype(np.float32), rng.integers(0, 7, (12, 5))
    mask = rng.integers(0, 2, (12, 5)).astype(np.float32)
    nll = -np.take_along_axis(scipy.special.log_softmax(logits.astype(float), -1), targets[..., None], -1)[..., 0]
    expected = np.exp((nll * mask).sum() / mask.sum())
    cuts = [0, 1, 8, 12]
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    metric = metrics.perplexity()
    value = measure(metric, *[Weighted((targets[p], logits[p]), mask[p]) for p in parts])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    value = measure(metric, *[Weighted((nll[p],), mask[p]) for p in parts])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    value = measure(metric, *[(Mean((nll[p] * mask[p]).sum(), mask[p].sum()),) for p in parts])
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    ignored = np.where(mask == 0, -100, targets)
    value = measure(metrics.perplexity(ignore=-100), *[(ignored[p], logits[p]) for p in parts])
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_perplexity_of_an_id_outside_the_vocabulary():
    """Catches -100 read as a token from the end: the value must be NaN, unless the token has no weight."""
    batch = (jnp.array([0, -1]), jnp.zeros((2, 4)))
    assert np.isnan(measure(metrics.perplexity(), batch))
    assert float(measure(metrics.perplexity(), Weighted(batch, jnp.array([1.0, 0.0])))) == pytest.approx(4)
    assert np.isnan(measure(metrics.perplexity(), (jnp.array([0, 4]), jnp.zeros((2, 4)))))


def test_perplexity_of_large_bfloat16_logits():
    """Catches a softmax computed in bfloat16, or overflowing."""
    logits = jnp.array([[1000.0, 999.0]], jnp.bfloat16)
    expected = float(jax.nn.softplus(jnp.float32(logits[0, 1]) - jnp.float32(logits[0, 0])))
    value = measure(metrics.perplexity(), (jnp.array([0]), logits))
    assert float(value) == pytest.approx(np.exp(expected), rel=1e-6)


def test_perplexity_refuses_other_arguments():
    """Catches one-hot targets, and a third argument silently dropped."""
    with pytest.raises(ShapeError, match=r"token ids of shape \(2,\)"):
        metrics.perplexity().init(jnp.zeros((2, 4)), jnp.zeros((2, 4)))
    with pytest.raises(TypeError, match="got 3 arguments"):
        metrics.perplexity().init(jnp.zeros(2), jnp.zeros(2), jnp.zeros(2))
