"""Forks a process for each save that a test wants to see killed: what is slow to import is imported once.

A line on standard input names a run directory; the process for it stops itself before its save, so that the test can
attach to it, and the line that answers is its number. After the save has ended, the next line says how.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from telic.checkpoints import Checkpoints, store
from telic.checkpoints.directory import RunDirectory

FROZEN = frozenset({"state/frozen"})


def leaves(step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Give what the checkpoint of a step holds: a large array, a small one and one that no step can write."""
    draw = np.random.default_rng(step)
    return {
        "state/large": draw.normal(size=(40_000,)),
        "state/small": draw.normal(size=(3,)),
        "state/frozen": np.arange(40_000, dtype=np.float64),
    }


def save(root: Path, step: int) -> None:
    """Save a step, and delete the one before it."""
    directory = RunDirectory(Checkpoints(root, keep=1))
    directory.open()
    directory.find()
    directory.save(step, {"note": step}, leaves(step), None, frozen=FROZEN)
    directory.finish()
    directory.close()


def serve() -> None:
    store.prepare()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            save(Path(line.strip()), 2)
            os._exit(0)
        os.waitpid(pid, os.WUNTRACED)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
