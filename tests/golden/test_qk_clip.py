"""QK-clip against Megatron-LM, through the optimizer chain, in float64 at 1e-9."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic import optimizers
from telic.errors import ContractError
from tests.golden import cases


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def clipped(params: Any, stats: Any, **options: Any) -> Any:
    optimizer = optax.chain(optax.sgd(1.0), optimizers.qk_clip(**options))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), params, qk_stats=stats)
    return optax.apply_updates(params, updates)


@pytest.mark.parametrize("case", cases("qk_clip"))
def test_heads_over_tau_are_scaled_as_megatron_does(case: dict[str, Any]) -> None:
    """Catches one factor for all heads, queries of a group scaled apart, or a head under tau that is scaled up."""
    config, given, out = case["config"], case["in"], case["out"]
    params = {
        "attention": {"query": {"kernel": jnp.asarray(given["query"])}, "key": {"kernel": jnp.asarray(given["key"])}}
    }
    stats = {"attention": {"max_logits": jnp.asarray(out["max_logits_before"])}}
    after = clipped(params, stats, tau=config["tau"], alpha=config["alpha"], axis=0)["attention"]
    np.testing.assert_allclose(after["query"]["kernel"], out["query"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(after["key"]["kernel"], out["key"], rtol=1e-9, atol=1e-12)
    # Flax keeps kernels as [in, heads, width].
    heads, width, shape = config["heads"], config["head_dim"], (-1, given["query"].shape[1])
    flax = {
        "query": {"kernel": jnp.asarray(given["query"].T.reshape(-1, heads, width))},
        "key": {"kernel": jnp.asarray(given["key"].T.reshape(-1, config["kv_heads"], width))},
    }
    if heads == config["kv_heads"]:
        three = clipped(flax, {"max_logits": jnp.asarray(out["max_logits_before"])}, tau=config["tau"])
        got = np.asarray(three["query"]["kernel"]).reshape(given["query"].shape[1], -1).T
        np.testing.assert_allclose(got, np.asarray(out["query"]).reshape(shape), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", cases("qk_clip"))
def test_latent_attention_is_scaled_as_megatron_does(case: dict[str, Any]) -> None:
    """Catches values scaled with the keys, and rotary queries that take only their share."""
    config, given, out = case["config"], case["in"], case["out"]["mla"]
    params = {
        "query": {"kernel": jnp.asarray(given["mla_query_up"])},
        "key": {"kernel": jnp.asarray(given["mla_key_value_up"])},
    }
    stats = {"max_logits": jnp.asarray(given["mla_max_logits"])}
    after = clipped(params, stats, tau=config["tau"], alpha=config["alpha"], axis=0, nope=config["mla"]["qk_nope"])
    np.testing.assert_allclose(after["query"]["kernel"], out["query_up"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(after["key"]["kernel"], out["key_value_up"], rtol=1e-9, atol=1e-12)


def test_heads_under_tau_keep_their_update_bit_for_bit() -> None:
    params = {"query": {"kernel": jnp.full((2, 4), 0.1)}, "key": {"kernel": jnp.full((2, 4), 0.3)}}
    step = jax.tree.map(lambda x: x * 1e-9, params)
    optimizer = optimizers.qk_clip(5.0)
    updates, _ = optimizer.update(
        step, optimizer.init(params), params, qk_stats={"max_logits": jnp.asarray([5.0, -np.inf])}
    )
    for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(step), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_does_not_fit_is_named() -> None:
    params = {"attn": {"query": {"kernel": jnp.ones((2, 4))}, "key": {"kernel": jnp.ones((2, 4))}}}
    optimizer = optimizers.qk_clip(5.0)
    with pytest.raises(ContractError, match=r"return Aux\(qk_stats"):
        optimizer.update(params, optimizer.init(params), params)
    with pytest.raises(ContractError, match=r"no leaf 'attm/query/kernel'. Did you mean 'attn/query/kernel'"):
        optimizer.update(params, optimizer.init(params), params, qk_stats={"attm": jnp.ones(2)})
    with pytest.raises(ContractError, match="3 heads do not divide"):
        optimizer.update(params, optimizer.init(params), params, qk_stats={"attn": jnp.ones(3)})


@pytest.mark.parametrize("case", cases("qk_clip"))
def test_blocks_scanned_as_one_are_scaled_layer_by_layer(case: dict[str, Any]) -> None:
    """Catches the largest logit of one layer that scales another, and heads sought in the dimension of layers."""
    config, given, out = case["config"], case["in"], case["out"]
    weights = {name: jnp.asarray(given[name].T) for name in ("query", "key")}
    # A layer like the case's, and one whose logits are small.
    params = {"layers": {name: {"kernel": jnp.stack([weight, weight])} for name, weight in weights.items()}}
    largest = jnp.asarray(out["max_logits_before"])
    stats = {"layers": {"max_logits": jnp.stack([largest, largest * 1e-3])}}
    after = clipped(params, stats, tau=config["tau"], alpha=config["alpha"])["layers"]
    for name, weight in weights.items():
        np.testing.assert_allclose(after[name]["kernel"][0].T, out[name], rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(after[name]["kernel"][1], weight)
