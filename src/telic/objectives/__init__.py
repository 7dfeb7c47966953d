"""Objectives: from a loss by name to a class of your own."""

from telic.objectives.base import Aux, EMASpec, Mean, Objective, Rows, Step, Terms, mean_loss, scalar_loss
from telic.objectives.convert import as_objective, supervised
from telic.objectives.diffusion.objective import DiffusionObjective
from telic.objectives.jepa.objective import JepaObjective
from telic.objectives.language.objective import LMObjective
from telic.objectives.policy import GRPOObjective
from telic.objectives.preferences import DPOObjective

__all__ = [
    "Aux",
    "DPOObjective",
    "DiffusionObjective",
    "JepaObjective",
    "EMASpec",
    "GRPOObjective",
    "LMObjective",
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
