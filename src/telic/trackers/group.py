"""Several trackers as one."""

from collections.abc import Mapping, Sequence
from typing import Any

from telic.trackers.base import Tracker
from telic.trackers.outbox import Outbox


class Trackers:
    """Gives everything to each of several trackers, each behind an `Outbox` of its own: one that hangs holds up none.

    Args:
      trackers: The trackers.
    Raises:
      TypeError: One of them is no tracker.
    """

    def __init__(self, trackers: Sequence[Tracker]):
        self._outboxes = tuple(Outbox(as_tracker(tracker)) for tracker in trackers)

    def start(self, config: Mapping[str, Any]) -> None:
        """Open each; returns at once."""
        for outbox in self._outboxes:
            outbox.start(config)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Give scalars to each."""
        for outbox in self._outboxes:
            outbox.log(scalars, step)

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Give an artifact to each."""
        for outbox in self._outboxes:
            outbox.artifact(name, value, step)

    def close(self) -> None:
        """Let each finish, within its patience."""
        for outbox in self._outboxes:
            outbox.close()


def as_tracker(given: Any) -> Tracker:
    """Give a tracker as it is.

    Raises:
      TypeError: It lacks a method of `Tracker`, or is a class.
    """
    if isinstance(given, type) or not isinstance(given, Tracker):
        what = f"the class {given.__name__}: call it" if isinstance(given, type) else f"{given!r:.80}"
        raise TypeError(
            "a tracker has start(config), log(scalars, step), artifact(name, value, step) and close(), such as "
            f"telic.trackers.JsonLines('runs/first'); got {what}"
        )
    return given


def as_group(given: Any) -> Trackers | None:
    """Give one tracker, a list of them, or None as what a run talks to."""
    if given is None or isinstance(given, Trackers):
        return given
    return Trackers(list(given) if isinstance(given, list | tuple) else [given])  # pyright: ignore[reportUnknownArgumentType]
