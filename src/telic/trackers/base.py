"""What a tracker is: where a run's numbers, pictures and texts go, in a form that does not depend on the service."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Somewhere to follow a run: a file, TensorBoard, a service.

    Making one opens nothing; `start` does. A tracker may be started again after `close`, as when one trainer runs
    twice. The steps of `log` and `artifact` never decrease within a run: they count the run's updates (batches, in a
    loop that has no updates), so that training and validation values of one moment share one step.

    A run calls its tracker from one thread of its own and on process 0 alone; a method may be slow or raise, and
    training goes on (see `Outbox`).
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the run.

        Args:
          config: What the run is: nested mappings of plain values, without secrets.
        """
        ...

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Take scalars of one moment, named like ``train/loss`` and ``validation/accuracy``; they may be NaN."""
        ...

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Take something to look at: an artifact, or an array [...] of numbers whose distribution is of interest."""
        ...

    def close(self) -> None:
        """Write everything that was taken, and let go."""
        ...
