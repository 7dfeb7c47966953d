"""How a step runs: traced, compiled and dispatched with its metrics, its state donated, its batches fed.

The only place that jits training and evaluation.
"""

from telic.driver.building import build_state
from telic.driver.feeding import Feeder
from telic.driver.gathering import Gathering
from telic.driver.stepping import (
    DriverOptions,
    Listener,
    StepDriver,
    compile_step,
)
from telic.driver.tracing import check_constants

__all__ = [
    "DriverOptions",
    "Feeder",
    "Gathering",
    "Listener",
    "StepDriver",
    "build_state",
    "check_constants",
    "compile_step",
]
