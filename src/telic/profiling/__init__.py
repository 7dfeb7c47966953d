"""Where the time and memory of a run go: its parts on a clock, what a step costs, how much of the wall time counts."""

from telic.profiling.account import OTHER_PARTS, PARTS, STEP_PARTS, Account
from telic.profiling.costs import Memory, flops_of, measured_peak, memory_of, published_peak, repeated_flops
from telic.profiling.goodput import Goodput, GoodputFile, read_goodput
from telic.profiling.report import Report, byte_text
from telic.profiling.wrappers import MeteredDriver, MeteredKeeper, MeteredListener, MeteredSource, metered_handler

__all__ = [
    "OTHER_PARTS",
    "PARTS",
    "STEP_PARTS",
    "Account",
    "Goodput",
    "GoodputFile",
    "Memory",
    "MeteredDriver",
    "MeteredKeeper",
    "MeteredListener",
    "MeteredSource",
    "Report",
    "byte_text",
    "flops_of",
    "measured_peak",
    "memory_of",
    "metered_handler",
    "published_peak",
    "read_goodput",
    "repeated_flops",
]
