"""Learning rates as functions of the update count.

Two families: those of this library's seed and of nanoGPT, and Hugging Face's by their names there. A schedule counts
optimizer updates, never microbatches. Its value has JAX's default float dtype.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import optax

from telic.types import Array

Schedule: TypeAlias = Callable[[Any], Any]
"""A function from the number of updates done, int32 scalar, to the rate of the next."""


def constant(value: float) -> Schedule:
    """Give the same rate at every update."""
    return lambda count: jnp.full(jnp.shape(count), value, jnp.zeros((), float).dtype)


def exponential_decay(
    init_value: float,
    *,
    decay_rate: float = 0.95,
    transition_steps: int = 10,
    transition_begin: int = 0,
    staircase: bool = False,
) -> Schedule:
    """Give init_value · decay_rate^(count / transition_steps).

    Args:
      init_value: Rate at the start.
      decay_rate: Factor for each `transition_steps` updates.
      transition_steps: Updates for one factor.
      transition_begin: Updates before the decay starts.
      staircase: Whether the factor applies at whole multiples only.
    """
    return optax.exponential_decay(init_value, transition_steps, decay_rate, transition_begin, staircase)


def cosine_decay(init_value: float, *, decay_steps: int = 10, alpha: float = 0.0) -> Schedule:
    """Give half a cosine from init_value to alpha · init_value over `decay_steps` updates, then alpha · init_value."""
    return optax.cosine_decay_schedule(init_value, decay_steps, alpha)


def polynomial_decay(
    init_value: float,
    end_value: float = 1e-3,
    *,
    power: float = 2.0,
    transition_steps: int = 10,
    transition_begin: int = 0,
) -> Schedule:
    """Give a polynomial from init_value to end_value over `transition_steps` updates, then end_value.

    Args:
      init_value: Rate at the start.
      end_value: Rate at the end.
      power: 1 decays linearly; larger bends towards the end value early.
      transition_steps: Updates of the decay.
      transition_begin: Updates before the decay starts.
    """
    return optax.polynomial_schedule(init_value, end_value, power, transition_steps, transition_begin)


def linear_decay(init_value: float, *, warmup: int = 0, steps: int = 1000) -> Schedule:
    """Give a ramp 0 → init_value over `warmup` updates, then a line down to 0 at update `steps`, then 0."""
    return _warm(init_value, warmup, lambda n: jnp.maximum(0.0, (steps - n) / max(1, steps - warmup)))


def warmup_cosine(peak_value: float, *, warmup: int, steps: int, end_value: float = 0.0) -> Schedule:
    """Give nanoGPT's warm-up cosine: update i warms with peak · (i+1) / (warmup+1), and ends at end_value.

    Args:
      peak_value: Rate after the warm-up.
      warmup: Updates of the warm-up. The first one already has a rate above zero.
      steps: Update at which the cosine reaches `end_value`, which is the rate from then on.
      end_value: Rate at the end.
    """
    _check(warmup, steps)

    def schedule(count: Any) -> Array:
        n = _number(count)
        progress = jnp.clip((n - warmup) / max(1, steps - warmup), 0.0, 1.0)
        decayed = end_value + 0.5 * (1 + jnp.cos(jnp.pi * progress)) * (peak_value - end_value)
        return jnp.where(n < warmup, peak_value * (n + 1) / (warmup + 1), jnp.where(n > steps, end_value, decayed))

    return schedule


def constant_with_warmup(peak_value: float, *, warmup: int) -> Schedule:
    """Give a ramp 0 → peak_value over `warmup` updates, then peak_value."""
    return _warm(peak_value, warmup, jnp.ones_like)


def linear(peak_value: float, *, warmup: int = 0, steps: int) -> Schedule:
    """Give a ramp 0 → peak_value over `warmup` updates, then a line down to 0 at update `steps`, then 0."""
    _check(warmup, steps)
    return linear_decay(peak_value, warmup=warmup, steps=steps)


def cosine(peak_value: float, *, warmup: int = 0, steps: int, num_cycles: float = 0.5) -> Schedule:
    """Give a ramp, then `num_cycles` cosine waves over the rest; half a wave ends at 0.

    The wave goes on after update `steps`, as in Hugging Face: train for `steps` updates, no more.

    Args:
      peak_value: Rate after the warm-up.
      warmup: Updates of the ramp 0 → peak_value.
      steps: Updates in all, the warm-up included.
      num_cycles: Waves after the warm-up.
    """
    return cosine_with_min_lr(peak_value, warmup=warmup, steps=steps, num_cycles=num_cycles)


def cosine_with_min_lr(
    peak_value: float, *, warmup: int = 0, steps: int, end_value: float = 0.0, num_cycles: float = 0.5
) -> Schedule:
    """Give `cosine` between peak_value and end_value; the ramp starts at 0."""
    _check(warmup, steps)
    floor = end_value / peak_value

    def decay(n: Array) -> Array:
        wave = 0.5 * (1 + jnp.cos(jnp.pi * 2 * num_cycles * (n - warmup) / max(1, steps - warmup)))
        return jnp.maximum(0.0, wave * (1 - floor) + floor)

    return _warm(peak_value, warmup, decay)


def cosine_with_restarts(peak_value: float, *, warmup: int = 0, steps: int, num_cycles: int = 1) -> Schedule:
    """Give a ramp, then `num_cycles` half waves that each start again at peak_value, then 0.

    Args:
      peak_value: Rate after the warm-up and at each restart.
      warmup: Updates of the ramp 0 → peak_value.
      steps: Updates in all, the warm-up included.
      num_cycles: Half waves after the warm-up.
    """
    _check(warmup, steps)

    def decay(n: Array) -> Array:
        progress = (n - warmup) / max(1, steps - warmup)
        return jnp.where(progress >= 1, 0.0, 0.5 * (1 + jnp.cos(jnp.pi * ((num_cycles * progress) % 1.0))))

    return _warm(peak_value, warmup, decay)


def polynomial(
    peak_value: float, *, warmup: int = 0, steps: int, end_value: float = 1e-7, power: float = 1.0
) -> Schedule:
    """Give a ramp, then a polynomial from peak_value to end_value at update `steps`, then end_value.

    Args:
      peak_value: Rate after the warm-up.
      warmup: Updates of the ramp 0 → peak_value.
      steps: Updates in all, the warm-up included.
      end_value: Rate at the end.
      power: Exponent of the part that remains.
    """
    _check(warmup, steps)

    def decay(n: Array) -> Array:
        remaining = jnp.clip(1 - (n - warmup) / max(1, steps - warmup), 0.0, 1.0)
        return ((peak_value - end_value) * remaining**power + end_value) / peak_value

    return _warm(peak_value, warmup, decay)


def inverse_sqrt(peak_value: float, *, warmup: int = 0, timescale: int | None = None) -> Schedule:
    """Give a ramp, then peak_value · sqrt(timescale / (count - warmup + timescale)).

    Args:
      peak_value: Rate after the warm-up.
      warmup: Updates of the ramp 0 → peak_value.
      timescale: Updates until the rate has fallen by 1/√2. Default `warmup`, or 10,000 without one.
    """
    scale = timescale or warmup or 10_000
    return _warm(peak_value, warmup, lambda n: 1 / jnp.sqrt((n + (scale - warmup)) / scale))


def warmup_stable_decay(
    peak_value: float,
    *,
    warmup: int = 0,
    steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    decay: Literal["cosine", "linear", "sqrt"] = "cosine",
) -> Schedule:
    """Give a ramp, then peak_value, then a decay to end_value over the last `decay_steps` updates.

    Args:
      peak_value: Rate after the warm-up.
      warmup: Updates of the ramp, end_value → peak_value as in Hugging Face.
      steps: Updates in all, the warm-up included.
      decay_steps: Updates of the decay.
      end_value: Rate at the end and at the start.
      decay: Shape of the decay in its progress x: (1 + cos πx) / 2, 1 - x, or 1 - √x.
    """
    _check(warmup, steps)
    start = steps - decay_steps
    if start < warmup:
        raise ValueError(f"warmup={warmup} and decay_steps={decay_steps} do not fit into steps={steps}")
    if decay not in ("cosine", "linear", "sqrt"):
        raise ValueError(f"decay must be 'cosine', 'linear' or 'sqrt', got {decay!r}")

    def schedule(count: Any) -> Array:
        n = _number(count)
        x = jnp.clip((n - start) / max(1, decay_steps), 0.0, 1.0)
        shapes = {"cosine": 0.5 * (1 + jnp.cos(jnp.pi * x)), "linear": 1 - x, "sqrt": 1 - jnp.sqrt(x)}
        high = jnp.where(n < warmup, n / max(1, warmup), jnp.where(n < steps, shapes[decay], 0.0))
        return end_value + (peak_value - end_value) * high

    return schedule


def _warm(peak_value: float, warmup: int, decay: Callable[[Array], Array]) -> Schedule:
    """Ramp linearly from 0, then follow a factor that is 1 at the end of the ramp."""

    def schedule(count: Any) -> Array:
        n = _number(count)
        return peak_value * jnp.where(n < warmup, n / max(1, warmup), decay(n))

    return schedule


def _number(count: Any) -> Array:
    """Give a count in the default float dtype: a decay must not divide integers."""
    return jnp.asarray(count).astype(jnp.zeros((), float).dtype)


def _check(warmup: int, steps: int) -> None:
    if not 0 <= warmup <= steps:
        raise ValueError(f"warmup must be between 0 and steps={steps}, got {warmup}")
