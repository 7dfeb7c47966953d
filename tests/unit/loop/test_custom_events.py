"""Events of a user's own: counts, order, filters, halts, states, and what may not be fired."""

from typing import Any

import numpy as np
import pytest

import telic
from telic.errors import TelicError

ONE = np.float32(1)


def summing(*events: str) -> telic.Loop:
    loop = telic.Loop(lambda total, batch: total + batch, lambda batch: 0.0)
    for event in events:
        loop.register_event(event)
    return loop


def firing(event: str) -> Any:
    def fire(state: telic.LoopState) -> None:
        state.fire(event)

    return fire


def test_handlers_run_when_it_is_fired_in_the_order_they_were_attached() -> None:
    """Catches a firing that is put off until the handler returns, or handlers out of order."""
    seen: list[str] = []
    loop = summing("hot")

    def fire(state: telic.LoopState) -> None:
        seen.append("before")
        assert state.fire("hot") is telic.CONTINUE
        seen.append("after")

    loop.handle_event("iteration_completed", fire)
    for name in ("a", "b"):
        loop.handle_event("hot", lambda s, name=name: seen.append(name))
    loop.handle_event("iteration_completed", lambda s: seen.append("next"))
    loop.run([ONE])
    assert seen == ["before", "a", "b", "after", "next"]


def test_it_is_counted_once_per_firing_over_the_run_and_in_the_epoch() -> None:
    """Catches counts per handler, counts kept only when somebody listens, and filters that see another number."""
    seen: list[tuple[int, int]] = []
    loop = summing("hot", "cold").handle_event("iteration_completed", firing("hot"), telic.every(2))
    for rule in (telic.every(3), telic.once(1, per_epoch=True)):
        loop.handle_event("hot", lambda s: seen.append((s.epoch, s.event_counts["hot"])), rule)
    final = loop.run([ONE] * 4, epochs=2)
    assert (final.event_counts["hot"], final.event_counts["cold"]) == (4, 0)
    assert final.counts.epoch["hot"] == 0
    assert seen == [(0, 1), (1, 3), (1, 3)]
    # Nobody listens: counted all the same.
    quiet = summing("hot").handle_event("iteration_completed", firing("hot"), telic.every(2)).run([ONE] * 4)
    assert quiet.event_counts["hot"] == 2


@pytest.mark.parametrize("status", [telic.HALT_EPOCH, telic.HALT_LOOP])
def test_a_halt_of_its_handlers_holds_though_the_one_that_fired_does_not_pass_it_on(status: Any) -> None:
    """Catches an answer that is lost, or that stops the run before the other handlers of the firing ran."""
    seen: list[Any] = []
    loop = summing("hot").handle_event("iteration_completed", lambda s: seen.append(s.fire("hot")), telic.once(2))
    loop.handle_event("hot", lambda s: status).handle_event("hot", lambda s: seen.append("all run"))
    final = loop.run([ONE] * 5, epochs=2)
    assert seen == ["all run", status]
    if status is telic.HALT_LOOP:
        assert (final.status, final.total_iterations) == ("halted", 2)
    else:
        assert (final.status, final.total_iterations) == ("completed", 7)
    assert final.event_counts["epoch_halted"] == 1


def test_an_answer_holds_for_its_own_firing_only() -> None:
    """Catches a halt that comes back at a later event."""
    loop = summing("hot").handle_event("started", firing("hot")).handle_event("iteration_completed", firing("hot"))
    loop.handle_event("hot", lambda s: telic.HALT_EPOCH, telic.once(2))
    final = loop.run([ONE] * 3, epochs=2)
    assert (final.status, final.total_iterations) == ("completed", 4)


def test_states_pass_in_both_directions() -> None:
    """Catches a state of the handler that fires which its event does not see, or one of the event that is lost."""
    seen: list[float] = []

    def fire(state: telic.LoopState) -> None:
        state.step_state = 10.0
        state.fire("hot")
        seen.append(float(state.step_state))

    def double(state: telic.LoopState) -> telic.LoopState:
        seen.append(float(state.step_state))
        return state.replace(step_state=2 * state.step_state)

    loop = summing("hot").handle_event("iteration_completed", fire, telic.once(1)).handle_event("hot", double)
    assert float(loop.run([ONE] * 2).step_state) == 21.0
    assert seen == [10.0, 20.0]


def test_one_event_may_fire_another_but_not_itself() -> None:
    """Catches recursion without an end."""
    loop = summing("a", "b").handle_event("iteration_completed", firing("a")).handle_event("a", firing("b"))
    assert loop.run([ONE]).event_counts["b"] == 1
    loop.handle_event("b", firing("a"))
    with pytest.raises(TelicError, match="'a' is being handled"):
        loop.run([ONE])


def test_all_has_the_events_registered_before() -> None:
    """Catches "all" that leaves out what a user added."""
    seen: list[int] = []
    loop = summing("hot").handle_event("all", lambda s: seen.append(s.event_counts["hot"]))
    loop.handle_event("completed", firing("hot")).run([ONE])
    assert seen[-1] == 1


def test_a_saved_state_keeps_the_counts_and_a_resumed_run_goes_on_with_them() -> None:
    """Catches counts of unknown names that are dropped, or that start again."""
    loop = summing("hot").handle_event("iteration_completed", firing("hot"))
    final = loop.run([ONE] * 3)
    back = telic.deserialize_state(telic.serialize_state(final), like=final.step_state)
    assert back.event_counts["hot"] == 3
    assert loop.from_state(back).run([ONE] * 3, epochs=2).event_counts["hot"] == 6


def test_unknown_names_and_the_loops_own_are_refused() -> None:
    """Catches a misspelt event that nobody ever hears of."""
    with pytest.raises(ValueError, match="unknown event 'hot'"):
        summing().handle_event("hot", lambda s: None)
    loop = summing("hot").handle_event("iteration_completed", firing("hott"))
    with pytest.raises(ValueError, match="Did you mean 'hot'") as caught:
        loop.run([ONE])
    assert any("register_event" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match="fired by the loop itself"):
        summing().handle_event("started", firing("completed")).run([ONE])
    for name, error, match in [
        ("started", ValueError, "fires itself"),
        ("all", ValueError, "every event"),
        ("", ValueError, "every event"),
        (3, TypeError, "must be text"),
    ]:
        with pytest.raises(error, match=match):
            summing(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="registered already"):
        summing("hot", "hot")
    with pytest.raises(ValueError, match="nobody knows its last firing"):
        summing("hot").handle_event("hot", lambda s: None, telic.every(2) | telic.last)


def test_nobody_fires_outside_of_a_handler() -> None:
    """Catches a kept or final state that reaches into a run that is over."""
    kept: list[telic.LoopState] = []
    loop = summing("hot").handle_event("iteration_completed", lambda s: kept.append(s.keep()))
    final = loop.run([ONE])
    for state in (final, kept[0], telic.LoopState()):
        with pytest.raises(TelicError, match="for handlers of a loop"):
            state.fire("hot")


def test_a_handler_may_give_a_kept_state_and_still_fire() -> None:
    """Catches a copy without the means to fire replacing the one everybody holds."""
    loop = summing("hot").handle_event("iteration_completed", lambda s: s.keep())
    loop.handle_event("iteration_completed", firing("hot"))
    assert loop.run([ONE] * 2).event_counts["hot"] == 2
