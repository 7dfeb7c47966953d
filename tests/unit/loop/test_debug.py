"""What `debug=True` and the logger telic.loop tell: answers, durations, dispatches, compilations, lost fusion."""

from typing import Any

import numpy as np
import pytest

import telic
from telic.loop.attachments import Attachment, Plan
from telic.loop.engine import Engine

ONE = np.float32(1)


def summing() -> telic.Loop:
    return telic.Loop(lambda total, batch: total + batch.sum(), lambda batch: 0.0)


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The data in the records, in order."""
    return [r.telic for r in caplog.records if r.name == "telic.loop" and hasattr(r, "telic")]


def test_a_handlers_answer_comes_with_its_duration_as_data(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a log that can only be parsed, and a duration that includes what ran before."""
    caplog.set_level("INFO", logger="telic.loop")
    summing().handle_event("epoch_completed", lambda s: telic.HALT_LOOP, name="stopper").run([ONE] * 2, debug=True)
    (entry,) = [e for e in told(caplog) if e.get("handler") == "stopper"]
    seconds = entry.pop("seconds")
    assert entry == {
        "event": "epoch_completed",
        "count": 1,
        "epoch": 0,
        "iteration": 2,
        "handler": "stopper",
        "answer": "HALT_LOOP",
    }
    assert seconds >= 0


def test_every_iteration_is_in_one_dispatch(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a report that leaves out or repeats iterations that were fused."""
    caplog.set_level("INFO", logger="telic.loop")
    summing().run([ONE] * 40, debug=True)
    assert sum(e.get("iterations", 0) for e in told(caplog)) == 40


@pytest.mark.parametrize(
    ("event", "rule", "told_of"),
    [
        ("iteration_completed", telic.always, True),
        ("iteration_completed", telic.when(lambda s: False), True),
        ("iteration_completed", telic.every_seconds(60), True),
        ("iteration_started", telic.always, True),
        ("step_completed", telic.always, True),
        ("iteration_completed", telic.every(10), False),
        ("iteration_completed", telic.before(3), False),
        ("iteration_completed", telic.last, False),
        ("epoch_completed", telic.always, False),
    ],
)
def test_it_says_who_keeps_iterations_apart(
    caplog: pytest.LogCaptureFixture, event: str, rule: Any, told_of: bool
) -> None:
    """Catches a slow run whose cause nobody can find, and a warning about a handler that costs nothing."""
    caplog.set_level("INFO", logger="telic.loop")
    summing().handle_event(event, lambda s: None, rule, name="watcher").run([ONE], debug=True)
    found = [m for m in caplog.messages if "keeps iterations from being fused" in m]
    assert [m.startswith(f"handler watcher at {event}") for m in found] == [True] * told_of


def test_without_debug_it_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a log that grows with the run though nobody asked."""
    caplog.set_level("INFO", logger="telic.loop")
    summing().handle_event("iteration_completed", lambda s: None).run([ONE] * 2)
    assert told(caplog) == []


def test_a_recompilation_names_the_leaf_and_both_shapes(caplog: pytest.LogCaptureFixture) -> None:
    """Catches minutes of compiling under strict=False without a word why."""
    caplog.set_level("INFO", logger="telic.loop")
    loop = telic.Loop(lambda total, b: total + b["x"].sum() + b["y"].sum(), lambda b: 0.0)
    sizes = [(4, 4), (4, 3), (4, 3), (4, 4)]
    loop.run([{"x": np.ones(a, np.float32), "y": np.ones(b, np.float32)} for a, b in sizes], strict=False)
    (message,) = [m for m in caplog.messages if "compiled" in m]
    assert message == (
        "batch 1 of epoch 0 is compiled for again (program 2): leaf 'y' was float32[4] and is float32[3]"
    )
    caplog.clear()
    two = telic.Loop(lambda total, b: total + sum(x.sum() for x in b.values()), lambda b: 0.0)
    two.run([{"x": np.ones(2, np.float32)}, {"x": np.ones(2, np.float32), "y": ONE}], strict=False)
    (message,) = [m for m in caplog.messages if "compiled" in m]
    assert "the structure was" in message


class Driver:
    """A driver that computes nothing."""

    step_state: Any = None
    metric_names: tuple[str, ...] = ()
    width = 1

    def stacks(self, first: Any, other: Any) -> bool:
        return True

    def advance(self, batches: Any, **where: Any) -> None:
        pass

    def compute(self, scope: str) -> Any:
        return dict

    def reset(self, scope: str) -> None:
        pass

    def check(self, *, wait: bool) -> None:
        pass


class Source:
    """As many batches as are asked for."""

    read_ahead = False
    fresh = True

    def begin(self, epoch: int, *, continuous: bool = False) -> None:
        pass

    def next(self, view: Any) -> Any:
        return ONE, None


def test_every_seconds_goes_by_the_time_all_processes_agree_on() -> None:
    """Catches processes whose clocks differ taking different decisions: one saves, the other waits for ever (XS056)."""
    asked: list[Any] = []
    seen: list[int] = []
    theirs = iter(range(1000))

    def agree(value: Any) -> Any:
        # Statuses pass as they are; of times, process 0's hold, which here are those of another clock.
        if isinstance(value, float):
            asked.append(value)
            return 10.0 * next(theirs)
        return value

    state = telic.LoopState(max_epoch=1, max_iteration=6)
    attachment = Attachment("iteration_completed", lambda s: seen.append(s.iteration), telic.every_seconds(25))
    engine: Any = Engine(
        plan=Plan((attachment,)),
        driver=Driver(),  # type: ignore[arg-type]
        source=Source(),  # type: ignore[arg-type]
        state=state,
        period=1,
        clock=lambda: 0.0,
        agree=agree,
    )
    for _ in engine.stream():
        pass
    # This process's clock stands still; by the agreed one 10 seconds pass at each firing.
    assert seen == [3]
    assert set(asked) == {0.0}
