"""What a joint-embedding loss is made of: normalised targets, distances between features, signs of collapse."""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from telic.errors import unknown_name
from telic.mean import wide
from telic.types import Array

Distance: TypeAlias = Literal["smooth_l1", "l1", "l2"]
"""smooth_l1 (I-JEPA), |d| (V-JEPA), or d² / 2."""


def layer_normed(features: Any, *, eps: float = 1e-5) -> Array:
    """Give features with mean 0 and variance 1 over their last axis, in at least float32; no parameters."""
    features = wide(features)
    mean = features.mean(axis=-1, keepdims=True)
    variance = jnp.square(features - mean).mean(axis=-1, keepdims=True)
    return (features - mean) * jax.lax.rsqrt(variance + eps)


def distances(predicted: Any, target: Any, kind: Distance = "smooth_l1") -> Array:
    """Give the distance of each element, in at least float32.

    Raises:
      ValueError: The kind is unknown.
    """
    d = wide(predicted) - wide(target)
    match kind:
        case "smooth_l1":
            size = jnp.abs(d)
            return jnp.where(size < 1, 0.5 * d**2, size - 0.5)
        case "l1":
            return jnp.abs(d)
        case "l2":
            return 0.5 * d**2
        case _:
            raise unknown_name("distance of features", kind, ("smooth_l1", "l1", "l2"))


def spread(features: Any) -> Array:
    """Give the mean over dimensions of the standard deviation over examples: 0 when all features are one."""
    features = wide(features)
    return jnp.sqrt(jnp.square(features - features.mean(axis=0)).mean(axis=0)).mean()


def correlation(features: Any) -> Array:
    """Give the mean square of the covariances between different dimensions: large when few of them say anything."""
    covariance = _covariance(features)
    dim = covariance.shape[0]
    off = jnp.sum(covariance**2) - jnp.sum(jnp.diagonal(covariance) ** 2)
    return off / max(1, dim * (dim - 1))


def variance_penalty(features: Any, *, target: float = 1.0, eps: float = 1e-4) -> Array:
    """Give the mean over dimensions of how far their standard deviation over examples falls short of a target.

    Source: Bardes et al. 2022 (VICReg) eq. 1.
    """
    features = wide(features)
    count = max(1, features.shape[0] - 1)
    variance = jnp.square(features - features.mean(axis=0)).sum(axis=0) / count
    return jnp.maximum(0, target - jnp.sqrt(variance + eps)).mean()


def covariance_penalty(features: Any) -> Array:
    """Give the sum of squared covariances between different dimensions, over the number of dimensions.

    Source: Bardes et al. 2022 (VICReg) eq. 3-4.
    """
    covariance = _covariance(features)
    off = jnp.sum(covariance**2) - jnp.sum(jnp.diagonal(covariance) ** 2)
    return off / covariance.shape[0]


def _covariance(features: Any) -> Array:
    centred = wide(features) - wide(features).mean(axis=0)
    return centred.T @ centred / max(1, centred.shape[0] - 1)
