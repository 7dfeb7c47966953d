"""Samplers: from noise back to data in one compiled loop.

A sampler is a value with one method, which makes one step from a noise level to a lower one. It asks a denoiser for the
data in a noisy sample and knows nothing of networks, guidance or conditions. Samples are kept as
``x = alpha · data + sigma · noise`` at every step, whatever the schedule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from telic.errors import unknown_name
from telic.mean import wide
from telic.objectives.diffusion.process import posterior
from telic.objectives.diffusion.schedules import Schedule
from telic.types import Array, Key, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Point:
    """One noise level of a sampler's way, or the whole way as arrays [steps].

    Attributes:
      t: Time, as the schedule counts it.
      alpha: How much of the data a sample holds.
      sigma: How much noise.
    """

    t: Any
    alpha: Any
    sigma: Any

    @property
    def ratio(self) -> Array:
        """Noise over data, sigma / alpha."""
        return self.sigma / self.alpha


Denoiser = Callable[[Any, Point], Array]
"""(x, point) -> the data in a noisy sample at a noise level."""


class Sampler(Protocol):
    """One step from a noise level to a lower one."""

    @property
    def draws(self) -> bool:
        """Whether steps consume noise."""
        ...

    def start(self, x: Array) -> PyTree:
        """Give what is carried from step to step, before the first."""
        ...

    def step(self, denoise: Denoiser, x: Array, carry: PyTree, *, move: "Move") -> tuple[Array, PyTree]:
        """Give (x, carry) at ``move.there``."""
        ...

    def check(self, way: Point) -> None:
        """Raise when the way is not one this sampler can go; traced levels cannot be checked."""
        ...


@dataclass(frozen=True)
class Move:
    """What a step knows beside the sample.

    Attributes:
      here: Where it starts.
      there: Where it ends, at less noise.
      noise: Standard normal of the sample's shape, or None for samplers that draw none.
      schedule: For noise levels between the points.
      num_steps: Steps of the whole way.
    """

    here: Point
    there: Point
    noise: Any
    schedule: Any = None
    num_steps: int = 1


@dataclass(frozen=True)
class DDIM:
    """The first-order step: estimate data and noise, and mix them anew for the lower level.

    With eta 0 it is deterministic: DDIM, and also Euler's method for the probability flow, on sigma or on a flow's time
    alike. With eta 1 it draws from the posterior: DDPM's sampler, and Euler ancestral.

    Args:
      eta: Part of the posterior's standard deviation that is drawn afresh.
      noise_scale: Factor on the noise drawn.
    Source: Song et al. 2021 eq. 12; Ho et al. 2020 algorithm 2.
    """

    eta: float = 0.0
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta is the part of the posterior's noise that is drawn, 0 to 1, got {self.eta!r}")

    @property
    def draws(self) -> bool:
        return self.eta > 0

    def start(self, x: Array) -> PyTree:
        del x

    def step(self, denoise: Denoiser, x: Array, carry: PyTree, *, move: Move) -> tuple[Array, PyTree]:
        here, there = move.here, move.there
        data = denoise(x, here)
        noise = (x - here.alpha * data) / here.sigma
        if not self.draws:
            return there.alpha * data + there.sigma * noise, carry
        _, variance = posterior(0.0, 0.0, (here.alpha, here.sigma), (there.alpha, there.sigma))
        variance = self.eta**2 * variance
        kept = jnp.sqrt(jnp.maximum(there.sigma**2 - variance, 0))
        fresh = jnp.sqrt(variance) * self.noise_scale * move.noise
        return there.alpha * data + kept * noise + fresh, carry

    def check(self, way: Point) -> None:
        del way


@dataclass(frozen=True)
class Heun:
    """The second-order step of Heun: two evaluations, one at each end; the last step has one.

    Args:
      space: In which coordinates the path is followed: "sigma" scales samples to data + noise, as EDM and k-diffusion
        do; "flow" scales them to (1 - s) data + s noise, whose ends are finite.
      churn: Total amount of fresh noise, as in EDM; 0 is deterministic. In "sigma" only.
      churn_min: Lowest level at which noise is added.
      churn_max: Highest.
      noise_scale: Factor on the noise added.
    Source: Karras et al. 2022 algorithms 1 and 2.
    """

    space: Literal["sigma", "flow"] = "sigma"
    churn: float = 0.0
    churn_min: float = 0.0
    churn_max: float = float("inf")
    noise_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.space not in ("sigma", "flow"):
            raise ValueError(f"Heun.space must be 'sigma' or 'flow', got {self.space!r}")
        if self.churn and self.space == "flow":
            raise ValueError("churn is a change of sigma: use Heun(space='sigma', churn=...)")

    @property
    def draws(self) -> bool:
        return self.churn > 0

    def start(self, x: Array) -> PyTree:
        del x

    def step(self, denoise: Denoiser, x: Array, carry: PyTree, *, move: Move) -> tuple[Array, PyTree]:
        here, there = move.here, move.there
        if self.draws:
            x, here = self._stirred(x, move)
        y, level, slope = self._at(denoise, x, here)
        scale, level_there = self._scale(there)
        distance = level_there - level
        first = y + distance * slope

        def second() -> Array:
            _, _, slope_there = self._at(denoise, first * scale, there)
            return y + distance * (slope + slope_there) / 2

        # At the data's end there is no noise left to estimate.
        return jax.lax.cond(there.sigma > 0, second, lambda: first) * scale, carry

    def check(self, way: Point) -> None:
        if self.space == "sigma" and not isinstance(way.alpha, Tracer) and bool((way.alpha == 0).any()):
            raise ValueError(
                "Heun in sigma starts at a finite sigma / alpha, and this schedule starts at pure noise: use "
                "Heun(space='flow') (sampler 'flow_heun'), or leave the first time out"
            )

    def _scale(self, point: Point) -> tuple[Any, Any]:
        scale = point.alpha if self.space == "sigma" else point.alpha + point.sigma
        return scale, point.sigma / scale

    def _at(self, denoise: Denoiser, x: Array, point: Point) -> tuple[Array, Array, Array]:
        """Give the scaled sample, its level, and the slope of the path in it."""
        data = denoise(x, point)
        noise = (x - point.alpha * data) / point.sigma
        scale, level = self._scale(point)
        return x / scale, level, noise if self.space == "sigma" else noise - data

    def _stirred(self, x: Array, move: Move) -> tuple[Array, Point]:
        level = move.here.ratio
        stirs = (level >= self.churn_min) & (level <= self.churn_max)
        share = jnp.where(stirs, min(self.churn / move.num_steps, 2**0.5 - 1), jnp.zeros_like(level))
        more = level * (1 + share)
        # The root of more² - level², without the subtraction, whose rounding would stir where nothing should.
        added = level * jnp.sqrt(share * (2 + share)) * self.noise_scale * move.noise
        t = move.schedule.time_of(more)
        alpha, sigma = move.schedule.marginal(t)
        return alpha * (x / move.here.alpha + added), Point(t, alpha, sigma)


@dataclass(frozen=True)
class DPMSolver:
    """DPM-Solver++ (2M): second order from one evaluation a step, by remembering the last one.

    Args:
      eta: 0 follows the ordinary differential equation, 1 the stochastic one.
      noise_scale: Factor on the noise drawn.
      correction: How the second order enters the stochastic step.
    Source: Lu et al. 2022 algorithm 2; the stochastic form as in k-diffusion's dpmpp_2m_sde.
    """

    eta: float = 0.0
    noise_scale: float = 1.0
    correction: Literal["midpoint", "heun"] = "midpoint"

    def __post_init__(self) -> None:
        if not self.eta >= 0:
            raise ValueError(f"DPMSolver.eta must be 0 or more, got {self.eta!r}")
        if self.correction not in ("midpoint", "heun"):
            raise ValueError(f"DPMSolver.correction must be 'midpoint' or 'heun', got {self.correction!r}")

    @property
    def draws(self) -> bool:
        return self.eta > 0

    def start(self, x: Array) -> PyTree:
        # No step yet: an infinite one, to which the second order gives no weight.
        return jnp.zeros_like(x), jnp.asarray(jnp.inf, x.dtype)

    def step(self, denoise: Denoiser, x: Array, carry: PyTree, *, move: Move) -> tuple[Array, PyTree]:
        here, there = move.here, move.there
        before, last = carry
        data = denoise(x, here)
        # Steps of log(alpha / sigma); infinite from pure noise and to the data.
        h = jnp.log(here.ratio) - jnp.log(there.ratio)
        gained = -jnp.expm1(-h * (1 + self.eta))
        order = jnp.where(jnp.isfinite(h) & (last > 0), h / last, 0.0)
        if self.correction == "midpoint":
            second = 0.5 * gained
        else:
            finite = jnp.where(jnp.isfinite(h), h, 1.0) * (1 + self.eta)
            second = 1 - gained / finite
        kept = jnp.exp(-self.eta * h) if self.draws else 1.0
        new = kept * (there.sigma / here.sigma) * x + there.alpha * gained * data
        new = new + there.alpha * second * order * (data - before)
        if self.draws:
            new = new + there.sigma * jnp.sqrt(-jnp.expm1(-2 * self.eta * h)) * self.noise_scale * move.noise
        return new, (data, h)

    def check(self, way: Point) -> None:
        del way


SAMPLERS: Mapping[str, Sampler] = MappingProxyType(
    {
        "ddpm": DDIM(eta=1.0),
        "ddim": DDIM(),
        "euler": DDIM(),
        "euler_ancestral": DDIM(eta=1.0),
        "heun": Heun(),
        "dpmpp_2m": DPMSolver(),
        "dpmpp_2m_sde": DPMSolver(eta=1.0),
        "flow_euler": DDIM(),
        "flow_heun": Heun(space="flow"),
    }
)
"""Samplers by name. Several names are one value: see `DDIM`."""


def as_sampler(given: str | Sampler) -> Sampler:
    """Give a sampler by its name, or the one given.

    Raises:
      ValueError: There is no such sampler.
    """
    if isinstance(given, str):
        if given not in SAMPLERS:
            raise unknown_name("sampler", given, SAMPLERS)
        return SAMPLERS[given]
    return given


def way(schedule: Schedule, times: Any, *, end: tuple[float, float] | None = (1.0, 0.0)) -> Point:
    """Give a sampler's way: the points at some times, and the end, as NumPy arrays, also under jit.

    Args:
      schedule: What alpha and sigma are.
      times: Falling times, [steps].
      end: (alpha, sigma) after the last step, the data themselves by default; None ends at the last of the times.
    Raises:
      ValueError: The noise does not fall.
    """
    times = np.asarray(times)
    with jax.ensure_compile_time_eval():
        alpha, sigma = (np.asarray(v) for v in schedule.marginal(jnp.asarray(times)))
    if end is not None:
        # The end is no time of its own: nothing is evaluated there.
        times = np.concatenate([times, times[-1:]])
        alpha, sigma = np.append(alpha, alpha.dtype.type(end[0])), np.append(sigma, sigma.dtype.type(end[1]))
    if not (sigma[:-1] * alpha[1:] > sigma[1:] * alpha[:-1]).all():
        raise ValueError(f"a sampler goes from noise to data, so its times must fall, got {times.tolist()}")
    return Point(times, alpha, sigma)


def run_sampler(
    denoise: Denoiser,
    x: Array,
    way: Point,
    *,
    sampler: Sampler | str = "ddim",
    schedule: Any = None,
    key: Key | None = None,
    noise: Any = None,
    trajectory: bool = False,
) -> Array:
    """Give the samples at the end of a way, or the whole trajectory.

    Compile it as a part of your own program: ``jax.jit(lambda x: run_sampler(...))``.

    Args:
      denoise: (x, point) -> the data in x.
      x: Where to start, [batch, ...], at the first point of the way.
      way: Made by `way`.
      sampler: One of `SAMPLERS` by name, or a value such as ``DDIM(eta=0.5)``.
      schedule: The way's; needed by Heun with churn.
      key: For samplers that draw.
      noise: The noise of each step, [steps, batch, ...], in place of a key.
      trajectory: Give [steps + 1, batch, ...], from the start on.
    Raises:
      ValueError: The sampler draws and has neither key nor noise, or cannot go this way.
    """
    chosen = as_sampler(sampler)
    chosen.check(way)
    x = wide(x)
    num_steps = way.sigma.shape[0] - 1
    levels = jax.tree.map(jnp.asarray, way)
    if chosen.draws and key is None and noise is None:
        raise ValueError(f"{type(chosen).__name__} draws noise at every step: pass key=jax.random.key(...)")

    given = None if noise is None else jnp.asarray(noise)

    def body(carry: Any, i: Any) -> Any:
        x, inner = carry
        here, there = (jax.tree.map(lambda v, j=j: v[j], levels) for j in (i, i + 1))
        fresh = None
        if chosen.draws and given is not None:
            fresh = given[i]
        elif chosen.draws and key is not None:
            fresh = jax.random.normal(jax.random.fold_in(key, i), x.shape, x.dtype)
        move = Move(here, there, fresh, schedule, num_steps)
        new, inner = chosen.step(denoise, x, inner, move=move)
        new = new.astype(x.dtype)
        return (new, inner), (new if trajectory else None)

    (last, _), states = jax.lax.scan(body, (x, chosen.start(x)), jnp.arange(num_steps))
    return jnp.concatenate([x[None], states]) if trajectory else last
