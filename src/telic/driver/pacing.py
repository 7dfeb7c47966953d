"""How far the host runs ahead of the device, and how many iterations it hands over at once.

Both follow what iterations were seen to take. Neither changes a bit of what is computed.
"""

import time
from collections import deque
from contextlib import nullcontext
from typing import Any

import jax

from telic.loop.ports import Agree, Meter

GROUP_SECONDS = 0.5
"""A dispatch is kept about this short, so that a signal or an error is never far.

A slow step gains by company too: XLA's CPU backend takes the memory of a dispatch from the system anew each time, which
is a quarter of the time of a step that needs 80 MB of it.
"""

_IN_FLIGHT = 3
"""Dispatches that may wait for the device before the host waits for the first of them: bounds memory."""

_LONG_SECONDS = 0.1
"""A dispatch that takes longer is followed by one at most, which is enough to keep the device busy."""

_STRETCH = 3
"""A window stays in one dispatch where that makes it this many times as long at most."""


class Pace:
    """What iterations take, measured where the host waits for a dispatch some way back.

    Attributes:
      seconds: Of one iteration in the steady state; None before it is known.
      agree: Makes the first measure the same in all processes, and it stays then; None measures on.

    Args:
      meter: Counts the time waited.
    """

    def __init__(self, meter: Meter | None = None):
        self.seconds: float | None = None
        self.agree: Agree | None = None
        self._meter = meter
        self._finished = 0.0
        self._in_flight: deque[tuple[Any, int, float]] = deque()

    def width(self, room: int, period: int) -> int:
        """Give how many iterations the next dispatch may run, of `room` at most; `period` of them are a window."""
        if self.seconds is None:
            return 1
        most = int(GROUP_SECONDS / max(self.seconds, 1e-9))
        if most < period <= _STRETCH * most:
            most = period
        most = min(room, most)
        return most - most % period if most > period else max(1, most)

    @property
    def ahead(self) -> int:
        """Dispatches that may not be done when `follow` returns, at most."""
        if self.seconds is None:
            return 0
        count = max((count for _, count, _ in self._in_flight), default=1)
        seconds = self.seconds * count
        if seconds < _LONG_SECONDS:
            return _IN_FLIGHT
        # Nothing waits behind a stretched window: a signal would wait for both.
        return 0 if count > 1 and seconds > 1.5 * GROUP_SECONDS else 1

    def started(self, ticket: Any) -> None:
        """Wait for the first dispatch of a program, which measures nothing."""
        self._wait(ticket)
        self._finished = time.perf_counter()

    def follow(self, ticket: Any, count: int, began: float) -> None:
        """Take note of a dispatch of `count` iterations that began at a moment, and wait for one some way back.

        The first is waited for, so that a slow step is known to be slow before it is grouped. The CPU backend runs some
        programs before it returns, so a dispatch begins before it is called.
        """
        self._in_flight.append((ticket, count, began))
        while len(self._in_flight) > self.ahead:
            self._measure(*self._in_flight.popleft())

    def _measure(self, ticket: Any, count: int, began: float) -> None:
        """Wait for a dispatch and learn from it; of one that was done already nobody knows when it was."""
        was_done = ticket.is_ready()
        self._wait(ticket)
        now = time.perf_counter()
        seconds = (now - (began if was_done else max(began, self._finished))) / count
        if not was_done:
            self._finished = now
        if self.seconds is None:
            self.seconds = seconds if self.agree is None else self.agree(seconds)
        elif self.agree is None:
            self.seconds = min(self.seconds, seconds) if was_done else 0.7 * self.seconds + 0.3 * seconds

    def _wait(self, ticket: Any) -> None:
        with nullcontext() if self._meter is None else self._meter.part("device"):
            jax.block_until_ready(ticket)
