"""``telic export``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import existing_directory


def command(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")],
    /,
    *,
    recipe: Annotated[Path | None, tyro.conf.arg(metavar="RECIPE")] = None,
    load: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.py"), tyro.conf.UseAppendAction] = (),
    averaged: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="GLOB"), tyro.conf.UseAppendAction] = (),
) -> int:
    """Write the weights of a run's newest checkpoint for other programs: .safetensors, .npz, or Hugging Face files.

    Leaves are named as in the checkpoint, such as params/head/kernel. A file that is there already is not replaced.

    Args:
      run: The run's directory, or one checkpoint in it.
      to: The file, whose suffix says the format; or a folder for Hugging Face files, which need the recipe.
      recipe: What the run was trained from; its model says what config.json holds.
      load: A program to run first, for the names it registers; may be given several times.
      averaged: Write the averaged weights.
      only: Keep the leaves of these names, such as params/encoder/**; may be given several times.
    """
    existing_directory(run)
    exporting = import_module("telic.cli.exporting")
    answer(exporting.export(run, to, recipe=recipe, load=load, averaged=averaged, only=only))
    return 0
