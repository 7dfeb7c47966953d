"""Noise schedules: how much of the data and how much noise a noisy sample holds at a time.

A noisy sample is ``x = alpha(t) · data + sigma(t) · noise``. Time grows with noise. A schedule says what alpha and
sigma are, at which times to train, how to turn a noise level back into a time, and which number the network is told.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from telic.mean import wide
from telic.objectives.diffusion import spacings
from telic.objectives.diffusion.times import LogitNormal, TimeDensity, Uniform, shifted
from telic.types import Array, Key


class Schedule(Protocol):
    """What a process needs of a noise schedule. Times are arrays of any shape."""

    def marginal(self, t: Any) -> tuple[Array, Array]:
        """Give (alpha, sigma) at some times, in at least float32."""
        ...

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        """Draw times to train at."""
        ...

    def time_of(self, ratio: Any) -> Array:
        """Give the time at which sigma / alpha has a value."""
        ...

    def network_time(self, t: Any) -> Array:
        """Give the number that tells the network the time."""
        ...

    def times(self, num_steps: int, *, spacing: str | None = None) -> Any:
        """Give the times of a sampler's evaluations, falling from the noisiest; None takes the usual spacing."""
        ...


@dataclass(frozen=True, eq=False)
class Discrete:
    """Variance-preserving steps 0 … T-1 given by their betas: alpha² = Π (1 - beta), sigma² = 1 - alpha².

    Make one with `Discrete.linear`, `scaled_linear`, `cosine` or `sqrt`; `zero_terminal_snr` rescales one so that its
    last step is pure noise. Times are whole numbers; times between them interpolate log(sigma / alpha).

    Attributes:
      betas: float64 [T], each in (0, 1]; 1 only at the last step.
    """

    betas: NDArray[np.float64]
    _alphas_cumprod: NDArray[np.float64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        betas = np.asarray(self.betas, np.float64)
        if betas.ndim != 1 or betas.size < 1 or not (betas > 0).all() or not (betas <= 1).all():
            raise ValueError(f"betas are numbers in (0, 1], one a step, got {_described(self.betas)}")
        object.__setattr__(self, "betas", betas)
        object.__setattr__(self, "_alphas_cumprod", np.cumprod(1 - betas))

    @staticmethod
    def linear(num_steps: int = 1000, *, start: float | None = None, end: float | None = None) -> "Discrete":
        """Give betas that rise linearly; by default from 0.1 / T to 20 / T.

        Source: Ho et al. 2020, scaled to any number of steps as in guided-diffusion.
        """
        first = 0.1 / num_steps if start is None else start
        last = 20 / num_steps if end is None else end
        return Discrete(np.linspace(first, last, num_steps, dtype=np.float64))

    @staticmethod
    def scaled_linear(num_steps: int = 1000, *, start: float = 0.00085, end: float = 0.012) -> "Discrete":
        """Give betas whose square roots rise linearly. Source: Rombach et al. 2022 (latent diffusion)."""
        return Discrete(np.linspace(start**0.5, end**0.5, num_steps, dtype=np.float64) ** 2)

    @staticmethod
    def cosine(num_steps: int = 1000, *, offset: float = 0.008, max_beta: float = 0.999) -> "Discrete":
        """Give the squared-cosine schedule. Source: Nichol and Dhariwal 2021 eq. 17."""
        return Discrete.of(lambda t: math.cos((t + offset) / (1 + offset) * math.pi / 2) ** 2, num_steps, max_beta)

    @staticmethod
    def sqrt(num_steps: int = 1000, *, offset: float = 1e-4, max_beta: float = 0.999) -> "Discrete":
        """Give alpha² = 1 - √(t + offset), which adds noise early. Source: Li et al. 2022 (Diffusion-LM)."""
        return Discrete.of(lambda t: 1 - math.sqrt(t + offset), num_steps, max_beta)

    @staticmethod
    def of(alpha_squared: Callable[[float], float], num_steps: int, max_beta: float = 0.999) -> "Discrete":
        """Give the steps of a function of time in [0, 1] for alpha², each beta at most `max_beta`."""
        edges = [alpha_squared(i / num_steps) for i in range(num_steps + 1)]
        return Discrete(np.array([min(1 - b / a, max_beta) for a, b in itertools.pairwise(edges)]))

    def zero_terminal_snr(self) -> "Discrete":
        """Give this schedule rescaled so that its last step holds no data at all.

        Train it with `Velocity` or `Data`: noise cannot be turned into data where there is none. Source: Lin et al.
        2024, algorithm 1.
        """
        root = np.sqrt(self._alphas_cumprod)
        root = (root - root[-1]) * root[0] / (root[0] - root[-1])
        squared = root**2
        return Discrete(1 - np.concatenate([squared[:1], squared[1:] / squared[:-1]]))

    @property
    def num_steps(self) -> int:
        """Number of steps T."""
        return self.betas.size

    @property
    def alphas_cumprod(self) -> NDArray[np.float64]:
        """Give alpha² of every step, float64 [T]."""
        return self._alphas_cumprod

    def marginal(self, t: Any) -> tuple[Array, Array]:
        t = jnp.asarray(t)
        dtype = _float_of(t)
        if jnp.issubdtype(t.dtype, jnp.integer):
            squared = jnp.asarray(self._alphas_cumprod, dtype)[t]
            # sigma² is kept apart: 1 - alpha² would lose it near the data in float32.
            return jnp.sqrt(squared), jnp.sqrt(jnp.asarray(1 - self._alphas_cumprod, dtype)[t])
        ratio = jnp.exp(jnp.interp(wide(t), jnp.arange(self.num_steps, dtype=dtype), jnp.asarray(self._logs(), dtype)))
        alpha = jax.lax.rsqrt(1 + ratio**2)
        return alpha, ratio * alpha

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return jax.random.randint(key, shape, 0, self.num_steps)

    def time_of(self, ratio: Any) -> Array:
        ratio = wide(ratio)
        steps = jnp.arange(self.num_steps, dtype=ratio.dtype)
        return jnp.interp(jnp.log(ratio), jnp.asarray(self._logs(), ratio.dtype), steps)

    def network_time(self, t: Any) -> Array:
        return wide(t)

    def times(self, num_steps: int, *, spacing: str | None = None) -> Any:
        """Give whole times for "leading", "trailing" (the default) and "linspace", and fractional ones for "karras"."""
        name = "trailing" if spacing is None else spacing
        if name in spacings.DISCRETE:
            return spacings.DISCRETE[name](self.num_steps, num_steps)
        logs = self._logs()
        return np.asarray(_spaced(self, name, num_steps, math.exp(logs[0]), math.exp(logs[-1]), spacings.DISCRETE))

    def _logs(self) -> NDArray[np.float64]:
        """Give log(sigma / alpha) of every step; the largest finite one in place of infinity."""
        squared = np.maximum(self._alphas_cumprod, 1e-40)
        return 0.5 * np.log((1 - squared) / squared)


@dataclass(frozen=True)
class Flow:
    """Straight lines between data and noise: alpha = 1 - t, sigma = t, for t from 0 (data) to 1 (noise).

    Args:
      density: Where to train, before the shift.
      shift: Moves times towards the noise, t → s t / (1 + (s - 1) t), in training and sampling alike. Larger images
        need more; `resolution_shift` gives SD3's rule.
      time_scale: What the network is told is the time times this.
    Source: Liu et al. 2023 (rectified flow); Esser et al. 2024 (SD3) for the density and the shift.
    """

    density: TimeDensity = field(default_factory=LogitNormal)
    shift: float = 1.0
    time_scale: float = 1000.0

    def __post_init__(self) -> None:
        _check_positive(self, "shift", "time_scale")

    def marginal(self, t: Any) -> tuple[Array, Array]:
        t = wide(t)
        return 1 - t, t

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return shifted(self.density.draw(key, shape), self.shift)

    def time_of(self, ratio: Any) -> Array:
        ratio = wide(ratio)
        return jnp.where(jnp.isinf(ratio), 1.0, ratio / (1 + ratio)).astype(ratio.dtype)

    def network_time(self, t: Any) -> Array:
        return wide(t) * self.time_scale

    def times(self, num_steps: int, *, spacing: str | None = None, smallest: float | None = None) -> Any:
        """Give times for "uniform" (the default), shifted, and for "karras" and its like.

        Args:
          num_steps: How many.
          spacing: How they lie.
          smallest: Last time before the shift; by default 1 / num_steps, the last of equal steps to 0.
        """
        name = "uniform" if spacing is None else spacing
        if name == "uniform":
            last = 1 / num_steps if smallest is None else smallest
            return np.asarray(shifted(np.linspace(1.0, last, num_steps), self.shift))
        low = 0.001 if smallest is None else smallest
        # In the flow's own times, as diffusers spaces them.
        return spacings.noise_levels(name, num_steps, low, 1.0, ("uniform",))


@dataclass(frozen=True)
class EDM:
    """Noise added to the data as it is: alpha = 1, sigma = t, trained at log-normal noise levels.

    Args:
      mean: Mean of log(sigma).
      std: Its standard deviation.
      sigma_min: Smallest noise level of sampling.
      sigma_max: Largest, at which sampling starts.
      rho: Exponent of the "karras" spacing.
      time_scale: Multiplies the number that tells the network its noise level, log(sigma) / 4. A network whose waves
        turn once in 2 pi, such as `DiT`, tells levels apart by some hundreds.
    Source: Karras et al. 2022 table 1.
    """

    mean: float = -1.2
    std: float = 1.2
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    rho: float = 7.0
    time_scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "std", "sigma_min", "sigma_max", "rho", "time_scale")

    def marginal(self, t: Any) -> tuple[Array, Array]:
        t = wide(t)
        return jnp.ones_like(t), t

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return self.level(jax.random.normal(key, shape))

    def level(self, unit_normal: Any) -> Array:
        """Give the noise level of a standard normal draw."""
        return jnp.exp(self.mean + self.std * wide(unit_normal))

    def time_of(self, ratio: Any) -> Array:
        return wide(ratio)

    def network_time(self, t: Any) -> Array:
        return self.time_scale * jnp.log(wide(t)) / 4

    def times(self, num_steps: int, *, spacing: str | None = None) -> Any:
        """Give noise levels for "karras" (the default), "exponential", "polyexponential" or "uniform"."""
        name = "karras" if spacing is None else spacing
        return spacings.noise_levels(name, num_steps, self.sigma_min, self.sigma_max, rho=self.rho)


@dataclass(frozen=True)
class VP:
    """The variance-preserving diffusion in continuous time: alpha = exp(-(beta_max - beta_min) t²/4 - beta_min t/2).

    Args:
      beta_min: Rate at t = 0.
      beta_max: Rate at t = 1.
      smallest: Smallest time trained at and sampled from.
      time_scale: What the network is told is the time times this.
    Source: Song et al. 2021 appendix C; the loss and network of Karras et al. 2022.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0
    smallest: float = 1e-5
    time_scale: float = 999.0

    def __post_init__(self) -> None:
        _check_positive(self, "beta_min", "beta_max", "smallest", "time_scale")

    def marginal(self, t: Any) -> tuple[Array, Array]:
        t = wide(t)
        exponent = 0.5 * (self.beta_max - self.beta_min) * t**2 + self.beta_min * t
        return jnp.exp(-exponent / 2), jnp.sqrt(-jnp.expm1(-exponent))

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return Uniform(self.smallest).draw(key, shape)

    def time_of(self, ratio: Any) -> Array:
        # log(1 + ratio²) is the exponent; the larger root of the quadratic in t, in its form without cancellation.
        exponent = jnp.log1p(wide(ratio) ** 2)
        slope = self.beta_max - self.beta_min
        return 2 * exponent / (self.beta_min + jnp.sqrt(self.beta_min**2 + 2 * slope * exponent))

    def network_time(self, t: Any) -> Array:
        return wide(t) * self.time_scale

    def times(self, num_steps: int, *, spacing: str | None = None) -> Any:
        """Give times for "uniform" (the default), and for "karras" and its like."""
        if spacing is None or spacing == "uniform":
            return np.linspace(1.0, max(self.smallest, 1e-3), num_steps)
        low, high = (float(s / a) for a, s in (self.marginal(max(self.smallest, 1e-3)), self.marginal(1.0)))
        return np.asarray(_spaced(self, spacing, num_steps, low, high, ("uniform",)))


@dataclass(frozen=True)
class VE:
    """Noise added to the data as it is, trained at noise levels whose logarithm is uniform.

    Source: Song et al. 2021; the loss and network of Karras et al. 2022 table 1.
    """

    sigma_min: float = 0.02
    sigma_max: float = 100.0

    def __post_init__(self) -> None:
        _check_positive(self, "sigma_min", "sigma_max")

    def marginal(self, t: Any) -> tuple[Array, Array]:
        t = wide(t)
        return jnp.ones_like(t), t

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return self.level(jax.random.uniform(key, shape))

    def level(self, unit_uniform: Any) -> Array:
        """Give the noise level of a uniform draw in [0, 1)."""
        return self.sigma_min * (self.sigma_max / self.sigma_min) ** wide(unit_uniform)

    def time_of(self, ratio: Any) -> Array:
        return wide(ratio)

    def network_time(self, t: Any) -> Array:
        return jnp.log(wide(t) / 2)

    def times(self, num_steps: int, *, spacing: str | None = None) -> Any:
        """Give noise levels for "exponential" (the default), "karras", "polyexponential" or "uniform"."""
        name = "exponential" if spacing is None else spacing
        return spacings.noise_levels(name, num_steps, self.sigma_min, self.sigma_max)


@dataclass(frozen=True)
class Cosine:
    """The cosine path in continuous time: alpha = cos(πt/2), sigma = sin(πt/2). Trained at uniform times.

    Source: Albergo and Vanden-Eijnden 2023; `flow_matching` calls it CosineScheduler.
    """

    density: TimeDensity = field(default_factory=Uniform)
    time_scale: float = 1000.0

    def __post_init__(self) -> None:
        _check_positive(self, "time_scale")

    def marginal(self, t: Any) -> tuple[Array, Array]:
        angle = wide(t) * (jnp.pi / 2)
        return jnp.cos(angle), jnp.sin(angle)

    def draw(self, key: Key, shape: tuple[int, ...]) -> Array:
        return self.density.draw(key, shape)

    def time_of(self, ratio: Any) -> Array:
        return jnp.arctan(wide(ratio)) * (2 / jnp.pi)

    def network_time(self, t: Any) -> Array:
        return wide(t) * self.time_scale

    def times(self, num_steps: int, *, spacing: str | None = None) -> Any:
        """Give times for "uniform" (the default), and for "karras" and its like."""
        if spacing is None or spacing == "uniform":
            return np.linspace(1.0, 0.0, num_steps + 1)[:-1]
        return np.asarray(_spaced(self, spacing, num_steps, 1e-3, 1e3, ("uniform",)))


def resolution_shift(
    num_tokens: int, *, base: int = 256, top: int = 4096, low: float = 0.5, high: float = 1.15
) -> float:
    """Give the shift for images of some number of tokens: exp of a line from `low` at `base` to `high` at `top`.

    Source: FLUX; Esser et al. 2024 section 5.3.2 gives the reason: √ of the ratio of resolutions keeps what is unknown.
    """
    slope = (high - low) / (top - base)
    return math.exp(low + slope * (num_tokens - base))


def _spaced(schedule: Schedule, name: str, num_steps: int, low: float, high: float, also: Any) -> Array:
    """Give the times of noise levels that lie as `name` says."""
    with jax.ensure_compile_time_eval():
        return schedule.time_of(spacings.noise_levels(name, num_steps, low, high, also))


def _float_of(t: Array) -> Any:
    return jnp.zeros((), float).dtype if jnp.issubdtype(t.dtype, jnp.integer) else wide(t).dtype


def _check_positive(value: Any, *names: str) -> None:
    for name in names:
        if not getattr(value, name) > 0:
            raise ValueError(f"{type(value).__name__}.{name} must be positive, got {getattr(value, name)!r}")


def _described(betas: Any) -> str:
    betas = np.asarray(betas)
    if betas.ndim != 1 or not betas.size:
        return f"an array of shape {betas.shape}"
    return f"values from {betas.min():.4g} to {betas.max():.4g}"
