"""``telic verify``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import existing_directory


def command(run: Annotated[Path, tyro.conf.Positional], /) -> int:
    """Read every checkpoint of a run and check every byte that counts. Exit code 1 when one is damaged.

    Args:
      run: The run's directory, as it was given to telic.Checkpoints.
    """
    report = import_module("telic.checkpoints").verify(existing_directory(run))
    answer(report)
    return 0 if report.is_fine else 1
