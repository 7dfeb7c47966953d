"""Joint-embedding prediction: masks, features and the objective that trains an encoder without labels."""

from telic.objectives.jepa.features import (
    Distance,
    correlation,
    covariance_penalty,
    distances,
    layer_normed,
    spread,
    variance_penalty,
)
from telic.objectives.jepa.masks import Masks, MultiBlockMask
from telic.objectives.jepa.objective import JepaObjective, momentum_ramp

__all__ = [
    "JepaObjective",
    "MultiBlockMask",
    "Masks",
    "momentum_ramp",
    "Distance",
    "distances",
    "layer_normed",
    "spread",
    "correlation",
    "variance_penalty",
    "covariance_penalty",
]
