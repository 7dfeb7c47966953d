"""Windows that do not divide the epoch: updates, epochs and plans that disagree in other trainers."""

import numpy as np
import pytest

import telic
from tests.faults.small import batches, trainer


def test_an_epoch_shorter_than_its_window() -> None:
    """XS003: accumulation that is silently off, and a counter that runs ahead of the updates."""
    flushed = trainer(accumulate=4).loop(log=0).run(batches(2), epochs=4)
    assert (flushed.steps, int(flushed.step_state.updates), int(flushed.step_state.attempts)) == (4, 4, 8)
    carried = trainer(accumulate=4).loop(log=0).run(batches(2), steps=2)
    assert (carried.steps, int(carried.step_state.updates), int(carried.step_state.attempts)) == (2, 2, 8)


def test_short_windows_count_as_updates() -> None:
    """XS005: 18 batches in windows of 7 are three updates an epoch, so the hundredth is in the epoch of index 33."""
    loop = trainer(accumulate=7).loop(log=0)
    borders: list[tuple[int, int]] = []
    loop.handle_event("epoch_completed", lambda s: borders.append((s.epoch, s.steps)))
    loop.handle_event("step_completed", lambda s: telic.HALT_LOOP, telic.once(100))
    final = loop.run(batches(18), epochs=50)
    assert (final.epoch, final.steps, int(final.step_state.updates)) == (33, 100, 100)
    assert borders == [(epoch, 3 * (epoch + 1)) for epoch in range(33)]


def test_what_is_planned_is_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    """XS015, XS076: a schedule over ceil(n / k) updates an epoch of which the loop makes fewer, so that the rate never
    reaches its end: 10 batches in windows of 4, three epochs, are 9 updates; as one stream, 7 and two batches over.
    """
    rate = telic.optimizers.linear_decay(0.1, steps=9)
    state = trainer(optimizer=telic.optimizers.sgd(rate), accumulate=4).fit(batches(10), epochs=3, log_every=1)
    assert capsys.readouterr().out.splitlines()[-1] == "updates 9 of 9 planned"
    assert int(state.updates) == 9
    np.testing.assert_allclose(rate(state.updates), 0.0, atol=1e-9)
    stream = trainer(accumulate=4).fit(batches(10), steps=7, log_every=0)
    assert (int(stream.updates), int(stream.attempts)) == (7, 28)
