"""Runs that go on where they stood: what was read, what is counted, what is shown and which buffers are used."""

import io
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

import telic
from telic.display import Progress
from telic.trackers import JsonLines, read_scalars
from tests.faults.small import NOISY, batches, bits, columns, reading, stopped, summing, trainer


def test_an_interrupted_run_finishes_its_epochs_and_no_more(tmp_path: Path) -> None:
    """S06: weights restored without the epoch's number: ten epochs again after an interruption at the fourth."""
    seen: list[int] = []

    def fail(state: telic.LoopState) -> None:
        if state.epoch == 4:
            raise RuntimeError("the end of this process")

    with pytest.raises(RuntimeError, match="end of this process"):
        summing(tmp_path).handle_event("epoch_started", fail).run([np.float32(1)] * 2, epochs=10)
    loop = summing(tmp_path).handle_event("epoch_started", lambda s: seen.append(s.epoch))
    assert float(loop.run([np.float32(1)] * 2, epochs=10).step_state) == 20.0
    assert seen == [4, 5, 6, 7, 8, 9]


def test_order_and_keys_go_on_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """S30, XS011: a run resumed between two epochs that draws the first one's keys, or reads its order, again."""
    unbroken: list[Any] = []
    whole = reading(trainer(model=NOISY).loop(log=0), unbroken).run(columns(), epochs=3).step_state
    read: list[Any] = []
    for epochs in (1, 2, 3):
        last = reading(trainer(tmp_path, NOISY).loop(log=0), read).run(columns(), epochs=epochs).step_state
    assert read == unbroken
    orders = {str(read[6 * epoch : 6 * epoch + 6]) for epoch in range(3)}
    assert len(orders) == 3
    assert bits(last) == bits(whole)


def test_every_record_once_though_the_run_is_restarted(tmp_path: Path) -> None:
    """XS010, XS012, XS014: batches to skip that are counted in updates, or in windows, or off by one, where k > 1."""
    unbroken: list[Any] = []
    reading(trainer(accumulate=3).loop(log=0), unbroken).run(columns(18), steps=6)
    read: list[Any] = []
    for steps in (2, 4, 6):
        final = reading(trainer(tmp_path, accumulate=3).loop(log=0), read).run(columns(18), steps=steps)
        # The first microbatch after the restart is number 3 · updates.
        assert len(read) == final.total_iterations == int(final.step_state.attempts) == 3 * steps
    assert read == unbroken
    for epoch in (read[:9], read[9:]):
        assert len(np.unique(epoch)) == 18


def test_counters_do_not_grow_with_restarts(tmp_path: Path) -> None:
    """XS021: a step that is added by each resume; XS016, XS026, XS027: an optimizer state that begins anew, or comes
    back in other containers, so that it does not fit a fresh one.
    """
    fresh = trainer(optimizer="adam", accumulate=2).fit(batches(3), epochs=3, log_every=0)
    for epochs in (1, 2, 3):
        final = trainer(tmp_path, optimizer="adam", accumulate=2).loop(log=0).run(batches(3), epochs=epochs)
        state = final.step_state
        assert (final.steps, int(state.updates), final.total_iterations) == (2 * epochs, 2 * epochs, 3 * epochs)
        assert int(state.opt_state.inner_state[0].count) == 2 * epochs
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    assert bits(state.opt_state) == bits(fresh.opt_state)


def test_the_place_in_an_epoch_goes_on(tmp_path: Path) -> None:
    """XS020: a batch's index and the step that differ by one after a resume in the middle of an epoch."""

    def noted(loop: telic.Loop, seen: list[Any]) -> telic.Loop:
        for event in ("iteration_started", "iteration_completed"):
            loop.handle_event(event, lambda s, e=event: seen.append((e, s.iteration, s.total_iterations, s.steps)))
        return loop

    unbroken: list[Any] = []
    noted(trainer().loop(log=0), unbroken).run(columns(20), epochs=1)
    seen: list[Any] = []
    stopped(noted(trainer(tmp_path).loop(log=0), seen), columns(20), 5, epochs=1)
    noted(trainer(tmp_path).loop(log=0), seen).run(columns(20), epochs=1)
    assert seen == unbroken


def test_a_run_stopped_every_fifty_batches(tmp_path: Path) -> None:
    """S33: an epoch that is counted though it was not finished: epochs of 100 batches, stopped at every fiftieth."""
    closed: list[tuple[int, int]] = []
    read: list[Any] = []

    def loop() -> telic.Loop:
        made = reading(trainer(tmp_path, every=1000).loop(log=0), read)
        return made.handle_event("epoch_completed", lambda s: closed.append((s.total_iterations, s.epoch)))

    reached = []
    for stop in (50, 100, 150):
        state = stopped(loop(), batches(100), stop, epochs=2)
        reached.append((state.total_iterations, len(closed)))
    final = loop().run(batches(100), epochs=2)
    # A signal in an epoch's last iteration comes before its end: the run that goes on begins with closing it.
    assert reached == [(50, 0), (100, 0), (150, 1)]
    assert closed == [(100, 0), (200, 1)]
    assert (final.total_iterations, final.epoch, list(final.history)) == (200, 2, [0, 1])
    assert [int(targets[0][0]) for targets in read] == [*range(100), *range(100)]


def test_a_warm_start_counts_from_its_state() -> None:
    """XS024: logs and schedules that begin at 0 though the state they start from has made updates."""
    warm = trainer().fit(columns(), steps=3, log_every=0)
    seen: list[tuple[int, int]] = []
    loop = trainer().loop(log=0)
    loop.handle_event("step_completed", lambda s: seen.append((s.steps, int(s.step_state.updates))))
    loop.run(columns(), steps=5, state=warm)
    assert seen == [(4, 4), (5, 5)]


# -- what is shown -------------------------------------------------------------------------------------------------


def rates(path: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["total_iterations"], line["training"]["learning_rate"]) for line in lines]


def test_the_rate_stays_on_its_curve(tmp_path: Path) -> None:
    """XS074: a schedule that is taken up by batches where it advanced by updates; XS019: a rate that is logged from an
    optimizer which is no longer the one in use.
    """

    def loop(directory: Path | None, log: Path) -> telic.Loop:
        optimizer = telic.optimizers.sgd(telic.optimizers.linear_decay(0.1, steps=12))
        made = trainer(directory, optimizer=optimizer, accumulate=2).loop(log=0)
        # The second epoch is no improvement of so much, so the rate is cut after it.
        return made.reduce_lr_on_plateau("loss", factor=0.5, patience=1, min_delta=1e9).record(log, interval=2)

    whole, log = tmp_path / "whole.jsonl", tmp_path / "log.jsonl"
    loop(None, whole).run(columns(8), epochs=3)
    for epochs in (2, 3):
        loop(tmp_path / "run", log).run(columns(8), epochs=epochs)
    assert rates(log) == rates(whole)
    # Two updates an epoch, the cut before the third epoch.
    expected = {n: 0.1 * (1 - (n / 2 - 1) / 12) * (0.5 if n > 8 else 1.0) for n in (2, 6, 10)}
    found = dict(rates(whole))
    assert {n: found[n] for n in expected} == pytest.approx(expected, rel=1e-5)


def shown(loop: telic.Loop, data: Any, **limits: int) -> list[str]:
    """Give what a terminal shows after each batch."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=20)
    display = Progress(console=console, batches=4)
    seen: list[str] = []

    def look(state: Any) -> None:
        with console.capture() as captured:
            console.print(display._render())
        seen.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", captured.get()))

    loop.handle_event("started", display.on_start)
    loop.handle_event("iteration_completed", display.on_iteration)
    loop.handle_event(["epoch_completed", "epoch_halted"], display.on_epoch_end)
    loop.handle_event(["completed", "halted", "interrupted"], display.on_end)
    loop.handle_event("iteration_completed", look).run(data, **limits)
    return seen


def test_progress_goes_on_in_its_own_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """XS013: a position multiplied by k beside a total that is not; XS017: an epoch's beginning shown as a whole run's
    batches, or the reverse.
    """
    trainer(tmp_path / "steps", accumulate=2).fit(batches(4), steps=2, log_every=0)
    seen = shown(trainer(tmp_path / "steps", accumulate=2).loop(log=0), batches(4), steps=4)
    assert "continuing steps at 2 of 4 updates" in capsys.readouterr().out
    counts = [re.findall(r"\d+/\d+ updates", line) for line in seen]
    # What stood there before the first batch, too; the update that a batch closes is counted after its handlers.
    assert set(counts[0]) == {"2/4 updates"}
    assert "3/4 updates" in counts[-1]
    summing(tmp_path / "epochs").run([np.float32(1)] * 4, epochs=1)
    seen = shown(summing(tmp_path / "epochs"), [np.float32(1)] * 4, epochs=3)
    assert "epoch 2/3" in seen[0]
    assert "5/12 batches" in seen[0]


def test_a_new_tracker_goes_on_at_the_run_s_update(tmp_path: Path) -> None:
    """XS123: the steps of a resumed run that begin at 0 in its new tracker, and are dropped."""
    trainer(tmp_path / "run", accumulate=2).fit(batches(4), steps=6, log_every=0)
    loop = trainer(tmp_path / "run", accumulate=2).loop(log=0).track(JsonLines(tmp_path / "new"), interval=1)
    loop.run(batches(4), steps=8)
    assert list(read_scalars(tmp_path / "new" / "scalars.jsonl")) == [7, 8]


# -- buffers -------------------------------------------------------------------------------------------------------


def test_a_restored_state_is_given_away_like_a_fresh_one(tmp_path: Path) -> None:
    """XS094: restored arrays that cannot be donated, so that the first step needs the state's memory twice."""

    def given_away(directory: Path, epochs: int) -> list[bool]:
        olds: list[Any] = []
        loop = trainer(directory, optimizer="adam").loop(log=0)
        for event in ("epoch_started", "iteration_completed"):
            loop.handle_event(event, lambda s: olds.append(jax.tree.leaves(s.step_state.params["params"])[0]))
        loop.run(batches(2), epochs=epochs)
        return [old.is_deleted() for old in olds]

    assert given_away(tmp_path / "run", 1) == [True, True, False]
    assert given_away(tmp_path / "run", 2) == [True, True, False]
