"""Flow matching against diffusers and flow_matching, in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from telic.objectives.diffusion.predictions import Data, Epsilon, FlowVelocity
from telic.objectives.diffusion.process import Process
from telic.objectives.diffusion.schedules import VP, Cosine, Flow
from telic.objectives.diffusion.times import LogitNormal, Mode
from telic.objectives.diffusion.weightings import CosMap, SigmaSqrt
from tests.golden import cases

CASES = cases("diffusion_flow")
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("case", CASES)
def test_interpolation_target_and_weights(case: dict[str, Any]) -> None:
    """Data and noise exchanged, which trains and samples nothing but noise."""
    given, out = case["in"], case["out"]
    data, noise, output, t = given["data"], given["noise"], given["model_output"], out["sigma"]
    process = Process(Flow(), FlowVelocity())
    x = process.noised(data, noise, t)
    np.testing.assert_allclose(x, out["x_t"], **CLOSE)
    np.testing.assert_allclose(process.target(data, noise, t), out["target"], **CLOSE)
    np.testing.assert_allclose(process.losses(output, data, noise, t), out["mse"], **CLOSE)
    np.testing.assert_allclose(process.estimates(x, output, t)[0], out["x0_from_velocity"], **CLOSE)
    np.testing.assert_allclose(process.network_inputs(x, t)[1], out["timestep"], **CLOSE)
    weights = {"weight_none": None, "weight_cosmap": CosMap(), "weight_sigma_sqrt": SigmaSqrt()}
    for name, weighting in weights.items():
        np.testing.assert_allclose(Process(Flow(), FlowVelocity(), weighting).weight(t), out[name], rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_flow_matchings_convention_is_the_same_path_run_backwards(case: dict[str, Any]) -> None:
    """A conversion that holds in one time convention only."""
    given, out = case["in"], case["out"]["flow_matching"]
    data, noise, output, t = given["data"], given["noise"], given["model_output"], 1 - out["t"]
    flow = Process(Flow(), FlowVelocity())
    x = flow.noised(data, noise, t)
    np.testing.assert_allclose(x, out["x_t"], **CLOSE)
    np.testing.assert_allclose(-flow.target(data, noise, t), out["dx_t"], **CLOSE)
    # Its velocity is the negative of ours.
    clean, epsilon = flow.estimates(x, -output, t)
    np.testing.assert_allclose(clean, out["target_from_velocity"], **CLOSE)
    np.testing.assert_allclose(epsilon, out["epsilon_from_velocity"], **CLOSE)
    for prediction, name in ((Data(), "velocity_from_target"), (Epsilon(), "velocity_from_epsilon")):
        clean, epsilon = Process(Flow(), prediction).estimates(x, output, t)
        np.testing.assert_allclose(clean - epsilon, out[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["cosine", "vp"])
@pytest.mark.parametrize("case", CASES)
def test_curved_paths(case: dict[str, Any], kind: str) -> None:
    """alpha and sigma exchanged by the other direction of time."""
    out = case["out"][f"path_{kind}"]
    schedule = Cosine() if kind == "cosine" else VP()
    t = 1 - case["out"]["flow_matching"]["t"]
    alpha, sigma = schedule.marginal(t)
    np.testing.assert_allclose(alpha, out["alpha_t"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(sigma, out["sigma_t"], rtol=1e-9, atol=1e-12)
    x = Process(schedule, Epsilon()).noised(case["in"]["data"], case["in"]["noise"], t)
    np.testing.assert_allclose(x, out["x_t"], **CLOSE)
    np.testing.assert_allclose(schedule.time_of(sigma / alpha), t, rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_densities_of_training_times(case: dict[str, Any]) -> None:
    """A mode at an end, or a logit-normal whose scale is its variance."""
    draws, config = case["out"]["draws"], case["config"]
    density = LogitNormal(config["logit_mean"], config["logit_std"])
    # The file's normals have this mean and standard deviation already.
    unit = (draws["logit_normal_from"] - density.mean) / density.std
    np.testing.assert_allclose(density.of(unit), draws["logit_normal"], **CLOSE)
    np.testing.assert_allclose(Mode(config["mode_scale"]).of(draws["mode_from"]), draws["mode"], **CLOSE)
    expected = case["out"]["logit_normal_density"]
    np.testing.assert_allclose(density.density(expected["t"]), expected["pdf"], **CLOSE)
