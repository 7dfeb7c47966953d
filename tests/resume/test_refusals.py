"""What may be continued, what may not, and what is said about it; in this process, with a model of one weight."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.errors import BusyError, CheckpointError, DataError, Interrupted, MismatchError, Preempted

RECORDS = 12


def columns(seed: int = 0, batch: int = 2) -> telic.data.Dataset:
    x = np.arange(RECORDS, dtype=np.float32)[:, None]
    return telic.data.columns({"inputs": x, "targets": 2 * x}, batch=batch, seed=seed)


def trainer(directory: Path, *, optimizer: Any = "sgd", width: int = 1, accumulate: int = 1, **o: Any) -> telic.Trainer:
    model = (
        lambda key, x: {"w": jnp.full((1, width), 0.1)},
        lambda params, x: (x @ params["w"]).sum(axis=1, keepdims=True) * 1e-3,
    )
    return telic.Trainer(
        telic.supervised(model, "mean_squared_error"),
        optimizer,
        key=0,
        accumulate=accumulate,
        checkpoints=telic.Checkpoints(directory, **o),
    )


def weight(state: Any) -> np.ndarray[Any, Any]:
    return np.asarray(jax.tree.leaves(state.variables)[0])


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir() if p.name[0].isdigit()}


def test_saves_at_multiples_and_at_the_end(tmp_path: Path) -> None:
    """Catches a last state that is not saved because the total is no multiple (fault S36), and one saved twice."""
    trainer(tmp_path, keep=10).fit(columns(), steps=5, checkpoint_every=2, log_every=0)
    assert names(tmp_path) == {"2", "4", "5"}


def test_without_a_cadence_each_epoch_is_saved(tmp_path: Path) -> None:
    """Catches a run that saves nothing because nobody said when (fault XS041)."""
    trainer(tmp_path, keep=10).fit(columns(), epochs=3, log_every=0)
    assert names(tmp_path) == {"6", "12", "18"}


def test_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches totals read as "more" (B15): 3 then 5 is 5, and 5 again is nothing, with no data opened."""
    three = trainer(tmp_path / "run").fit(columns(), steps=3, log_every=0)
    five = trainer(tmp_path / "run").fit(columns(), steps=5, log_every=0)
    assert int(three.updates) == 3
    assert int(five.updates) == 5
    assert "continuing run at 3 of 5 updates" in capsys.readouterr().out
    straight = trainer(tmp_path / "straight").fit(columns(), steps=5, log_every=0)
    assert weight(five) == weight(straight)

    def untouched(partition: Any) -> Iterator[Any]:
        raise AssertionError("data was opened")

    data = telic.data.Dataset(train=untouched)
    capsys.readouterr()
    assert weight(trainer(tmp_path / "run").fit(data, steps=5, log_every=0)) == weight(five)
    assert "run: already at 5 of 5 updates" in capsys.readouterr().out


def test_zero_steps_saves_the_beginning(tmp_path: Path) -> None:
    """Catches a run of no steps that leaves nothing behind."""
    trainer(tmp_path).fit(columns(), steps=0, log_every=0)
    assert names(tmp_path) == {"0"}
    assert int(trainer(tmp_path).fit(columns(), steps=2, log_every=0).updates) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 3}, r"variables/params/w: float32\[1, 1\] in the checkpoint, float32\[1, 3\] in this run"),
        (
            {"optimizer": "adam"},
            r"\n  optimizer: [A-Za-z, ]+ in the checkpoint, [A-Za-z, ]*ScaleByAdamState[A-Za-z, ]* in",
        ),
        ({"accumulate": 2}, "accumulate: 1 in the checkpoint, 2 in this run"),
    ],
)
def test_another_run_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Catches another model, optimizer or window continued as if it were the same, or refused without a name."""
    trainer(tmp_path).fit(columns(), steps=3, log_every=0)
    with pytest.raises(MismatchError, match=message):
        trainer(tmp_path, **options).fit(columns(), steps=5, log_every=0)
    assert names(tmp_path) == {"3"}


def test_changed_options_are_said_and_a_changed_rate_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a rate changed in the program that the restored optimizer state takes back without a word."""

    def train(rate: float, steps: int) -> tuple[Any, str]:
        made = trainer(tmp_path / "run", optimizer=telic.optimizers.sgd(rate))
        capsys.readouterr()
        return made.fit(columns(), steps=steps, log_every=0), capsys.readouterr().out

    before, _ = train(0.1, 2)
    after, said = train(0.0, 3)
    assert "run: the optimizer goes on with learning_rate 0, not 0.1\n" in said
    assert weight(after) == weight(before)
    # What was said once is not said again, and a run that is over keeps the rate it ended with.
    assert "goes on with" not in train(0.0, 4)[1]
    over, said = train(0.5, 4)
    assert "goes on with" not in said
    assert float(telic.optimizers.hyperparams(over.opt_state)["learning_rate"]) == 0.0


def test_options_of_the_step_that_changed_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that goes on under other rules than it was begun with, and says nothing."""
    trainer(tmp_path / "run").fit(columns(), steps=2, log_every=0)
    other = trainer(tmp_path / "run")
    other.nonfinite, other.max_rejected = "raise", 7
    other.fit(columns(), steps=3, log_every=0)
    said = capsys.readouterr().out
    assert "run: nonfinite was reject, is raise from here on\n" in said
    assert "run: max_rejected was 20, is 7 from here on\n" in said
    assert "precision" not in said


def test_the_window_may_change_between_epochs(tmp_path: Path) -> None:
    """Catches a window's empty sums taken for a part of the model."""
    trainer(tmp_path).fit(columns(), epochs=1, log_every=0)
    state = trainer(tmp_path, accumulate=2).fit(columns(), epochs=2, log_every=0)
    assert int(state.updates) == 6 + 3


@pytest.mark.parametrize("other", [{"seed": 1}, {"batch": 3}])
def test_other_columns_are_refused(other: dict[str, int], tmp_path: Path) -> None:
    """Catches a run continued on other data, where part of it would come twice and part never."""
    trainer(tmp_path).fit(columns(), steps=3, log_every=0)
    with pytest.raises(DataError, match=next(iter(other))):
        trainer(tmp_path).fit(columns(**other), steps=5, log_every=0)


def test_other_batches_are_refused(tmp_path: Path) -> None:
    """Catches data without a fingerprint of its own exchanged in the middle of an epoch; it can be allowed."""
    x = np.ones((2, 1), np.float32)
    first, other = [(i * x, x) for i in range(4)], [(-i * x, x) for i in range(4)]

    def stop(state: telic.LoopState) -> None:
        if state.total_iterations == 2:
            raise RuntimeError("the end of this process")

    loop = trainer(tmp_path).loop(log=0, checkpoint_every=1).handle_event("iteration_started", stop)
    with pytest.raises(RuntimeError, match="end of this process"):
        loop.run(first, epochs=1)
    with pytest.raises(MismatchError, match="the next batch differs"):
        trainer(tmp_path).fit(other, epochs=1, log_every=0)
    trainer(tmp_path, check_data=False).fit(other, epochs=1, log_every=0)


def test_data_that_cannot_come_back_is_refused(tmp_path: Path) -> None:
    """Catches checkpoints of a position that no later process can reach: said before the first step (XS022)."""
    used = []

    def batches() -> Iterator[Any]:
        used.append(1)
        yield np.ones((2, 1), np.float32), np.ones((2, 1), np.float32)

    with pytest.raises(DataError, match="get_state and set_state"):
        trainer(tmp_path).fit(batches(), steps=1, checkpoint_every=1)
    assert used == []


def test_cadence_needs_a_place() -> None:
    """Catches checkpoint_every= accepted and ignored."""
    plain = telic.Trainer(telic.supervised((lambda k, x: {}, lambda p, x: x), "huber"), "sgd", key=0)
    with pytest.raises(ValueError, match=r"needs a place: give Trainer\(checkpoints="):
        plain.fit(columns(), steps=1, checkpoint_every=1)
    with pytest.raises(ValueError, match="resume='must' needs a place"):
        plain.fit(columns(), steps=1, resume="must")
    with pytest.raises(ValueError, match="checkpoint_every must be"):
        trainer(Path("never-made")).fit(columns(), steps=1, checkpoint_every=0)
    with pytest.raises(TypeError, match=r"telic\.Checkpoints"):
        telic.Trainer(plain.objective, "sgd", key=0, checkpoints="runs")  # type: ignore[arg-type]
    assert not Path("never-made").exists()


def test_must_and_never(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a typo in a directory that begins a run anew, and a new beginning that deletes or continues the old."""
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        trainer(tmp_path).fit(columns(), steps=1, resume="must", log_every=0)
    trainer(tmp_path).fit(columns(), steps=3, log_every=0)
    state = trainer(tmp_path).fit(columns(), steps=2, resume="never", log_every=0)
    assert int(state.updates) == 2
    assert names(tmp_path) == {"2"}
    assert (tmp_path / "earlier" / "1" / "3").is_dir()
    assert "begins anew" in capsys.readouterr().out


def test_damaged_newest_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a fallback nobody is told of, and one that ends with other bits."""
    whole = trainer(tmp_path).fit(columns(), steps=6, checkpoint_every=2, log_every=0)
    manifest = tmp_path / "6" / "manifest" / "metadata"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    again = trainer(tmp_path).fit(columns(), steps=6, log_every=0)
    said = capsys.readouterr().out
    assert "checkpoint 6 was not taken: its manifest is damaged" in said
    assert "at 4 of 6 updates" in said
    assert weight(again) == weight(whole)
    assert names(tmp_path) == {"4", "6", "6.1"}


def test_the_run_holds_its_directory(tmp_path: Path) -> None:
    """Catches two runs in one directory, and a lock that outlives its run."""

    def second(state: telic.LoopState) -> None:
        with pytest.raises(BusyError, match=f"process {os.getpid()}"):
            trainer(tmp_path).fit(columns(), steps=1, log_every=0)

    trainer(tmp_path).loop(log=0).handle_event("started", second).run(columns(), steps=1)
    trainer(tmp_path).fit(columns(), steps=2, log_every=0)


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(signal.SIGTERM, Preempted, 143), (signal.SIGINT, Interrupted, 130)]
)
def test_signals(number: signal.Signals, kind: type[BaseException], code: int, tmp_path: Path) -> None:
    """Catches a signal that loses the step it came in, fires no event, or leaves its handler behind (XS135)."""
    seen: list[str | None] = []
    before = signal.getsignal(number)
    loop = trainer(tmp_path).loop(log=0)
    loop.handle_event("iteration_completed", lambda s: os.kill(os.getpid(), number) if s.iteration == 2 else None)
    loop.handle_event("interrupted", lambda s: seen.append(s.status))
    with pytest.raises(kind) as caught:
        loop.run(columns(), epochs=1)
    assert caught.value.code == code  # type: ignore[attr-defined]
    assert caught.value.state.steps == 3  # type: ignore[attr-defined]
    assert seen == ["interrupted"]
    assert names(tmp_path) == {"3"}
    assert signal.getsignal(number) == before
    # In a library, Ctrl-C is a KeyboardInterrupt as ever.
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert int(trainer(tmp_path).fit(columns(), epochs=1, log_every=0).updates) == 6


def test_signal_at_the_last_step(tmp_path: Path) -> None:
    """Catches a signal that is swallowed because the run was ending anyway."""
    loop = trainer(tmp_path).loop(log=0)
    loop.handle_event("completed", lambda s: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted):
        loop.run(columns(), steps=2)
    assert names(tmp_path) == {"2"}


def test_signals_without_checkpoints_are_left_alone(tmp_path: Path) -> None:
    """Catches a library that takes over the signals of programs which asked for nothing."""
    seen: list[Any] = []
    plain = telic.Trainer(trainer(tmp_path).objective, "sgd", key=0)
    before = signal.getsignal(signal.SIGTERM)
    loop = plain.loop(log=0).handle_event("started", lambda s: seen.append(signal.getsignal(signal.SIGTERM)))
    loop.run(columns(), steps=1)
    assert seen == [before]


def test_a_thread_saves_too(tmp_path: Path) -> None:
    """Catches a run in a thread, where signals cannot be taken over, that fails for it."""
    thread = threading.Thread(target=lambda: trainer(tmp_path).fit(columns(), steps=2, log_every=0))
    thread.start()
    thread.join()
    assert names(tmp_path) == {"2"}


def test_last_save_failing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that ends "fine" while its last state is lost; the lock must be free again."""
    from telic.checkpoints import store

    def broken(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", broken)
        with pytest.raises(CheckpointError, match="the last checkpoint could not be saved"):
            trainer(tmp_path).fit(columns(), steps=2, log_every=0)
    assert names(tmp_path) == set()
    trainer(tmp_path).fit(columns(), steps=2, log_every=0)


def test_an_error_in_a_handler_waits_for_the_save(tmp_path: Path) -> None:
    """Catches a save under way that dies with the run, and a lock that is kept."""

    def fail(state: telic.LoopState) -> None:
        raise RuntimeError("a bug of the user's")

    loop = trainer(tmp_path).loop(log=0, checkpoint_every=1)
    loop.handle_event("step_completed", fail, telic.after(2))
    with pytest.raises(RuntimeError, match="a bug of the user's"):
        loop.run(columns(), steps=5)
    assert "2" in names(tmp_path)
    assert int(trainer(tmp_path).fit(columns(), steps=5, log_every=0).updates) == 5


def test_a_raw_loop_saves_too(tmp_path: Path) -> None:
    """Catches checkpoints that only a Trainer's state can have."""
    batches = [np.full(3, float(i)) for i in range(4)]

    def make() -> telic.Loop:
        return telic.Loop(lambda total, batch: total + batch.sum(), lambda batch: jnp.zeros(())).save(
            telic.Checkpoints(tmp_path), checkpoint_every=1
        )

    assert float(make().run(batches, epochs=1).step_state) == 18.0
    assert float(make().run(batches, epochs=2).step_state) == 36.0


def test_an_early_stop_stays_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a halted run that trains on when it is started again (B16)."""
    for _ in range(2):
        loop = trainer(tmp_path).loop(log=0)
        loop.handle_event("epoch_completed", lambda s: telic.HALT_LOOP if s.epoch == 1 else None)
        state = loop.run(columns(), epochs=5)
        assert state.steps == 12
        assert state.status == "halted"
    assert "already halted at" in capsys.readouterr().out


def test_weights_alone(tmp_path: Path) -> None:
    """Catches a warm start from the newest weights where the best were asked for, or from a damaged one; weights that
    cannot be read when the run has just ended (XS051, XS053).
    """
    from telic.checkpoints import load_variables

    options: dict[str, Any] = {"keep": 10, "keep_best": 1, "metric": "loss", "mode": "min"}
    state = trainer(tmp_path, **options).fit(columns(), epochs=3, log_every=0)
    (newest,) = jax.tree.leaves(load_variables(tmp_path))
    assert newest.tobytes() == weight(state).tobytes()
    (first,) = jax.tree.leaves(load_variables(tmp_path / "6"))
    # The loss falls from epoch to epoch, so the largest is the first.
    assert load_variables(tmp_path, best="max") == {"params": {"w": first}}
    assert load_variables(tmp_path, best="min", select="params/w") == {"params": {"w": newest}}
    with pytest.raises(ValueError, match="select"):
        load_variables(tmp_path, select="params/v")
    (tmp_path / "18" / "manifest" / "metadata").write_text("{}")
    assert jax.tree.leaves(load_variables(tmp_path))[0] != newest
