"""Dynamic loss scaling against jmp and torch.amp.GradScaler, step by step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.precision import Dynamic
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
