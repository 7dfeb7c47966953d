"""Optimizers against torch, schedules against nanoGPT and Hugging Face, clipping against Optax.

Everything runs in float64, at the tolerance of the files: 1e-9 for steps and clipping, 1e-12 for rates.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic import optimizers
from tests.golden import cases

STEPS = cases("optimizer_steps")
SCHEDULES = cases("lr_schedules")
CLIPPING = cases("grad_clipping")


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def adam_l2(c: dict[str, Any]) -> optax.GradientTransformation:
    adam = optimizers.adam(c["lr"], b1=c["betas"][0], b2=c["betas"][1], eps=c["eps"], eps_root=0.0)
    return optax.chain(optax.add_decayed_weights(c["weight_decay"]), adam)


# torch has no eps under the root (eps_root=0), and RMSprop's stands outside it (eps_in_sqrt=False).
SAME: dict[str, Callable[[dict[str, Any]], optax.GradientTransformation]] = {
    "adamw": lambda c: optimizers.adamw(
        c["lr"], b1=c["betas"][0], b2=c["betas"][1], eps=c["eps"], eps_root=0.0, weight_decay=c["weight_decay"]
    ),
    "adam_l2": adam_l2,
    "sgd": lambda c: optimizers.sgd(c["lr"]),
    "sgd_momentum": lambda c: optimizers.sgd(c["lr"], momentum=c["momentum"]),
    "sgd_nesterov": lambda c: optimizers.sgd(c["lr"], momentum=c["momentum"], nesterov=c["nesterov"]),
    "rmsprop": lambda c: optimizers.rmsprop(c["lr"], decay=c["alpha"], eps=c["eps"], eps_in_sqrt=False),
    # torch adds eps to the root of the sum, Optax under it; at eps = 1e-10 and sums ≥ 0.1 that is below 1e-9.
    "adagrad": lambda c: optimizers.adagrad(
        c["lr"], initial_accumulator_value=c["initial_accumulator_value"], eps=c["eps"]
    ),
}

ELSEWHERE = {
    "nadam": "torch's momentum follows a schedule (momentum_decay); Optax's nesterov Adam has a constant one",
    "amsgrad": "not one of Telic's optimizers",
}


def trajectory(optimizer: optax.GradientTransformation, case: dict[str, Any]) -> Any:
    params = jnp.asarray(case["in"]["params"])
    state = optimizer.init(params)
    rows = []
    for grads in case["in"]["grads"]:
        updates, state = jax.jit(optimizer.update)(jnp.asarray(grads), state, params)
        params = optax.apply_updates(params, updates)
        rows.append(params)
    return np.stack(rows)


@pytest.mark.parametrize("name", sorted(SAME))
@pytest.mark.parametrize("case", STEPS)
def test_parameters_after_every_step_are_torchs(case: dict[str, Any], name: str) -> None:
    """A swapped option, a rate rounded to float32, a decay that enters the moments."""
    actual = trajectory(SAME[name](case["config"][name]), case)
    np.testing.assert_allclose(actual, case["out"][name]["params"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", STEPS)
def test_every_golden_optimizer_is_compared_or_named(case: dict[str, Any]) -> None:
    """An optimizer added to the reference file that no test reads."""
    assert set(case["out"]) == {*SAME, *ELSEWHERE}


@pytest.mark.parametrize("case", STEPS)
def test_nesterov_adam_is_not_torchs_nadam(case: dict[str, Any]) -> None:
    """The reason in ELSEWHERE would be out of date: then compare the two."""
    actual = trajectory(optimizers.adam(case["config"]["nadam"]["lr"], eps_root=0.0, nesterov=True), case)
    assert not np.allclose(actual, case["out"]["nadam"]["params"], rtol=1e-5)


RATES: dict[str, Callable[[dict[str, Any], dict[str, Any]], optimizers.schedules.Schedule]] = {
    "hf_linear": lambda c, a: optimizers.linear(c["learning_rate"], warmup=c["warmup"], steps=c["total"]),
    "hf_cosine": lambda c, a: optimizers.cosine(c["learning_rate"], warmup=c["warmup"], steps=c["total"]),
    "hf_cosine_with_restarts": lambda c, a: optimizers.cosine_with_restarts(
        c["learning_rate"], warmup=c["warmup"], steps=c["total"], num_cycles=a["num_cycles"]
    ),
    "hf_polynomial": lambda c, a: optimizers.polynomial(
        c["learning_rate"], warmup=c["warmup"], steps=c["total"], end_value=a["lr_end"], power=a["power"]
    ),
    "hf_inverse_sqrt": lambda c, a: optimizers.inverse_sqrt(c["learning_rate"], warmup=c["warmup"]),
    "hf_constant_with_warmup": lambda c, a: optimizers.constant_with_warmup(c["learning_rate"], warmup=c["warmup"]),
    "hf_cosine_with_min_lr": lambda c, a: optimizers.cosine_with_min_lr(
        c["learning_rate"], warmup=c["warmup"], steps=c["total"], end_value=a["min_lr"]
    ),
    "hf_warmup_stable_decay": lambda c, a: optimizers.warmup_stable_decay(
        c["learning_rate"], warmup=c["warmup"], steps=c["total"], decay_steps=a["num_decay_steps"]
    ),
}


@pytest.mark.parametrize("name", sorted(RATES))
@pytest.mark.parametrize("case", SCHEDULES)
def test_rates_are_hugging_faces(case: dict[str, Any], name: str) -> None:
    """A ramp or decay off by one update, and what comes after the last planned one."""
    expected = case["out"][name]
    schedule = RATES[name](case["config"], expected["arguments"])
    actual = jax.vmap(schedule)(jnp.arange(len(expected["lr"]), dtype=jnp.int32))
    np.testing.assert_allclose(actual, expected["lr"], rtol=1e-12)


@pytest.mark.parametrize("case", SCHEDULES)
def test_warmup_cosine_is_nanogpts(case: dict[str, Any]) -> None:
    """A warm-up that starts at zero, or a cosine that does not stop at the last planned update."""
    config = case["config"]
    schedule = optimizers.warmup_cosine(
        config["learning_rate"], warmup=config["warmup"], steps=config["total"], end_value=config["min_lr"]
    )
    expected = case["out"]["nanogpt"]
    actual = jax.vmap(schedule)(jnp.arange(len(expected), dtype=jnp.int32))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.parametrize("case", SCHEDULES)
def test_every_golden_schedule_is_compared(case: dict[str, Any]) -> None:
    """A schedule added to the reference file that no test reads."""
    assert set(case["out"]) == {*RATES, "nanogpt"}


@pytest.mark.parametrize("case", CLIPPING)
def test_clipping_by_global_norm_is_optaxs_exact_quotient(case: dict[str, Any]) -> None:
    """torch's max_norm / (norm + 1e-6) in its place; SGD with rate 1 shows what reaches the optimizer."""
    grads = jax.tree.map(jnp.asarray, case["in"]["grads"])
    params = jax.tree.map(jnp.asarray, case["in"]["params"])
    clipped = optax.chain(optax.clip_by_global_norm(case["config"]["max_norm"]), optimizers.sgd(1.0))
    updates, _ = clipped.update(grads, clipped.init(params), params)
    for name, expected in case["out"]["optax_clip_by_global_norm"].items():
        np.testing.assert_allclose(-updates[name], expected, rtol=1e-9, atol=1e-12)
