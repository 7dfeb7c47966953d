"""``telic doctor``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import UsageError


def command(
    *,
    folder: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs"),
) -> int:
    """Look at what training rests on here: versions, devices, a compiled step, the cache, disk, and known problems.

    Nothing is changed. Exit code 1 when something would keep a run from working.

    Args:
      folder: Where runs are written: its disk is looked at.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--folder is where runs go, and {folder} is a file; give a directory")
    checks = import_module("telic.cli.diagnosis").examine(folder)
    answer("\n".join(check.line for check in checks))
    bad = sum(check.level == "bad" for check in checks)
    warned = sum(check.level == "warning" for check in checks)
    warnings = "1 warning" if warned == 1 else f"{warned or 'no'} warnings"
    answer(f"\n{f'{bad} wrong' if bad else 'Nothing is wrong'}, {warnings}.")
    return 1 if bad else 0
