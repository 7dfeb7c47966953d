"""Routing and balancing of experts against Megatron-LM, torchtitan, DeepSeek and transformers, in float64 at 1e-9."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.models import Experts
from telic.models.decoder.routing import RouterStatistics, route, statistics_of
from telic.objectives.language.router import bias_change, router_z, sequence_balance
from tests.golden import cases


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def experts_of(config: dict[str, Any], num_experts: int, **options: Any) -> Experts:
    return Experts(num_experts=num_experts, top_k=config["top_k"], **options)


def weights_of(logits: Any, experts: Experts, bias: Any = None) -> np.ndarray:
    """Lay the weights out as [tokens, experts], zero for experts that were not chosen."""
    chosen, weights, _ = jax.jit(lambda x: route(x[None], experts, bias))(jnp.asarray(logits))
    out = np.zeros(logits.shape)
    np.put_along_axis(out, np.asarray(chosen[0]), np.asarray(weights[0]), axis=-1)
    return out


# What each reference does: options of the router, whether it has a bias (then it also scales), whether it has groups.
KINDS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "sigmoid_bias": ({"scoring": "sigmoid"}, True, False),
    "sigmoid": ({"scoring": "sigmoid"}, False, False),
    "softmax_before_topk": ({"normalize": False}, False, False),
    "softmax_after_topk": ({"normalize": True}, False, False),
    "sigmoid_bias_groups": ({"scoring": "sigmoid"}, True, True),
    "deepseek_gate_sigmoid_bias": ({"scoring": "sigmoid"}, True, True),
    "deepseek_gate_softmax_bias": ({"normalize": False}, True, True),
    "hf_deepseek_v3": ({"scoring": "sigmoid"}, True, True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", cases("moe"))
def test_experts_and_weights(case: dict[str, Any], kind: str) -> None:
    """Catches a bias that reaches the weights, weights normalised over all experts, a group's score of one expert."""
    config, given = case["config"], case["in"]
    if kind not in case["out"]:
        pytest.skip("one group only")
    options, is_biased, is_grouped = KINDS[kind]
    if is_grouped:
        options = {**options, "num_groups": config["num_groups"], "top_groups": config["group_topk"]}
    if is_biased:
        options = {**options, "scale": config["route_scale"]}
    if kind in ("sigmoid", "sigmoid_bias") and config["top_k"] == 1:
        options = {**options, "normalize": False}  # Megatron normalises when there is more than one
    logits = given["gate_input"] @ given["gate_weight"].T if kind.startswith(("deep", "hf")) else given["logits"]
    expected = case["out"][kind]
    experts = experts_of(config, logits.shape[1], **options)
    found = weights_of(logits, experts, jnp.asarray(given["bias"]) if is_biased else None)
    np.testing.assert_array_equal(found != 0, expected["routing_map"])
    np.testing.assert_allclose(found, expected["weights"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", cases("moe"))
def test_bias_moves_by_the_sign_of_the_load(case: dict[str, Any]) -> None:
    """Catches a move towards load instead of from it, one by the size of the difference, and a centring that is not."""
    out = case["out"]["bias_update"]
    bias = jnp.asarray(case["in"]["bias"])
    plain = bias + bias_change(jnp.asarray(out["counts_first"]), rate=out["rate"])
    centered = bias + bias_change(jnp.asarray(out["counts_first"]), rate=out["rate"], centered=True)
    np.testing.assert_allclose(plain, out["megatron_first"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(centered, out["torchtitan_first"], rtol=1e-9, atol=1e-12)
    for counts, expected in zip(out["counts_next"], out["megatron_sequence"], strict=True):
        plain = plain + bias_change(jnp.asarray(counts), rate=out["rate"])
        np.testing.assert_allclose(plain, expected, rtol=1e-9, atol=1e-12)


def one_row(logits: Any, experts: Experts, counted: Any = None) -> RouterStatistics:
    """Give the statistics of all tokens as one row of one layer."""
    chosen, _, shares = route(logits[None], experts)
    sums = statistics_of(logits[None], chosen, shares, None if counted is None else counted[None])
    tokens = jnp.asarray([logits.shape[0]]) if counted is None else counted[None].sum(1)
    return RouterStatistics(sums["counts"][None], sums["probabilities"][None], sums["z"][None], tokens)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("case", cases("moe"))
def test_balance_loss_and_its_gradient(case: dict[str, Any], scoring: Any) -> None:
    """Catches a load that carries a gradient, one that does not sum to one, and sigmoid scores left unnormalised."""
    logits, expected = jnp.asarray(case["in"]["logits"]), case["out"][f"megatron_aux_{scoring}"]
    experts = experts_of(case["config"], logits.shape[1], scoring=scoring)

    def loss(logits: Any) -> Any:
        return expected["coefficient"] * sequence_balance(one_row(logits, experts)).value()

    value, grad = jax.jit(jax.value_and_grad(loss))(logits)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grad, expected["grad_logits"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", cases("moe"))
def test_z_loss_and_its_gradient(case: dict[str, Any]) -> None:
    """Catches a square of the mean in place of the mean of squares."""
    logits, expected = jnp.asarray(case["in"]["logits"]), case["out"]["router_z_loss"]
    experts = experts_of(case["config"], logits.shape[1])

    def loss(logits: Any) -> Any:
        return expected["coefficient"] * router_z(one_row(logits, experts)).value()

    value, grad = jax.jit(jax.value_and_grad(loss))(logits)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(grad, expected["grad_logits"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", cases("moe"))
def test_padding_counts_nowhere(case: dict[str, Any]) -> None:
    """Catches padding in the load, in the probabilities, or in the number of tokens."""
    logits, padding = jnp.asarray(case["in"]["logits"]), case["in"]["padding_mask"]
    experts = experts_of(case["config"], logits.shape[1])
    padded, alone = one_row(logits, experts, jnp.asarray(~padding)), one_row(logits[~padding], experts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), padded, alone)
    expected = case["out"]["megatron_aux_softmax_padded"]
    found = expected["coefficient"] * sequence_balance(padded).value()
    np.testing.assert_allclose(found, expected["loss"], rtol=1e-9)
    z = case["out"]["router_z_loss"]
    np.testing.assert_allclose(z["coefficient"] * router_z(padded).value(), z["padded"], rtol=1e-9)


@pytest.mark.parametrize("case", cases("moe"))
def test_mixtral_pools_layers_and_sums_the_load_to_top_k(case: dict[str, Any]) -> None:
    """Catches sums from which transformers' Mixtral loss could not be formed."""
    config, out = case["config"], case["out"]["mixtral_aux"]
    both = [jnp.asarray(case["in"]["logits"]), jnp.asarray(out["second_layer_logits"])]
    experts = experts_of(config, both[0].shape[1])
    kept = jnp.asarray(~case["in"]["padding_mask"])
    for name, layers, counted in (
        ("one_layer", both[:1], None),
        ("two_layers", both, None),
        ("two_layers_padded", both, kept),
    ):
        rows = [one_row(logits, experts, counted) for logits in layers]
        tokens = sum(row.tokens.sum() for row in rows)
        f, p = (sum(getattr(row, part).sum((0, 1)) for row in rows) / tokens for part in ("counts", "probabilities"))
        np.testing.assert_allclose(both[0].shape[1] * (f * p).sum(), out[name], rtol=1e-9)
