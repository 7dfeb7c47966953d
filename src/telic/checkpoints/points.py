"""The moments of a save, a restore and a clean-up at which a test may kill the process."""

from collections.abc import Callable

POINTS = (
    "lock_taken",
    "leftovers_listed",
    "leftovers_removed",
    "candidates_listed",
    "arrays_read",
    "run_taken",
    "snapshot_taken",
    "digests_made",
    "arrays_written",
    "synced",
    "committed",
    "read_back",
    "moved_to_trash",
    "trash_removed",
)
"""Every point, in the order one run reaches them."""

_listeners: list[Callable[[str], None]] = []


def listen(listener: Callable[[str], None]) -> None:
    """Call a function with the name of each point that this process reaches from now on."""
    _listeners.append(listener)


def reach(point: str) -> None:
    """Tell the listeners, of which there are none outside tests."""
    for listener in _listeners:
        listener(point)
