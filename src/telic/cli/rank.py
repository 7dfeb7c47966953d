"""One process of a run of several: it joins the others, runs the program, and does not leave them waiting for it.

``telic launch`` starts it: ``python -m telic.cli.rank``. A process that fails says so and is gone at once; unwound as
usual it would wait in JAX's shutdown for the others, which wait for it in the middle of a step.
"""

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from telic.cli.asked import UsageError

BEAT_SECONDS = 1.0
"""How often a process says that it is alive."""

HEARTBEAT_TIMEOUT_SECONDS = 15
"""Silence after which JAX takes a process for dead, and ends the others."""

SHUTDOWN_TIMEOUT_SECONDS = 15
"""How long the processes wait for each other at the end."""

ORPHAN_SECONDS = 60.0
"""How long a process may go on to save once its launcher is gone."""

END_PATIENCE_SECONDS = 3600.0
"""How long a process that is done waits for one that still writes; `telic launch` and JAX notice those that died."""


@dataclass(frozen=True)
class Rank:
    """The place of one process.

    Attributes:
      coordinator: Address and port of process 0; None lets JAX find it, the count and the index on the cluster.
      count: Number of processes.
      index: This one.
      beats: File descriptor that takes a byte now and then; None where nobody listens.
    """

    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    beats: int | None = None


def join(rank: Rank) -> tuple[int, int]:
    """Bring this process together with the others; give its index and their number.

    Raises:
      ValueError: There is no cluster here that JAX knows.
    """
    jax: Any = import_module("jax")
    jax.distributed.initialize(
        coordinator_address=rank.coordinator,
        num_processes=rank.count,
        process_id=rank.index,
        # The service asks nobody for a password: where the address is known it listens there and nowhere else.
        coordinator_bind_address=rank.coordinator,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_SECONDS,
    )
    return jax.process_index(), jax.process_count()


def run(program: Path, arguments: list[str], rank: Rank) -> int:
    """Run a program as one process of several and give its exit code; a failure ends this process here."""
    if rank.beats is not None:
        threading.Thread(target=_beat, args=(rank.beats,), name="telic-beat", daemon=True).start()
    index, count = join(rank)
    sys.argv = [str(program), *arguments]
    sys.path[0] = str(program.resolve().parent)
    code = 0
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            _end(index, count, f"it ended with {stop.code!r}", 1)
        code = stop.code or 0
        if code not in (0, 130, 143):
            _end(index, count, f"it ended with exit code {code}", code)
    except KeyboardInterrupt:
        _end(index, count, "it was stopped by Ctrl-C", 130)
    except BaseException:
        _end(index, count, "it failed", 1, traceback.format_exc())
    try:
        # Process 0 may still write, and the others would end its service.
        import_module("telic.placement").ManyProcesses(END_PATIENCE_SECONDS).exchange("the end of the program", code)
    except Exception:
        _end(index, count, "it could not end with the others", code or 1, traceback.format_exc())
    return code


def _end(index: int, count: int, what: str, code: int, trace: str = "") -> NoReturn:
    """Say what happened and be gone: no clean-up, which would wait for the others."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"{trace}telic: process {index} of {count}: {what}; the others are ended\n")
        sys.stderr.flush()
    os._exit(code)


def _beat(descriptor: int) -> None:
    """Say now and then that this process is alive; where nobody listens any more, save and end: nobody else ends it."""
    try:
        while True:
            os.write(descriptor, b".")
            time.sleep(BEAT_SECONDS)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("telic: the launcher of this process is gone, so it saves and ends\n")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS)
        os._exit(128 + signal.SIGTERM)


def run_found(program: Path, arguments: list[str]) -> int:
    """Run a program as one of the processes that a cluster started.

    Raises:
      UsageError: JAX finds no cluster here.
    """
    try:
        return run(program, arguments, Rank())
    except ValueError as error:
        raise UsageError(
            f"no cluster was found ({error}): start it with srun, mpirun or as pods of a Kubernetes job, or give "
            "--processes for several on this machine"
        ) from error


def main() -> int:
    """Run the program that the command line names, in the place it gives."""
    place, program, *arguments = sys.argv[1:]
    coordinator, count, index, beats = place.split(",")
    return run(Path(program), arguments, Rank(coordinator, int(count), int(index), int(beats)))


if __name__ == "__main__":
    sys.exit(main())
