"""Preference losses against TRL, the code of the DPO paper and SimPO, in float64 and float32."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.mean import Mean
from telic.objectives.preferences.losses import Pairs, PreferenceLoss
from telic.objectives.preferences.scores import completion_sums, reward_metrics
from tests.golden import load

TOKENS = load("dpo_trl")["cases"]
SEQUENCES = [case for case in load("dpo_other")["cases"] if not case["name"].startswith("batch_logps")]

METRICS = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "reward_margin": "rewards/margins",
    "reward_accuracy": "rewards/accuracies",
    "log_prob_chosen": "logps/chosen",
    "log_prob_rejected": "logps/rejected",
}

DIVERGENCES = {"forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}

NOT_HERE = {"wpo_sigmoid": "weights by the policy's own probability are not offered"}

RENAMED = {"trl0.21_aot_pair": "aot_unpaired", "trl0.21_js": "sigmoid", "trl0.21_alpha": "sigmoid"}
"""Variants whose name in the file is not the loss's name here."""


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


def float_array(values: Any) -> jax.Array:
    return jnp.asarray(values, jnp.zeros((), float).dtype)


def paired(rows: Any) -> Any:
    """[2·pairs, time], chosen first, as [pairs, 2, time]."""
    return np.stack(np.split(np.asarray(rows), 2), axis=1)


def loss_of(settings: dict[str, Any], name: str) -> PreferenceLoss:
    """The loss of a variant, with those of its settings that act in it."""
    given: dict[str, Any] = {"name": name, "beta": settings["beta"]}
    if name in ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"):
        given["label_smoothing"] = settings.get("label_smoothing", 0.0)
    if name in ("sigmoid", "hinge") and "f_divergence_type" in settings:
        given["divergence"] = DIVERGENCES.get(settings["f_divergence_type"], settings["f_divergence_type"])
        if given["divergence"] == "alpha":
            given["alpha"] = settings["f_alpha_divergence_coef"]
    if name == "ipo":
        given["length_normalized"] = True
    if name == "discopop":
        given["temperature"] = settings["discopop_tau"]
    return PreferenceLoss(**given)


@pytest.mark.parametrize(("case", "double"), in_precisions(TOKENS))
def test_losses_of_token_log_probs(case: dict[str, Any], tolerance: dict[str, float]) -> None:
    """S44, XS160, XS161, XS162: a loss type that is not passed on, a divergence that falls back, lengths counted wrong.

    Loss, gradient at every token, and the reported rewards.
    """
    given = case["in"]
    mask = paired(given["completion_mask"][:, 1:])
    lengths = mask.sum(-1)
    variants = {name: settings for name, settings in case["config"].items() if name not in NOT_HERE}
    assert len(variants) == 24

    def pairs_of(policy: jax.Array, reference: jax.Array, tail: float) -> Pairs:
        sums, held = (completion_sums(x, mask, tail_weight=tail) for x in (policy, reference))
        return Pairs(sums[:, 0], sums[:, 1], held[:, 0], held[:, 1], lengths[:, 0], lengths[:, 1])

    def value_of(policy: jax.Array, reference: jax.Array, settings: dict[str, Any]) -> Any:
        pairs = pairs_of(policy, reference, settings.get("ld_alpha", 1.0))
        total = jnp.zeros(())
        for name, weight in zip(settings["loss_type"], settings.get("loss_weights", [1.0]), strict=True):
            if name == "sft":
                total += weight * Mean.of(-policy[:, 0], mask[:, 0]).value()
            else:
                total += weight * jnp.mean(loss_of(settings, name)(pairs))
        return total, {name: mean.value() for name, mean in reward_metrics(pairs, settings["beta"]).items()}

    @quick
    def every(policy: jax.Array, reference: jax.Array) -> Any:
        return {
            name: jax.value_and_grad(value_of, has_aux=True)(policy, reference, settings)
            for name, settings in variants.items()
        }

    policy, reference = (float_array(paired(given[name])) for name in ("policy_token_logps", "ref_token_logps"))
    for name, ((value, reported), gradient) in every(policy, reference).items():
        expected = case["out"][name]
        bounds = {"rtol": 2e-5, "atol": 2e-6} if name.endswith("_f32") else tolerance
        np.testing.assert_allclose(value, expected["loss"], err_msg=name, **bounds)
        np.testing.assert_allclose(gradient, paired(expected["grad_policy_token_logps"]), err_msg=name, **bounds)
        for ours, theirs in METRICS.items():
            np.testing.assert_allclose(reported[ours], expected["metrics"][theirs], err_msg=f"{name} {ours}", **bounds)


def as_loss(variant: str, settings: dict[str, Any]) -> tuple[PreferenceLoss, bool] | None:
    """The loss of a variant of dpo_other and whether it has no reference; None where it is not offered."""
    name = variant.split("_", 1)[1]
    if variant.startswith("mitchell"):
        name = "ipo" if settings["ipo"] else "sigmoid"
    if name.startswith(("hinge", "ipo")) or variant.startswith("simpo"):
        name = name.split("_")[0]
    name = RENAMED.get(variant, name)
    if name == "bco_pair_running":
        return None
    given: dict[str, Any] = {"name": name, "beta": settings["beta"]}
    if name in ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"):
        given["label_smoothing"] = settings.get("label_smoothing", 0.0)
    if name == "discopop":
        given["temperature"] = settings["discopop_tau"]
    if variant == "trl0.21_js":
        given["divergence"] = "js"
    if variant == "trl0.21_alpha":
        # Its order is ours counted from reverse KL: u^-a against t^(a - 1).
        given |= {"divergence": "alpha", "alpha": 1 - settings["alpha"]}
    if variant.startswith("simpo"):
        given["margin"] = settings["gamma_beta_ratio"]
    return PreferenceLoss(**given), settings.get("reference_free", False) or variant.startswith("simpo")


@pytest.mark.parametrize(("case", "double"), in_precisions(SEQUENCES))
def test_losses_of_sequences(case: dict[str, Any], tolerance: dict[str, float]) -> None:
    """S44, XS158: conservative label smoothing, sums in IPO, a reference that is left out only when asked to."""
    found = {name: as_loss(name, settings) for name, settings in case["config"].items()}
    offered = {name: loss for name, loss in found.items() if loss is not None}
    assert len(offered) >= 20

    @quick
    def every(chosen: jax.Array, rejected: jax.Array, reference: Any) -> Any:
        def losses(chosen: jax.Array, rejected: jax.Array, loss: PreferenceLoss, reference: Any) -> Any:
            values = loss(Pairs(chosen, rejected, *reference))
            return jnp.mean(values), values

        zeros = (jnp.zeros_like(chosen), jnp.zeros_like(chosen))
        differentiate = jax.value_and_grad(losses, argnums=(0, 1), has_aux=True)
        return {
            name: differentiate(chosen, rejected, loss, zeros if reference_free else reference)
            for name, (loss, reference_free) in offered.items()
        }

    given = {name: float_array(value) for name, value in case["in"].items()}
    reference = (given["ref_chosen"], given["ref_rejected"])
    for name, ((value, values), gradient) in every(given["policy_chosen"], given["policy_rejected"], reference).items():
        expected = case["out"][name]
        np.testing.assert_allclose(value, expected["loss"], err_msg=name, **tolerance)
        np.testing.assert_allclose(values, expected["losses"], err_msg=name, **tolerance)
        for ours, theirs in zip(gradient, ("grad_policy_chosen", "grad_policy_rejected"), strict=True):
            np.testing.assert_allclose(ours, expected[theirs], err_msg=name, **tolerance)
