"""``telic verify-resume``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer, complain
from telic.cli.asked import UsageError, make_folder


def command(
    program: Annotated[Path, tyro.conf.Positional],
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    at: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N [N ...]")],
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Prove that a training program continues: run it once through, once with real kills, and compare every bit.

    The program is any file that trains with checkpoints=telic.Checkpoints(...), started as you start it; its own run
    directory is not touched. Exit code 0 when every array, the history and the metric logs are the same, 1 when not.

    Args:
      program: The Python file.
      arguments: Its own arguments, after --.
      at: Updates after which the process is killed with -9, each time before that update is saved.
      out: Where the two runs go, a new or empty folder that stays; by default one that is removed when all is the same.
    """
    if not at or min(at) < 1:
        raise UsageError("--at takes updates to kill after, from 1 on, such as --at 10 25")
    kill_test = import_module("telic.cli.kill_test")
    programs = import_module("telic.cli.programs")
    asked = programs.Program(program, arguments)
    if out is not None:
        make_folder(out)
    root = programs.scratch() if out is None else out.resolve()
    try:
        verdict = kill_test.verify_resume(asked, tuple(sorted(set(at))), root, answer)
    except programs.ProgramError as error:
        complain(error)
        complain(f"what it left is in {root}")
        return 1
    answer("\n".join(verdict.lines))
    if verdict.is_same:
        answer("The run continues bit for bit.")
        if out is None:
            programs.remove(root)
        return 0
    answer(f"The run does not continue bit for bit. Both runs are in {root}")
    return 1
