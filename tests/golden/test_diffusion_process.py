"""Forward process, posterior, targets, conversions and weights against guided-diffusion, diffusers and Min-SNR."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.objectives.diffusion.predictions import Data, Epsilon, Velocity
from telic.objectives.diffusion.process import Process
from telic.objectives.diffusion.schedules import Discrete
from telic.objectives.diffusion.weightings import SNR, MinSNR, TruncatedSNR
from tests.golden import cases

CASES = cases("diffusion_process")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
PREDICTIONS = {"epsilon": Epsilon(), "sample": Data(), "v_prediction": Velocity()}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def schedule(case: dict[str, Any]) -> Discrete:
    make = {"linear": Discrete.linear, "cosine": Discrete.cosine}[case["config"]["schedule"]]
    return make(case["config"]["num_steps"])


def inputs(case: dict[str, Any]) -> tuple[Any, ...]:
    given = case["in"]
    return given["x0"], given["noise"], given["t"], given["model_output"]


def by_row(values: Any, like: Any) -> Any:
    return np.asarray(values).reshape(-1, *[1] * (np.ndim(like) - 1))


@pytest.mark.parametrize("case", CASES)
def test_forward_process(case: dict[str, Any]) -> None:
    """alpha² and sigma² where their roots should be; a time that indexes the wrong axis."""
    data, noise, t, output = inputs(case)
    process, out = Process(schedule(case), Epsilon()), case["out"]
    x = process.noised(data, noise, t)
    np.testing.assert_allclose(x, out["x_t"], **CLOSE)
    alpha, sigma = process.marginal(t, data)
    np.testing.assert_allclose(alpha * data, out["q_mean"], **CLOSE)
    np.testing.assert_allclose(np.ravel(sigma**2), out["q_variance"], **CLOSE)
    np.testing.assert_allclose(np.ravel((alpha / sigma) ** 2), out["snr"], **CLOSE)
    np.testing.assert_allclose(process.estimates(x, output, t)[0], out["x0_from_noise"], **CLOSE)
    _, found = Process(schedule(case), Data()).estimates(x, output, t)
    np.testing.assert_allclose(found, out["noise_from_x0"], **CLOSE)
    velocity = Process(schedule(case), Velocity()).target(data, noise, t)
    np.testing.assert_allclose(velocity, out["velocity"], **CLOSE)


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_output_gives_the_data_of_diffusers(case: dict[str, Any], kind: str) -> None:
    """A sign or a root lost in one of the conversions."""
    data, noise, t, output = inputs(case)
    process = Process(schedule(case), PREDICTIONS[kind])
    x = process.noised(data, noise, t)
    found, found_noise = process.estimates(x, output, t)
    np.testing.assert_allclose(found, case["out"]["x0_from_model_output"][kind], **CLOSE)
    # What is taken apart fits together again.
    alpha, sigma = process.marginal(t, x)
    np.testing.assert_allclose(alpha * found + sigma * found_noise, x, rtol=1e-9, atol=1e-9)


def log_normal_ratio(mean_a: Any, log_a: Any, mean_b: Any, log_b: Any) -> Any:
    """Give KL(a || b) of two normal distributions, elementwise."""
    return 0.5 * (-1 + log_b - log_a + np.exp(log_a - log_b) + (mean_a - mean_b) ** 2 * np.exp(-log_b))


@pytest.mark.parametrize("kind", ["epsilon", "start_x"])
@pytest.mark.parametrize("case", CASES)
def test_posterior_and_reverse_step(case: dict[str, Any], kind: str) -> None:
    """A posterior whose two coefficients are exchanged, or whose variance is that of the forward step."""
    data, noise, t, output = inputs(case)
    out = case["out"]
    process = Process(schedule(case), Epsilon() if kind == "epsilon" else Data())
    x = process.noised(data, noise, t)
    np.testing.assert_allclose(process.losses(output, data, noise, t), out[f"mse_{kind}"], **CLOSE)

    def step(clean: Any) -> tuple[Any, Any]:
        later = t > 0
        mean, variance = process.posterior(clean, x, t, np.maximum(t - 1, 0))
        last_mean, last_variance = process.posterior(clean, x, t, None)
        return (
            np.where(by_row(later, x), mean, last_mean),
            np.where(later, np.ravel(variance), np.ravel(last_variance)),
        )

    mean, variance = step(data)
    np.testing.assert_allclose(mean, out["posterior_mean"], **CLOSE)
    np.testing.assert_allclose(variance, out["posterior_variance"], **CLOSE)
    clean, _ = process.estimates(x, output, t)
    np.testing.assert_allclose(step(clean)[0], out[f"p_mean_{kind}"], **CLOSE)
    np.testing.assert_allclose(step(np.clip(clean, -1, 1))[0], out[f"p_mean_{kind}_clipped"], **CLOSE)
    second = np.ravel(process.posterior(np.zeros(1), np.zeros(1), np.ones(1, int), np.zeros(1, int))[1])
    small = np.log(np.where(t > 0, variance, second))
    np.testing.assert_allclose(small, out["p_log_variance_fixed_small"], **CLOSE)
    betas = process.schedule.betas
    np.testing.assert_allclose(np.log(np.where(t > 0, betas[t], second)), out["p_log_variance_fixed_large"], **CLOSE)
    later = t > 0
    # The terms of the variational bound follow from the posterior, in bits; the first step has another likelihood.
    learned, _ = step(clean)
    kl = log_normal_ratio(mean, by_row(small, x), learned, by_row(np.log(betas[t]), x))
    bits = kl.mean(axis=tuple(range(1, x.ndim))) / np.log(2)
    assert later.any()
    np.testing.assert_allclose(bits[later], out[f"kl_{kind}"][later], rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_min_snr_weights(case: dict[str, Any]) -> None:
    """S47: min(SNR + 1, g) / (SNR + 1) for a velocity. XS172: 1 added to the weight in place of its denominator."""
    data, noise, t, output = inputs(case)
    out, gamma = case["out"], case["config"]["snr_gamma"]
    for kind in ("epsilon", "v_prediction"):
        process = Process(schedule(case), PREDICTIONS[kind], MinSNR(gamma))
        np.testing.assert_allclose(process.weight(t), out[f"min_snr_weight_{kind}"], **CLOSE)
        loss = process.losses(output, data, noise, t).mean()
        np.testing.assert_allclose(loss, out[f"min_snr_loss_{kind}"], **CLOSE)
    for kind, weighting in (("min_snr", MinSNR(gamma)), ("snr", SNR()), ("trunc_snr", TruncatedSNR())):
        process = Process(schedule(case), Data(), weighting)
        loss = process.losses(output, data, noise, t)
        np.testing.assert_allclose(loss, out[f"minsnr_repo_start_x_{kind}"], **CLOSE)
    process = Process(schedule(case), Epsilon(), MinSNR(gamma))
    loss = process.losses(output, data, noise, t)
    np.testing.assert_allclose(loss, out["minsnr_repo_epsilon_min_snr"], **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_float32_keeps_its_tolerance(case: dict[str, Any]) -> None:
    """1 - alpha² taken in float32, which has three digits left near the data."""
    data, noise, t, output = inputs(case)
    with jax.enable_x64(False):
        single = [jnp.asarray(v, jnp.float32) for v in (data, noise, output)]
        process = Process(schedule(case), Epsilon())
        x = process.noised(single[0], single[1], jnp.asarray(t, jnp.int32))
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, case["out"]["x_t"], rtol=2e-5, atol=2e-6)
        loss = process.losses(single[2], single[0], single[1], jnp.asarray(t, jnp.int32))
        np.testing.assert_allclose(loss, case["out"]["mse_epsilon"], rtol=2e-5, atol=2e-6)
