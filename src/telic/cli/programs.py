"""A user's training program as a process under rehearsal: started, waited for, and ended with us."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from telic.checkpoints import files
from telic.cli.asked import UsageError
from telic.compose.rehearsal import Rehearsal

SHOWN_LINES = 30
"""Lines of a failed program's output that are shown."""


class ProgramError(Exception):
    """The program did not do what a rehearsal needs; the text has the end of its output."""


@dataclass(frozen=True)
class Program:
    """A Python file and its arguments, started as its author does.

    Attributes:
      path: The file.
      arguments: What follows it.
    """

    path: Path
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise UsageError(f"{self.path} is no file; give the program that trains, such as train.py")

    def run(self, rehearsal: Rehearsal, log: Path) -> int:
        """Run it to its end and give how it ended: an exit code, or minus the number of a signal.

        Args:
          rehearsal: What is asked of it.
          log: Takes its output.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(self.path), *self.arguments],
                env={**os.environ, **rehearsal.environment(), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own, so that its data workers end with it.
                start_new_session=True,
            )
            try:
                return process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def failed(self, code: int, log: Path) -> ProgramError:
        """Give the error of a process that ended as it should not have."""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        text = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        return ProgramError("\n".join([f"{self.path} {how}; the end of what it said:", *(f"  | {x}" for x in text)]))


def scratch() -> Path:
    """Give a folder for a test of its own."""
    return Path(tempfile.mkdtemp(prefix="telic-"))


def remove(root: Path) -> None:
    """Remove such a folder."""
    shutil.rmtree(root)


def run_directories(root: Path) -> list[Path]:
    """Give the directories below a folder that hold checkpoints, or did hold a run's lock."""
    found: list[Path] = []
    for folder, names, inside in os.walk(root):
        path = Path(folder)
        if files.LOCK in inside or files.listing(path)[0]:
            found.append(path)
            names.clear()
        names.sort()
    return found


def newest(run: Path) -> Path | None:
    """Give the newest checkpoint of a run, or None."""
    orders, _ = files.listing(run)
    return run / files.name_of(orders[-1]) if orders else None


def shown(rehearsed: Path, root: Path) -> str:
    """Give the name that the program's author knows a directory or file of a rehearsal by."""
    real = Path("/") / rehearsed.relative_to(root / "files")
    with contextlib.suppress(ValueError):
        return str(real.relative_to(Path.cwd().resolve()))
    return str(real)
