"""Ratios, surrogates, estimators and averages by hand: the figures of reports, and what lies behind masks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ShapeError
from telic.objectives.policy.ratios import importance_ratios, kl_estimate, masked, own_means, own_sums, sampling_weights
from telic.objectives.policy.surrogates import Cispo, Clip, aggregate, num_sequences, token_advantages

ONES = np.ones((1, 2), np.float32)


def test_reductions_weigh_lengths_differently() -> None:
    """S45: loss 1 per token, lengths 1 and 9, advantages +1 and -1, longest completion 10."""
    mask = (np.arange(10) < np.asarray([[1], [9]])).astype(np.float32)
    losses = jnp.asarray([[1.0], [-1.0]]) * jnp.ones((2, 10))
    found = {
        over: float(aggregate(losses, mask, over=over, max_tokens=10).value())  # pyright: ignore
        for over in ("sequence_mean", "token_mean", "constant", "sequence_sum")
    }
    assert found == {
        "sequence_mean": 0.0,
        "token_mean": pytest.approx(-0.8),
        "constant": pytest.approx(-0.4),
        "sequence_sum": -4.0,
    }


def test_token_mean_is_exact_on_dyadic_numbers() -> None:
    """XS171: an epsilon in the denominator, which no tolerance of 1e-6 sees."""
    mean = aggregate(np.asarray([[0.5, 7.0]], np.float32), np.asarray([[2.0**-10, 0]], np.float32), over="token_mean")
    assert float(mean.value()) == 0.5
    none = aggregate(ONES, 0 * ONES, over="token_mean")
    assert float(none.mass) == 0
    assert not bool(none.has_data())


@pytest.mark.parametrize("over", ["sequence_mean", "token_mean", "constant", "sequence_sum"])
def test_rows_without_a_token_are_in_no_mean(over: Any) -> None:
    """Catches a masked row that dilutes the mean, or brings in NaN."""
    losses = np.asarray([[1.0, 2.0, 3.0], [np.nan, np.inf, -np.inf]], np.float32)
    mask = np.asarray([[1, 1, 0], [0, 0, 0]], np.float32)
    both = aggregate(losses, mask, over=over, max_tokens=3)
    alone = aggregate(losses[:1], mask[:1], over=over, max_tokens=3)
    assert (float(both.total), float(both.mass)) == (float(alone.total), float(alone.mass))
    gradient = jax.grad(lambda x: aggregate(x, mask, over=over, max_tokens=3).total)(jnp.asarray(losses))
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("over", ["sequence_mean", "token_mean", "constant", "sequence_sum"])
def test_packed_rows_are_their_sequences(over: Any) -> None:
    """Row 69 of the reference: two sequences in one row weigh what they weigh in rows of their own."""
    draw = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    mask = np.asarray([[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 0]], np.float32)
    apart = aggregate(draw, mask, over=over, max_tokens=4)
    packed, packed_mask = (x.reshape(1, -1) for x in (draw, mask))
    segments = np.repeat(np.asarray([[1, 2, 3]]), 4, axis=1)
    together = aggregate(packed, packed_mask, over=over, max_tokens=4, segments=segments)
    np.testing.assert_allclose(together.total, apart.total, rtol=1e-6)
    assert float(together.mass) == float(apart.mass)
    old = draw - np.asarray([[0.3], [-0.2], [0.1]], np.float32)
    ratio = importance_ratios(draw, old, mask, level="sequence").reshape(1, -1)
    np.testing.assert_allclose(
        importance_ratios(packed, old.reshape(1, -1), packed_mask, level="sequence", segments=segments),
        ratio,
        rtol=1e-6,
    )


def test_sequences_are_counted_by_their_tokens() -> None:
    """Catches a sequence that counts although none of its tokens does, and ids that come back later in a row."""
    segments = np.asarray([[1, 1, 2, 2, 3, 3, 1, 0]])
    mask = np.asarray([[0, 1, 0, 0, 1, 1, 1, 0]])
    assert float(num_sequences(mask, segments)) == 3
    sums = own_sums(jnp.asarray([[1.0, 2, 3, 4, 5, 6, 7, 8]]), segments)
    np.testing.assert_array_equal(sums, [[3, 3, 7, 7, 11, 11, 7, 8]])
    means = own_means(jnp.asarray([[1.0, 2, 3, 4, 5, 6, 7, 8]]), mask, segments)
    np.testing.assert_array_equal(means, [[2, 2, 0, 0, 5.5, 5.5, 7, 0]])


def test_ppo_clip_by_hand() -> None:
    """Row 64: five tokens of which one is clipped above and one below by the dual clip."""
    log_ratio = np.asarray([[0.0, 0.9, -0.4, 0.0, 3.0]], np.float32)
    advantages = np.asarray([[1.0, 1.0, 1.0, -1.0, -1.0]], np.float32)
    ratios = importance_ratios(log_ratio, 0 * log_ratio, np.ones_like(log_ratio))
    losses = Clip(0.2, 0.5, dual=3.0)(ratios, jnp.asarray(log_ratio), jnp.asarray(advantages))
    np.testing.assert_allclose(losses, [[-1, -1.5, -np.exp(-0.4), 1, 3]], rtol=1e-6)
    clipped = Clip(0.2, 0.5).clipped(ratios, jnp.asarray(advantages))
    assert clipped["clip_high"].tolist() == [[False, True, False, False, False]]
    assert not clipped["clip_low"].any()
    low = Clip(0.2, 0.5).clipped(ratios, -jnp.asarray(advantages))["clip_low"]
    assert low.tolist() == [[False, False, True, False, False]]


def test_clipped_tokens_have_no_gradient() -> None:
    """Catches a clip on the wrong side: tokens that went too far in the direction of their advantage stop there."""

    def loss(log_ratio: Any, advantage: float) -> Any:
        ratios = importance_ratios(log_ratio, jnp.zeros_like(log_ratio), jnp.ones_like(log_ratio))
        return Clip(0.2, 0.2)(ratios, log_ratio, jnp.full_like(log_ratio, advantage)).sum()

    log_ratio = jnp.asarray([[-0.5, 0.0, 0.5]])
    up, down = (np.asarray(jax.grad(loss)(log_ratio, a))[0] for a in (1.0, -1.0))
    np.testing.assert_allclose(up, [-np.exp(-0.5), -1, 0], rtol=1e-6)
    np.testing.assert_allclose(down, [0, 1, np.exp(0.5)], rtol=1e-6)


def test_cispo_cuts_from_above_only() -> None:
    """Catches the other convention, 1 ± epsilon, and a cut that takes the gradient."""
    log_probs = jnp.log(jnp.asarray([[0.1, 0.5, 0.9]]))
    ratios = jnp.asarray([[0.01, 1.0, 9.0]])
    gradient = jax.grad(lambda x: Cispo(2.0)(ratios, x, jnp.ones((1, 3))).sum())(log_probs)
    np.testing.assert_allclose(gradient, [[-0.01, -1.0, -2.0]], rtol=1e-6)


def test_k3_by_hand() -> None:
    """Row 65: e^.5 - 1.5 and e^-2 + 1; thirty nats are cut at 10 if asked, and a log-ratio at 20."""
    policy, reference = np.asarray([[0.0, 0.0, 0.0]]), np.asarray([[0.5, -2.0, 30.0]])
    found = kl_estimate(policy, reference, np.ones((1, 3)), limit=10.0)
    np.testing.assert_allclose(found, [[np.exp(0.5) - 1.5, np.exp(-2) + 1, 10]], rtol=1e-6)
    found = kl_estimate(policy, reference, np.ones((1, 3)))
    np.testing.assert_allclose(found[0, 2], np.exp(20.0) - 21, rtol=1e-6)
    ratio = importance_ratios(np.asarray([[50.0, -50.0]]), np.zeros((1, 2)), ONES)
    np.testing.assert_allclose(ratio, [[np.exp(20), np.exp(-20)]], rtol=1e-6)


def test_k3_needs_the_importance_weight_off_policy() -> None:
    """XS163: its mean under an older policy is .14863; weighed by π / π_old it is the KL, .22314."""
    old, new, reference = (np.log(np.asarray([p])) for p in ([0.9, 0.1], [0.5, 0.5], [0.8, 0.2]))
    kl = kl_estimate(new, reference, ONES)
    weights = importance_ratios(new, old, ONES)
    assert float((np.exp(old) * kl).sum()) == pytest.approx(0.14863, abs=1e-5)
    assert float((np.exp(old) * kl * weights).sum()) == pytest.approx(0.22314, abs=1e-5)


def test_gspo_has_one_ratio_and_each_tokens_gradient() -> None:
    """Row 66: a mean log-ratio of .15 everywhere; the gradient at each token is its own weight times the ratio."""
    log_probs = jnp.asarray([[0.1, 0.2, 0.15]])
    weights = jnp.asarray([[1.0, 2.0, 3.0]])
    ones = np.ones((1, 3))
    ratios = importance_ratios(log_probs, jnp.zeros((1, 3)), ones, level="sequence")
    np.testing.assert_allclose(jnp.log(ratios), 0.15 * ones, rtol=1e-6)
    gradient = jax.grad(lambda x: (weights * importance_ratios(x, jnp.zeros((1, 3)), ones, level="sequence")).sum())
    np.testing.assert_allclose(gradient(log_probs), weights * np.exp(0.15), rtol=1e-6)


def test_no_gradient_flows_to_old_or_reference() -> None:
    """XS166: a gradient through the old log-probs cancels the policy's."""
    draw = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)
    mask = np.ones((2, 3))
    for level in ("token", "sequence"):
        gradient = jax.grad(lambda old, level=level: importance_ratios(draw, old, mask, level=level).sum())(draw - 0.1)
        np.testing.assert_array_equal(gradient, 0)
    np.testing.assert_array_equal(jax.grad(lambda r: kl_estimate(draw, r, mask).sum())(draw - 0.1), 0)


def test_nothing_behind_the_mask_reaches_the_gradient() -> None:
    """XS169: -inf at padding, times 0, is NaN."""
    mask = np.asarray([[1.0, 1.0, 0.0]])
    log_probs = jnp.asarray([[-1.0, -2.0, -jnp.inf]])
    old, reference = jnp.asarray([[-1.1, -1.9, jnp.nan]]), jnp.asarray([[-1.0, -1.0, jnp.inf]])

    def loss(log_probs: Any, level: Any) -> Any:
        ratios = importance_ratios(log_probs, old, mask, level=level)
        losses = Clip()(ratios, masked(log_probs, mask), token_advantages(np.ones(1), mask))
        losses = losses + Cispo()(ratios, masked(log_probs, mask), token_advantages(np.ones(1), mask))
        losses = losses + kl_estimate(log_probs, reference, mask)
        return aggregate(losses, mask, over="sequence_mean").value()

    for level in ("token", "sequence"):
        value, gradient = jax.value_and_grad(loss)(log_probs, level)
        assert np.isfinite(value)
        assert np.isfinite(gradient).all()
        assert float(gradient[0, 2]) == 0


def test_tokens_without_a_sampling_log_prob_weigh_one() -> None:
    """Catches a NaN of the sampler that spreads over its row, and one that is passed over in silence."""
    old = np.log(np.asarray([[0.5, 0.5, 0.5, 0.5]], np.float32))
    given = np.asarray([[np.log(0.25), np.nan, -np.inf, np.nan]], np.float32)
    mask = np.asarray([[1, 1, 1, 0]], np.float32)
    weights, missing = sampling_weights(old, given, mask, highest=1.5)
    np.testing.assert_allclose(weights, [[1.5, 1, 1, 1]], rtol=1e-6)
    np.testing.assert_array_equal(missing, [[0, 1, 1, 0]])
    weights, _ = sampling_weights(old, given, mask, level="sequence", highest=3.0)
    np.testing.assert_allclose(weights, [[2, 2, 2, 2]], rtol=1e-6)
    weights, _ = sampling_weights(old, given, mask, mode="mask", highest=1.5, lowest=0.5)
    np.testing.assert_allclose(weights, [[0, 1, 1, 1]], rtol=1e-6)


def test_what_is_refused() -> None:
    """Catches log-probs, advantages and settings that would broadcast or train to something else."""
    with pytest.raises(ShapeError, match=r"got \(1, 3\) and \(1, 2\)"):
        importance_ratios(np.zeros((1, 3)), np.zeros((1, 3)), ONES)
    with pytest.raises(ShapeError, match=r"advantages must be \[rows\] or \[rows, time\].*got \(2,\)"):
        token_advantages(np.zeros(2), np.ones((3, 2)))
    with pytest.raises(ValueError, match="dual_clip bounds ratios that grew"):
        Clip(dual=1.0)
    for low, high in ((1.0, 0.2), (-0.1, 0.2), (0.2, 0.0)):
        with pytest.raises(ValueError, match="epsilon"):
            Clip(low, high)
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate(ONES, ONES, over="constant")
    with pytest.raises(ValueError, match="lowest < highest"):
        sampling_weights(ONES, ONES, ONES, highest=1.0, lowest=1.0)
    for call in (
        lambda: importance_ratios(ONES, ONES, ONES, level="row"),  # pyright: ignore
        lambda: kl_estimate(ONES, ONES, ONES, estimator="k4"),  # pyright: ignore
        lambda: aggregate(ONES, ONES, over="mean"),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match="unknown"):
            call()
