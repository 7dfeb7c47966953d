"""The events of a run, and the counters filters read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from telic.errors import unknown_name

STARTED = "started"
EPOCH_STARTED = "epoch_started"
ITERATION_STARTED = "iteration_started"
ITERATION_COMPLETED = "iteration_completed"
STEP_COMPLETED = "step_completed"
EPOCH_COMPLETED = "epoch_completed"
EPOCH_HALTED = "epoch_halted"
COMPLETED = "completed"
HALTED = "halted"
INTERRUPTED = "interrupted"

EVENTS = (
    STARTED,
    EPOCH_STARTED,
    ITERATION_STARTED,
    ITERATION_COMPLETED,
    STEP_COMPLETED,
    EPOCH_COMPLETED,
    EPOCH_HALTED,
    COMPLETED,
    HALTED,
    INTERRUPTED,
)
"""Every event, in the order a run may fire them. The last three end a run, and exactly one of them fires."""


def resolve_events(events: str | Sequence[str], known: Sequence[str] = EVENTS) -> tuple[str, ...]:
    """Give the events that one name, a list of names, or "all" stands for.

    Raises:
      ValueError: A name is unknown (the nearest is shown), or the list is empty.
    """
    if isinstance(events, str):
        events = known if events == "all" else (events,)
    if not events:
        raise ValueError(f"give at least one event; known: {', '.join(known)}")
    for event in events:
        if event not in known:
            raise unknown_name("event", event, (*known, "all"))
    return tuple(events)


def check_event_name(name: str, known: Sequence[str]) -> str:
    """Give a name that a user wants to register for an event.

    Raises:
      TypeError: It is no text.
      ValueError: It is empty, "all", or an event already.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise TypeError(f"an event's name must be text, got {name!r} ({type(name).__name__})")
    if not name or name == "all":
        raise ValueError(f"an event may not be named {name!r}: 'all' stands for every event")
    if name in EVENTS:
        raise ValueError(f"{name!r} is an event that the loop fires itself; choose another name")
    if name in known:
        raise ValueError(f"the event {name!r} is registered already")
    return name


@dataclass
class Counts:
    """How often each event fired: over the run, and in this epoch. Counted once per firing, before its handlers."""

    total: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))
    epoch: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EVENTS, 0))

    def add(self, event: str, firings: int = 1) -> None:
        """Count firings, by default one."""
        self.total[event] += firings
        self.epoch[event] += firings

    def register(self, events: Sequence[str]) -> None:
        """Count these events too; what was counted of them before stays."""
        for event in events:
            self.total.setdefault(event, 0)
            self.epoch.setdefault(event, 0)

    def start_epoch(self) -> None:
        """Set the per-epoch counters back to zero."""
        self.epoch = dict.fromkeys(self.total, 0)
