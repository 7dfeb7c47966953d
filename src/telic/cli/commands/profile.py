"""``telic profile``."""

import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import UsageError


def command(
    program: Annotated[Path, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
) -> int:
    """Run a training program and show where the time of each of its runs went, and what a step costs.

    The program needs no change: each loop that it runs writes, when it ends, the split of its time (data, dispatch,
    device, handlers, checkpoints, the loop itself), examples per second, operations and memory. Ctrl-C ends it early
    and still shows the table. Given the directory of a run instead, shows how much of the run's wall time went into
    training, over all its starts.

    Args:
      program: A Python file, or the directory of a run that was profiled.
      arguments: Arguments of the program; after -- where they begin with a dash.
    """
    if program.is_dir():
        if arguments:
            raise UsageError(f"{program} is a directory, so there is no program to give {' '.join(arguments)} to")
        profiling, errors = import_module("telic.profiling"), import_module("telic.errors")
        try:
            answer(profiling.read_goodput(program))
        except errors.DataError as error:
            raise UsageError(str(error)) from error
        return 0
    if not program.is_file():
        raise UsageError(f"{program} is no file; give a Python program, such as examples/loss_by_name.py")
    before = sys.argv, sys.path[:]
    sys.argv = [str(program), *arguments]
    # As Python does for a program it runs.
    sys.path.insert(0, str(program.resolve().parent))
    try:
        with import_module("telic.compose.metering").profiled(answer):
            runpy.run_path(str(program), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    return 0
