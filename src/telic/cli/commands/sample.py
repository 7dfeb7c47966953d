"""``telic sample``."""

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
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Let a run's newest checkpoint show what it can do: what the objective's preview gives, as files.

    Pictures become .png, texts .txt and .json, all else .json; texts are printed too. Preview reads one batch of the
    recipe's data, that of validation where there is one.

    Args:
      recipe: What the run was trained from: a program or a file of settings.
      run: The run's directory; by default runs/ and the recipe's name.
      assign: Change a setting, such as objective.temperature=0.2; may be given several times.
      load: A program to run first, for the names it registers; may be given several times.
      out: Folder to write; by default samples in the run's directory.
    """
    recipes = import_module("telic.cli.recipes")
    made = recipes.asked(recipe, run, assign=assign, load=load, trained=True)
    with recipes.usage_errors():
        built = made.run()
        state, name = built.restore(made.folder)
        written = built.sample(state, made.folder / "samples" if out is None else out)
    answer(f"{made.folder}: checkpoint {name}")
    for path in written:
        answer(str(path))
        if path.suffix == ".txt":
            answer(path.read_text(encoding="utf-8").rstrip("\n"))
    return 0
