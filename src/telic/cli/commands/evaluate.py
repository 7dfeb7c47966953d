"""``telic evaluate``."""

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer


def command(
    recipe: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")],
    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None,
    /,
    *,
    assign: Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="PATH=VALUE"), tyro.conf.UseAppendAction] = (),
    load: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE.py"), tyro.conf.UseAppendAction] = (),
    as_json: Annotated[bool, tyro.conf.arg(name="json"), tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Evaluate a run's newest checkpoint over the recipe's validation data, every example once.

    The settings are those the run was trained with, but for the ones changed here. The run is only read, and may be
    under way.

    Args:
      recipe: What the run was trained from: a program or a file of settings.
      run: The run's directory; by default runs/ and the recipe's name.
      assign: Change a setting, such as data.batch=500; may be given several times.
      load: A program to run first, for the names it registers; may be given several times.
      as_json: Write one JSON object instead of lines.
    """
    recipes = import_module("telic.cli.recipes")
    made = recipes.asked(recipe, run, assign=assign, load=load, trained=True)
    with recipes.usage_errors():
        built = made.run()
        state, name = built.restore(made.folder)
        scores = built.evaluate(state)
    if as_json:
        print(json.dumps(import_module("telic.jsonable").as_json(scores), allow_nan=False))
        return 0
    answer(f"{made.folder}: checkpoint {name}")
    answer("\n".join(recipes.numbers(scores)))
    return 0
