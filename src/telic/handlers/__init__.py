"""What watches a run: monitors of a metric, early stopping, the plateau, checkpoints.

Each is a handler of the loop: a function of the state that answers with nothing or a status. What one remembers is a
plain record in `LoopState.handler_state` under a name of its own, so that a saved state carries it. The methods of
`telic.Loop` build and attach them.
"""

from telic.handlers.checkpoint import Checkpoint, best_checkpoint, last_checkpoint
from telic.handlers.early_stop import EarlyStop
from telic.handlers.monitor import Monitor, as_mode, record_name
from telic.handlers.plateau import ReduceRate

__all__ = [
    "Checkpoint",
    "EarlyStop",
    "Monitor",
    "ReduceRate",
    "as_mode",
    "best_checkpoint",
    "last_checkpoint",
    "record_name",
]
