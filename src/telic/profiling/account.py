"""Where a run's time goes: each moment belongs to exactly one part, so that the parts add up to the wall time."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

STEP_PARTS: tuple[str, ...] = ("data", "dispatch", "device", "handlers", "checkpoint", "loop")
"""Parts of a step's time: waiting for a batch, giving work to the device, waiting for the device, handlers on the host,
saving, and the loop's own bookkeeping, which is whatever is left."""

OTHER_PARTS: tuple[str, ...] = ("start", "restore", "compile")
"""What a run does before its steps: reading shapes and building the state, reading a checkpoint, compiling."""

PARTS: tuple[str, ...] = (*STEP_PARTS, *OTHER_PARTS)


class Account:
    """Counts time by part. A part inside another is counted for itself and not for the outer one.

    Only the thread that made the account is counted: what others do meanwhile is no time of the run's own.

    Args:
      clock: Monotonic seconds.
      part: What the time belongs to until a part is opened.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, part: str = "start"):
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open = [part]
        self._since = clock()
        self._thread = threading.get_ident()

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count the time inside as a part's.

        Args:
          name: One of `PARTS`, with a detail after a slash where it has one: "handlers/log".
        Raises:
          ValueError: There is no such part.
        """
        if name.split("/")[0] not in PARTS:
            raise ValueError(f"{name!r} is no part of a run's time; the parts are {', '.join(PARTS)}")
        if threading.get_ident() != self._thread:
            yield
            return
        self._settle()
        depth = len(self._open)
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            # An error may have left a part inside open.
            del self._open[depth:]

    def rest(self, name: str) -> None:
        """Say what the time outside all parts belongs to from here on."""
        self._settle()
        self._open[0] = name

    def _settle(self) -> None:
        now = self._clock()
        part = self._open[-1]
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    @property
    def details(self) -> dict[str, float]:
        """Seconds so far by part, those with a detail by themselves."""
        self._settle()
        return dict(self._seconds)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds so far by part; their sum is the wall time since the account was made."""
        made: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for name, value in self.details.items():
            made[name.split("/")[0]] += value
        return made
