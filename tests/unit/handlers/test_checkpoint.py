"""Checkpoints of the loop: which files are written, which stay, and what a failure leaves behind."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

import telic
from telic.errors import ContractError
from telic.handlers import best_checkpoint, last_checkpoint
from telic.handlers.checkpoint import INDEX
from tests.unit.handlers.scripted import run, scripted


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != INDEX)


def read(directory: Path, name: str) -> telic.LoopState:
    return telic.deserialize_state((directory / name).read_bytes())


def test_one_file_an_epoch(tmp_path: Path) -> None:
    """loop.md 4.1 and XS041, XS048: nothing saved where no metric is given, or names that are not the epoch's."""
    run(scripted().checkpoint(tmp_path, keep_last="all"), 3)
    assert files(tmp_path) == ["checkpoint_0_1", "checkpoint_1_1", "checkpoint_2_1"]


def test_the_two_newest_stay(tmp_path: Path) -> None:
    """A directory that fills the disk."""
    run(scripted().checkpoint(tmp_path), 5)
    assert files(tmp_path) == ["checkpoint_3_1", "checkpoint_4_1"]
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint_4_1"


def test_iterations_with_a_filter(tmp_path: Path) -> None:
    """loop.md 4.1: a filter that counts something else than the event it is attached to."""
    loop = scripted().checkpoint(
        tmp_path, event="iteration_completed", filter=telic.every(2, first=True, per_epoch=True), keep_last="all"
    )
    final = loop.run([np.ones(1, np.float32)] * 5, epochs=3)
    assert files(tmp_path) == sorted(f"checkpoint_{e}_{i}" for e in range(3) for i in (0, 2, 4))
    assert (final.epoch, final.iteration, final.event_counts["iteration_completed"]) == (3, 0, 15)


@pytest.mark.parametrize("pattern", ["ckp_{epoch}.ckpt", lambda state: f"ckp_{state.epoch}.ckpt"])
def test_file_pattern_and_directory(tmp_path: Path, pattern) -> None:
    """A pattern that is ignored, or a directory that is not made."""
    run(scripted().checkpoint(tmp_path / "a" / "b", file_pattern=pattern, keep_last="all"), 3)
    assert files(tmp_path / "a" / "b") == ["ckp_0.ckpt", "ckp_1.ckpt", "ckp_2.ckpt"]


def test_criteria_saves_on_improvement(tmp_path: Path) -> None:
    """B23: the seed saves once the metric has stopped improving, and never the best."""
    loop = scripted(loss=[15, 10, 5, 5, 5, 5]).checkpoint(tmp_path, criteria="loss", keep_best="all")
    run(loop, 6)
    assert files(tmp_path) == ["checkpoint_0_1", "checkpoint_1_1", "checkpoint_2_1"]


@pytest.mark.parametrize(
    ("series", "mode", "keep", "kept"),
    [
        ([5, 4, 3, 2, 1], "min", 2, [3, 4]),  # XS039: the first two stay instead of the best two
        ([3, 1, 2], "min", "all", [0, 1]),  # XS040
        ([1, 2, 3], "min", 1, [0]),  # XS045: the newest always taken for the best
        ([0, 0, 0, 0.1, 0.2], "max", 2, [3, 4]),  # XS047: the list trimmed at the wrong end after ties
        ([0.9, 0.9], "max", 2, [0]),  # XS049: of equal scores the oldest is the best
        ([1, 3, 2], "max", "all", [0, 1]),  # XS050: saves every time
        ([3, math.nan, 2], "min", 1, [2]),  # S12: after a NaN nothing is ever saved
        ([math.nan, 3, math.inf], "max", 1, [1]),
    ],
)
def test_the_best_stay(tmp_path: Path, series, mode, keep, kept) -> None:
    """The faults named beside each series."""
    run(scripted(score=series).checkpoint(tmp_path, criteria="score", mode=mode, keep_best=keep), len(series))
    assert files(tmp_path) == [f"checkpoint_{epoch}_1" for epoch in kept]
    assert best_checkpoint(tmp_path) == tmp_path / f"checkpoint_{kept[-1]}_1"


def test_best_and_last_are_separate_pools(tmp_path: Path) -> None:
    """S14: with a worsening metric the three best are kept and the last is gone."""
    loop = scripted(loss=[1, 2, 3, 4, 5]).checkpoint(tmp_path, criteria="loss", keep_last=3)
    run(loop, 5)
    assert files(tmp_path) == [f"checkpoint_{epoch}_1" for epoch in (0, 2, 3, 4)]
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoint_0_1"
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint_4_1"


def test_two_metrics_keep_their_own_best(tmp_path: Path) -> None:
    """XS046: one pool of retention for several metrics, in which one deletes the best of the other."""
    loop = scripted(loss=[1, 2, 3], accuracy=[0.1, 0.9, 0.2])
    loop.checkpoint(tmp_path, criteria="loss").checkpoint(tmp_path, criteria="accuracy", mode="max")
    run(loop, 3)
    assert files(tmp_path) == ["checkpoint_0_1", "checkpoint_1_1"]
    assert best_checkpoint(tmp_path, "checkpoint/accuracy") == tmp_path / "checkpoint_1_1"
    with pytest.raises(ValueError, match="say which with record="):
        best_checkpoint(tmp_path)


def test_a_restart_does_not_overwrite_a_better_one(tmp_path: Path) -> None:
    """XS054: the best begins at infinity in each run, and the first epoch of a restart replaces a better file."""
    run(scripted(loss=[0.1]).checkpoint(tmp_path, criteria="loss", file_pattern="best"), 1)
    before = (tmp_path / "best").read_bytes()
    final = run(scripted(loss=[0.2, 0.15]).checkpoint(tmp_path, criteria="loss", file_pattern="best"), 2)
    assert (tmp_path / "best").read_bytes() == before
    assert "checkpoint/loss" not in final.handler_state
    run(scripted(loss=[0.05]).checkpoint(tmp_path, criteria="loss", file_pattern="best"), 1)
    assert (tmp_path / "best").read_bytes() != before


def test_the_saved_cursor_is_the_next_epoch(tmp_path: Path) -> None:
    """B10 and S07: a checkpoint of an epoch's end that repeats the epoch, its iteration at N."""
    run(scripted(loss=[3, 2, 1]).checkpoint(tmp_path), 2)
    state = read(tmp_path, "checkpoint_1_1")
    assert (state.epoch, state.iteration, state.status) == (2, 0, None)
    assert state.history == {0: {"loss": 3.0}, 1: {"loss": 2.0}}
    final = run(scripted(loss=[3, 2, 1]).from_state(state), 3)
    assert (float(final.step_state), final.history[2]) == (3.0, {"loss": 1.0})


def test_is_saved_after_all_handlers_of_the_event(tmp_path: Path) -> None:
    """S35 and XS131: a checkpoint attached before early stopping holds a counter that is one epoch old."""
    loop = scripted(loss=[1, 2, 2, 2]).checkpoint(tmp_path, keep_last="all").early_stop("loss", patience=2)
    twin = scripted(loss=[1, 2, 2, 2]).early_stop("loss", patience=2)
    final = run(loop, 4)
    state = read(tmp_path, "checkpoint_1_1")
    assert state.handler_state["early_stop/loss"]["since_last_improvement"] == 1
    resumed = run(twin.from_state(state), 4)
    assert (resumed.history, resumed.epoch) == (final.history, final.epoch)


def test_a_record_is_still_what_was_saved_when_a_run_has_started(tmp_path: Path) -> None:
    """XS129 and XS032: counts that are set back by the handler's own start; a plateau whose patience begins again."""
    seen: list[int] = []
    run(scripted(loss=[1, 1, 1]).early_stop("loss", patience=3).checkpoint(tmp_path), 3)
    loop = scripted(loss=[1] * 9).early_stop("loss", patience=3).from_state(read(tmp_path, "checkpoint_2_1"))
    loop.handle_event("started", lambda s: seen.append(s.handler_state["early_stop/loss"]["since_last_improvement"]))
    assert (len(run(loop, 9).history), seen) == (4, [2])


def test_all_handlers_of_a_metric_agree_on_its_best_after_a_resume(tmp_path: Path) -> None:
    """XS130: early stopping's best stays stale after a resume while the checkpoint's moves."""

    def make(series) -> telic.Loop:
        return scripted(loss=series).early_stop("loss").checkpoint(tmp_path, criteria="loss")

    run(make([3, 2]), 2)
    final = run(make([3, 2, 1]).from_state(read(tmp_path, "checkpoint_1_1")), 3)
    assert final.handler_state["early_stop/loss"]["best"] == final.handler_state["checkpoint/loss"]["score"] == 1.0


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/x", "a/b", "..", ".", "", ".hidden", "a\\b", "C:x", "a\x00b", "a\nb", INDEX, 7]
)
def test_a_name_cannot_leave_its_directory(tmp_path: Path, name) -> None:
    """A pattern that writes elsewhere; one that is text is refused before anything runs."""
    if isinstance(name, str) and name:
        with pytest.raises(ValueError, match="one plain name in its directory"):
            scripted().checkpoint(tmp_path / "in", file_pattern=name)
    with pytest.raises((ValueError, TypeError), match="file name must be"):
        run(scripted().checkpoint(tmp_path / "in", file_pattern=lambda state: name), 1)
    assert files(tmp_path) == ["in"]
    assert files(tmp_path / "in") == []


@pytest.mark.parametrize("pattern", ["{epoch.__class__}", "{metrics}", "{0}", "{epok}"])
def test_unknown_fields_of_a_pattern_are_named(tmp_path: Path, pattern: str) -> None:
    """A format string that reaches into objects, or a misspelt field found after an epoch."""
    with pytest.raises(ValueError, match="Known: epoch, iteration, total_iterations, steps"):
        scripted().checkpoint(tmp_path, file_pattern=pattern)


def test_a_failing_serializer_leaves_the_old_file(tmp_path: Path) -> None:
    """XS043: the only good checkpoint destroyed by an exception, with a temporary file left."""
    run(scripted().checkpoint(tmp_path, file_pattern="state"), 1)
    before = (tmp_path / "state").read_bytes()
    loop = scripted().handle_event("epoch_completed", lambda s: s.handler_state.update(bad=object()))
    with pytest.raises(TypeError, match="handler_state/bad holds a object"):
        run(loop.checkpoint(tmp_path, file_pattern="state"), 1)
    assert (tmp_path / "state").read_bytes() == before
    assert files(tmp_path) == ["state"]


def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XS042: a full disk half-way through leaves a truncated file under the name of the good one."""
    run(scripted().checkpoint(tmp_path, file_pattern="state"), 1)
    before = (tmp_path / "state").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run(scripted().checkpoint(tmp_path, file_pattern="state"), 2)
    assert "earlier checkpoints are as they were" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert (tmp_path / "state").read_bytes() == before
    assert files(tmp_path) == ["state"]


def test_leftovers_of_killed_saves_are_cleared(tmp_path: Path) -> None:
    """XS044: temporary files of killed saves that fill the disk; foreign files that are deleted with them."""
    for i in range(3):
        (tmp_path / f".telic-checkpoint_{i}.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    run(scripted().checkpoint(tmp_path, keep_last=1), 2)
    assert files(tmp_path) == ["checkpoint_1_1", "notes.txt"]


def test_a_removal_that_was_cut_off_is_finished(tmp_path: Path) -> None:
    """Files between two writes of a killed run that stay for ever."""
    run(scripted().checkpoint(tmp_path, keep_last=1), 1)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / "old").write_bytes(b"")
    (tmp_path / INDEX).write_text(json.dumps(index | {"removing": ["old", "checkpoint_0_1"]}))
    scripted().checkpoint(tmp_path, keep_last=1).run([np.ones(1, np.float32)], epochs=0)
    assert files(tmp_path) == ["checkpoint_0_1"]


def test_an_unwritable_directory_is_told_before_training(tmp_path: Path) -> None:
    """A path that cannot be written, found after the first epoch."""
    (tmp_path / "file").write_text("")
    ran: list[int] = []
    loop = scripted().handle_event("epoch_started", lambda s: ran.append(s.epoch)).checkpoint(tmp_path / "file" / "x")
    with pytest.raises(OSError, match="file") as caught:
        run(loop, 1)
    assert "give a directory that can be written" in caught.value.__notes__[0]
    assert ran == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema": 2, "pools": {}, "removing": []}',
        '{"schema": 1, "pools": {}, "removing": ["../../x"]}',
        '{"schema": 1, "pools": {"a": {"metric": null, "mode": null, "last": ["/etc/x"], "best": []}}, "removing": []}',
        '{"schema": 1, "pools": {"a": {"metric": "m", "mode": "min", "last": [], '
        '"best": [{"name": "x", "score": NaN}]}}, "removing": []}',
        "[" * 100_000,
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, text: str) -> None:
    """An index from elsewhere whose names are deleted, or whose scores beat everything."""
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match="is no index of checkpoints"):
        run(scripted().checkpoint(tmp_path), 1)


def test_scores_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    """A run that saves by accuracy in a directory whose best is a loss."""
    run(scripted(loss=[1]).checkpoint(tmp_path, criteria="loss", name="best"), 1)
    with pytest.raises(ValueError, match="scores of 'loss'"):
        run(scripted(accuracy=[1]).checkpoint(tmp_path, criteria="accuracy", mode="max", name="best"), 1)


def test_an_absent_criterion_is_named(tmp_path: Path) -> None:
    """A misspelt criterion that saves nothing, found in the morning."""
    with pytest.raises(ContractError, match="Did you mean 'accuracy'"):
        run(scripted(accuracy=[1]).checkpoint(tmp_path, criteria="acuracy", mode="max"), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1"),
        ({"criteria": "loss", "keep_best": 0}, "keep_best must be at least 1"),
        ({"mode": "min"}, "give criteria as well"),
        ({"criteria": "f1"}, "mode='min' or mode='max'"),
    ],
)
def test_options_without_effect_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    """B24: a documented option that reaches nothing, or something else."""
    with pytest.raises(ValueError, match=message):
        scripted().checkpoint(tmp_path, **options)


def test_compressed_files_are_read_alike(tmp_path: Path) -> None:
    """An option that is read and not used."""
    loop = telic.Loop(lambda s, b: s, lambda b: np.zeros(10_000, np.float32))
    loop.checkpoint(tmp_path / "a").checkpoint(tmp_path / "b", compress=True).run([np.ones(1, np.float32)])
    sizes = [(tmp_path / d / "checkpoint_0_1").stat().st_size for d in "ab"]
    assert sizes[1] < 10_000 < 40_000 < sizes[0]
    assert (read(tmp_path / "b", "checkpoint_0_1").step_state == 0).all()
