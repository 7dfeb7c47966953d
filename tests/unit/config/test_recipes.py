"""Recipes: what a program or a file of settings says of a run."""

import os
import sys
from pathlib import Path

import pytest

from telic.config import Run, open_recipe
from telic.errors import SettingsError
from tests.unit.config.programs import LINE

TOML = """
steps = 4
log_every = 0
metrics = ["mean_absolute_error"]

[data]
name = "arrays"
file = "FILE"
batch = 4
held_out = 4

[model]
name = "mlp"
outputs = 1
widths = [3]

[objective]
name = "supervised"
loss = "mean_squared_error"

[optimizer]
name = "adam"
"""


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def written(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def described(folder: Path) -> Path:
    import numpy as np

    np.savez(folder / "mine.npz", inputs=np.ones((12, 2), np.float32), targets=np.ones((12, 1), np.float32))
    return written(folder, TOML.replace("FILE", str(folder / "mine.npz")), "run.toml")


def test_a_program_gives_its_run_with_the_settings_asked_for(tmp_path: Path) -> None:
    """Catches defaults that win over what was assigned, and a program run as __main__."""
    recipe = open_recipe(written(tmp_path, LINE + "\nassert __name__ != '__main__'\n"))
    settings = recipe.read(["learning_rate=0.5", "steps=9"], {"steps": 7, "seed": 3})
    assert (settings.learning_rate, settings.steps, settings.seed) == (0.5, 9, 3)
    run = recipe.run(settings)
    assert isinstance(run, Run)
    assert run.steps == 9
    assert recipe.asked(settings) == {
        **{"steps": 9, "learning_rate": 0.5, "seed": 3, "held_out": 8},
        **{"averaged": False, "apart": False},
    }
    assert recipe.name == "train"


def test_a_file_gives_its_run(tmp_path: Path) -> None:
    """Catches a setting of a file that reaches no argument."""
    recipe = open_recipe(described(tmp_path))
    settings = recipe.read(["optimizer.learning_rate=0.25", "accumulate=2", 'trainable=["params/**"]', "seed=5"])
    run = recipe.run(settings)
    assert (run.steps, run.metrics, run.log_every) == (4, ("mean_absolute_error",), 0)
    assert run.trainer.accumulate == 2
    assert recipe.read((), recipe.asked(settings)) == settings


def test_modules_beside_the_program_of_its_project_and_of_this_directory_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a program that runs with python and not with telic."""
    for folder in ("here", "project", "project/there"):
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, "VALUE = 1\n", f"module_{Path(folder).name}_of_test.py")
    written(tmp_path / "project", "", "pyproject.toml")
    monkeypatch.chdir(tmp_path / "here")
    text = "import module_here_of_test, module_project_of_test, module_there_of_test\n" + LINE
    assert open_recipe(written(tmp_path / "project" / "there", text)).settings is not None


def test_postponed_annotations_are_read(tmp_path: Path) -> None:
    """Catches a program whose annotations are texts."""
    recipe = open_recipe(written(tmp_path, "from __future__ import annotations\n" + LINE))
    assert recipe.read(["steps=2"]).steps == 2


def built(path: Path) -> Run:
    recipe = open_recipe(path)
    return recipe.run(recipe.read())


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("x = 1", "train.py", "defines no function build()"),
        ("def build(): return 3", "train.py", "must return a telic.config.Run, got int"),
        ("def build(a, b): ...", "train.py", "takes one parameter, its settings"),
        ("def build(a): ...", "train.py", "must be annotated with a frozen dataclass"),
        ("def build(a: int): ...", "train.py", "must be annotated with a frozen dataclass"),
        ("x = 1", "train.txt", "neither a Python program (.py) nor a file of settings (.toml)"),
        ("steps = 1", "run.toml", "must be given: data (the name of a registered data), objective"),
        ("program = 'train.py'", "run.toml", "unknown setting 'program'"),
        ("import = 'os'", "run.toml", "unknown setting 'import'"),
    ],
)
def test_what_is_no_recipe_says_what_to_write(text: str, name: str, message: str, tmp_path: Path) -> None:
    """Catches a traceback for a program without build, and a file that can make telic import something."""
    path = written(tmp_path, text, name)
    with pytest.raises(SettingsError) as caught:
        built(path)
    assert message in str(caught.value)


def test_a_missing_file_and_assignments_without_settings_are_errors(tmp_path: Path) -> None:
    """Catches a --set that nothing reads."""
    with pytest.raises(SettingsError, match="is no file; give a Python program"):
        open_recipe(tmp_path / "none.py")
    recipe = open_recipe(written(tmp_path, "def build(): ..."))
    with pytest.raises(SettingsError, match="has no settings to assign"):
        recipe.read(["steps=3"])


def test_a_program_registers_names_for_a_file(tmp_path: Path) -> None:
    """Catches a name of a user's own that no file can use."""
    code = """
import telic
from telic.config import register

@register("objective", "halved_of_test")
def halved(model, *, factor: float = 0.5):
    return telic.supervised(model, lambda targets, prediction: factor * ((prediction - targets) ** 2).mean(-1))
"""
    program = written(tmp_path, code, "mine.py")
    path = described(tmp_path)
    path.write_text(path.read_text().replace('"supervised"\nloss = "mean_squared_error"', '"halved_of_test"'))
    with pytest.raises(SettingsError, match="unknown objective 'halved_of_test'"):
        open_recipe(path).read()
    settings = open_recipe(path, [program]).read(["objective.factor=0.25"])
    assert settings.objective.settings.factor == 0.25


def test_a_file_whose_objective_needs_a_model_says_so(tmp_path: Path) -> None:
    """Catches a missing [model] that fails inside of the objective."""
    path = described(tmp_path)
    path.write_text(path.read_text().replace('[model]\nname = "mlp"\noutputs = 1\nwidths = [3]\n', ""))
    with pytest.raises(SettingsError, match=r"objective 'supervised' needs a model: add a table \[model\]"):
        open_recipe(path).read()


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        ("data.file=none.npz", "[data] arrays: data.file must be an .npz file, and there is none at none.npz"),
        ("data.batch=99", "[data] arrays: "),
        ("objective.loss=squared", "[objective] supervised: unknown loss 'squared'"),
        ("precision=float8", "unknown dtype"),
        ("accumulate=0", "accumulate must be at least 1, got 0"),
        ("epochs=2", "a run goes by steps=4 or by epochs=2: give one"),
    ],
)
def test_what_a_part_refuses_is_an_error_of_settings(assigned: str, message: str, tmp_path: Path) -> None:
    """Catches a traceback through telic for a number in a file: no code of the user's is in it."""
    recipe = open_recipe(described(tmp_path))
    settings = recipe.read([assigned])
    with pytest.raises(SettingsError) as caught:
        recipe.run(settings)
    assert message in str(caught.value)


def test_reading_a_file_of_settings_imports_nothing_it_names(tmp_path: Path) -> None:
    """Catches a file that is run: whatever it names, telic looks it up in its table only."""
    written(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')", "evil.py")
    path = described(tmp_path)
    for name in ("evil", "evil.py", "evil:build", str(tmp_path / "evil.py"), "os.system"):
        path.write_text(TOML.replace('"supervised"', f'"{name}"'))
        with pytest.raises(SettingsError, match="unknown objective"):
            open_recipe(path).read()
    assert not os.path.exists(tmp_path / "ran")
