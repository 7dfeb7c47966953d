"""Properties of preference losses that no reference file shows: extremes, dropped pairs, what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ShapeError
from telic.objectives.preferences.losses import NAMES, OF_SCORES, SMOOTHED, Pairs, PreferenceLoss
from telic.objectives.preferences.scores import completion_sums


def pairs_of(margin: float, **fields: Any) -> Pairs:
    """One pair whose ratios differ by a margin."""
    return Pairs(jnp.asarray([margin / 2]), jnp.asarray([-margin / 2]), jnp.zeros(1), jnp.zeros(1), **fields)


def test_a_margin_of_six() -> None:
    """S44: a loss type that is not passed on trains as sigmoid; the values are those of the report."""
    found = {name: float(PreferenceLoss(name)(pairs_of(6.0))[0]) for name in ("sigmoid", "hinge", "ipo")}
    np.testing.assert_allclose([found["sigmoid"], found["hinge"], found["ipo"]], [0.437488, 0.4, 1.0], atol=1e-6)


def test_ipo_of_sums_and_of_means() -> None:
    """XS161: four tokens of ratio 4 against two of ratio 1, where sums and means differ by a factor of five."""
    pairs = Pairs(*(jnp.asarray([x]) for x in (4.0, 1.0, 0.0, 0.0, 4, 2)))
    assert float(PreferenceLoss("ipo")(pairs)[0]) == pytest.approx(4.0)
    assert float(PreferenceLoss("ipo", length_normalized=True)(pairs)[0]) == pytest.approx(20.25)


@pytest.mark.parametrize("margin", [-1e4, -200.0, 200.0, 1e4])
@pytest.mark.parametrize("name", sorted(NAMES))
def test_far_margins_stay_finite(name: str, margin: float) -> None:
    """Catches inf · 0 where a logistic and an exponential are blended, and log of a rounded sigmoid."""
    smoothing = 1e-3 if name == "exo_pair" else 0.0
    loss = PreferenceLoss(name, beta=1.0 if name == "sppo_hard" else 0.05, label_smoothing=smoothing)
    value, slope = jax.value_and_grad(lambda x: loss(pairs_of(0.0, mask=None)).sum() * 0 + _of(loss, x))(margin)
    assert np.isfinite(value)
    # The exponential of DiscoPOP grows without bound on the wrong side, as its definition does.
    assert np.isfinite(slope)


def _of(loss: PreferenceLoss, margin: Any) -> Any:
    return loss(Pairs(*(jnp.reshape(x, 1) for x in (margin / 2, -margin / 2, 0.0, 0.0)))).sum()


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_divergences_differ_and_stay_finite(divergence: Any) -> None:
    """XS160: a chosen divergence that silently falls back to reverse KL."""
    options = {"alpha": 0.5} if divergence == "alpha" else {}
    loss = PreferenceLoss(divergence=divergence, **options)
    assert abs(float(loss(pairs_of(6.0))[0]) - 0.437488) > 1e-3
    for margin in (-400.0, 400.0):
        value, slope = jax.value_and_grad(lambda x: _of(loss, x))(margin)
        assert np.isfinite(value)
        assert np.isfinite(slope)


def test_reverse_kl_is_the_alpha_divergence_of_order_one() -> None:
    """Catches a parametrisation by another order."""
    near = PreferenceLoss(divergence="alpha", alpha=1 + 1e-4)(pairs_of(6.0))
    np.testing.assert_allclose(near, PreferenceLoss()(pairs_of(6.0)), rtol=1e-3)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_dropped_pairs_have_no_rank(name: str) -> None:
    """Catches padding that takes part in the sort."""
    draw = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    mask = np.asarray([1, 0, 1, 1, 0, 1])
    loss = PreferenceLoss(name, label_smoothing=0.1)
    kept = loss(Pairs(*draw[:, mask != 0]))

    def total(draw: Any) -> Any:
        return loss(Pairs(*draw, mask=mask)).sum()

    value, gradient = jax.value_and_grad(total)(jnp.asarray(draw))
    np.testing.assert_allclose(value, kept.sum(), rtol=1e-6)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, mask == 0], 0)


def test_label_smoothing_has_its_optimum_at_the_smoothed_odds() -> None:
    """Catches smoothing that only scales the loss: cDPO's minimum is where σ(β · margin) = 1 - ε."""
    loss = PreferenceLoss(beta=1.0, label_smoothing=0.1)
    best = float(np.log(0.9 / 0.1))
    assert abs(float(jax.grad(lambda x: _of(loss, x))(best))) < 1e-6


def test_the_tail_counts_less() -> None:
    """Catches a shared length counted over prompts or over all pairs."""
    log_probs = -np.ones((2, 2, 6), np.float32)
    mask = np.asarray([[[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]], [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]])
    np.testing.assert_allclose(completion_sums(log_probs, mask, tail_weight=0.5), [[-3.5, -2], [-2, -2.5]])
    np.testing.assert_allclose(completion_sums(log_probs, mask), [[-5, -2], [-2, -3]])


def test_what_stands_behind_the_mask_reaches_nothing() -> None:
    """XS169: -inf · 0 is NaN, in the value and in the gradient."""
    log_probs = jnp.asarray(np.where(np.arange(4) < 2, -1.0, -np.inf)) * jnp.ones((1, 2, 4))
    mask = np.asarray([[[1, 1, 0, 0], [1, 0, 0, 0]]])
    value, gradient = jax.value_and_grad(lambda x: completion_sums(x, mask).sum())(log_probs)
    assert float(value) == -3
    np.testing.assert_array_equal(gradient, mask)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": "sigmod"}, "Did you mean 'sigmoid'"),
        ({"beta": 0.0}, "beta must be a finite number above 0"),
        ({"beta": float("nan")}, "beta must be a finite number above 0"),
        ({"label_smoothing": 0.5}, r"label_smoothing must be in \[0, 0.5\)"),
        ({"name": "exo_pair"}, "exo_pair needs label_smoothing above 0"),
        ({"name": "hinge", "label_smoothing": 0.1}, "no meaning in the loss 'hinge'"),
        ({"name": "bco_pair", "divergence": "js"}, "no meaning in the loss 'bco_pair'"),
        ({"name": "aot", "margin": 1.0}, "no meaning in the loss 'aot'"),
        ({"divergence": "kl"}, "unknown divergence 'kl'"),
        ({"alpha": 0.5}, "alpha=0.5 is the order of divergence='alpha'"),
        ({"temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_settings_that_are_refused(options: dict[str, Any], text: str) -> None:
    """XS160: a setting that is read as another, or silently ignored."""
    with pytest.raises(ValueError, match=text):
        PreferenceLoss(**options)


def test_names_are_of_losses() -> None:
    """Catches a loss that was renamed in one table only."""
    assert set(NAMES) > SMOOTHED | OF_SCORES


def test_log_probs_of_another_shape_are_refused() -> None:
    """Catches token log-probs given for sums, which would broadcast."""
    with pytest.raises(ShapeError, match=r"shape \(2,\), those of reference_chosen \(2, 3\)"):
        PreferenceLoss()(Pairs(np.zeros(2), np.zeros(2), np.zeros((2, 3)), np.zeros(2)))
