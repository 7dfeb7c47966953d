"""Checkpoints of a run: whole or absent, checked byte by byte, and never executed.

`Checkpoints` says where a run saves itself and what stays; hand it to `telic.Trainer`. `verify` reads every checkpoint
of a run and says which are whole; `inspect` shows what one holds; `load_variables` gives its weights.
"""

from telic.checkpoints.config import Checkpoints
from telic.checkpoints.inspection import Contents, Report, inspect, load_variables, verify

__all__ = ["Checkpoints", "Contents", "Report", "inspect", "load_variables", "verify"]
