"""``telic launch``."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.asked import UsageError


def command(
    program: Annotated[Path, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
) -> int:
    """Run a training program as several processes that hold one mesh together.

    With --processes they are started on this machine and talk on its loopback; without it this process is one of
    those that Slurm, Open MPI or Kubernetes started, and finds the others. Either way, when one of them fails, is
    killed or stops answering, all end, and it is said which and why. SIGTERM to one of them saves the same step in
    all. Exit code 0 when all did what they were asked.

    Args:
      program: The Python file that trains, with mesh=telic.MeshSpec(...) given to its trainer.
      arguments: The program's own arguments, after --.
      processes: Processes to start on this machine.
      devices: CPU devices to simulate in each of them, to try a mesh without accelerators.
    """
    if not program.is_file():
        raise UsageError(f"{program} is no file; give the program that trains, such as train.py")
    if processes is None:
        if devices is not None:
            raise UsageError("--devices are simulated in the processes that --processes starts: give that too")
        return import_module("telic.cli.rank").run_found(program, list(arguments))
    for name, value in (("--processes", processes), ("--devices", devices)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    launching = import_module("telic.cli.launching")
    return launching.launch(
        program,
        arguments,
        processes=processes,
        devices=devices,
        say=lambda line: print(f"telic: {line}", file=sys.stderr, flush=True),
    )
