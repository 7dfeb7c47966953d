"""From rewards to advantages: how much better a completion did than what was to be expected. Pure functions.

They work on NumPy arrays where they are, and on JAX arrays inside a program.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from telic.errors import ShapeError, unknown_name

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]


def group_advantages(
    rewards: Any,
    *,
    group: int,
    scale: Scale = "group",
    baseline: Baseline = "mean",
    epsilon: float = 1e-4,
) -> Any:
    """Compare each completion's reward with those of the other completions of its prompt.

    ``scale="group"`` is GRPO, ``scale="none"`` Dr. GRPO, ``baseline="leave_one_out"`` with ``scale="none"`` RLOO. A
    group whose rewards are all equal gets exactly 0: it says nothing about what is better.

    Args:
      rewards: One number per completion, [rows], the completions of a prompt one after the other. NaN says that a
        completion was not scored: it is in no mean, and its advantage is 0.
      group: Completions per prompt, at least 2.
      scale: Divide by the standard deviation (unbiased, plus `epsilon`) of the group or of the whole batch, or not.
      baseline: Subtract the mean of the group, or for each completion the mean of the others.
      epsilon: Added to the standard deviation.
    Returns:
      Advantages, [rows], in the dtype of the rewards, at least float32.
    Raises:
      ValueError: A group of one, or an unknown scale or baseline.
      ShapeError: The rewards are not [rows], or the rows do not fill groups.
    Source: Shao 2024 (https://arxiv.org/abs/2402.03300); as TRL and verl have it, golden grpo_advantages.
    Example:
      >>> group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), group=4, scale="none")
      array([ 0.75, -0.25, -0.25, -0.25])
    """
    xp = jnp if isinstance(rewards, jax.Array) else np
    rewards = xp.asarray(rewards)
    if not np.issubdtype(rewards.dtype, np.floating):
        rewards = rewards.astype(np.float32)
    if isinstance(group, bool) or not isinstance(group, int) or group < 2:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(
            f"a group needs at least 2 completions, got group={group!r}: alone, a completion is always average, and "
            "nothing is learned"
        )
    if rewards.ndim != 1 or rewards.shape[0] % group:
        raise ShapeError(
            f"rewards must be [rows] with whole groups of {group}, got shape {rewards.shape}; give one number per "
            "completion, the completions of a prompt one after the other"
        )
    if scale not in ("group", "batch", "none"):
        raise unknown_name("scale", scale, ("group", "batch", "none"))
    if baseline not in ("mean", "leave_one_out"):
        raise unknown_name("baseline", baseline, ("mean", "leave_one_out"))
    grouped = rewards.reshape(-1, group)
    known = ~xp.isnan(grouped)
    values = xp.where(known, grouped, 0)
    count = known.sum(-1, keepdims=True)
    mean = values.sum(-1, keepdims=True) / xp.maximum(count, 1)
    centred = xp.where(known, values - mean, 0)
    if baseline == "leave_one_out":
        # r - (S - r) / (n - 1) is n / (n - 1) of the distance from the mean of all.
        centred = centred * count / xp.maximum(count - 1, 1)
    # Told by the rewards themselves: their mean is rounded, so that equal rewards may differ from it.
    highest = xp.where(known, grouped, -np.inf).max(-1, keepdims=True)
    lowest = xp.where(known, grouped, np.inf).min(-1, keepdims=True)
    centred = xp.where(highest > lowest, centred, 0)
    if scale == "group":
        centred = centred / (_deviation(xp, values, known, axis=-1) + epsilon)
    elif scale == "batch":
        centred = centred / (_deviation(xp, values, known, axis=None) + epsilon)
    return centred.reshape(rewards.shape).astype(rewards.dtype)


def _deviation(xp: Any, values: Any, known: Any, *, axis: int | None) -> Any:
    """Give the unbiased standard deviation of the known values."""
    count = known.sum(axis, keepdims=True)
    mean = values.sum(axis, keepdims=True) / xp.maximum(count, 1)
    squares = (xp.where(known, values - mean, 0) ** 2).sum(axis, keepdims=True)
    return xp.sqrt(squares / xp.maximum(count - 1, 1))


def generalized_advantages(
    rewards: Any, values: Any, mask: Any, *, discount: float = 1.0, decay: float = 0.95
) -> tuple[Any, Any]:
    """Give advantages and returns of each step by generalised advantage estimation (GAE).

    Args:
      rewards: Reward after each step, [rows, time].
      values: Value expected before each step, [rows, time].
      mask: Steps that count, [rows, time]. A step of mask 0 is passed over: what follows it belongs to the step before
        it. Its reward and value may be anything.
      discount: γ, in [0, 1].
      decay: λ, in [0, 1]: 0 trusts the values, 1 the rewards.
    Returns:
      (advantages, returns), each [rows, time]; the advantage of a masked step is 0, its return that of the next step.
    Raises:
      ShapeError: The arrays differ in shape.
    Source: Schulman 2015 eq. 16 (https://arxiv.org/abs/1506.02438).
    """
    rewards, values, kept = jnp.asarray(rewards), jnp.asarray(values), jnp.asarray(mask) != 0
    if rewards.ndim != 2 or values.shape != rewards.shape or kept.shape != rewards.shape:
        raise ShapeError(
            f"rewards, values and mask must all be [rows, time], got {rewards.shape}, {values.shape} and {kept.shape}"
        )
    for name, number in (("discount", discount), ("decay", decay)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {number!r}")
    rewards, values = jnp.where(kept, rewards, 0), jnp.where(kept, values, 0)

    def back(after: tuple[Any, Any], step: Any) -> tuple[tuple[Any, Any], Any]:
        advantage, value = after
        reward, here, counts = step
        found = reward + discount * value - here + discount * decay * advantage
        advantage, value = jnp.where(counts, found, advantage), jnp.where(counts, here, value)
        return (advantage, value), (advantage, value)

    start = (jnp.zeros_like(rewards[:, 0]), jnp.zeros_like(values[:, 0]))
    steps = (rewards.T, values.T, kept.T)
    _, (advantages, bases) = jax.lax.scan(back, start, steps, reverse=True)
    return jnp.where(kept, advantages.T, 0), (advantages + bases).T
