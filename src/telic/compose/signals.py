"""Signals that end a run: what is saved before, and what all processes of it agree on."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from telic.errors import Preempted
from telic.loop.ports import Processes
from telic.loop.state import LoopState
from telic.types import Batch


class Signals:
    """SIGTERM and SIGINT while a run with checkpoints is active: the first asks for a save, the second ends at once."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def install(self) -> None:
        """Take the signals over, in the main thread; ignored ones stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or before is None:
                continue
            self._before[number] = before
            signal.signal(number, self._receive)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, before in self._before.items():
            # A handler that somebody installed since then stays.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, before)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if number == signal.SIGINT and _is_interactive():
                raise KeyboardInterrupt
            os._exit(128 + number)
        self.received = signal.Signals(number)
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            os.write(2, f"\n{self.received.name}: saving after this step; a second signal ends at once\n".encode())
        before = self._before.get(self.received)
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)


def _is_interactive() -> bool:
    """Say whether a person types the program as it runs: its process is theirs to keep."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


@dataclass(frozen=True)
class Unsaved:
    """The keeper of a run in several processes that has no checkpoints: SIGTERM to one of them ends it in all.

    JAX takes that signal over in a program of several processes and ends nothing by it.

    Attributes:
      processes: The processes.
    """

    processes: Processes

    def wants(self, state: LoopState, *, closed: bool) -> bool:
        """Say whether to end the run here: at the same place in every process."""
        del state, closed
        return self.processes.stops()

    def keep(self, state: LoopState, upcoming: Batch | None) -> None:
        """End the run.

        Raises:
          Preempted: Always.
        """
        del upcoming
        if self.processes.index == 0:
            print(f"SIGTERM: ended at {state.steps:,} updates; the run has no checkpoints, and nothing is saved")
        raise Preempted(state)
