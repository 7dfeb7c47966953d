"""Events, halts and handlers: what happens when, and what a handler may do."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.errors import ContractError, TelicError
from telic.loop.attachments import Attachment, Plan
from telic.loop.engine import Engine
from telic.loop.events import EVENTS
from telic.loop.status import Status

ONE = np.float32(1)

Trace = list[tuple[str, int, int]]


def summing() -> telic.Loop:
    """A raw loop that sums batches, with the mean of the batches as its metric."""
    return telic.Loop(lambda total, batch: telic.Result(total + batch, {"x": batch}), lambda batch: 0.0).metric(
        lambda x: x, "x", reads="x"
    )


def accumulating(k: int) -> telic.Loop:
    """A trainer with windows of k batches."""
    model = (lambda key, x: {"w": np.zeros(1, np.float32)}, lambda params, x: x @ params["w"][:, None])
    return telic.trainer(model, "mean_squared_error", "sgd", log=0, accumulate=k)


def pairs(count: int) -> list[Any]:
    return [(np.ones((2, 1), np.float32), np.ones((2, 1), np.float32))] * count


def traced(loop: telic.Loop) -> Trace:
    trace: Trace = []
    for event in EVENTS:
        loop.handle_event(event, lambda s, event=event: trace.append((event, s.epoch, s.iteration)))
    return trace


def iteration(epoch: int, i: int) -> Trace:
    return [(e, epoch, i) for e in ("iteration_started", "iteration_completed", "step_completed")]


def test_events_come_in_order() -> None:
    """Loop.md 1.8: an event too many, too few or out of order, over 2 epochs of 2 batches."""
    loop = summing()
    trace = traced(loop)
    final = loop.run([ONE] * 2, epochs=2)
    assert trace == [
        ("started", 0, 0),
        ("epoch_started", 0, 0),
        *iteration(0, 0),
        *iteration(0, 1),
        ("epoch_completed", 0, 2),
        ("epoch_started", 1, 0),
        *iteration(1, 0),
        *iteration(1, 1),
        ("epoch_completed", 1, 2),
        ("completed", 2, 0),
    ]
    assert (final.status, final.epoch, final.iteration, final.total_iterations) == ("completed", 2, 0, 4)
    assert sum(final.event_counts.values()) == len(trace)


def test_events_are_counted_though_nobody_listens() -> None:
    """B3: counts that advance once per handler, so that none or two handlers change what a filter sees."""
    silent, loud = summing(), summing()
    traced(loud)
    traced(loud)
    assert silent.run([ONE] * 3, epochs=2).event_counts == loud.run([ONE] * 3, epochs=2).event_counts


def test_two_handlers_with_one_filter_both_fire() -> None:
    """B3: with two handlers, `every: 2` fires always for the first and never for the second."""
    seen: list[str] = []
    loop = summing()
    for name in "ab":
        loop.handle_event(
            "iteration_completed", lambda s, name=name: seen.append(f"{name}{s.iteration}"), telic.every(2)
        )
    loop.run([ONE] * 5)
    assert seen == ["a1", "b1", "a3", "b3"]


def test_step_completed_fires_once_a_window_and_at_a_flush() -> None:
    """A window counted per batch, or a short last window that fires nothing: 5 batches in windows of 2."""
    loop = accumulating(2)
    steps: list[tuple[int, int]] = []
    loop.handle_event("step_completed", lambda s: steps.append((s.epoch, s.iteration)))
    final = loop.run(pairs(5), epochs=2)
    assert steps == [(0, 1), (0, 3), (0, 5), (1, 1), (1, 3), (1, 5)]
    assert final.steps == int(final.step_state.updates) == 6


def test_last_fires_at_the_last_window_only() -> None:
    """`last` on the flush of every epoch, since a short window closes outside the iterations."""
    loop = accumulating(2)
    seen: list[tuple[str, int]] = []
    for event in (
        "iteration_started",
        "iteration_completed",
        "step_completed",
        "epoch_started",
        "epoch_completed",
        "completed",
    ):
        loop.handle_event(event, lambda s, event=event: seen.append((event, s.total_iterations)), telic.last)
    loop.run(pairs(3), epochs=2)
    assert seen == [
        ("epoch_started", 3),
        ("iteration_started", 5),
        ("iteration_completed", 6),
        ("step_completed", 6),
        ("epoch_completed", 6),
        ("completed", 6),
    ]


@pytest.mark.parametrize("limits", [{"epochs": 2}, {"epochs": 1, "iterations": 5}, {"steps": 5}])
def test_every_1000_or_last_fires_once_at_the_end(limits: dict[str, Any]) -> None:
    """B48: the last iteration that nobody sees."""
    seen: list[int] = []
    loop = summing().handle_event(
        "iteration_completed", lambda s: seen.append(s.total_iterations), telic.every(1000) | telic.last
    )
    final = loop.run([ONE] * 7, **limits)
    assert seen == [final.total_iterations]


# -- halts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [telic.HALT_EPOCH, telic.HALT_LOOP])
def test_a_halt_from_started_runs_no_epoch(status: Status) -> None:
    """A halt before anything ran that still runs an epoch, or that fills in metrics (B8)."""
    loop = summing()
    trace = traced(loop)
    loop.handle_event("started", lambda s: status)
    final = loop.run([ONE] * 2, epochs=2)
    assert trace == [("started", 0, 0), ("halted", 0, 0)]
    assert (final.status, final.history, float(final.step_state)) == ("halted", {}, 0.0)


@pytest.mark.parametrize("event", ["epoch_started", "iteration_started", "iteration_completed", "step_completed"])
def test_halt_epoch_goes_on_with_the_next_epoch(event: str) -> None:
    """B1, B56, B57: an epoch that is halted and not closed: metrics lost or carried over, counters not reset."""
    loop = summing()
    trace = traced(loop)
    loop.handle_event(event, lambda s: telic.HALT_EPOCH, telic.once(1 if event == "epoch_started" else 2))
    final = loop.run([np.float32(1), np.float32(2), np.float32(4)], epochs=2)
    done = {"epoch_started": 0, "iteration_started": 1, "iteration_completed": 2, "step_completed": 2}[event]
    halted = trace.index(("epoch_halted", 0, done))
    before = {
        "epoch_started": ("epoch_started", 0, 0),
        "iteration_started": ("iteration_started", 0, 1),
        "iteration_completed": ("step_completed", 0, 1),
        "step_completed": ("step_completed", 0, 1),
    }[event]
    assert trace[halted - 1] == before
    assert trace[halted + 1] == ("epoch_started", 1, 0)
    assert [e for e, _, _ in trace].count("epoch_completed") == 1
    assert trace[-1] == ("completed", 2, 0)
    assert final.status == "completed"
    assert final.history[0] == {0: {}, 1: {"x": 1.0}, 2: {"x": 1.5}}[done]
    # The next epoch is a whole one, and its metrics are its own.
    assert final.history[1] == {"x": pytest.approx(7 / 3)}
    assert float(final.step_state) == {0: 0, 1: 1, 2: 3}[done] + 7


@pytest.mark.parametrize("event", ["epoch_started", "iteration_started", "iteration_completed", "step_completed"])
def test_halt_loop_ends_the_run(event: str) -> None:
    """B7, B8, B16: the halted epoch's metrics lost, later epochs made up, a cursor that is neither here nor there."""
    loop = summing()
    trace = traced(loop)
    loop.handle_event(event, lambda s: telic.HALT_LOOP, telic.once(1 if event == "epoch_started" else 2))
    final = loop.run([np.float32(1), np.float32(2), np.float32(4)], epochs=3)
    done = {"epoch_started": 0, "iteration_started": 1, "iteration_completed": 2, "step_completed": 2}[event]
    assert trace[-2:] == [("epoch_halted", 0, done), ("halted", 0, done)]
    assert (final.status, final.epoch, final.iteration) == ("halted", 0, done)
    assert final.history == {0: {0: {}, 1: {"x": 1.0}, 2: {"x": 1.5}}[done]}
    assert list(final.times) == [0]


def test_a_halt_from_epoch_completed_fires_both() -> None:
    """An epoch that completed and does not say so, or that is recorded twice."""
    loop = summing()
    trace = traced(loop)
    loop.handle_event("epoch_completed", lambda s: telic.HALT_EPOCH, telic.once(1))
    final = loop.run([ONE] * 2, epochs=2)
    at = trace.index(("epoch_completed", 0, 2))
    assert trace[at : at + 3] == [("epoch_completed", 0, 2), ("epoch_halted", 0, 2), ("epoch_started", 1, 0)]
    assert (final.status, final.epoch, list(final.history)) == ("completed", 2, [0, 1])


def test_epoch_halted_may_end_the_run() -> None:
    """loop.md 1.8: a status from epoch_halted that is not read."""
    loop = summing()
    loop.handle_event("iteration_completed", lambda s: telic.HALT_EPOCH, telic.once(1))
    loop.handle_event("epoch_halted", lambda s: telic.HALT_LOOP)
    final = loop.run([ONE] * 3, epochs=3)
    assert (final.status, final.epoch, final.iteration) == ("halted", 0, 1)


def test_halt_epoch_does_not_reuse_the_peeked_batch_of_another_epoch() -> None:
    """B36: the batch read to learn shapes, kept over an epoch that was halted before it: data of the wrong epoch."""
    loop = summing().handle_event("epoch_started", lambda s: telic.HALT_EPOCH if s.epoch == 0 else None)
    seen: list[float] = []
    loop.handle_event("iteration_completed", lambda s: seen.append(s.metrics["x"]))
    loop.run(lambda epoch: [np.float32(epoch)] * 2, epochs=2)
    assert seen == [1.0, 1.0]


def test_a_halt_of_a_run_of_steps_halts_the_run() -> None:
    """A run of steps has one epoch: halting it must not claim that the plan was finished."""
    loop = summing().handle_event("iteration_completed", lambda s: telic.HALT_EPOCH, telic.once(2))
    final = loop.run([ONE] * 2, steps=10)
    assert (final.status, final.steps, final.epoch, final.iteration) == ("halted", 2, 0, 2)


def test_a_half_window_is_flushed_at_a_halt() -> None:
    """A halted window whose gradient is dropped, or committed in the next epoch."""
    loop = accumulating(4)
    loop.handle_event("iteration_completed", lambda s: telic.HALT_LOOP, telic.once(2))
    final = loop.run(pairs(8), epochs=2)
    assert (final.steps, int(final.step_state.updates), int(final.step_state.attempts)) == (1, 1, 2)


@pytest.mark.parametrize("how", ["completed", "halted", "interrupted"])
def test_exactly_one_event_ends_a_run(how: str) -> None:
    """B9: `halted` and `completed` that never fire, or both."""
    loop = summing()
    seen: list[tuple[str, str | None, dict[int, Any]]] = []
    for event in ("completed", "halted", "interrupted"):
        loop.handle_event(event, lambda s, event=event: seen.append((event, s.status, dict(s.history))))

    def act(state: telic.LoopState) -> Any:
        if how == "interrupted":
            raise KeyboardInterrupt
        return telic.HALT_LOOP if how == "halted" else None

    loop.handle_event("iteration_completed", act, telic.once(2))
    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            loop.run([ONE] * 2)
    else:
        loop.run([ONE] * 2)
    # Status and metrics are final when the event fires.
    assert seen == [(how, how, {} if how == "interrupted" else {0: {"x": 1.0}})]


# -- handlers ----------------------------------------------------------------------------------------------------


def test_all_handlers_of_a_firing_run_and_the_severest_status_wins() -> None:
    """B54: a checkpoint attached after an early stop misses the last epoch."""
    order: list[str] = []

    def answering(name: str, answer: Any) -> Callable[[Any], Any]:
        def handler(state: telic.LoopState) -> Any:
            order.append(name)
            return answer

        return handler

    loop = summing()
    for name, answer in (("a", telic.HALT_EPOCH), ("b", telic.HALT_LOOP), ("c", telic.CONTINUE), ("d", None)):
        loop.handle_event("iteration_completed", answering(name, answer))
    final = loop.run([ONE] * 3, epochs=3)
    assert order == ["a", "b", "c", "d"]
    assert (final.status, final.total_iterations) == ("halted", 1)


def test_a_handler_may_return_a_state() -> None:
    """A returned state that is dropped, or that later handlers of the firing do not see."""
    seen: list[float] = []
    loop = summing()
    loop.handle_event("iteration_completed", lambda s: s.replace(step_state=s.step_state * 10), telic.once(1))
    loop.handle_event("iteration_completed", lambda s: seen.append(float(s.step_state)))
    loop.handle_event("iteration_completed", lambda s: (telic.HALT_LOOP, s.replace(max_epoch=9)), telic.once(2))
    final = loop.run([ONE] * 3)
    assert seen == [10.0, 11.0]
    assert (final.status, final.max_epoch, float(final.step_state)) == ("halted", 9, 11.0)


def test_a_handler_may_change_the_state_in_place() -> None:
    """A step state that a handler assigns and the next step does not start from."""

    def reset(state: telic.LoopState) -> None:
        state.step_state = 100.0  # A Python number: weakly typed, so that it would compile again.

    final = summing().handle_event("epoch_started", reset).run([ONE] * 3)
    assert float(final.step_state) == 103.0


def test_a_state_a_handler_gives_is_not_consumed() -> None:
    """A handler's own array, donated to the next step and gone for the handler."""
    mine = np.float32(5) * np.ones(3, np.float32)
    loop = telic.Loop(lambda s, b: s + b, lambda b: np.zeros(3, np.float32))
    kept = jnp.asarray(mine)

    def restore(state: telic.LoopState) -> None:
        state.step_state = kept

    loop.handle_event("iteration_completed", restore)
    loop.run([np.ones(3, np.float32)] * 3)
    assert np.array_equal(np.asarray(kept), mine)


@pytest.mark.parametrize("nonsense", [True, 1, "halt", (telic.HALT_LOOP,), (None, 3), {"status": 1}, False])
def test_nonsense_from_a_handler_names_handler_and_event(nonsense: Any) -> None:
    """An answer that is taken for "go on": the seed's ArgumentError names the event, here the handler too."""

    def confused(state: telic.LoopState) -> Any:
        return nonsense

    with pytest.raises(ContractError, match=r"confused at event 'epoch_started' must return None, a status"):
        summing().handle_event("epoch_started", confused).run([ONE])


def test_an_error_in_a_handler_says_where() -> None:
    """A traceback that does not say which of ten handlers, and when."""

    def broken(state: telic.LoopState) -> None:
        raise RuntimeError("no disk")

    loop = summing().handle_event("iteration_completed", broken, telic.once(4), name="saver")
    with pytest.raises(RuntimeError, match="no disk") as caught:
        loop.run([ONE] * 3, epochs=2)
    assert caught.value.__notes__ == ["raised by handler saver at event 'iteration_completed', epoch 1, iteration 0"]
    # The loop is free again.
    loop.metric(lambda x: x, "y", reads="x")


def test_a_step_state_of_another_kind_names_the_event() -> None:
    """B28: a handler's state of another dtype that compiles again, or fails deep inside the step."""

    def widen(state: telic.LoopState) -> None:
        state.step_state = np.zeros(2, np.float32)

    with pytest.raises(ContractError, match="handler's step_state changes leaf") as caught:
        summing().handle_event("epoch_started", widen, name="widen").run([ONE])
    assert any("'epoch_started': widen" in note for note in caught.value.__notes__)


def test_attaching_while_running_raises() -> None:
    """A handler that is attached and never runs."""
    loop = summing()
    loop.handle_event("started", lambda s: loop.metric("accuracy"))  # pyright: ignore
    with pytest.raises(TelicError, match=r"running: attach before run"):
        loop.run([ONE])
    other = summing()
    other.handle_event("started", lambda s: other.run([ONE]))
    with pytest.raises(TelicError, match="running already"):
        other.run([ONE])


def test_debug_tells_of_every_handler(caplog: pytest.LogCaptureFixture) -> None:
    """A silent loop that nobody can look into (axon #311)."""
    caplog.set_level("INFO", logger="telic.loop")
    summing().handle_event("epoch_completed", lambda s: telic.HALT_LOOP, name="stopper").run([ONE], debug=True)
    assert any(m.startswith("epoch_completed #1: stopper answered HALT_LOOP in ") for m in caplog.messages)


# -- the borrowed state ------------------------------------------------------------------------------------------


def test_a_kept_step_state_is_gone_and_the_error_says_keep() -> None:
    """A deleted array without a word of why."""
    held: list[Any] = []

    def late(state: telic.LoopState) -> None:
        held.append(state.step_state)
        float(held[0])

    with pytest.raises(RuntimeError, match="deleted") as caught:
        summing().handle_event("iteration_completed", late).run([ONE] * 3)
    assert any("state.keep()" in note for note in caught.value.__notes__)


def test_keep_gives_a_state_of_its_own() -> None:
    """A snapshot that changes with the run, in its arrays, its metrics, its history or its counters."""
    kept: list[telic.LoopState] = []
    loop = summing().handle_event("iteration_completed", lambda s: kept.append(s.keep()))
    loop.run([np.float32(1), np.float32(3)], epochs=2)
    assert [float(s.step_state) for s in kept] == [1.0, 4.0, 5.0, 8.0]
    assert [s.metrics["x"] for s in kept] == [1.0, 2.0, 1.0, 2.0]
    assert [s.event_counts["iteration_completed"] for s in kept] == [1, 2, 3, 4]
    assert [list(s.history) for s in kept] == [[], [], [0], [0]]


def test_metrics_that_were_not_read_in_time_are_refused() -> None:
    """Values of another moment, or zeros after the epoch was closed, under an old name."""
    shown: list[Any] = []
    loop = summing().handle_event("iteration_completed", lambda s: shown.append(s.metrics))
    loop.run([ONE] * 2)
    for metrics in shown:
        with pytest.raises(ContractError, match="earlier moment"):
            metrics["x"]


def test_metrics_are_there_at_iteration_started_too() -> None:
    """A handler before the batch that finds nothing of the batches so far."""
    seen: list[Any] = []
    loop = summing().handle_event("iteration_started", lambda s: seen.append(dict(s.metrics)))
    loop.run([np.float32(1), np.float32(3), np.float32(9)])
    assert seen == [{}, {"x": 1.0}, {"x": 2.0}]


def test_per_epoch_counts_are_still_there_at_the_end_of_the_epoch() -> None:
    """B50: counters that are reset before the handlers of epoch_completed see them."""
    seen: list[int] = []
    loop = summing().handle_event("epoch_completed", lambda s: seen.append(s.counts.epoch["iteration_completed"]))
    loop.run([ONE] * 3, epochs=2)
    assert seen == [3, 3]


def test_a_name_that_is_no_metric_says_what_there_is() -> None:
    """A KeyError without the names (loop.md 1.23)."""
    loop = summing().handle_event("epoch_completed", lambda s: s.metrics["xx"])
    with pytest.raises(KeyError, match=r"no metric 'xx'.*Did you mean 'x'"):
        loop.run([ONE])


def test_live_limits_are_obeyed() -> None:
    """B52: a max_epoch that is only decoration; a limit per epoch that grows."""

    def shorten(state: telic.LoopState) -> None:
        state.max_iteration = 2

    def extend(state: telic.LoopState) -> None:
        state.max_epoch = 3

    loop = summing().handle_event("iteration_completed", shorten, telic.first).handle_event("epoch_completed", extend)
    assert loop.run([ONE] * 4, epochs=1).total_iterations == 6


def test_every_seconds_reads_the_injected_clock() -> None:
    """A wall clock nobody can test; a clock read per handler."""

    class Still:
        step_state: Any = 0
        metric_names: tuple[str, ...] = ()
        width = 1

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: {} if name == "compute" else None

    class Batches:
        read_ahead, fresh, left = True, True, 6

        def begin(self, epoch: int, *, continuous: bool = False) -> None: ...

        def next(self, view: Any) -> Any:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return 0, None

    seen: list[int] = []
    now = iter(range(0, 1000, 10))
    engine = Engine(
        plan=Plan((Attachment("iteration_completed", lambda s: seen.append(s.iteration), telic.every_seconds(25)),)),
        driver=Still(),  # pyright: ignore
        source=Batches(),  # pyright: ignore
        state=telic.LoopState(),
        period=1,
        clock=lambda: next(now),
        agree=lambda value: value,
    )
    list(engine.stream())
    # Readings: the epoch's start at 0, then 10, 20, ... at each iteration; 10 is the baseline.
    assert seen == [3]
