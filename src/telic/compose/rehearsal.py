"""A rehearsal: somebody's training program, unchanged, run for a test of it. The one place that reads its variable.

``telic verify-resume`` and ``telic replay`` start a program as its author does, with one more environment variable. A
run with checkpoints then goes to a directory of the rehearsal instead of its own, and may be told to die after an
update, or to end at an iteration. Files that ``record``, ``curves`` and ``checkpoint`` write go there too. Without the
variable nothing here does anything.
"""

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from telic.checkpoints.config import Checkpoints
from telic.loop import events as ev
from telic.loop.attachments import Attachment
from telic.loop.filters import once
from telic.loop.ports import State
from telic.places import local

VARIABLE = "TELIC_REHEARSAL"
"""Environment variable with a rehearsal as JSON."""


@dataclass(frozen=True)
class End:
    """Where a run under rehearsal ends, as SIGTERM would end it: saved.

    Attributes:
      directory: The run's directory in the rehearsal.
      iterations: Iterations of the run in all.
      closed: After the epoch that ends there, instead of before its end.
    """

    directory: Path
    iterations: int
    closed: bool


@dataclass(frozen=True)
class Rehearsal:
    """What is asked of a program under rehearsal.

    Attributes:
      root: Where its files go.
      kill_after: Update after which the process kills itself with SIGKILL, before that update is saved; or None.
      end: Where one of its runs ends; or None.
    """

    root: Path
    kill_after: int | None = None
    end: End | None = None

    def place(self, path: str | os.PathLike[str]) -> Path:
        """Give where a file or directory of the program lies in the rehearsal."""
        real = Path(os.path.realpath(path))
        return self.root / "files" / real.relative_to(real.anchor)

    def environment(self) -> dict[str, str]:
        """Give the variable that asks a process for this."""
        end = self.end
        asked: dict[str, Any] = {"root": str(self.root), "kill_after": self.kill_after, "end": None}
        if end is not None:
            asked["end"] = {"directory": str(end.directory), "iterations": end.iterations, "closed": end.closed}
        return {VARIABLE: json.dumps(asked)}

    def checkpoints(self, config: Checkpoints) -> Checkpoints:
        """Give the checkpoints of a run in the rehearsal."""
        return replace(config, directory=self.place(config.directory))

    def attachments(self, directory: Path, finish: Callable[[], None]) -> tuple[Attachment, ...]:
        """Give the handlers of a run in the rehearsal: they act after all others.

        Args:
          directory: The run's directory in the rehearsal.
          finish: Waits for the save under way, so that what a killed run is continued from does not depend on how fast
            the disk was.
        """

        def die(state: State) -> None:
            del state
            finish()
            os.kill(os.getpid(), signal.SIGKILL)

        made: list[Attachment] = []
        if self.kill_after is not None:
            made.append(Attachment(ev.STEP_COMPLETED, die, once(self.kill_after), "rehearsal", late=True))
        if self.end is not None and self.end.directory == directory and self.end.iterations:
            # It does nothing but end a group of iterations there, so that the run is asked whether it ends.
            here = once(self.end.iterations)
            made.append(Attachment(ev.ITERATION_COMPLETED, _nothing, here, "rehearsal", late=True))
        return tuple(made)

    def ends(self, directory: Path, state: State, *, closed: bool) -> bool:
        """Say whether a run ends here, between two iterations or, with `closed`, between two epochs."""
        end = self.end
        if end is None or end.directory != directory:
            return False
        return closed == end.closed and state.total_iterations == end.iterations


def rehearsal() -> Rehearsal | None:
    """Give what this process is asked to rehearse, or None, as ever outside of a rehearsal.

    Raises:
      ValueError: The variable holds something else.
    """
    text = os.environ.get(VARIABLE)
    return None if text is None else _parsed(text)


def placed(path: str | os.PathLike[str]) -> Path:
    """Give where a file of the program goes: where it says, or in the rehearsal; also when it changes its directory.

    Raises:
      ValueError: It is an address.
    """
    asked = rehearsal()
    return local(path).absolute() if asked is None else asked.place(path)


@cache
def _parsed(text: str) -> Rehearsal:
    try:
        found: Any = json.loads(text)
        end = found["end"]
        kill_after = found["kill_after"]
        if set(found) != {"root", "kill_after", "end"} or type(kill_after) not in (int, type(None)):
            raise ValueError("other fields")
        return Rehearsal(Path(found["root"]), kill_after, None if end is None else _end(end))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"the environment variable {VARIABLE} is for telic verify-resume and telic replay, got {text!r} ({error}); "
            "unset it"
        ) from None


def _end(found: Mapping[str, Any]) -> End:
    iterations, closed = found["iterations"], found["closed"]
    if type(iterations) is not int or type(closed) is not bool:
        raise ValueError("an end is an iteration and whether the epoch is closed")
    return End(Path(found["directory"]), iterations, closed)


def _nothing(state: State) -> None:
    del state
