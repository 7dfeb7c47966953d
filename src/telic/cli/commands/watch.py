"""``telic watch``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.asked import UsageError, existing_directory

_LONGEST = 86_400.0
"""Seconds."""


def command(
    run: Annotated[Path, tyro.conf.Positional],
    /,
    *,
    every: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 2.0,
    plain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Follow a run in the terminal until it ends: its newest metrics, its speed, its curves and what stands out.

    Piped, it writes one line for each new line of metrics instead. Ctrl-C ends the watching, not the run.

    Args:
      run: The run's directory; one that is to come is waited for.
      every: Seconds between looks.
      plain: Write lines even on a terminal.
    """
    if not 0 < every <= _LONGEST:
        raise UsageError(f"--every is a time in seconds, at most a day and more than 0, got {every}")
    if run.exists():
        existing_directory(run)
    watching = import_module("telic.cli.watching")
    watching.watch(run, every_seconds=every, plain=True if plain else None)
    return 0
