"""How far a policy has moved: importance ratios, weights for samples of another program, KL estimators. Pure functions.

Shapes: log-probs are [rows, time], one for each token of a completion, in nats. A mask of the same shape says which
tokens count; where it is 0 a log-prob may be anything, -inf and NaN included, and its gradient is 0.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from telic.errors import ShapeError, unknown_name
from telic.mean import wide
from telic.types import Array

Level = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]

_LARGEST_LOG_RATIO = 20.0
"""Where the log-ratio of a token is cut: e^20 is 5e8, far outside of any clip range, and finite in every dtype."""

_LARGEST_MEAN_LOG_RATIO = 10.0
"""The same for the mean log-ratio of a sequence."""


def masked(values: Any, mask: Any) -> Array:
    """Give values in at least float32 with 0 where the mask is 0; no gradient flows there.

    Raises:
      ShapeError: Values and mask differ in shape.
    """
    values, mask = wide(values), jnp.asarray(mask)
    if values.shape != mask.shape:
        raise ShapeError(
            f"log-probs and mask must have one shape [rows, time], got {values.shape} and {mask.shape}; log-probs of "
            "completions go with the mask of the same tokens"
        )
    return jnp.where(mask != 0, values, 0)


def own_sums(values: Array, segments: Any = None) -> Array:
    """Give each token the sum over the tokens of its own sequence, [rows, time].

    Args:
      values: [rows, time].
      segments: Sequence of each token, int [rows, time], where rows hold several one after the other; None: each row
        is one sequence.
    """
    if segments is None:
        return jnp.broadcast_to(values.sum(-1, keepdims=True), values.shape)
    segments = jnp.asarray(segments)
    runs = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0))).cumsum(-1)
    width = values.shape[1]
    return jax.vmap(lambda row, run: jax.ops.segment_sum(row, run, num_segments=width)[run])(values, runs)


def own_means(values: Array, mask: Any, segments: Any = None) -> Array:
    """Give each token the mean over the counted tokens of its own sequence, [rows, time]; 0 where none is counted."""
    weights = wide(mask)
    count = own_sums(weights, segments)
    total = own_sums(jnp.where(weights != 0, values, 0) * weights, segments)
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)


def importance_ratios(
    log_probs: Any, old_log_probs: Any, mask: Any, *, level: Level = "token", segments: Any = None
) -> Array:
    """Give π / π_old of each token, [rows, time]; 1 where the mask is 0 (of the token, or of all its sequence).

    At the sequence level (GSPO) every token has the ratio of its sequence, the geometric mean of its tokens', and the
    gradient of its own log-prob.

    Args:
      log_probs: Under the policy that learns.
      old_log_probs: Under the policy that drew the samples; no gradient flows to it.
      mask: Tokens that count.
      level: "token" or "sequence".
      segments: As in `own_sums`.
    Source: Zheng 2025 (https://arxiv.org/abs/2507.18071); agrees with TRL and verl, tests/golden/test_grpo_losses.py.
    """
    new = masked(log_probs, mask)
    log_ratio = jnp.clip(
        new - jax.lax.stop_gradient(masked(old_log_probs, mask)), -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO
    )
    match level:
        case "token":
            return jnp.exp(log_ratio)
        case "sequence":
            mean = jnp.minimum(own_means(log_ratio, mask, segments), _LARGEST_MEAN_LOG_RATIO)
            return jnp.exp(jax.lax.stop_gradient(mean) + new - jax.lax.stop_gradient(new))
        case _:
            raise unknown_name("importance level", level, ("token", "sequence"))


def sampling_weights(
    old_log_probs: Any,
    sampling_log_probs: Any,
    mask: Any,
    *,
    level: Level = "token",
    mode: Literal["truncate", "mask"] = "truncate",
    highest: float = 2.0,
    lowest: float = 0.0,
    segments: Any = None,
) -> tuple[Array, Array]:
    """Give weights π_old / π_sampling that correct for samples drawn by another program than the one that learns.

    A token without a finite sampling log-prob weighs 1, and counts 0 in the ratio of its sequence.

    Args:
      old_log_probs: Under the policy that drew, as the training program computes it.
      sampling_log_probs: As the program that drew computed them; NaN or infinite where it gave none.
      mask: Tokens that count.
      level: Weigh each token by its own ratio, or by the product over its sequence.
      mode: "truncate" cuts weights at `highest`; "mask" gives 0 outside of [`lowest`, `highest`].
      highest: Largest weight.
      lowest: Least weight that "mask" keeps.
      segments: As in `own_sums`.
    Returns:
      (weights, missing), each [rows, time], without gradient; `missing` is 1 at counted tokens without a sampling
      log-prob.
    Source: truncated importance sampling, Yao 2025 (https://fengyao.notion.site/off-policy-rl); golden grpo_trl.
    """
    if not (highest > 0 and 0 <= lowest < highest):
        raise ValueError(f"weights need 0 <= lowest < highest, got lowest={lowest!r} and highest={highest!r}")
    counted = jnp.asarray(mask) != 0
    given = wide(sampling_log_probs)
    scored = counted & jnp.isfinite(given)
    missing = wide(counted & ~scored)
    log_ratio = masked(old_log_probs, mask) - jnp.where(scored, masked(given, mask), 0)
    log_ratio = jnp.clip(jnp.where(scored, log_ratio, 0), -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    match level:
        case "token":
            pass
        case "sequence":
            log_ratio = jnp.clip(own_sums(log_ratio, segments), -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        case _:
            raise unknown_name("importance level", level, ("token", "sequence"))
    ratio = jnp.exp(log_ratio)
    match mode:
        case "truncate":
            weights = jnp.minimum(ratio, highest)
        case "mask":
            weights = jnp.where((ratio >= lowest) & (ratio <= highest), ratio, 0)
        case _:
            raise unknown_name("mode", mode, ("truncate", "mask"))
    return jax.lax.stop_gradient(weights), jax.lax.stop_gradient(missing)


def kl_estimate(
    log_probs: Any,
    reference_log_probs: Any,
    mask: Any,
    *,
    estimator: Estimator = "k3",
    limit: float | None = None,
) -> Array:
    """Estimate KL(π ‖ reference) at each token of samples drawn from π, [rows, time]; 0 where the mask is 0.

    With r = log reference - log π: k1 is -r, k2 is r² / 2, k3 is e^r - r - 1. k1 and k3 have the right mean; k3 is
    never negative and varies less. Where the samples are an older policy's, each is biased: weigh it by π / π_old.

    Args:
      log_probs: Under the policy that learns.
      reference_log_probs: Under the reference; no gradient flows to it.
      mask: Tokens that count.
      estimator: "k1", "k2" or "k3".
      limit: Where the estimate of a token is cut, so that one outlier is not the whole loss; 10 is usual. Its gradient
        is 0 beyond. None cuts nothing but log-ratios of 20 nats.
    Source: Schulman 2020 (http://joschu.net/blog/kl-approx.html); golden grpo_verl.
    """
    difference = jax.lax.stop_gradient(masked(reference_log_probs, mask)) - masked(log_probs, mask)
    difference = jnp.clip(difference, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be above 0, got {limit!r}")
    match estimator:
        case "k1":
            found = -difference
        case "k2":
            found = 0.5 * difference**2
        case "k3":
            found = jnp.expm1(difference) - difference
        case _:
            raise unknown_name("KL estimator", estimator, ("k1", "k2", "k3"))
    return found if limit is None else jnp.clip(found, -limit, limit)
