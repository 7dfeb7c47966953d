"""What a run tells of rejected attempts: their count where metrics are read, and the batch that ended it."""

import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.driver import StepDriver
from telic.errors import NonFiniteError
from telic.train.state import TrainState

ROWS = 4


def dense(key: Any, inputs: Any) -> Any:
    del key
    return {"params": {"w": jnp.zeros(inputs.shape[-1])}}


def apply(variables: Any, inputs: Any) -> Any:
    return (inputs * 0.001) @ variables["params"]["w"]


def convolved(variables: Any, inputs: Any) -> Any:
    """Give the same through a convolution: such a step runs one batch at a time."""
    kernel = variables["params"]["w"][None, None, :]
    out = jax.lax.conv_general_dilated((inputs * 0.001)[:, None, :], kernel, (1,), "VALID")
    return out[:, 0, 0]


def batches(count: int, bad: Any = ()) -> list[Any]:
    """Give batches whose inputs hold their index, with NaN in the targets of some."""
    made = []
    for i in range(count):
        rows = np.arange(ROWS, dtype=np.float32)
        targets = np.full(ROWS, np.nan if i in bad else 1, np.float32)
        made.append({"inputs": np.stack([np.full(ROWS, i, np.float32), rows], 1), "targets": targets})
    return made


def trainer(forward: Any = apply, **options: Any) -> telic.Trainer:
    return telic.Trainer(telic.supervised((dense, forward), "mean_squared_error"), "sgd", key=0, **options)


@pytest.fixture(name="widths")
def _widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note how many batches each dispatch ran."""
    found: list[int] = []
    advance = StepDriver.advance

    def noted(self: StepDriver, batches: Any, **options: Any) -> None:
        found.append(len(batches))
        advance(self, batches, **options)

    monkeypatch.setattr(StepDriver, "advance", noted)
    return found


@pytest.mark.parametrize(
    ("options", "forward", "fuse"),
    [
        ({}, apply, True),
        ({}, apply, False),
        ({}, convolved, True),
        ({"accumulate": 3}, apply, True),
    ],
    ids=["fused", "single", "convolution", "windows"],
)
def test_the_batch_that_was_rejected_last_comes_with_the_error(
    options: Any, forward: Any, fuse: bool, widths: list[int]
) -> None:
    """The batch of the moment the host noticed, or the newest of a fused dispatch, is another one."""
    loop = trainer(forward, max_rejected=5, **options).loop(log=0, fuse=fuse)
    data = batches(300, bad=range(103, 300))
    with pytest.raises(NonFiniteError) as caught:
        loop.run(data)
    assert caught.value.attempt == 107
    batch: Any = caught.value.batch
    np.testing.assert_array_equal(batch["inputs"], data[107]["inputs"])
    assert type(batch["targets"]) is np.ndarray
    # The host noticed later, and that did not matter.
    assert sum(widths) > 108
    assert (max(widths) > 1) is (fuse and forward is apply)


def test_of_a_sliced_batch_it_is_the_slice() -> None:
    """The whole batch hides which rows were not finite; slices that are numbered as batches name another."""
    data = batches(12)
    data[7]["targets"][2:] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        trainer(microbatch=2, nonfinite="raise").loop(log=0).run(data)
    assert caught.value.attempt == 15
    batch: Any = caught.value.batch
    np.testing.assert_array_equal(batch["inputs"], data[7]["inputs"][2:])


def test_attempts_are_counted_from_where_the_state_stands() -> None:
    """A run that goes on from a state counts attempts over all of it; its batches began anew."""
    made = trainer(nonfinite="raise")
    state = made.fit(batches(5), log_every=0)
    data = batches(9, bad={6})
    with pytest.raises(NonFiniteError) as caught:
        made.fit(data, state=state, log_every=0)
    assert caught.value.attempt == 11
    batch: Any = caught.value.batch
    np.testing.assert_array_equal(batch["inputs"], data[6]["inputs"])


def test_a_handler_that_replaces_the_state_moves_the_count() -> None:
    """A state put back by a handler counts its attempts from elsewhere, and the batch was looked up where it is not."""

    def rewind(state: telic.LoopState) -> telic.LoopState:
        held: TrainState = state.step_state
        return state.replace(step_state=held.replace(attempts=held.attempts + 100))

    data = batches(9, bad={6})
    loop = trainer(nonfinite="raise").loop(log=0).handle_event("iteration_completed", rewind, telic.once(3))
    with pytest.raises(NonFiniteError) as caught:
        loop.run(data)
    assert caught.value.attempt == 106
    batch: Any = caught.value.batch
    np.testing.assert_array_equal(batch["inputs"], data[6]["inputs"])


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """XS108: a reference to every batch of the run: memory that grows with it."""
    loop = trainer().loop(log=0)
    drivers: list[Any] = []
    start = StepDriver.start

    def noted(self: StepDriver, *arguments: Any, **options: Any) -> None:
        drivers.append(self)
        start(self, *arguments, **options)

    monkeypatch.setattr(StepDriver, "start", noted)
    most: list[int] = []
    recent = lambda: drivers[0]._recent
    loop.handle_event("iteration_completed", lambda _: most.append(sum(len(run) for *_, run in recent()._groups)))
    loop.run(batches(200))
    assert 1 <= max(most) <= 40
    assert recent()._bytes == sum(len(run) * run.slab.row_bytes for *_, run in recent()._groups)
    monkeypatch.setattr("telic.driver.kept.KEPT_BYTES", 50)
    most.clear()
    drivers.clear()
    loop.run(batches(20))
    assert max(most) == 1


@pytest.mark.parametrize("place", ["checkpoints", "record"])
def test_a_run_with_a_directory_saves_the_batch_in_it(place: str, tmp_path: Path) -> None:
    """A batch that is only in memory is gone with the process; one that is pickled is not to be loaded."""
    data = batches(9, bad={4})
    for batch in data:
        batch["inputs"] = jnp.asarray(batch["inputs"], jnp.bfloat16)
    made = trainer(nonfinite="raise")
    folder = tmp_path / "run"
    if place == "checkpoints":
        loop = made.loop(log=0, checkpoints=telic.Checkpoints(folder))
    else:
        loop = made.loop(log=0).record(folder / "metrics.jsonl")
    with pytest.raises(NonFiniteError) as caught:
        loop.run(data)
    assert any("nonfinite_batch.npz" in note for note in caught.value.__notes__)
    with np.load(folder / "nonfinite_batch.npz", allow_pickle=False) as saved:
        assert sorted(saved) == ["attempt", "batch/inputs", "batch/targets"]
        assert saved["attempt"] == 4
        np.testing.assert_array_equal(saved["batch/inputs"], np.asarray(data[4]["inputs"], np.float32))
        assert np.isnan(saved["batch/targets"]).all()


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"nonfinite": "raise"}, "skip such attempts with nonfinite='reject'"),
        ({"max_rejected": 1}, "raise max_rejected"),
    ],
)
def test_the_advice_is_one_that_helps(options: dict[str, Any], advice: str) -> None:
    """Catches a run of nonfinite="raise" that is told to raise a budget it does not read."""
    with pytest.raises(NonFiniteError, match=f"clip the gradient, or {advice}"):
        trainer(**options).loop(log=0).run(batches(3, bad={1}))


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NonFiniteError):
        trainer(nonfinite="raise").loop(log=0).run(batches(3, bad={1}))
    assert not list(tmp_path.iterdir())


# -- counts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [True, False])
def test_rejections_are_a_metric_of_their_epoch(fuse: bool) -> None:
    """A metric that is updated by accepted attempts alone never counts one; a count of the run is not the epoch's."""
    data = batches(40, bad={3, 17})
    state = trainer().loop(log=0, fuse=fuse).run(lambda epoch: data if epoch else data[:10], epochs=2)
    assert [state.history[epoch]["rejected"] for epoch in (0, 1)] == [1, 2]
    assert state.metrics["rejected"] == 2
    assert np.isfinite(state.history[1]["loss"])


def test_a_commit_that_is_undone_is_counted() -> None:
    """The attempt was accepted, and yet its window was rejected."""

    def burst(targets: Any, prediction: Any) -> Any:
        return (prediction - targets) ** 2 * 1e30

    made = telic.Trainer(
        telic.supervised((dense, lambda v, x: x @ v["params"]["w"]), burst),
        telic.optimizers.sgd(1e30),
        key=0,
        accumulate=2,
        max_rejected=3,
    )
    state = made.loop(log=0).run(batches(4))
    assert state.history[0]["rejected"] == 2
    assert int(state.step_state.updates) == 0


def test_log_lines_show_rejections_once_there_are_some() -> None:
    """A line that shows "rejected: 0" everywhere is noise, one that never shows them hides them."""
    out = io.StringIO()
    loop = trainer().loop(log=0)
    loop.log(4, device=out)
    loop.run(batches(12, bad={6, 9}))
    shown = [re.findall(r"rejected: (\S+)", line) for line in out.getvalue().splitlines()]
    assert shown == [[], ["1"], ["2"]]


def test_a_fit_ends_with_its_updates(capsys: pytest.CaptureFixture[str]) -> None:
    """Windows that were planned, and what became of them: rejected attempts commit nothing."""
    made = trainer()
    state = made.fit(batches(1200, bad=range(300, 310)), steps=1200, log_every=400)
    assert capsys.readouterr().out.splitlines()[-1] == "updates 1,190 of 1,200 planned, 10 rejected"
    # Updates of an earlier run are not this one's.
    made.fit(batches(8, bad={3}), state=state, log_every=4)
    assert capsys.readouterr().out.splitlines()[-1] == "updates 7 of 8 planned, 1 rejected"
    made.fit(batches(8), log_every=4)
    assert capsys.readouterr().out.splitlines()[-1] == "updates 8 of 8 planned"
    made.fit(batches(8), log_every=0)
    assert capsys.readouterr().out == ""


def test_a_continued_fit_counts_the_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = batches(20, bad={2, 15})
    made = trainer(checkpoints=telic.Checkpoints(tmp_path / "run"))
    made.fit(data, steps=10, log_every=5)
    assert capsys.readouterr().out.splitlines()[-1] == "updates 9 of 10 planned, 1 rejected"
    made.fit(data, steps=20, log_every=5)
    assert capsys.readouterr().out.splitlines()[-1] == "updates 18 of 20 planned, 2 rejected"


def test_progress_shows_rejections(capsys: pytest.CaptureFixture[str]) -> None:
    loop = trainer().loop(log=0).progress(plain=True)
    loop.run(batches(12, bad={6}))
    lines = capsys.readouterr().out.splitlines()
    assert re.search(r"rejected 1$", lines[-2])
    assert lines[-1] == "updates 11 of 12 planned, 1 rejected"
    loop.run(batches(12))
    assert "rejected" not in capsys.readouterr().out
