"""Noise schedules and timestep spacings against guided-diffusion, diffusers, k-diffusion and EDM, in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from telic.objectives.diffusion import spacings
from telic.objectives.diffusion.predictions import Velocity
from telic.objectives.diffusion.process import Process
from telic.objectives.diffusion.schedules import VP, Discrete, Flow
from telic.objectives.diffusion.times import shifted
from tests.golden import load

CASES = {case["name"]: case for case in load("diffusion_schedules")["cases"]}
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def guided(config: dict[str, Any]) -> Discrete:
    make = {"linear": Discrete.linear, "cosine": Discrete.cosine}[config["schedule"]]
    return make(config["num_steps"])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("guided")])
def test_steps_and_posterior_are_guided_diffusions(name: str) -> None:
    """Betas scaled to 1000 steps only, a posterior one step off, or a variance lost near the data."""
    case = CASES[name]
    out = case["out"]
    schedule = guided(case["config"])
    np.testing.assert_allclose(schedule.betas, out["betas"], **CLOSE)
    np.testing.assert_allclose(schedule.alphas_cumprod, out["alphas_cumprod"], **CLOSE)
    process = Process(schedule, Velocity())
    t = np.arange(1, schedule.num_steps)
    one, zero = np.ones(t.size), np.zeros(t.size)
    of_data, variance = process.posterior(one, zero, t, t - 1)
    of_sample, _ = process.posterior(zero, one, t, t - 1)
    np.testing.assert_allclose(of_data, out["posterior_mean_coef1"][1:], **CLOSE)
    np.testing.assert_allclose(of_sample, out["posterior_mean_coef2"][1:], **CLOSE)
    np.testing.assert_allclose(variance, out["posterior_variance"][1:], **CLOSE)
    # The reference clips the log of the first variance, which is 0, to the second's.
    np.testing.assert_allclose(np.log(variance), out["posterior_log_variance_clipped"][1:], **CLOSE)
    first = process.posterior(one[:1], zero[:1], np.zeros(1, int), None)
    np.testing.assert_allclose(first[0], out["posterior_mean_coef1"][:1], **CLOSE)
    np.testing.assert_allclose(first[1], out["posterior_variance"][:1], **CLOSE)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("diffusers")])
def test_steps_are_diffusers(name: str) -> None:
    """Betas interpolated where their roots should be; a rescaled last step that still holds data."""
    case = CASES[name]
    config = case["config"]
    ends = {"start": config.get("beta_start"), "end": config.get("beta_end")}
    steps = config["num_train_timesteps"]
    match config["beta_schedule"]:
        case "linear":
            schedule = Discrete.linear(steps, **ends)
        case "scaled_linear":
            schedule = Discrete.scaled_linear(steps, **ends)
        case _:
            schedule = Discrete.cosine(steps)
    if config.get("rescale_betas_zero_snr"):
        schedule = schedule.zero_terminal_snr()
        assert schedule.alphas_cumprod[-1] == 0
    np.testing.assert_allclose(schedule.betas, case["out"]["betas"], **CLOSE)
    np.testing.assert_allclose(schedule.alphas_cumprod, case["out"]["alphas_cumprod"], **CLOSE)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("spacing")])
def test_spacings_are_those_of_diffusers_and_guided_diffusion(name: str) -> None:
    """A sampler that starts one step below the noise, or skips the last."""
    case = CASES[name]
    config, out = case["config"], case["out"]
    total, num = config["num_train_timesteps"], config["num_inference_steps"]
    np.testing.assert_array_equal(spacings.leading(total, num, offset=config["steps_offset"]), out["leading"])
    np.testing.assert_array_equal(spacings.trailing(total, num), out["trailing"])
    np.testing.assert_array_equal(spacings.linspace(total, num), out["linspace"])
    np.testing.assert_array_equal(np.sort(spacings.linspace(total, num)), out["guided_section"])
    ddim = num if total % num == 0 else 10
    np.testing.assert_array_equal(np.sort(spacings.leading(total, ddim)), out["guided_ddim"])


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("sigmas")])
def test_noise_levels_are_k_diffusions(name: str) -> None:
    """An exponent of 1/rho where rho should be, or a schedule that ends above its end."""
    case = CASES[name]
    config, out = case["config"], case["out"]
    ends = (config["n"], config["sigma_min"], config["sigma_max"])
    close = {"rtol": 1e-9, "atol": 1e-12}
    np.testing.assert_allclose(spacings.karras(*ends, rho=config["rho"]), out["karras"][:-1], **close)
    np.testing.assert_allclose(spacings.exponential(*ends), out["exponential"][:-1], **close)
    np.testing.assert_allclose(spacings.polyexponential(*ends, rho=2.0), out["polyexponential_rho2"][:-1], **close)
    alpha, sigma = VP().marginal(VP().times(config["n"]))
    np.testing.assert_allclose(sigma / alpha, out["vp"][:-1], **close)
    np.testing.assert_allclose(VP().time_of(sigma / alpha), VP().times(config["n"]), rtol=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("flow")])
def test_flow_times_are_diffusers(name: str) -> None:
    """A shift towards the data in place of the noise."""
    case = CASES[name]
    config, out = case["config"], case["out"]
    dynamic = config["mu"] is not None
    flow = Flow(shift=float(np.exp(config["mu"])) if dynamic else config["shift"])
    training = shifted(np.arange(1000, 0, -1) / 1000, 1.0 if dynamic else flow.shift)
    np.testing.assert_allclose(training, out["training_sigmas"], **CLOSE)
    # diffusers spaces evenly down to its smallest training sigma, which is shifted already, and shifts once more.
    smallest = training[-1]
    if config.get("use_karras_sigmas"):
        times = flow.times(config["num_inference_steps"], spacing="karras", smallest=shifted(smallest, flow.shift))
    else:
        times = flow.times(config["num_inference_steps"], smallest=smallest)
    np.testing.assert_allclose(times, out["sigmas"][:-1], **CLOSE)
    np.testing.assert_allclose(flow.network_time(times), out["timesteps"], rtol=1e-9)


def test_time_shift() -> None:
    """The exponential form without its exponential, or a power on the wrong side."""
    case = CASES["time_shift_shift3"]
    t, shift, out = case["in"]["t"], case["config"]["shift"], case["out"]
    np.testing.assert_allclose(shifted(t, shift), out["linear"], **CLOSE)
    np.testing.assert_allclose(shifted(t, shift), out["exponential_of_log_shift"], **CLOSE)
    np.testing.assert_allclose(shifted(t, shift, power=2.0), out["linear_sigma2"], **CLOSE)
