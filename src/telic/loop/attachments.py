"""Handlers as a run holds them: each with its event and the firings of it that count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from telic.loop import events as ev
from telic.loop.filters import Filter, always
from telic.loop.state import LoopState

Handler = Callable[[LoopState], Any]
"""``(LoopState) -> None | status | LoopState | (status, LoopState)``."""


@dataclass(frozen=True)
class Attachment:
    """A handler, the event it answers to, and the firings of it that count.

    Attributes:
      event: Name of the event.
      handler: What runs.
      filter: Which firings it answers to.
      name: How errors call the handler.
      late: Run after every handler of the firing that is not, whatever the order they were attached in.
      probe: Name of the probe that is computed at the firings the filter names; None for every other handler.
    """

    event: str
    handler: Handler
    filter: Filter = always
    name: str = ""
    late: bool = False
    probe: str | None = None


@dataclass(frozen=True)
class Plan:
    """All handlers of a loop, in the order they were attached."""

    attachments: tuple[Attachment, ...] = ()

    def of(self, event: str) -> tuple[Attachment, ...]:
        """Give an event's handlers in the order they run."""
        own = [a for a in self.attachments if a.event == event]
        return tuple(sorted(own, key=lambda a: a.late))

    def horizon(self, counts: ev.Counts, period: int, slot: int) -> int:
        """Give how many iterations may run before the host is needed: at least 1.

        It is asked after the first of them has started.

        Args:
          counts: Firings so far.
          period: Iterations per window.
          slot: Iterations done in the open window.
        """
        ahead = 1 << 30
        for a in self.attachments:
            if a.event not in (ev.ITERATION_STARTED, ev.ITERATION_COMPLETED, ev.STEP_COMPLETED):
                continue
            done = counts.total[a.event]
            fires_at = a.filter.next_fire(done, counts.epoch[a.event])
            if fires_at is None:
                continue
            distance = fires_at - done
            if a.event == ev.STEP_COMPLETED:
                distance = distance * period - slot
            # A handler of a start runs before its batch does, so the group ends with the batch in front of it: since
            # the first batch of the group has started already, that is `distance` batches.
            ahead = min(ahead, distance)
        return max(1, ahead)
