"""``telic inspect``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import existing_directory


def command(checkpoint: Annotated[Path, tyro.conf.Positional], /) -> int:
    """Show what is in a checkpoint: arrays by name with shapes and dtypes, sizes, versions.

    Args:
      checkpoint: One checkpoint, or a run's directory, whose newest is taken.
    """
    answer(import_module("telic.checkpoints").inspect(existing_directory(checkpoint)))
    return 0
