"""Sampler trajectories against k-diffusion, EDM, guided-diffusion and diffusers, in float64.

The data are N(mean, std² I), whose denoiser is exact, so every state after every step can be compared.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.objectives.diffusion.guidance import guided, rescaled
from telic.objectives.diffusion.samplers import DDIM, DPMSolver, Heun, Point, Sampler, run_sampler, way
from telic.objectives.diffusion.schedules import EDM, Discrete, Flow
from tests.golden import load

CASES = {case["name"]: case for case in load("diffusion_samplers")["cases"]}
GAUSSIAN = [name for name in CASES if name.startswith("n")]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def exact_denoiser(case: dict[str, Any]) -> Any:
    mean, std = case["config"]["mean"], case["config"]["std"]

    def denoise(x: Any, point: Point) -> Any:
        # D(x, s) of the sample scaled to data + noise, without dividing by an alpha of 0.
        alpha, sigma = point.alpha, point.sigma
        return (alpha * std**2 * x + sigma**2 * mean) / (alpha**2 * std**2 + sigma**2)

    return denoise


def follow(case: dict[str, Any], sampler: Sampler | str, points: Point, start: Any, **options: Any) -> Any:
    return run_sampler(exact_denoiser(case), jnp.asarray(start), points, sampler=sampler, trajectory=True, **options)


def edm_way(case: dict[str, Any]) -> Point:
    config = case["config"]
    schedule = EDM(sigma_min=config["sigma_min"], sigma_max=config["sigma_max"], rho=config["rho"])
    return way(schedule, schedule.times(config["n"]))


def check(states: Any, expected: Any) -> None:
    np.testing.assert_allclose(states, expected, rtol=1e-8, atol=1e-9)


K_DIFFUSION = {
    "euler": DDIM(),
    "heun": Heun(),
    "dpmpp_2m": DPMSolver(),
    # The file was made with eta 0.8, which its states show: the noise in them is 0.8 of the posterior's.
    "euler_ancestral": DDIM(eta=0.8),
    "dpmpp_2m_sde": DPMSolver(eta=1.0),
}


@pytest.mark.parametrize("kind", K_DIFFUSION)
@pytest.mark.parametrize("name", GAUSSIAN)
def test_k_diffusion(name: str, kind: str) -> None:
    """A slope at the wrong end, a second order that enters at the first step or the last, noise of the wrong size."""
    case = CASES[name]
    points = edm_way(case)
    np.testing.assert_allclose(points.sigma, case["out"]["k_diffusion"]["sigmas"], rtol=1e-9)
    states = follow(case, K_DIFFUSION[kind], points, case["in"]["init_sigma_space"], noise=case["in"]["noise"])
    check(states, case["out"]["k_diffusion"][kind]["states"])


@pytest.mark.parametrize("name", GAUSSIAN)
def test_edm(name: str) -> None:
    """Churn that moves the sample and not its noise level, or counts its share of another number of steps."""
    case = CASES[name]
    points, start, churn = edm_way(case), case["in"]["init_sigma_space"], case["config"]["edm_churn"]
    check(follow(case, "heun", points, start)[-1], case["out"]["edm"]["heun"])
    if name == "n8":
        # The ablation sampler keeps EDM's own levels, which are those of this case alone.
        check(follow(case, "heun", points, start)[-1], case["out"]["edm"]["ablation_edm_heun"])
        check(follow(case, "euler", points, start)[-1], case["out"]["edm"]["ablation_edm_euler"])
    stirred = Heun(
        churn=churn["S_churn"], churn_min=churn["S_min"], churn_max=churn["S_max"], noise_scale=churn["S_noise"]
    )
    states = follow(case, stirred, points, start, schedule=EDM(), noise=case["in"]["noise"])
    check(states[-1], case["out"]["edm"]["heun_churn"])


@pytest.mark.parametrize(("kind", "eta"), [("ddim_eta0", 0.0), ("ddim_eta0.7", 0.7), ("ddpm", 1.0)])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_guided_diffusion(name: str, kind: str, eta: float) -> None:
    """A respaced chain that keeps the betas of the full one."""
    case = CASES[name]
    out = case["out"]["guided_diffusion"]
    points = way(Discrete.linear(1000), np.asarray(out["timesteps"])[::-1])
    states = follow(case, DDIM(eta=eta), points, case["in"]["init_vp"], noise=case["in"]["noise"])
    check(states, out[kind]["states"])


DIFFUSERS = {
    "ddim_epsilon_leading": DDIM(),
    "ddim_v_prediction_leading": DDIM(),
    "ddim_sample_leading": DDIM(),
    "ddim_epsilon_trailing": DDIM(),
    "ddim_epsilon_eta0.5": DDIM(eta=0.5),
    "dpmpp_2m_linspace": DPMSolver(),
    "dpmpp_2m_trailing_lower_order_final_off": DPMSolver(),
}


@pytest.mark.parametrize("kind", DIFFUSERS)
@pytest.mark.parametrize("name", GAUSSIAN)
def test_diffusers_variance_preserving(name: str, kind: str) -> None:
    """A step to the wrong next time, or a last step that ends above the data."""
    case = CASES[name]
    expected = case["out"]["diffusers"][kind]
    schedule = Discrete.linear(1000)
    if name == "n16" and kind.startswith("ddim") and "leading" not in kind:
        pytest.skip("diffusers' DDIM steps by 1000 // 16 = 62, and so to levels it does not start from next")
    # With lower_order_final off diffusers ends at the level of step 0, at second order.
    first = schedule.alphas_cumprod[0]
    end = (first**0.5, (1 - first) ** 0.5) if kind.endswith("off") else (1.0, 0.0)
    points = way(schedule, expected["timesteps"], end=end)
    states = follow(case, DIFFUSERS[kind], points, case["in"]["init_vp"], noise=case["in"]["noise"])
    check(states, expected["states"])


@pytest.mark.parametrize("kind", ["flow_euler_shift1", "flow_euler_shift3", "flow_heun_shift1"])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_diffusers_flow(name: str, kind: str) -> None:
    """Heun of another coordinate, which agrees only in the limit."""
    case = CASES[name]
    expected = case["out"]["diffusers"][kind]
    times = np.asarray(expected["timesteps"]) / 1000
    heun = kind.startswith("flow_heun")
    points = way(Flow(), np.unique(times)[::-1])
    sampler = Heun(space="flow") if heun else DDIM()
    states = follow(case, sampler, points, expected["states"][0])
    # diffusers shows the sample between Heun's two evaluations as well.
    check(
        states, expected["states"][[0, *range(2, len(expected["states"]) - 1, 2), -1]] if heun else expected["states"]
    )


@pytest.mark.parametrize("kind", ["euler_discrete_linspace", "euler_discrete_karras"])
@pytest.mark.parametrize("name", GAUSSIAN)
def test_diffusers_noise_levels_of_a_discrete_schedule(name: str, kind: str) -> None:
    """Levels between steps, where sigma is a line in diffusers' linspace and given by rho in its karras."""
    case = CASES[name]
    expected = case["out"]["diffusers"][kind]
    schedule = Discrete.linear(1000)
    alphas = schedule.alphas_cumprod
    levels = np.sqrt((1 - alphas) / alphas)
    times = np.asarray(expected["timesteps"])
    if kind.endswith("karras"):
        found = schedule.times(case["config"]["n"], spacing="karras")
        np.testing.assert_allclose(found, times, rtol=1e-6, atol=1e-6)
        points = way(schedule, found)
        ratio = np.append(points.ratio[:-1], 0.0)
    else:
        ratio = np.append(np.interp(times, np.arange(1000), levels), 0.0)
    # diffusers keeps data + noise.
    points = Point(jnp.asarray(ratio), jnp.ones(ratio.size), jnp.asarray(ratio))
    check(follow(case, "euler", points, expected["states"][0]), expected["states"])


def test_guidance_and_its_rescaling() -> None:
    """A standard deviation over the batch, or one without its correction."""
    case = CASES["guidance"]
    given, config = case["in"], case["config"]
    found = guided(given["conditional"], given["unconditional"], config["guidance_scale"])
    np.testing.assert_allclose(found, case["out"]["guided"], rtol=1e-9, atol=1e-12)
    found = rescaled(found, given["conditional"], config["guidance_rescale"])
    np.testing.assert_allclose(found, case["out"]["rescaled"], rtol=1e-9, atol=1e-12)


SOLVERS = {"euler": 1, "heun": 2, "dpmpp_2m": 2, "flow_heun": 2}


@pytest.mark.parametrize("name", SOLVERS)
def test_convergence_order(name: str) -> None:
    """A solver of second order in name only: halving the steps must divide the error by 2^order.

    Between two finite noise levels, where the path is smooth and the exact end is known.
    """
    case = CASES["n8"]
    mean, std = case["config"]["mean"], case["config"]["std"]
    top, bottom = 4.0, 0.5
    start = np.linspace(-3.0, 3.0, 7)
    exact = mean + (start - mean) * np.sqrt((std**2 + bottom**2) / (std**2 + top**2))
    flow = name.startswith("flow")
    errors = []
    for num_steps in (32, 64, 128):
        if flow:
            times = np.linspace(top / (1 + top), bottom / (1 + bottom), num_steps + 1)
            points = way(Flow(), times, end=None)
            last = follow(case, name, points, start / (1 + top))[-1] * (1 + bottom)
        else:
            points = way(EDM(), np.geomspace(top, bottom, num_steps + 1), end=None)
            last = follow(case, name, points, start)[-1]
        errors.append(np.abs(last - exact).max())
    orders = np.log2(np.divide(errors[:-1], errors[1:]))
    np.testing.assert_allclose(orders, SOLVERS[name], atol=0.15)


@pytest.mark.parametrize("name", ["ddim", "heun", "dpmpp_2m", "flow_heun"])
def test_the_end_is_the_exact_flow(name: str) -> None:
    """A sampler that converges to something else."""
    case = CASES["n8"]
    config = case["config"]
    schedule = EDM(sigma_min=config["sigma_min"], sigma_max=config["sigma_max"])
    last = follow(case, name, way(schedule, schedule.times(400)), case["in"]["init_sigma_space"])[-1]
    np.testing.assert_allclose(last, case["out"]["exact"], atol=2e-2 if name == "ddim" else 2e-3)
