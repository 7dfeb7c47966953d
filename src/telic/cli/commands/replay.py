"""``telic replay``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer, complain
from telic.cli.asked import existing_directory


def command(
    program: Annotated[Path, tyro.conf.Positional],
    run: Annotated[Path, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    step: Annotated[int, tyro.conf.arg(metavar="N")],
) -> int:
    """Compute a checkpoint of a run again, from the one before it, and compare every bit; the run is only read.

    What differs tells of a fault of the hardware, of data that is not what it was, or of another program or version;
    the first array that differs is named. Exit code 0 when every bit is the same, 1 when not.

    Args:
      program: The Python file that made the run.
      run: The run's directory, as the program names it.
      arguments: The program's own arguments, after --.
      step: Updates of the checkpoint to compute again.
    """
    existing_directory(run)
    programs = import_module("telic.cli.programs")
    recompute = import_module("telic.cli.recompute")
    root = programs.scratch()
    try:
        asked = programs.Program(program, arguments)
        verdict = recompute.replay(asked, run, step, root, answer)
    except programs.ProgramError as error:
        complain(error)
        return 1
    finally:
        programs.remove(root)
    answer("\n".join(verdict.lines))
    return 0 if verdict.is_same else 1
