"""``telic train``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import tyro

from telic.cli.answers import answer


def command(
    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None,
    /,
    *,
    assign: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="PATH=VALUE"), tyro.conf.UseAppendAction] = (),
    load: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.py"), tyro.conf.UseAppendAction] = (),
    resume: Literal["auto", "never", "must"] = "auto",
    show: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Train what a program or a file of settings describes, and keep the run in a directory.

    Start it again to go on: a run that was stopped continues from its newest checkpoint, one that is finished says so.
    What changed in the settings since then is said first.

    Args:
      recipe: A Python program with a function build() that gives a telic.config.Run, or a .toml file of settings.
      run: The run's directory; by default runs/ and the recipe's name.
      assign: Change a setting, such as optimizer.learning_rate=3e-4; may be given several times.
      load: A program to run first, for the names it registers; may be given several times.
      resume: auto goes on where there is a checkpoint, must insists on one, never begins anew and sets the old aside.
      show: Write the settings and what each takes, and train nothing.
    """
    recipes = import_module("telic.cli.recipes")
    made = recipes.asked(recipe, run, assign=assign, load=load)
    if show:
        answer(recipes.shown(made))
        return 0
    with recipes.usage_errors():
        built = made.run()
    answer(f"{made.recipe.path}: into {made.folder}")
    built.train(made.folder, settings=made.table, resume=resume, say=answer)
    return 0
