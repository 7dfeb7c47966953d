"""What a run leaves on disk: the record and the curves."""

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.display import Recorder, draw_curves
from telic.display.curves import _panels
from telic.display.recorder import as_json


def batches(count: int = 4) -> list[np.ndarray]:
    return [np.full(2, i, np.float32) for i in range(count)]


def loop() -> telic.Loop:
    """Sums batches; its metric is their mean."""
    made = telic.Loop(lambda total, batch: total + jnp.sum(batch), lambda batch: jnp.zeros(()))
    return made.metric(jnp.mean, "mean", reads=("batch",))


def records(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_intervals_and_epochs_are_recorded(tmp_path: Path) -> None:
    """Catches a line that carries the values of another moment."""
    path = tmp_path / "new" / "metrics.jsonl"
    loop().record(path, interval=2).run(batches(5), epochs=2)
    found = [(r["kind"], r["epoch"], r["iteration"], r["metrics"]["mean"]) for r in records(path)]
    epoch = [("interval", 2, 0.5), ("interval", 4, 1.5), ("epoch", 5, 2.0)]
    assert found == [(kind, e, i, mean) for e in (0, 1) for kind, i, mean in epoch]
    assert [r["total_iterations"] for r in records(path)] == [2, 4, 5, 7, 9, 10]


def test_epoch_record_holds_validation(tmp_path: Path) -> None:
    """Catches a record that is written before validation has run."""
    pair = (lambda key, x: {"w": jnp.zeros(())}, lambda params, x: params["w"] * x)
    data = [{"inputs": np.ones((2, 1), np.float32), "targets": np.ones((2, 1), np.float32)}]
    path = tmp_path / "m.jsonl"
    # Attached before validate: it must still come after it.
    telic.trainer(pair, "mse", "sgd", log=0).record(path).validate(data).run(data)
    assert set(records(path)[-1]["metrics"]) == {"loss", "validation_loss"}


def test_new_run_replaces_and_continued_run_keeps(tmp_path: Path) -> None:
    """Catches a record in which epochs of two runs stand behind each other, or the first epochs are lost."""
    path = tmp_path / "m.jsonl"
    made = loop().record(path)
    made.run(batches(), epochs=3)
    first = made.run(batches(), epochs=1)
    assert [r["epoch"] for r in records(path)] == [0]
    with path.open("a") as file:
        file.write('{"kind": "epoch", "epoch": 1, "total_it')  # what a killed run leaves
    loop().record(path).run(batches(), epochs=3, state=first)
    assert [(r["kind"], r["epoch"]) for r in records(path)] == [("epoch", 0), ("epoch", 1), ("epoch", 2)]


def test_an_epoch_that_is_closed_again_is_recorded_once(tmp_path: Path) -> None:
    """Catches a second line for an epoch that is saved after its last batch and killed after its end."""
    path = tmp_path / "m.jsonl"
    seen: list[telic.LoopState] = []
    made = loop().record(path)
    made.handle_event("iteration_completed", lambda state: seen.append(state.keep()))
    made.run(batches(), epochs=1)
    whole = records(path)
    loop().record(path).run(batches(), epochs=1, state=seen[-1])
    assert [(r["kind"], r["epoch"]) for r in records(path)] == [(r["kind"], r["epoch"]) for r in whole]


def test_record_is_strict_json() -> None:
    """Catches NaN, which json writes and no JSON reader takes, and arrays that end a run."""
    value = {"a": math.nan, "b": [math.inf, -math.inf], "c": np.arange(2), "d": np.float32(0.5), "e": jnp.ones(1)}
    assert as_json(value) == {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": [0, 1], "d": 0.5, "e": [1.0]}


def test_recorder_opens_nothing_before_the_run(tmp_path: Path) -> None:
    """Catches a constructor that touches the disk."""
    Recorder(tmp_path / "a" / "b.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_curves_are_drawn_at_each_epoch(tmp_path: Path) -> None:
    """Catches a picture that appears only when all is over, or half written."""
    path = tmp_path / "curves.png"
    sizes: list[int] = []
    made = loop().curves(path)
    made.handle_event("epoch_started", lambda state: sizes.append(path.stat().st_size if path.exists() else 0))
    made.run(batches(), epochs=2)
    assert sizes[0] == 0
    assert sizes[1] > 1000
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


def test_panels_join_training_and_validation() -> None:
    """Catches a panel per name: what is compared must be in one panel."""
    history = {
        0: {"loss": 2.0, "validation_loss": 3.0, "validation_hard_loss": 4.0, "matrix": np.eye(2)},
        1: {"loss": 1.0, "validation_loss": 2.5, "validation_hard_loss": 3.5, "matrix": np.eye(2)},
    }
    assert _panels(history) == {
        "loss": {
            "training": [(0, 2.0), (1, 1.0)],
            "validation": [(0, 3.0), (1, 2.5)],
            "validation: hard": [(0, 4.0), (1, 3.5)],
        }
    }


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    """Catches an empty picture in place of a message."""
    with pytest.raises(ValueError, match="no scalar metric to draw"):
        draw_curves({0: {"matrix": np.eye(2)}}, tmp_path / "x.png")
