"""Diffusion and flow matching: processes, samplers and the objective that trains them.

A `Process` is a schedule (`Discrete`, `Flow`, `EDM`, `VP`, `VE`, `Cosine`), what the network's output means
(`Epsilon`, `Data`, `Velocity`, `FlowVelocity`, `Karras`), and a weighting of the noise levels (`SNR`, `MinSNR`, …).
Samplers (`DDIM`, `Heun`, `DPMSolver`) work on any of them.
"""

from telic.objectives.diffusion.guidance import Guidance
from telic.objectives.diffusion.objective import Autoencoder, DiffusionObjective
from telic.objectives.diffusion.predictions import Data, Epsilon, FlowVelocity, Karras, Prediction, Velocity
from telic.objectives.diffusion.process import PROCESSES, Process, as_process
from telic.objectives.diffusion.samplers import (
    DDIM,
    SAMPLERS,
    DPMSolver,
    Heun,
    Point,
    Sampler,
    as_sampler,
    run_sampler,
    way,
)
from telic.objectives.diffusion.schedules import EDM, VE, VP, Cosine, Discrete, Flow, Schedule, resolution_shift
from telic.objectives.diffusion.times import LogitNormal, Mode, TimeDensity, Uniform, shifted
from telic.objectives.diffusion.weightings import (
    SNR,
    CosMap,
    KarrasWeight,
    MinSNR,
    SigmaSqrt,
    SoftMinSNR,
    TruncatedSNR,
    Weighting,
)

__all__ = [
    "DiffusionObjective",
    "Process",
    "as_process",
    "PROCESSES",
    "Schedule",
    "Discrete",
    "Flow",
    "EDM",
    "VP",
    "VE",
    "Cosine",
    "resolution_shift",
    "TimeDensity",
    "Uniform",
    "LogitNormal",
    "Mode",
    "shifted",
    "Prediction",
    "Epsilon",
    "Data",
    "Velocity",
    "FlowVelocity",
    "Karras",
    "Weighting",
    "SNR",
    "TruncatedSNR",
    "MinSNR",
    "SoftMinSNR",
    "KarrasWeight",
    "CosMap",
    "SigmaSqrt",
    "Sampler",
    "SAMPLERS",
    "as_sampler",
    "DDIM",
    "Heun",
    "DPMSolver",
    "Point",
    "way",
    "run_sampler",
    "Guidance",
    "Autoencoder",
]
