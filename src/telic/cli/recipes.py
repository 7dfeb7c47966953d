"""What the commands train, evaluate, sample and export share: a recipe, its settings, and the run's directory."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from telic.cli.asked import UsageError
from telic.config.recipes import Recipe, open_recipe
from telic.config.running import Run, recorded
from telic.config.settings import expected, fields
from telic.config.tables import as_toml
from telic.errors import SettingsError
from telic.reports.text import visible

RUNS = Path("runs")
"""Where run directories are, unless another is given."""


@dataclass(frozen=True)
class Asked:
    """A recipe with its settings, and where its run is.

    Attributes:
      recipe: The recipe.
      settings: Its settings, as the run has them.
      folder: The run's directory.
    """

    recipe: Recipe
    settings: Any
    folder: Path

    @property
    def table(self) -> dict[str, Any]:
        """The settings as a table."""
        return self.recipe.asked(self.settings)

    def run(self) -> Run:
        """Build the run."""
        return self.recipe.run(self.settings)


@contextmanager
def usage_errors() -> Generator[None]:
    """Turn what is wrong with settings into a message and exit code 2."""
    try:
        yield
    except SettingsError as error:
        raise UsageError(str(error)) from error


def asked(
    path: Path, run: Path | None, *, assign: Sequence[str] = (), load: Sequence[Path] = (), trained: bool = False
) -> Asked:
    """Read a recipe and its settings.

    Args:
      path: The program or file of settings.
      run: The run's directory; None takes ``runs/<name of the file>``.
      assign: ``path=value`` texts.
      load: Programs to run first.
      trained: The run is there already: its own settings hold, but for those assigned.
    Raises:
      UsageError: The recipe or a setting is none, or the run is missing.
    """
    with usage_errors():
        recipe = open_recipe(path, load)
        folder = RUNS / recipe.name if run is None else run
        if trained and not folder.is_dir():
            raise UsageError(f"there is no run in {folder}: train it with telic train {path}, or give its directory")
        before = _asked_then(recipe, folder) if trained else None
        return Asked(recipe, recipe.read(assign, before), folder)


def _asked_then(recipe: Recipe, folder: Path) -> Mapping[str, Any] | None:
    """Give what a run was asked, where it fits the recipe as it is now."""
    found = None if recipe.settings is None else recorded(folder)
    try:
        recipe.read((), found)
    except SettingsError as error:
        raise UsageError(
            f"the run in {folder} was asked something that {recipe.path} does not take now: {error} Train it on with "
            "telic train, or take the recipe it was trained from"
        ) from error
    return found


def shown(made: Asked) -> str:
    """Give the settings as a file would hold them, each with what it takes."""
    if made.recipe.settings is None:
        return f"{made.recipe.path} has no settings"
    lines = [f"# {made.recipe.path}: what --set takes", as_toml(made.table).rstrip(), ""]
    lines += [f"# {name}: {expected(hint)}" for name, hint in fields(made.recipe.settings).items()]
    return "\n".join(lines)


def numbers(values: Mapping[str, Any]) -> list[str]:
    """Give one line for each metric: a number, or the shape of what is larger."""
    named = {visible(name): value for name, value in values.items()}
    width = max(map(len, named), default=0)
    lines: list[str] = []
    for name, value in named.items():
        shape = getattr(value, "shape", ())
        lines.append(f"{name.ljust(width)}  {f'array {list(shape)}' if shape else f'{float(value):.6g}'}")
    return lines
