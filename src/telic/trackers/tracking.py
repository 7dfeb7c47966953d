"""The handler that gives a run's metrics to its trackers."""

from collections.abc import Callable, Mapping
from typing import Any

from telic.loop.ports import State
from telic.trackers.group import Trackers
from telic.trackers.names import as_scalars, tracked_name


class Tracking:
    """Gives metrics to trackers: an interval late while a run goes on, exactly at the end of an epoch or run.

    So nothing waits for the device until an epoch ends.

    Args:
      trackers: Where they go.
      config: Gives what the run is; asked when it starts.
    """

    def __init__(self, trackers: Trackers, config: Callable[[], Mapping[str, Any]]):
        self._trackers = trackers
        self._config = config
        self._pending: tuple[int, Callable[[], Mapping[str, Any]]] | None = None
        self._closed = -1

    def on_start(self, state: State) -> None:
        """Open the trackers."""
        del state
        self._pending, self._closed = None, -1
        self._trackers.start(self._config())

    def on_step(self, state: State) -> None:
        """Note this moment, and give the one before."""
        self._give_pending()
        self._pending = state.steps, state.metrics.later()

    def on_end(self, state: State) -> None:
        """Give the whole epoch, or what the last one had when the run ended."""
        self._give_pending()
        # An interruption may come between a step and its metrics: those of the moment cannot be read then.
        if state.steps > self._closed and state.status != "interrupted":
            self._closed = state.steps
            self._trackers.log(as_scalars(dict(state.metrics)), state.steps)

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Give an artifact; ``validation_images`` becomes ``validation/images``."""
        self._trackers.artifact(tracked_name(name), value, step)

    def flush(self) -> None:
        """Give what is noted and not given yet: before a checkpoint of the run, whose continuation will not."""
        self._give_pending()

    def close(self) -> None:
        """Let the trackers finish; harmless when they have."""
        self._pending = None
        self._trackers.close()

    def _give_pending(self) -> None:
        if self._pending is not None:
            step, read = self._pending
            self._pending = None
            self._trackers.log(as_scalars(read()), step)
