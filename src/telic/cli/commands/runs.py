"""``telic runs``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import UsageError


def command(folder: Annotated[Path, tyro.conf.Positional] = Path("runs"), /) -> int:
    """List the runs below a folder: whether each is running or how it ended, its step, size and last metrics.

    Args:
      folder: Where the run directories are.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory; give the folder that holds your run directories")
    lines = import_module("telic.cli.run_table").table(folder)
    answer("\n".join(lines) if lines else f"no runs in {folder}")
    return 0
