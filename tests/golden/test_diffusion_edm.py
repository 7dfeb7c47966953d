"""EDM preconditioning, losses and weights against NVlabs/edm and k-diffusion, in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from telic.objectives.diffusion.predictions import Epsilon, Karras
from telic.objectives.diffusion.process import Process
from telic.objectives.diffusion.schedules import EDM, VE, VP
from telic.objectives.diffusion.times import Uniform
from telic.objectives.diffusion.weightings import SNR, KarrasWeight, SoftMinSNR
from tests.golden import cases

CASES = cases("diffusion_edm")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def probe(case: dict[str, Any], x: Any, time: Any) -> Any:
    """The affine network of the file."""
    a, b, d = case["config"]["probe"]
    return a * x + b * np.asarray(time).reshape(-1, *[1] * (np.ndim(x) - 1)) + d


def made(case: dict[str, Any], weighting: Any = None) -> Process:
    config = case["config"]
    return Process(EDM(mean=config["P_mean"], std=config["P_std"]), Karras(config["sigma_data"]), weighting)


def drawn(case: dict[str, Any]) -> tuple[Process, Any, Any, Any]:
    process = made(case)
    return process, case["in"]["y"], case["in"]["unit_noise"], process.schedule.level(case["in"]["unit_normal"])


@pytest.mark.parametrize("case", CASES)
def test_preconditioning(case: dict[str, Any]) -> None:
    """c_out without its root, or c_noise without its quarter."""
    process, grid = made(case), case["out"]["grid"]
    skip, out, into = process.prediction.coefficients(grid["sigma"])
    np.testing.assert_allclose(skip, grid["c_skip"], **CLOSE)
    np.testing.assert_allclose(out, grid["c_out"], **CLOSE)
    np.testing.assert_allclose(into, grid["c_in"], **CLOSE)
    np.testing.assert_allclose(process.schedule.network_time(grid["sigma"]), grid["c_noise"], **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_denoiser_and_loss(case: dict[str, Any]) -> None:
    """XS176: a loss weight of another target. The loss of the output must be EDM's weighted loss of the data."""
    process, data, noise, sigma = drawn(case)
    out = case["out"]
    np.testing.assert_allclose(sigma, out["sigma"], **CLOSE)
    x = process.noised(data, noise, sigma)
    output = probe(case, *process.network_inputs(x, sigma))
    found, _ = process.estimates(x, output, sigma)
    np.testing.assert_allclose(found, out["denoised"], **CLOSE)
    losses = process.losses(output, data, noise, sigma)
    np.testing.assert_allclose(losses, out["loss"].mean(axis=(1, 2, 3)), **CLOSE)
    np.testing.assert_allclose(losses.mean(), out["loss_mean"], **CLOSE)
    weighting = KarrasWeight(case["config"]["sigma_data"])
    np.testing.assert_allclose(weighting(1 / np.asarray(sigma) ** 2), out["weight"], **CLOSE)
    np.testing.assert_allclose(made(case, weighting).weight(sigma), np.ones_like(sigma), **CLOSE)


@pytest.mark.parametrize("kind", ["karras", "snr", "soft-min-snr"])
@pytest.mark.parametrize("case", CASES)
def test_k_diffusions_target_form_and_weights(case: dict[str, Any], kind: str) -> None:
    """A weight for the data's error put on the network's."""
    weighting = {"karras": None, "snr": SNR(), "soft-min-snr": SoftMinSNR(case["config"]["sigma_data"])}[kind]
    _, data, noise, sigma = drawn(case)
    process = made(case, weighting)
    x = process.noised(data, noise, sigma)
    inputs, _ = process.network_inputs(x, sigma)
    # k-diffusion gives its network sigma itself.
    output = probe(case, inputs, np.log(sigma) / 4)
    np.testing.assert_allclose(process.weight(sigma), case["out"][f"k_diffusion_weight_{kind}"], **CLOSE)
    losses = process.losses(output, data, noise, sigma)
    np.testing.assert_allclose(losses, case["out"][f"k_diffusion_loss_{kind}"], **CLOSE)
    np.testing.assert_allclose(process.estimates(x, output, sigma)[0], case["out"]["k_diffusion_denoised"], **CLOSE)


@pytest.mark.parametrize("kind", ["vp", "ve", "iddpm"])
@pytest.mark.parametrize("case", CASES)
def test_other_preconditioners(case: dict[str, Any], kind: str) -> None:
    """A network that reads the unscaled sample, or a time in other units."""
    out = case["out"]["other_preconditioners"][kind]
    # In the reference the sample is data + sigma · noise, and each network is one of noise.
    schedule = VE() if kind == "ve" else VP()
    sigma = np.asarray(case["out"]["sigma"])
    data, noise = case["in"]["y"], case["in"]["unit_noise"]
    process = Process(schedule, Epsilon(), SNR())
    t = schedule.time_of(sigma)
    x = process.noised(data, noise, t)
    inputs, time = process.network_inputs(x, t)
    np.testing.assert_allclose(inputs, out["network_input"], rtol=1e-9, atol=1e-9)
    if kind != "iddpm":
        np.testing.assert_allclose(time, out["c_noise"], rtol=1e-9)
    output = probe(case, inputs, out["c_noise"])
    # EDM's VE network gives the negative of the noise.
    sign = -1 if kind == "ve" else 1
    found, _ = process.estimates(x, sign * output, t)
    np.testing.assert_allclose(found, out["denoised_on_noised"], rtol=1e-9, atol=1e-9)
    if kind == "iddpm":
        return
    unit = out["unit_uniform"]
    t = Uniform(VP().smallest).of(1 - unit) if kind == "vp" else VE().level(unit)
    x = process.noised(data, out["unit_noise"], t)
    output = probe(case, *process.network_inputs(x, t))
    losses = process.losses(sign * output, data, out["unit_noise"], t)
    np.testing.assert_allclose(losses, out["loss"].mean(axis=(1, 2, 3)), rtol=1e-8)
