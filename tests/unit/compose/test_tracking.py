"""A run and its trackers: what they get, at which updates, and that a broken one changes nothing."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import telic
from telic.data import columns
from telic.trackers import JsonLines, TrackerWarning, read_scalars

rng = np.random.default_rng(0)
X = rng.normal(size=(64, 3)).astype(np.float32)
Y = (X @ rng.normal(size=(3, 1))).astype(np.float32)


def data() -> Any:
    return columns({"inputs": X, "targets": Y}, batch=8, held_out=16)


def trainer(**options: Any) -> telic.Trainer:
    return telic.Trainer(telic.supervised(nn.Dense(1), "mean_squared_error"), "adam", key=0, **options)


def test_training_and_validation_of_one_moment_share_one_update(tmp_path: Path) -> None:
    """Catches values logged by batches instead of updates, validation one step behind, and a last value lost
    (S34, XS124).
    """
    run = trainer(accumulate=2, tracker=JsonLines(tmp_path / "run"))
    final = run.fit(data(), epochs=3, log_every=2, eval_every="epoch", metrics=["mean_absolute_error"])
    rows = read_scalars(tmp_path / "run" / "scalars.jsonl")
    # 6 batches, 3 updates an epoch: every second update, and each epoch's end.
    assert list(rows) == [2, 3, 4, 6, 8, 9]
    assert int(final.updates) == 9
    names = {"train/loss", "train/mean_absolute_error"}
    assert set(rows[2]) == names
    assert set(rows[9]) == names | {"validation/loss", "validation/mean_absolute_error"}
    assert rows[9]["validation/loss"] < rows[3]["validation/loss"]


def test_values_are_those_of_the_run_itself(tmp_path: Path) -> None:
    """Catches a tracker that is given the values of another moment than it is told."""
    loop = trainer().loop(log=0).track(JsonLines(tmp_path / "run"), interval=1).record(tmp_path / "r.jsonl", interval=1)
    final = loop.run(data(), epochs=2)
    rows = read_scalars(tmp_path / "run" / "scalars.jsonl")
    assert rows[6]["train/loss"] == pytest.approx(final.history[0]["loss"], rel=0, abs=0)
    assert rows[12]["train/loss"] == final.history[1]["loss"]


def test_configuration_is_plain_and_the_callers_is_added(tmp_path: Path) -> None:
    """Catches a run whose page does not say what it was."""
    trainer().loop(log=0).track(JsonLines(tmp_path), config={"note": "first", "lr": 1e-3}).run(data())
    import json

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["note"] == "first"
    assert config["objective"]
    assert set(config["versions"]) == {"telic", "jax", "flax", "optax"}


class Broken:
    """A tracker whose service is gone."""

    def start(self, config: Any) -> None:
        raise ConnectionError("refused")

    log = artifact = start

    def close(self) -> None:
        raise ConnectionError("refused")


def test_broken_tracker_changes_no_bit_and_hides_no_other(tmp_path: Path) -> None:
    """Catches an outage that ends training, changes it, or keeps another tracker from its values."""
    plain = trainer().fit(data(), epochs=2, log_every=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tracked = trainer(tracker=[Broken(), JsonLines(tmp_path)]).fit(data(), epochs=2, log_every=0)
    assert [w.category for w in caught] == [TrackerWarning, TrackerWarning]
    assert all(
        bool((a == b).all())
        for a, b in zip(jax.tree.leaves(plain.variables), jax.tree.leaves(tracked.variables), strict=True)
    )
    assert list(read_scalars(tmp_path / "scalars.jsonl")) == [6, 12]


def test_second_run_of_one_trainer_is_tracked_too(tmp_path: Path) -> None:
    """Catches a tracker that is closed for ever after the first run."""
    run = trainer(tracker=JsonLines(tmp_path))
    state = run.fit(data(), epochs=1, log_every=0)
    run.fit(data(), epochs=1, log_every=0, state=state)
    assert len((tmp_path / "scalars.jsonl").read_text().splitlines()) >= 2


def test_run_that_raises_closes_its_tracker(tmp_path: Path) -> None:
    """Catches a thread and an open file left behind by an error."""
    kept = JsonLines(tmp_path)

    def fail(state: Any) -> None:
        raise RuntimeError("mine")

    loop = trainer().loop(log=0).track(kept).handle_event("epoch_completed", fail)
    with pytest.raises(RuntimeError, match="mine"):
        loop.run(data())
    assert kept._file is None


@pytest.mark.parametrize("given", ["runs/a", JsonLines])
def test_no_tracker_is_refused_at_once(given: Any) -> None:
    """Catches a mistake noticed only when the run starts."""
    with pytest.raises(TypeError, match="a tracker has"):
        trainer(tracker=given)


class _Pictured(telic.Objective):
    """Shows one picture."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": np.zeros((3, 1), np.float32)}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        return telic.Mean.of((batch["inputs"] @ variables["params"]["w"] - batch["targets"]) ** 2)

    def preview(self, variables: Any, batch: Any, step: Any, *, scored: Any = None) -> Any:
        return telic.artifacts.ImageGrid(np.zeros((1, 2, 2, 1), np.float32))


@pytest.mark.parametrize("has_directory", [False, True])
def test_previews_reach_the_trackers(has_directory: bool, tmp_path: Path) -> None:
    """Catches pictures that only the run's own folder gets, and a run without a folder that shows none."""
    checkpoints = telic.Checkpoints(tmp_path / "run") if has_directory else None
    tracker = JsonLines(tmp_path / "tracked")
    made = telic.Trainer(_Pictured(), "adam", key=0, tracker=tracker, checkpoints=checkpoints)
    made.fit(data(), epochs=2, eval_every="epoch", log_every=0, preview=True)
    tracked = sorted(path.name for path in (tmp_path / "tracked" / "artifacts").iterdir())
    assert tracked == ["validation_image_grid_00000006.png", "validation_image_grid_00000012.png"]
    own = tmp_path / "run" / "previews"
    assert own.exists() == has_directory
    assert len(list(own.glob("*.png"))) == (2 if has_directory else 0)
