"""Leaves that no step can write: on the disk once, checked in every checkpoint, and never broken by retention."""

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.checkpoints import files, load_variables, verify
from telic.checkpoints.store import FROZEN

SIDE = 200
"""Rows and columns of the frozen array: 160 kB, too large to lie among the small leaves."""


def trainer(directory: Path, *, teacher: float = 1.0, keep: int = 2, **o: Any) -> telic.Trainer:
    model = (
        lambda key, x: {"w": jnp.full((1, 1), 0.1), "still": jnp.full((SIDE, SIDE), 0.5)},
        lambda params, x: x @ params["w"] * params["still"].mean(),
    )
    frozen = {"teacher": {"t": jnp.full((SIDE, SIDE), teacher)}}
    objective = telic.supervised(model, "mean_squared_error", frozen=frozen)
    places = telic.Checkpoints(directory, keep=keep, **o)
    return telic.Trainer(objective, "adamw", key=0, trainable="params/w", checkpoints=places)


def data() -> telic.data.Dataset:
    x = np.arange(12, dtype=np.float32)[:, None]
    return telic.data.columns({"inputs": x, "targets": 2 * x}, batch=2)


def fit(directory: Path, steps: int, every: int = 1, **o: Any) -> telic.TrainState:
    return trainer(directory, **o).fit(data(), steps=steps, checkpoint_every=every, log_every=0)


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir() if p.name[0].isdigit()}


def test_stored_once(tmp_path: Path) -> None:
    """Catches a frozen leaf written with every checkpoint, and one that is not written at all."""
    fit(tmp_path, 4, keep=4)
    inodes = [{p.stat().st_ino for p in (tmp_path / n / FROZEN).rglob("*") if p.is_file()} for n in names(tmp_path)]
    assert len(inodes) == 4
    assert all(one == inodes[0] for one in inodes)
    frozen = 2 * 4 * SIDE**2
    # Moments of what is trained and the rest are small: a second copy would show.
    assert frozen <= files.size(tmp_path) < 1.5 * frozen
    assert verify(tmp_path).is_fine


def test_retention_and_processes_keep_them(tmp_path: Path) -> None:
    """Catches files that go with the oldest checkpoint though newer ones need them, or are written anew by each run."""
    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "run", 3)
    first = {p.stat().st_ino for p in (tmp_path / "run" / "3" / FROZEN).rglob("*") if p.is_file()}
    state = fit(tmp_path / "run", 6)
    assert names(tmp_path / "run") == {"5", "6"}
    assert {p.stat().st_ino for p in (tmp_path / "run" / "6" / FROZEN).rglob("*") if p.is_file()} == first
    assert verify(tmp_path / "run").is_fine
    for a, b in zip(jax.tree.leaves(state.variables), jax.tree.leaves(whole.variables), strict=True):
        assert a.tobytes() == b.tobytes()
    # One checkpoint, copied elsewhere, is whole by itself.
    shutil.copytree(tmp_path / "run" / "6", tmp_path / "elsewhere" / "6")
    shutil.rmtree(tmp_path / "run")
    assert load_variables(tmp_path / "elsewhere" / "6")["teacher"]["t"].sum() == SIDE**2


def test_begins_anew(tmp_path: Path) -> None:
    """Catches a new beginning that links to what it set aside, or breaks it."""
    fit(tmp_path, 2)
    trainer(tmp_path, teacher=2.0).fit(data(), steps=2, log_every=0, resume="never")
    assert load_variables(tmp_path)["teacher"]["t"].sum() == 2 * SIDE**2
    assert load_variables(tmp_path / "earlier" / "1")["teacher"]["t"].sum() == SIDE**2
    assert verify(tmp_path / "earlier" / "1").is_fine


def test_a_handler_that_writes_one_is_saved(tmp_path: Path) -> None:
    """Catches a link to old values where somebody changed what no step can."""

    def double(state: telic.LoopState) -> telic.LoopState:
        step_state = state.step_state
        changed = {**step_state.variables, "teacher": {"t": step_state.variables["teacher"]["t"] * 2}}
        return state.replace(step_state=step_state.replace(variables=changed))

    loop = trainer(tmp_path, keep=5).loop(log=0, checkpoint_every=1)
    loop.handle_event("step_completed", double, telic.once(3))
    loop.run(data(), steps=4)
    sums = [float(load_variables(tmp_path / str(n))["teacher"]["t"].sum()) for n in (1, 2, 3, 4)]
    assert sums == [SIDE**2, SIDE**2, 2 * SIDE**2, 2 * SIDE**2]


def damage(checkpoint: Path) -> None:
    largest = max((p for p in (checkpoint / FROZEN).rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    with largest.open("r+b") as file:  # in place: all names of the file see it
        file.write(content)


def test_damage_is_seen_in_each_and_mended_by_the_next(tmp_path: Path) -> None:
    """Catches a frozen leaf that nobody checks any more once it is linked, and a run that goes on linking to it."""
    run = tmp_path / "run"
    loop = trainer(run, keep=9).loop(log=0, checkpoint_every=1)
    loop.handle_event("step_completed", lambda s: damage(run / "1"), telic.once(3))
    # The save of update 2 is over when that of update 3 begins; it may or may not have seen the damage.
    loop.run(data(), steps=5)
    report = verify(run)
    assert "1" in report.damaged
    assert "teacher" in report.damaged["1"] or "still" in report.damaged["1"]
    assert {"4", "5"} <= set(report.whole)


def test_without_hard_links_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file system without hard links on which no second checkpoint can be saved."""

    def refused(*arguments: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refused)
    fit(tmp_path, 3)
    assert verify(tmp_path).whole == ("2", "3")


def test_no_frozen_leaves_no_item(tmp_path: Path) -> None:
    """Catches an empty item, which costs each save a directory, where everything is trained."""
    model = (lambda key, x: {"w": jnp.full((SIDE, SIDE), 0.5)}, lambda params, x: x * params["w"].mean())
    objective = telic.supervised(model, "mean_squared_error")
    plain = telic.Trainer(objective, "sgd", key=0, checkpoints=telic.Checkpoints(tmp_path))
    plain.fit(data(), steps=1, log_every=0)
    assert not list(tmp_path.rglob(FROZEN))
    assert load_variables(tmp_path)["params"]["w"].shape == (SIDE, SIDE)
