"""Where a run can be followed beside its own record: files, TensorBoard, services.

Give one or several to `telic.Trainer`: ``tracker=telic.trackers.TensorBoard("runs/first")``. A tracker that fails or
hangs neither slows nor ends training. Making one opens nothing, and a package is imported when its tracker starts.
"""

from telic.trackers.base import Tracker
from telic.trackers.files import JsonLines, read_scalars
from telic.trackers.group import Trackers, as_group, as_tracker
from telic.trackers.mlflow import MLflow
from telic.trackers.outbox import Outbox, TrackerWarning
from telic.trackers.tensorboard import TensorBoard
from telic.trackers.tracking import Tracking
from telic.trackers.trackio import Trackio
from telic.trackers.weights_and_biases import WeightsAndBiases

__all__ = [
    "JsonLines",
    "MLflow",
    "Outbox",
    "TensorBoard",
    "Tracker",
    "TrackerWarning",
    "Trackers",
    "Trackio",
    "Tracking",
    "WeightsAndBiases",
    "as_group",
    "as_tracker",
    "read_scalars",
]
