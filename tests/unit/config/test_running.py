"""Runs: trained into a directory, gone on with, restored, evaluated and shown."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from telic.config import Recipe, Run, open_recipe
from telic.config.running import recorded
from telic.errors import CheckpointError, MismatchError, SettingsError
from telic.optimizers import hyperparams
from tests.unit.config.programs import LINE


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "train.py"
    path.write_text(LINE)
    return open_recipe(path)


@pytest.fixture
def train(recipe: Recipe, tmp_path: Path) -> Callable[..., list[str]]:
    def go(*assigned: str, resume: str = "auto") -> list[str]:
        said: list[str] = []
        settings = recipe.read(assigned)
        asked = recipe.asked(settings)
        recipe.run(settings).train(tmp_path / "run", settings=asked, resume=resume, say=said.append)  # type: ignore[arg-type]
        return said

    return go


def test_a_run_keeps_what_it_was_asked_and_says_what_changed(
    train: Callable[..., list[str]], recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run directory that does not know its settings, and a change nobody is told of."""
    assert train() == []
    assert recorded(tmp_path / "run") == recipe.asked(recipe.read())
    assert train("steps=8") == ["run: steps was 6, is 8 from here on"]
    assert "continuing run at 6 of 8 updates" in capsys.readouterr().out
    assert recorded(tmp_path / "run") == recipe.asked(recipe.read(["steps=8"]))
    assert train("steps=8") == []
    assert "already at 8 of 8 updates" in capsys.readouterr().out
    assert train(resume="never") == []
    assert recorded(tmp_path / "run") == recipe.asked(recipe.read())


def test_a_run_that_goes_on_ends_with_the_bits_of_one_that_was_never_stopped(
    train: Callable[..., list[str]], recipe: Recipe, tmp_path: Path
) -> None:
    """Catches a directory given to a run that changes what it computes."""
    whole = recipe.run(recipe.read(["steps=8"])).train()
    train("steps=3")
    train("steps=8")
    restored, name = recipe.run(recipe.read()).restore(tmp_path / "run")
    assert name.startswith("8")
    np.testing.assert_array_equal(restored.variables["params"]["w"], whole.variables["params"]["w"])
    np.testing.assert_array_equal(restored.averaged["params"]["w"], whole.averaged["params"]["w"])
    assert int(restored.updates) == 8


def test_a_changed_rate_reaches_the_optimizer(train: Callable[..., list[str]], recipe: Recipe, tmp_path: Path) -> None:
    """Catches a rate that is said to be another one, while the state goes on with the one it was begun with."""
    train("steps=3")
    before, _ = recipe.run(recipe.read()).restore(tmp_path / "run")
    assert train("steps=4", "learning_rate=0") == [
        "run: steps was 3, is 4 from here on",
        "run: learning_rate was 0.1, is 0.0 from here on",
    ]
    after, _ = recipe.run(recipe.read()).restore(tmp_path / "run")
    np.testing.assert_array_equal(after.variables["params"]["w"], before.variables["params"]["w"])
    assert int(after.updates) == 4
    # What a handler made of the rate stays while the settings say what they said.
    assert float(hyperparams(after.opt_state)["learning_rate"]) == 0


def test_a_run_is_evaluated_while_it_is_held_by_another(
    train: Callable[..., list[str]], recipe: Recipe, tmp_path: Path
) -> None:
    """Catches an evaluation that takes the lock of a running process, or another's weights."""
    from telic.checkpoints import files

    train()
    run = recipe.run(recipe.read())
    with files.locked(tmp_path / "run"):
        state, _ = run.restore(tmp_path / "run")
    scores = run.evaluate(state)
    assert set(scores) == {"loss", "size"}
    assert scores["loss"] < run.evaluate(run.trainer.place())["loss"]


def test_samples_are_what_the_preview_gives(train: Callable[..., list[str]], recipe: Recipe, tmp_path: Path) -> None:
    """Catches samples of other weights, and a run without validation data that can show nothing."""
    train()
    for assigned in ((), ("held_out=0",)):
        run = recipe.run(recipe.read(assigned))
        state, _ = run.restore(tmp_path / "run")
        (written,) = run.sample(state, tmp_path / "samples")
        size = float(np.sum(state.variables["params"]["w"] ** 2))
        assert json.loads(written.read_text())["size"] == pytest.approx(size)


def test_what_is_evaluated_afterwards_only_needs_no_cadence(recipe: Recipe) -> None:
    """Catches validation data, or averaged weights, that a run without eval_every refuses to train with."""
    run = recipe.run(recipe.read(["apart=true", "averaged=true", "held_out=0", "steps=3"]))
    state = run.train()
    averaged = run.evaluate(state)
    assert averaged["loss"] != recipe.run(recipe.read(["apart=true", "held_out=0"])).evaluate(state)["loss"]


def test_what_cannot_be_done_is_said(recipe: Recipe, tmp_path: Path) -> None:
    """Catches a traceback where a run, its data or its settings are missing."""
    run = recipe.run(recipe.read(["held_out=0"]))
    with pytest.raises(CheckpointError, match="there is no directory"):
        run.restore(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no checkpoint; train the run first"):
        run.restore(tmp_path / "empty")
    with pytest.raises(SettingsError, match="has no validation data"):
        run.evaluate(run.trainer.place())
    with pytest.raises(SettingsError, match="give one"):
        Run(trainer=run.trainer, data=run.data, steps=3, epochs=1)
    with pytest.raises(TypeError, match=r"takes a telic.Trainer, got str"):
        Run(trainer="adam", data=[])  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "[]", '{"settings": 3', "{}", "\x00"])
def test_a_damaged_record_is_named(content: str, tmp_path: Path) -> None:
    """Catches settings taken from half a file."""
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(SettingsError, match=r"run\.json does not say what the run was asked"):
        recorded(tmp_path)
    assert recorded(tmp_path / "none") is None


def test_another_model_is_refused_by_leaf(train: Callable[..., list[str]], tmp_path: Path) -> None:
    """Catches weights that are poured into another model."""
    train()
    other = tmp_path / "other.py"
    other.write_text(LINE.replace('{"w": jnp.zeros((2, 1))}', '{"w": jnp.zeros((2, 1)), "b": jnp.zeros(1)}'))
    recipe = open_recipe(other)
    with pytest.raises(MismatchError, match=r"params/b: float32\[1\] in this run, not in the checkpoint"):
        recipe.run(recipe.read()).restore(tmp_path / "run")
