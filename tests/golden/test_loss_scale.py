"""Dynamic loss scaling against jmp and torch.amp.GradScaler, step by step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic.contract import Objective
from telic.mean import Mean
from telic.precision import Dynamic
from telic.train.step import TrainStep
from tests.golden import cases

CASES = cases("loss_scale")


def run(case: dict[str, Any], minimum: float) -> tuple[list[float], list[int], list[float]]:
    """Give the scale before each step, the counter after it and the weight after it, with SGD on finite steps."""
    config, given = case["config"], case["in"]
    scale = Dynamic(
        config["init_scale"], period=config["growth_interval"], factor=config["growth_factor"], minimum=minimum
    )
    weight, before, counters, weights = jnp.float32(0.5), [], [], []

    @jax.jit
    def step(scale: Dynamic, weight: Any, grad: Any) -> Any:
        scaled = scale.scale(jnp.float32(1)) * grad
        grads = scale.unscale(scaled)
        finite = jnp.isfinite(grads)
        return scale.adjust(finite), jnp.where(finite, weight - config["lr"] * grads, weight)

    for finite, grad in zip(given["finite"], given["grads"], strict=True):
        before.append(float(scale.value))
        scale, weight = step(scale, weight, jnp.float32(grad if finite else np.inf))
        counters.append(int(scale.counter))
        weights.append(float(weight))
    return [*before, float(scale.value)], counters, weights


@pytest.mark.parametrize("case", CASES)
def test_scale_and_counter_follow_jmp(case: dict[str, Any]) -> None:
    """A period counted off by one, a counter kept over an overflow, or a floor that is not there."""
    expected = case["out"]["jmp_dynamic_loss_scale"]
    scales, counters, _ = run(case, minimum=1.0)
    assert scales == [*expected["scale_before"], expected["scale_final"]]
    assert counters == list(expected["counter_after"])


@pytest.mark.parametrize("case", CASES)
def test_scale_counter_and_weights_follow_torch(case: dict[str, Any]) -> None:
    """As torch, which has no floor: a weight moved by a rejected step, or by gradients that are still scaled."""
    expected = case["out"]["torch_grad_scaler"]
    scales, counters, weights = run(case, minimum=2.0**-20)
    assert scales == [*expected["scale_before"], expected["scale_final"]]
    assert counters == list(expected["growth_tracker_after"])
    np.testing.assert_allclose(weights, expected["params"], rtol=2e-5, atol=2e-6)


class Slope(Objective):
    """One weight whose gradient is the batch: infinite where the batch is."""

    def init(self, key: Any, variables: Any = None) -> Any:
        del key, variables
        return {"params": {"w": jnp.float32(0.5)}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        del step
        return Mean(variables["params"]["w"] * batch["grad"].sum(), batch["grad"].size)


@pytest.mark.parametrize("reference", ["jmp_dynamic_loss_scale", "torch_grad_scaler"])
@pytest.mark.parametrize("case", CASES)
def test_the_train_step_follows_the_reference(case: dict[str, Any], reference: str) -> None:
    """The real step with SGD: a scale adjusted twice or not at all, an update by scaled gradients, a rejected attempt
    that counts as an update, a reference without a floor (torch) or with one of 1 (jmp).
    """
    config, given, expected = case["config"], case["in"], case["out"][reference]
    torch = case["out"]["torch_grad_scaler"]
    scale = Dynamic(
        config["init_scale"],
        period=config["growth_interval"],
        factor=config["growth_factor"],
        minimum=2.0**-20 if reference == "torch_grad_scaler" else 1.0,
    )
    optimizer = optax.with_extra_args_support(optax.sgd(config["lr"]))
    step = TrainStep(Slope(), optimizer, jax.random.key(0), loss_scale=scale, max_rejected=100)
    state = step.init({"grad": np.zeros(1, np.float32)})
    advance = jax.jit(step.step)
    before, stepped, counters, weights = [], [], [], []
    for finite, grad in zip(given["finite"], given["grads"], strict=True):
        before.append(float(state.loss_scale.value))
        updates = int(state.updates)
        result = advance(state, {"grad": np.array([grad if finite else np.inf], np.float32)})
        state = result.state
        stepped.append(int(state.updates) - updates == 1)
        assert bool(result.accepted) is stepped[-1]
        counters.append(int(state.loss_scale.counter))
        weights.append(float(state.variables["params"]["w"]))
    assert before == list(expected["scale_before"])
    assert float(state.loss_scale.value) == expected["scale_final"]
    assert counters == list(expected.get("counter_after", expected.get("growth_tracker_after")))
    assert stepped == list(torch["stepped"]) == list(given["finite"])
    np.testing.assert_allclose(weights, torch["params"], rtol=2e-5, atol=2e-6)
    assert int(state.attempts) == len(weights)
    assert int(state.rejections.total) == len(weights) - sum(stepped)
