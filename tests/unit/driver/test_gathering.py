"""Passes over data that is not trained on run in few dispatches; how many iterations one takes follows the device."""

import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.driver import DriverOptions, Gathering, StepDriver
from telic.driver.pacing import Pace
from telic.placement import SingleDevice


def rows(*sizes: int) -> list[Any]:
    """Give batches of these sizes, each of other numbers."""
    random = np.random.default_rng(0)
    return [(random.normal(size=(n, 3)).astype(np.float32), random.integers(0, 4, n).astype(np.int32)) for n in sizes]


def expected(variables: Any, batches: list[Any]) -> float:
    """Give the mean loss of all rows, by NumPy in float64."""
    x, y = (np.concatenate(part) for part in zip(*batches, strict=True))
    kernel, bias = (np.asarray(variables["params"][n], np.float64) for n in ("kernel", "bias"))
    logits = x @ kernel + bias
    return float((np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(y)), y]).mean())


@pytest.mark.parametrize("sizes", [(8,) * 40, (8,) * 40 + (3,), (8, 3, 8, 3, 8, 8), (3, *(8,) * 9), (8,)])
def test_a_pass_counts_every_row_once_whatever_the_shapes(sizes: tuple[int, ...]) -> None:
    """Batches that wait for company and are forgotten, counted twice, or run as another shape."""
    model = nn.Dense(4)
    trainer = telic.Trainer(telic.supervised(model, "softmax_cross_entropy"), "sgd", key=0)
    data = rows(*sizes)
    variables = model.init(jax.random.key(0), data[0][0])
    for _ in range(2):
        assert trainer.evaluate(data, state=variables)["loss"] == pytest.approx(expected(variables, data), rel=1e-6)


def test_a_pass_is_a_few_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dispatch for each batch: a validation of a small model took ten times as long as one by hand."""
    counts: list[int] = []
    advance = StepDriver.advance

    def counted(self: StepDriver, batches: Any, **where: Any) -> None:
        counts.append(len(batches))
        advance(self, batches, **where)

    monkeypatch.setattr(StepDriver, "advance", counted)
    model = nn.Dense(4)
    trainer = telic.Trainer(telic.supervised(model, "softmax_cross_entropy"), "sgd", key=0)
    data = rows(*(8,) * 300)
    trainer.evaluate(data, state=model.init(jax.random.key(0), data[0][0]))
    assert sum(counts) == 300
    assert len(counts) < 30


def test_a_pass_that_ended_early_leaves_nothing_for_the_next() -> None:
    """Batches that waited when the data raised are counted in the next pass."""
    step = telic.train_step(nn.Dense(4), "softmax_cross_entropy", "sgd", key=0)
    data = rows(*(8,) * 12)
    evaluation = step.bind(data[0]).evaluation()
    state = evaluation.adopt(data[0], step.init(data[0]).variables)
    inner = StepDriver(evaluation, {}, SingleDevice(), DriverOptions(strict=False), carries=False)
    driver = Gathering(inner)
    driver.start(state, data[0])
    for i in range(7):
        driver.advance([data[i]], epoch=0, iteration=i)
    driver.restart(state)
    for i in range(3):
        driver.advance([data[i]], epoch=0, iteration=i)
    driver.compute("epoch")()
    assert int(inner.accumulators("index")) == 3


def test_passes_that_fail_go_on_to_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is lost with each failed dispatch: the fourth pass failed for want of it, and hid the cause."""
    trainer = telic.Trainer(telic.supervised(nn.Dense(4), "softmax_cross_entropy"), "sgd", key=0)
    data = rows(*(8,) * 3)
    step = trainer.train_step().bind(data[0])
    evaluation = step.evaluation()
    state = evaluation.adopt(data[0], step.init(data[0]).variables)
    driver = Gathering(StepDriver(evaluation, {}, SingleDevice(), DriverOptions(strict=False), carries=False))
    driver.start(state, data[0])

    def broken(*given: Any, **where: Any) -> None:
        raise RuntimeError("the cause")

    monkeypatch.setattr(StepDriver, "advance", broken)
    for _ in range(5):
        driver.restart(state)
        with pytest.raises(RuntimeError, match="the cause"):
            driver.advance([data[0]], epoch=0, iteration=0)


def test_iterations_of_one_dispatch_follow_the_device_and_not_the_host() -> None:
    """A dispatch that was done before anybody waited for it looked like one that took no time, so that the next ones
    grew until a signal had to wait for a minute."""

    def slow(total: Any, batch: Any) -> Any:
        wait = lambda x: (time.sleep(0.02), np.asarray(x))[1]
        late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
        return total + batch.sum() + late

    program = telic.Loop(slow, lambda batch: jnp.zeros(()))._program  # pyright: ignore[reportPrivateUsage]
    driver = StepDriver(program, {}, SingleDevice(), DriverOptions())
    batch = np.ones(3, np.float32)
    driver.start(program.init(batch), batch)
    for i in range(30):
        driver.advance([batch], epoch=0, iteration=i)
        if i % 2:
            jax.block_until_ready(driver.step_state)
    assert 1 < driver.width <= 50


@pytest.mark.parametrize(
    ("seconds", "room", "period", "width"),
    [
        (None, 128, 1, 1),
        (1e-4, 128, 1, 128),
        (0.16, 128, 1, 3),
        (0.16, 128, 8, 8),
        (0.16, 128, 5, 5),
        (0.08, 128, 8, 8),
        (0.3, 128, 8, 1),
        (1e-4, 128, 3, 126),
        (1e-4, 20, 8, 16),
        (1e-4, 5, 8, 5),
        (3.0, 128, 1, 1),
        (3.0, 128, 2, 1),
    ],
)
def test_windows_stay_whole_where_there_is_time(seconds: float | None, room: int, period: int, width: int) -> None:
    """A window that is cut in two pays for a second dispatch; a slow step must not be grouped for long."""
    pace = Pace()
    pace.seconds = seconds
    assert pace.width(room, period) == width


@pytest.mark.parametrize(
    ("seconds", "count", "ahead"),
    [(None, 1, 0), (1e-4, 128, 3), (0.16, 1, 1), (0.16, 3, 1), (0.16, 8, 0), (3.0, 1, 1)],
)
def test_little_waits_behind_a_long_dispatch(seconds: float | None, count: int, ahead: int) -> None:
    """A signal that comes in a stretched window must not wait for a second one; a single step hides the host's work."""
    pace = Pace()
    pace.seconds = 1e-9
    ticket = jnp.zeros(())
    pace.follow(ticket, count, time.perf_counter())
    pace.seconds = seconds
    assert pace.ahead == ahead
