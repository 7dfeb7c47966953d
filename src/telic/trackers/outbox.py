"""The way out to a tracker: one thread, a bounded queue, and a run that neither waits nor fails because of it."""

import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from telic.trackers.base import Tracker

_ROOM = 1_000
"""Calls that may wait. At a hundred scalars each that is about a megabyte."""

_PATIENCE_SECONDS = 10.0
"""How long the end of a run waits for a tracker that is behind."""


class TrackerWarning(UserWarning):
    """A tracker failed or is behind; training goes on."""


class Outbox:
    """Hands calls to a tracker on a thread of its own.

    What comes while the queue is full is dropped and counted; the first failure gives one warning, the end of the run
    says how much the tracker did not get. The run's own record on disk is written elsewhere and misses nothing.

    Args:
      tracker: Where calls go.
      room: Calls that may wait.
      patience_seconds: How long `close` waits for those.
      warn: Shows one line; `warnings.warn` by default.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        room: int = _ROOM,
        patience_seconds: float = _PATIENCE_SECONDS,
        warn: Callable[[str], None] | None = None,
    ):
        self._tracker = tracker
        self._room = room
        self._patience_seconds = patience_seconds
        self._warn = warn or _warn
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(room)
        self._thread: threading.Thread | None = None
        self._failed: str | None = None
        self._num_failed = 0
        self._num_dropped = 0

    @property
    def name(self) -> str:
        """What the tracker is called in messages."""
        return type(self._tracker).__name__

    def start(self, config: Mapping[str, Any]) -> None:
        """Open the tracker on the thread; returns at once. Forgets the failures of an earlier run."""
        self.close()
        # A queue of its own for each run: a thread that hangs in the last one must not take from this one.
        self._waiting = queue.Queue(self._room)
        self._failed, self._num_failed, self._num_dropped = None, 0, 0
        self._thread = threading.Thread(
            target=self._work, args=(self._waiting,), name=f"telic-{self.name}", daemon=True
        )
        self._thread.start()
        self._put(lambda: self._tracker.start(config))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Hand scalars on, or count them as dropped."""
        self._put(lambda: self._tracker.log(scalars, step))

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Hand an artifact on, or count it as dropped. Its arrays must not be written to afterwards."""
        self._put(lambda: self._tracker.artifact(name, value, step))

    def close(self) -> None:
        """Let the tracker finish, within the patience; say what it did not get. Harmless when closed already."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        until = time.monotonic() + self._patience_seconds
        for last in (self._tracker.close, None):
            try:
                self._waiting.put(last, timeout=max(0.0, until - time.monotonic()))
            except queue.Full:
                break
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            behind = self._waiting.qsize()
            self._tell(
                f"tracker {self.name} did not finish within {self._patience_seconds:g} s ({behind} calls wait): the "
                "run ends without it"
            )
        elif self._num_failed or self._num_dropped:
            why = f"; the first failure was {self._failed}" if self._failed else ""
            self._tell(
                f"tracker {self.name} missed {self._num_failed + self._num_dropped} calls ({self._num_failed} failed, "
                f"{self._num_dropped} found no room){why}"
            )

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            if self._num_dropped == 0:
                self._tell(f"tracker {self.name} is {self._room} calls behind: further ones are dropped and counted")
            self._num_dropped += 1

    def _work(self, waiting: "queue.Queue[Callable[[], None] | None]") -> None:
        while (call := waiting.get()) is not None:
            try:
                call()
            except Exception as error:  # whatever a service raises, training goes on
                self._num_failed += 1
                if self._failed is None:
                    self._failed = f"{type(error).__name__}: {error}"
                    self._tell(f"tracker {self.name} failed ({self._failed}); training goes on, further failures count")

    def _tell(self, text: str) -> None:
        try:
            self._warn(text)
        except Exception:  # pragma: no cover - a warning turned into an error must not end the thread
            pass


def _warn(text: str) -> None:
    warnings.warn(text, TrackerWarning, stacklevel=4)
