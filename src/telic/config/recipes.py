"""Recipes: how a command learns what to run, from a Python program or from a file of settings."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast, get_type_hints

from telic.config.described import Described, described_run
from telic.config.registry import is_frozen
from telic.config.running import Run
from telic.config.settings import assignments, defaults, overlay, read, table_of
from telic.config.tables import read_table
from telic.errors import SettingsError

BUILD = "build"
"""The function of a program that gives its `Run`."""


@dataclass(frozen=True)
class Recipe:
    """What a program or a file of settings says of a run: which settings it has, and how it is built of them.

    Attributes:
      path: The program or file.
      settings: Frozen dataclass of its settings; None for a program without any.
      build: Makes the run of them.
      table: What the file gives; empty for a program.
    """

    path: Path
    settings: type | None
    build: Callable[..., Run]
    table: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The run's name: that of the file, without its suffix."""
        return self.path.stem

    def read(self, assigned: Sequence[str] = (), recorded: Mapping[str, Any] | None = None) -> Any:
        """Give the settings: the defaults, above them the file's, what a run recorded, and what was assigned.

        Args:
          assigned: ``path=value`` texts.
          recorded: What a run of this recipe was asked; None takes the recipe as it stands.
        Raises:
          SettingsError: A setting is unknown, missing or of another type.
        """
        tables = assignments(assigned)
        if self.settings is None:
            if tables:
                raise SettingsError(
                    f"{self.path} has no settings to assign: give its {BUILD} a parameter annotated with a frozen "
                    "dataclass"
                )
            return None
        found: dict[str, Any] = defaults(self.settings)
        for table in (self.table, recorded or {}, *tables):
            found = overlay(self.settings, found, table)
        return read(self.settings, found)

    def run(self, settings: Any) -> Run:
        """Build the run.

        Raises:
          SettingsError: The program's function gave something else.
        """
        made: Any = self.build() if self.settings is None else self.build(settings)
        if not isinstance(made, Run):
            raise SettingsError(
                f"{BUILD} of {self.path} must return a telic.config.Run, got {type(made).__name__}; write "
                "`return Run(trainer=telic.Trainer(...), data=data, steps=1000)`"
            )
        return made

    def asked(self, settings: Any) -> dict[str, Any]:
        """Give settings as the table that a run keeps."""
        return {} if settings is None else table_of(settings)


def open_recipe(path: str | Path, load: Sequence[str | Path] = ()) -> Recipe:
    """Read a recipe: a Python program with a function ``build``, or a TOML file of settings.

    A program is run, as Python runs it, but under another name than ``__main__``, and finds the modules of its project
    too: those in the nearest folder above it that has a ``pyproject.toml``. A TOML file runs nothing: it names what is
    registered, by telic or by the programs in `load`.

    Args:
      path: The program or file.
      load: Programs to run first, for what they register.
    Raises:
      SettingsError: It is no recipe; the text says what to write.
    """
    place = Path(path)
    for program in load:
        _module(_existing(Path(program)))
    if _existing(place).suffix == ".toml":
        return Recipe(place, Described, described_run, read_table(place))
    if place.suffix != ".py":
        raise SettingsError(f"{place} is neither a Python program (.py) nor a file of settings (.toml)")
    build: Any = getattr(_module(place), BUILD, None)
    if not callable(build):
        raise SettingsError(
            f"{place} defines no function {BUILD}(): write one that returns telic.config.Run(trainer=..., data=...), "
            f"or start the program itself with python {place}"
        )
    made = cast(Callable[..., Run], build)
    return Recipe(place, _settings_of(made, place), made, {})


def _settings_of(build: Callable[..., Any], path: Path) -> type | None:
    """Give the dataclass that a program's function takes."""
    parameters = list(inspect.signature(build).parameters.values())
    if not parameters:
        return None
    first, *others = parameters
    if any(p.default is inspect.Parameter.empty for p in others):
        raise SettingsError(f"{BUILD} of {path} takes one parameter, its settings; got {inspect.signature(build)}")
    kind = get_type_hints(build).get(first.name)
    if not is_frozen(kind):
        raise SettingsError(
            f"the parameter {first.name} of {BUILD} in {path} must be annotated with a frozen dataclass, got {kind!r}; "
            f"write @dataclass(frozen=True) class Settings: ..., and def {BUILD}({first.name}: Settings)"
        )
    return kind


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise SettingsError(
            f"{path} is no file; give a Python program such as train.py, or a file of settings such as run.toml"
        )
    return path


def _module(path: Path) -> ModuleType:
    """Run a program under a name of its own, and give its module."""
    real = path.resolve()
    name = f"telic_program_{real.stem}_{abs(hash(str(real))):x}"
    spec = importlib.util.spec_from_file_location(name, real)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{path} is no Python program")
    # Modules beside the program are found, as Python does, those of its project, and those of this directory, as
    # python -m does.
    project = [str(folder) for folder in real.parents if (folder / "pyproject.toml").is_file()]
    for folder in (str(Path.cwd()), *project[:1], str(real.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    # Annotations are looked up in the module by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
