"""``telic report``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import UsageError, existing_directory


def command(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    *,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None,
) -> int:
    """Write one HTML page about one or several runs: curves, comparison, samples, speed, and what stands out in words.

    The page holds all it needs, so it can be sent, kept and opened without a network.

    Args:
      runs: Run directories.
      out: The page; by default report.html in the run's directory, of several runs report.html here.
    """
    if not runs:
        raise UsageError("give the directory of a run, such as telic report runs/demo")
    reports = import_module("telic.reports")
    read = []
    for directory in runs:
        run = reports.read_run(existing_directory(directory), str(directory) if len(runs) > 1 else None)
        if not run.record and not run.lines:
            raise UsageError(
                f"{directory} has no record of a run (run.json, metrics.jsonl): runs with checkpoints and "
                "loop.record('runs/name') write one"
            )
        read.append(run)
    place = out or (runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    if place.is_dir():
        raise UsageError(f"--out is the page itself, and {place} is a directory: give {place / 'report.html'}")
    text = reports.page(reports.fragment(read))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{place} cannot be written: {error.strerror or error}; give another place, --out FILE"
        ) from error
    answer(f"{place}  ({len(text.encode()) / 1e6:.1f} MB): open it in a browser")
    return 0
