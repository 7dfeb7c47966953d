"""Feeding: a thread of its own reads, copies and places batches ahead of their use, and leaves nothing behind."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.data import as_source
from telic.driver.feeding import Feeder
from telic.loop.ports import View
from telic.placement import SingleDevice


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No test may leave a thread that reads."""
    yield
    assert not readers()


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "telic-feed"]


def summing() -> telic.Loop:
    return telic.Loop(lambda total, batch: total + batch.mean(), lambda batch: 0.0)


def slowly(total: Any, batch: Any) -> Any:
    """Add a batch, after the device has been busy for a while."""
    wait = lambda x: (time.sleep(0.002), np.asarray(x))[1]
    late = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(0))
    return total + batch.mean() + late


# -- what is read ------------------------------------------------------------------------------------------------


def test_an_array_that_the_loader_refills_survives_a_slow_device() -> None:
    """Memory that is written again while a dispatch still reads it: every sum is of later batches then."""
    buffer = np.zeros((64, 512), np.float32)

    def refilled(epoch: int) -> Iterator[Any]:
        for i in range(60):
            buffer[:] = i + epoch
            yield buffer

    loop = telic.Loop(slowly, lambda batch: 0.0)
    assert float(loop.run(refilled, epochs=2).step_state) == sum(range(60)) + sum(range(1, 61))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_columns_written_many_at_a_time_are_those_one_at_a_time(shuffle: bool, named: bool) -> None:
    """Rows of another batch, a position that is one off, or an epoch that is read past its end."""
    x, y = np.arange(46 * 3, dtype=np.float32).reshape(46, 3), np.arange(46)
    data = telic.data.columns({"b": x, "a": y} if named else (x, y), batch=4, shuffle=shuffle, seed=3)
    one, many = as_source(data), as_source(data)
    for epoch in range(3):
        one.begin(epoch)
        expected = []
        while True:
            try:
                expected.append(one.next(View(None, epoch, 0)))
            except StopIteration:
                break
        feeder = Feeder(many, SingleDevice(), lambda _: 4, stacked=True, threaded=True)
        feeder.begin(epoch, continuous=False, back_to=None, keep=False, unused=False)
        seen = []
        while (run := feeder.next(View(None, epoch, 0), None)) is not None:
            while run is not None:
                head, run = run.split(1)
                seen.append((jax.tree.map(np.array, head[0]), head.position))
                head.release()
        feeder.close()
        assert len(seen) == len(expected) == 11
        for (batch, position), (other, place) in zip(seen, expected, strict=True):
            jax.tree.map(np.testing.assert_array_equal, batch, other)
            assert position == place


def test_a_batch_of_another_shape_ends_a_run_and_is_not_lost() -> None:
    shapes = [3, 3, 3, 2]
    state = (
        summing().metric(lambda x: x, "x", reads=lambda total: (total,)).run([np.ones(n, np.float32) for n in shapes])
    )
    assert float(state.step_state) == 4.0
    assert state.total_iterations == 4


def test_reading_ahead_is_bounded() -> None:
    """A thread that reads the whole data set into memory while the device is at its first batch."""
    read, used, most = [0], [0], [0]

    def counted(epoch: int) -> Iterator[Any]:
        for _ in range(400):
            read[0] += 1
            most[0] = max(most[0], read[0] - used[0])
            yield np.ones((256, 1024), np.float32)  # a mebibyte: four to a slab

    def note(state: telic.LoopState) -> None:
        used[0] = state.iteration + 1
        time.sleep(0.001)

    summing().handle_event("iteration_completed", note).run(counted, iterations=40)
    assert most[0] <= 4 * 5
    assert read[0] <= 40


def test_an_iterator_of_ones_own_is_read_no_further_than_it_is_used() -> None:
    """Batches of somebody else's iterator that were read ahead are lost to them."""
    source = iter([np.float32(i) for i in range(100)])
    loop = summing().handle_event("iteration_completed", lambda _: telic.HALT_LOOP, telic.once(7))
    assert loop.run(source).total_iterations == 7
    assert next(source) == 7


def test_no_more_is_read_than_the_run_can_use() -> None:
    """Batches past the last one, of data that may end there with an error."""

    def ending(epoch: int) -> Iterator[Any]:
        for i in range(5):
            yield np.float32(i)
        raise AssertionError("read past what was asked for")

    assert float(summing().run(ending, iterations=5).step_state) == 10
    assert float(summing().run(ending, steps=5).step_state) == 10


# -- how it ends -------------------------------------------------------------------------------------------------


def test_an_error_of_the_loader_comes_after_the_batches_before_it() -> None:
    """An error that overtakes the batches that were read before it, or one that is lost in its thread."""
    seen: list[int] = []

    def broken(epoch: int) -> Iterator[Any]:
        for i in range(5):
            yield np.float32(i)
        raise OSError("the disk is gone")

    loop = summing().handle_event("iteration_completed", lambda s: seen.append(s.iteration))
    with pytest.raises(OSError, match="the disk is gone") as caught:
        loop.run(broken)
    assert seen == [0, 1, 2, 3, 4]
    assert "while reading batch 5 of epoch 0" in caught.value.__notes__


@pytest.mark.parametrize("ending", ["halt", "error", "interrupt", "closed"])
def test_no_thread_is_left(ending: str) -> None:
    """A thread that goes on reading after its run is over."""
    batches = [np.float32(i) for i in range(500)]

    def end(state: telic.LoopState) -> Any:
        assert readers()
        if ending == "error":
            raise RuntimeError("a handler's")
        if ending == "interrupt":
            raise KeyboardInterrupt
        return telic.HALT_LOOP

    loop = summing()
    if ending == "closed":
        running = loop.stream(batches, epochs=3)
        next(running)
        assert readers()
        running.close()  # type: ignore[attr-defined]
        return
    loop.handle_event("iteration_completed", end, telic.once(200))
    if ending == "halt":
        assert loop.run(batches).total_iterations == 200
    else:
        with pytest.raises(RuntimeError if ending == "error" else KeyboardInterrupt):
            loop.run(batches)


def test_a_halted_epoch_gives_back_what_was_read_ahead() -> None:
    """The next epoch of a stream begins behind the last batch that was used, not behind the last that was read."""
    x = np.arange(400, dtype=np.float32)[:, None]
    data = telic.data.columns((x,), batch=1, shuffle=False)
    used: list[float] = []
    step = lambda state, batch: batch[0].sum()
    loop = telic.Loop(step, lambda batch: 0.0)
    loop.handle_event("iteration_completed", lambda s: used.append(float(s.step_state)))
    loop.handle_event("iteration_completed", lambda _: telic.HALT_EPOCH, telic.every(3, per_epoch=True))
    loop.run(data, epochs=4)
    assert used == [float(i) for i in range(12)]


def test_the_time_waited_for_data_is_known() -> None:
    """A run that waits for its data and says nothing of it."""

    def late(epoch: int) -> Iterator[Any]:
        for _ in range(4):
            time.sleep(0.02)
            yield np.float32(1)

    waited: list[float] = []
    summing().handle_event("iteration_completed", lambda s: waited.append(s.waited)).run(late)
    assert waited == sorted(waited)
    assert waited[-1] > 0


# -- no waits ----------------------------------------------------------------------------------------------------


def test_the_host_runs_ahead_of_the_device() -> None:
    """A loop that waits for each step: a handler then never sees a state that is not there yet."""

    def step(weights: Any, batch: Any) -> Any:
        for _ in range(4):
            weights = jnp.tanh(weights @ weights) + batch
        return weights

    waiting: list[bool] = []
    loop = telic.Loop(step, lambda batch: np.eye(500, dtype=np.float32))
    loop.handle_event("iteration_completed", lambda s: waiting.append(not s.step_state.is_ready()))
    loop.run([np.float32(0.001)] * 20)
    assert sum(waiting) >= 10


def test_what_no_metric_reads_is_not_computed() -> None:
    """Outputs as large as predictions that every step computes for nobody."""

    def forward(variables: Any, inputs: Any) -> Any:
        return inputs @ variables["params"]["w"]

    @telic.objective
    def objective(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
        output = forward(variables, inputs)
        loss = ((output.prediction - targets) ** 2).mean()
        return loss, output.replace(prediction=jnp.sort(output.prediction, axis=0))

    model = (lambda key, inputs: {"params": {"w": jnp.zeros((3, 1))}}, forward)
    data = [(np.ones((4, 3), np.float32), np.ones((4, 1), np.float32))] * 3
    from telic.driver import StepDriver

    texts: dict[bool, str] = {}
    for reads in (False, True):
        loop = telic.trainer(model, objective, "sgd", log=0)
        if reads:
            loop.metric(lambda x: x.max(), "top", reads=("prediction",))
        found: list[Any] = []
        start = StepDriver.start

        def noted(self: Any, *arguments: Any, found: Any = found, start: Any = start, **options: Any) -> None:
            found.append(self)
            start(self, *arguments, **options)

        StepDriver.start = noted  # type: ignore[method-assign]
        try:
            loop.run(data)
        finally:
            StepDriver.start = start  # type: ignore[method-assign]
        texts[reads] = found[0].compiled.as_text()
    assert " sort(" not in texts[False]
    assert " sort(" in texts[True]
