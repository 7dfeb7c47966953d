"""Objectives: from a loss by name to a class of your own."""

from telic.objectives.base import Aux, EMASpec, Mean, Objective, Rows, Step, Terms, mean_loss, scalar_loss
from telic.objectives.convert import as_objective, supervised

__all__ = [
    "Aux",
    "EMASpec",
    "Mean",
    "Objective",
    "Rows",
    "Step",
    "Terms",
    "as_objective",
    "mean_loss",
    "scalar_loss",
    "supervised",
]
