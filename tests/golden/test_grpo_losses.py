"""Policy-gradient losses of given token log-probs against TRL and verl: loss, gradients, clip shares, weights."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.objectives.policy.ratios import importance_ratios, kl_estimate, masked, sampling_weights
from telic.objectives.policy.surrogates import Cispo, Clip, aggregate, token_advantages
from tests.golden import load

TRL = load("grpo_trl")["cases"]
VERL = [case for case in load("grpo_verl")["cases"] if not case["name"].startswith("outcome")]

NOT_HERE = {"sapo", "vespo", "grpo_top_entropy", "grpo_off_policy_mask", "grpo_accumulation4"}
"""Losses that are not offered, and TRL's division of a microbatch by their number, which `Mean` makes unnecessary."""

OVER = {
    **{"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "cispo": "token_mean"},
    **{"dr_grpo": "constant", "luspo": "sequence_sum"},
}

quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compiled once and run once: what counts is the compilation."""


def in_precisions(cases: list[dict[str, Any]]) -> list[Any]:
    """Every case in float64, the first in float32 too."""
    double = [pytest.param(case, True, id=f"{case['name']}-float64") for case in cases]
    return [*double, pytest.param(cases[0], False, id=f"{cases[0]['name']}-float32")]


@pytest.fixture
def tolerance(double: bool) -> Iterator[dict[str, float]]:
    with jax.enable_x64(double):
        yield {"rtol": 1e-9, "atol": 1e-12} if double else {"rtol": 2e-5, "atol": 2e-6}


def float_arrays(given: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.zeros((), float).dtype) for name, value in given.items()}


def trl_loss(log_probs: jax.Array, given: dict[str, jax.Array], settings: dict[str, Any]) -> tuple[jax.Array, Any]:
    mask = given["completion_mask"] * given.get("tool_mask", 1)
    level = settings.get("importance_sampling_level", "token")
    old = log_probs if settings.get("on_policy") else given["old_token_logps"]
    ratios = importance_ratios(log_probs, old, mask, level=level)
    advantages = token_advantages(given["advantages"], mask)
    if settings["loss_type"] == "cispo":
        surrogate: Any = Cispo(settings["epsilon_high"])
    else:
        surrogate = Clip(settings["epsilon_low"], settings["epsilon_high"], settings.get("delta"))
    losses = surrogate(ratios, masked(log_probs, mask), advantages)
    report: dict[str, Any] = {}
    for name, clipped in surrogate.clipped(ratios, advantages).items():
        over = "sequence_mean" if level == "sequence" else "token_mean"
        report[name] = aggregate(clipped, mask, over=over).value()
    if "is_mode" in settings:
        weight_level, mode = settings["is_mode"].split("_")
        weights, missing = sampling_weights(
            old,
            given["sampling_token_logps"],
            mask,
            level=weight_level,
            mode=mode,
            highest=settings["is_clip_max"],
            lowest=settings.get("is_clip_min") or 0.0,
        )
        report |= {"weights": weights * (mask != 0), "missing": missing.sum()}
        losses = losses * weights
    if settings.get("beta"):
        kl = kl_estimate(log_probs, given["ref_token_logps"], mask)
        if settings.get("use_bias_correction_kl"):
            kl = kl * importance_ratios(log_probs, old, mask)
        report["kl"] = jnp.sum(kl * mask) / mask.sum()
        losses = losses + settings["beta"] * kl
    width = settings.get("max_completion_length", losses.shape[1])
    mean = aggregate(losses, mask, over=OVER[settings["loss_type"]], max_tokens=width)
    if "num_items_in_batch" in settings:
        return mean.total / settings["num_items_in_batch"], report
    if settings["loss_type"] == "grpo" or settings["loss_type"] in ("dr_grpo", "luspo"):
        # TRL counts rows without a token in the mean over rows; here they are in none.
        return mean.value() * (jnp.any(mask != 0, axis=-1).sum() / mask.shape[0]), report
    return mean.value(), report


@pytest.mark.parametrize(("case", "double"), in_precisions(TRL))
def test_losses_against_trl(case: dict[str, Any], tolerance: dict[str, float]) -> None:
    """S45, XS163, XS166: reductions that weigh rows differently, a wrong clip, a gradient through old log-probs."""
    variants = {name: settings for name, settings in case["config"].items() if name not in NOT_HERE}
    assert len(variants) == (7 if case["name"] == "empty_row" else 23)

    @quick
    def every(given: dict[str, jax.Array]) -> Any:
        differentiate = jax.value_and_grad(trl_loss, has_aux=True)
        return {name: differentiate(given["token_logps"], given, settings) for name, settings in variants.items()}

    given = float_arrays(case["in"])
    for name, ((value, report), gradient) in every(given).items():
        expected = case["out"][name]
        np.testing.assert_allclose(value, expected["loss"], err_msg=name, **tolerance)
        np.testing.assert_allclose(gradient, expected["grad_token_logps"], err_msg=name, **tolerance)
        metrics = expected["metrics"]
        clips = {"clip_low": "clip_ratio/low_mean", "clip_high": "clip_ratio/high_mean"}
        if "cispo_clip_ratio" in metrics:
            clips = {"clip_high": "cispo_clip_ratio"}
        for ours, theirs in {**clips, "kl": "kl"}.items():
            if theirs in metrics and case["name"] != "empty_row":
                np.testing.assert_allclose(report[ours], metrics[theirs], err_msg=f"{name} {ours}", **tolerance)
        if "weights" in report:
            counted = np.asarray(given["completion_mask"] * given.get("tool_mask", 1)) != 0
            weights = np.broadcast_to(expected["importance_sampling_ratio"], counted.shape)
            np.testing.assert_allclose(report["weights"], weights * counted, err_msg=name, **tolerance)
            assert report["missing"] == 0


VERL_OVER = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}


@pytest.mark.parametrize(("case", "double"), in_precisions(VERL))
def test_losses_against_verl(case: dict[str, Any], tolerance: dict[str, float]) -> None:
    """A dual clip that bounds the wrong sign, GSPO's gradient, and sequence weights that are sums, not means."""
    config = case["config"]
    # verl adds 1e-8 to its denominators: 1e-8 relative to a count of at least one.
    tolerance = {"rtol": max(tolerance["rtol"], 2e-8), "atol": max(tolerance["atol"], 1e-8)}
    chosen = {
        name: settings
        for name, settings in config["variants"].items()
        if settings["function"].startswith("compute_policy_loss") and "cispo" not in name
    }

    def loss(log_probs: jax.Array, given: dict[str, jax.Array], name: str, settings: dict[str, Any]) -> jax.Array:
        mask = given["completion_mask"]
        gspo = name == "gspo"
        ratios = importance_ratios(log_probs, given["old_token_logps"], mask, level="sequence" if gspo else "token")
        clip = Clip(config["clip_ratio_low"], config["clip_ratio_high"], None if gspo else config["clip_ratio_c"])
        losses = clip(ratios, log_probs, token_advantages(given["advantages"], mask))
        if settings["rollout_is"] is not None:
            weights, _ = sampling_weights(
                given["old_token_logps"],
                given["sampling_token_logps"],
                mask,
                level=settings["rollout_is"],
                highest=config["rollout_threshold"],
            )
            losses = losses * weights
        over = VERL_OVER[settings["loss_agg_mode"]]
        mean = aggregate(losses, mask, over=over, max_tokens=mask.shape[1])
        # verl's "norm" divides by the width alone.
        return mean.total / mask.shape[1] if over == "constant" else mean.value()

    @quick
    def every(given: dict[str, jax.Array]) -> Any:
        return {
            name: jax.value_and_grad(loss)(given["token_logps"], given, name, settings)
            for name, settings in chosen.items()
        }

    given = float_arrays(case["in"])
    for name, (value, gradient) in every(given).items():
        np.testing.assert_allclose(value, case["out"][name]["loss"], err_msg=name, **tolerance)
        np.testing.assert_allclose(gradient, case["out"][name]["grad_token_logps"], err_msg=name, **tolerance)


@pytest.mark.parametrize(("case", "double"), in_precisions(VERL))
def test_kl_and_cispo_against_verl(case: dict[str, Any], tolerance: dict[str, float]) -> None:
    """An estimator under another's name; and CISPO where verl's cut from below, which we leave out, does not act."""
    given = float_arrays(case["in"])
    mask = given["completion_mask"]
    for kind in ("k1", "k2", "k3"):
        expected = case["out"][f"kl_{kind}"]

        def total(log_probs: jax.Array, kind: Any = kind) -> tuple[jax.Array, jax.Array]:
            values = kl_estimate(log_probs, given["ref_token_logps"], mask, estimator=kind)
            return jnp.sum(values * mask) / mask.sum(), values

        (_, values), gradient = jax.value_and_grad(total, has_aux=True)(given["token_logps"])
        counted = np.asarray(mask) != 0
        np.testing.assert_allclose(values, expected["per_token"] * counted, **tolerance)
        np.testing.assert_allclose(gradient, expected["grad_token_logps"], rtol=max(tolerance["rtol"], 2e-8), atol=1e-6)

    ratios = importance_ratios(given["token_logps"], given["old_token_logps"], mask)
    cispo = Cispo(1 + case["config"]["clip_ratio_high"])

    def cispo_loss(log_probs: jax.Array) -> jax.Array:
        losses = cispo(ratios, masked(log_probs, mask), token_advantages(given["advantages"], mask))
        return aggregate(losses, mask, over="token_mean").value()

    gradient = jax.grad(cispo_loss)(given["token_logps"])
    above = np.asarray(ratios) >= 1 - case["config"]["clip_ratio_low"]
    expected = case["out"]["cispo_token-mean"]["grad_token_logps"]
    np.testing.assert_allclose(np.asarray(gradient)[above], expected[above], rtol=1e-5, atol=1e-7)
