"""The record of a run: what it says, that it costs no bits, and that nothing about it ends training."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import telic
from telic.compose import recording
from telic.compose.recording import command, git_state, seed_of
from telic.display import Recorder
from telic.driver import StepDriver
from telic.trackers import JsonLines


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x.reshape(x.shape[0], -1))))


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Dense()(nn.Conv(2, (3, 3))(x))


def batches(shape: tuple[int, ...], count: int = 12) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(4, *shape)).astype(np.float32), random.normal(size=(4, 1)).astype(np.float32))
        for _ in range(count)
    ]


def trainer(model: Any = None, rate: Any = 0.1, **options: Any) -> telic.Trainer:
    objective = telic.supervised(Dense() if model is None else model, "mean_squared_error")
    return telic.Trainer(objective, telic.optimizers.adam(rate), key=3, **options)


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def about(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())


@pytest.mark.parametrize(("model", "shape"), [(Dense(), (5,)), (Convolution(), (6, 6, 1))], ids=["fused", "straight"])
def test_a_recorded_run_has_the_bits_of_one_that_is_not(model: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Catches a record that makes the program compute something more, or group its iterations into other bits."""
    data = batches(shape)
    plain = trainer(model).loop(log=0).run(data, epochs=2).step_state
    loop = trainer(model).loop(log=0).record(tmp_path / "run", interval=3, gradient_norm=True)
    recorded = loop.run(data, epochs=2).step_state
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(recorded), strict=True):
        if jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_the_directory_says_what_was_run(tmp_path: Path) -> None:
    """Catches a record from which a run cannot be known again, and a rate or norm of another update."""
    schedule = telic.optimizers.cosine(0.1, steps=12)
    data = batches((5,))
    made = trainer(rate=schedule)
    loop = made.loop(log=0).record(tmp_path / "run", interval=4, config={"width": 8}, gradient_norm=True)
    norms: list[float] = []
    spy = made.loop(log=0)
    spy.probe(lambda o: o["gradient_norm"], telic.every(4), "norm", to=lambda value, state: norms.append(float(value)))
    spy.run(data)
    loop.run(data)
    run, found = about(tmp_path / "run"), lines(tmp_path / "run")
    assert run["status"] == "completed"
    assert run["settings"] == {"width": 8}
    assert run["configuration"]["seed"] == 3
    assert run["configuration"]["parameters"] == 5 * 8 + 8 + 8 + 1
    assert run["configuration"]["objective"] == "Supervised"
    assert {"python", "telic", "jax", "numpy"} <= set(run["versions"])
    assert run["device"]["count"] == jax.device_count()
    assert run["result"]["loss"] == found[-1]["metrics"]["loss"]
    assert [(line["kind"], line["total_iterations"]) for line in found] == [
        *(("interval", n) for n in (4, 8, 12)),
        ("epoch", 12),
    ]
    # The rate of the n-th update is the schedule's at n - 1.
    rates = [line["training"]["learning_rate"] for line in found[:3]]
    np.testing.assert_allclose(rates, [float(schedule(n - 1)) for n in (4, 8, 12)], rtol=1e-6)
    assert [line["training"]["gradient_norm"] for line in found[:3]] == norms
    assert "gradient_norm" not in found[-1]["training"]
    speed = found[1]["speed"]
    assert {"batches_per_second", "examples_per_second", "seconds", "memory"} <= set(speed)
    assert speed["memory"]["host_bytes"] > 0
    assert json.loads((tmp_path / "run" / "profile.json").read_text())["iterations"] == 12


def test_the_rate_has_all_that_multiplies_it(tmp_path: Path) -> None:
    """Catches a plateau that lowers the rate and a record that goes on showing the old one."""
    loop = trainer(rate=0.5).loop(log=0)
    loop.reduce_lr_on_plateau("loss", factor=0.1, patience=1, min_delta=1e9).record(tmp_path / "run", interval=100)
    loop.run(batches((5,)), epochs=3)
    rates = [line["training"]["learning_rate"] for line in lines(tmp_path / "run")]
    # The first epoch is the best so far; after the second the rate is lowered, so the third has a tenth.
    np.testing.assert_allclose(rates[0], 0.5, rtol=1e-6)
    assert rates[-1] < 0.1


def test_nothing_is_waited_for_at_a_line(tmp_path: Path) -> None:
    """Catches a value of the device that is read when a line is noted instead of one interval later."""
    reads: list[str] = []

    class Value:
        def __float__(self) -> float:
            reads.append("norm")
            return 1.0

    class Metrics(dict[str, Any]):
        def later(self) -> Any:
            return lambda: reads.append("metrics") or {}

    state = telic.LoopState(probes={"norm": Value()})
    state.metrics = Metrics()  # type: ignore[assignment]
    recorder = Recorder(tmp_path / "m.jsonl", probe="norm")
    recorder.on_start(state)
    recorder.on_iteration(state)
    assert reads == []
    recorder.on_iteration(state)
    assert reads == ["metrics", "norm"]
    recorder.close()


def test_checkpoints_bring_a_record_that_goes_on(tmp_path: Path) -> None:
    """Catches a continued run that is recorded as a new one, or whose lines stand twice."""
    data = batches((5,))
    for epochs in (1, 3):
        trainer(checkpoints=telic.Checkpoints(tmp_path / "run")).fit(data, epochs=epochs, log_every=0)
    run, found = about(tmp_path / "run"), lines(tmp_path / "run")
    assert [start["iterations"] for start in run["starts"]] == [0, 12]
    assert [line["epoch"] for line in found if line["kind"] == "epoch"] == [0, 1, 2]
    assert run["status"] == "completed"
    trainer(checkpoints=telic.Checkpoints(tmp_path / "bare")).fit(data, log_every=0, record=False)
    assert not (tmp_path / "bare" / "run.json").exists()
    trainer().fit(data, log_every=0, record=tmp_path / "plain")
    assert about(tmp_path / "plain")["status"] == "completed"
    with pytest.raises(ValueError, match="there are none: give a directory"):
        trainer().fit(data, record=True)


@pytest.mark.parametrize(
    ("raised", "status"), [(ValueError("no\x1b[2J"), "failed"), (KeyboardInterrupt(), "interrupted")], ids=str
)
def test_a_run_that_ends_early_says_how(raised: BaseException, status: str, tmp_path: Path) -> None:
    """Catches a record that says "running" for ever."""

    def fail(state: Any) -> None:
        raise raised

    loop = trainer().loop(log=0).record(tmp_path / "run").handle_event("iteration_completed", fail, telic.once(3))
    with pytest.raises(type(raised)):
        loop.run(batches((5,)))
    run = about(tmp_path / "run")
    assert run["status"] == status
    assert ("ValueError: no" in run.get("error", "")) == (status == "failed")


def test_ctrl_c_between_a_step_and_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an interrupted run that ends with an error of its record or its tracker, which read metrics too late."""
    advance = StepDriver.advance
    calls: list[int] = []

    def interrupted(self: Any, *arguments: Any, **options: Any) -> None:
        advance(self, *arguments, **options)
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(StepDriver, "advance", interrupted)
    loop = trainer().loop(log=0, tracker=JsonLines(tmp_path / "tracked")).record(tmp_path / "run", interval=2)
    with pytest.raises(KeyboardInterrupt):
        loop.run(batches((5,)))
    assert about(tmp_path / "run")["status"] == "interrupted"


def test_recorded_once_more_is_recorded_once(tmp_path: Path) -> None:
    """Catches two recorders that write one file, where a trainer records by itself and its user asks for it too."""
    loop = trainer(checkpoints=telic.Checkpoints(tmp_path / "run")).loop(log=0)
    loop.record(tmp_path / "run", interval=6, config={"mine": 1})
    loop.run(batches((5,)))
    assert [line["total_iterations"] for line in lines(tmp_path / "run")] == [6, 12, 12]
    assert about(tmp_path / "run")["settings"] == {"mine": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a night's training lost to a line of a log."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "write_text", full)
    (tmp_path / "run").mkdir()
    for name in ("metrics.jsonl", "profile.json"):
        (tmp_path / "run" / name).symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        final = trainer().loop(log=0).record(tmp_path / "run", interval=2).run(batches((5,)))
    assert final.status == "completed"
    for name in ("metrics.jsonl", "run.json", "profile.json"):
        assert name in caplog.text


def test_wrong_asks_are_refused(tmp_path: Path) -> None:
    """Catches settings that are silently dropped, and a norm that is never there."""
    with pytest.raises(ValueError, match="give its folder"):
        trainer().loop().record(tmp_path / "m.jsonl", config={"a": 1})
    with pytest.raises(ValueError, match="needs a step made of an objective"):
        telic.Loop(lambda s, b: s, lambda b: 0.0).record(tmp_path, gradient_norm=True)


def test_a_secret_of_the_command_line_is_not_kept() -> None:
    """Catches a token in a file that people send around."""
    given = ["train.py", "--api-key", "hunter2", "--token=hunter2", "--rate", "0.1", "--PASSWORD", "hunter2", "x"]
    kept = command(given)
    assert "hunter2" not in " ".join(kept)
    assert kept == ["train.py", "--api-key", "...", "--token=...", "--rate", "0.1", "--PASSWORD", "...", "x"]


def test_seed_of_a_key() -> None:
    """Catches a seed that does not give the same run again."""
    assert seed_of(jax.random.key(7)) == 7
    assert seed_of(jax.random.PRNGKey(7)) == 7
    assert isinstance(seed_of(jax.random.fold_in(jax.random.key(7), 1)), list)


def test_code_outside_of_git_is_no_error(tmp_path: Path) -> None:
    """Catches a run that cannot start where there is no repository."""
    assert git_state(str(tmp_path / "nowhere")) is None
