"""Events, counters and filters of the loop against the seed's, Axon.Loop v0.5.0.

Where the seed is right, everything is compared exactly: the trace, the final cursor, the counts, the epochs that have
metrics. Three differences are by design and hold everywhere: Telic also fires `step_completed` and one event that ends
the run; `every(n)` fires on n, 2n, ... (the seed's form is ``first=True``); without a limit `max_iteration` is None.
Where the seed is wrong, the test says what changes and why.
"""

from typing import Any

import numpy as np
import pytest

import telic
from telic.loop.events import EVENTS
from tests.golden import load

CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in load("axon_events")["cases"]}
SEED_EVENTS = tuple(e for e in EVENTS if e not in ("step_completed", "completed", "halted", "interrupted"))
STATUSES = {":halt_epoch": telic.HALT_EPOCH, ":halt_loop": telic.HALT_LOOP}


def counting_loop() -> telic.Loop:
    return telic.Loop(lambda total, batch: total + batch, lambda batch: 0.0).metric(
        lambda total: total, "total", reads=lambda state: (state,)
    )


def play(config: dict[str, Any]) -> tuple[list[list[Any]], telic.LoopState]:
    """Give the trace of the seed's events and the final state of a case."""
    trace: list[list[Any]] = []
    loop = counting_loop()
    for event in SEED_EVENTS:
        loop.handle_event(event, lambda s, event=event: trace.append([event, s.epoch, s.iteration]))
    if "halt" in config:
        status, at = config["halt"]
        answer = STATUSES[status]
        loop.handle_event(config.get("on", "iteration_completed"), lambda s: answer, telic.once(at))
    limit = config.get("iters", -1)
    final = loop.run(
        [np.float32(1)] * config["batches"], epochs=config["epochs"], iterations=None if limit < 0 else limit
    )
    return trace, final


def numbers(final: telic.LoopState) -> dict[str, Any]:
    """Give the final state in the seed's terms."""
    return {
        "epoch": final.epoch,
        "iteration": final.iteration,
        "max_epoch": final.max_epoch,
        "max_iteration": -1 if final.max_iteration is None else final.max_iteration,
        "metrics_epochs": list(final.history),
        "status": final.status,
        "event_counts": {e: n for e, n in final.event_counts.items() if e in SEED_EVENTS},
    }


def expected(case: dict[str, Any], **mended: Any) -> dict[str, Any]:
    out = {k: v for k, v in case["out"].items() if k not in ("trace", "same_in_v0_8_1", "v0_8_1")}
    counts = {e: n for e, n in out["event_counts"].items() if e in SEED_EVENTS}
    return {**out, "event_counts": counts, **mended}


@pytest.mark.parametrize("name", ["two_epochs", "iteration_limit"])
def test_runs_without_a_halt_are_the_seed_s(name: str) -> None:
    """An event out of order, a cursor off by one in a handler, a limit that grows with the epochs."""
    case = CASES[name]
    trace, final = play(case["config"])
    assert trace == case["out"]["trace"]
    assert numbers(final) == expected(case)
    assert final.event_counts["completed"] == 1
    assert final.event_counts["step_completed"] == final.event_counts["iteration_completed"]


def test_halt_epoch_closes_its_epoch() -> None:
    """B1: in the seed the halted epoch goes on as if it were the next: epoch stays 0, iteration stays 1.

    By design: the trace is the seed's up to `epoch_halted`, which sees both batches done, and then epoch 1 runs whole.
    The epochs, the counts but for the batches that the stale iteration cost, and the end agree.
    """
    case = CASES["halt_epoch"]
    trace, final = play(case["config"])
    seed = case["out"]["trace"]
    cut = seed.index(["epoch_halted", 0, 1])
    assert trace[:cut] == seed[:cut]
    assert trace[cut] == ["epoch_halted", 0, 2]
    # The epoch after the halt is a whole one, as the seed's last is.
    last = seed[seed.index(["epoch_started", 2, 0]) :]
    assert trace[cut + 1 :] == [[e, 1, i] for e, _, i in last] + last
    assert numbers(final) == expected(case)


def test_halt_loop_keeps_the_batch_it_halted_after() -> None:
    """B7, B8, B16: the seed leaves the index of the last batch, loses the epoch's metrics and fills in epoch 2.

    By design: `epoch_halted` fires, `iteration` is the number of batches done, and only epochs that ran have metrics.
    """
    case = CASES["halt_loop"]
    trace, final = play(case["config"])
    assert trace == [*case["out"]["trace"], ["epoch_halted", 1, 2]]
    counts = expected(case)["event_counts"] | {"epoch_halted": 1}
    assert numbers(final) == expected(case, iteration=2, metrics_epochs=[0, 1], event_counts=counts)
    assert final.history[1] == {"total": pytest.approx(4.5)}
    assert final.event_counts["halted"] == 1


def test_halt_epoch_at_epoch_started_goes_on_with_the_next() -> None:
    """B1: in the seed epoch 1 is halted and started again under the same number.

    By design: epoch 1 is closed without a batch, and epoch 2 follows.
    """
    case = CASES["halt_epoch_at_epoch_started"]
    trace, final = play(case["config"])
    seed = case["out"]["trace"]
    again = seed.index(["epoch_started", 1, 0], seed.index(["epoch_halted", 1, 0]))
    assert trace == seed[:again] + [[event, 2, i] for event, _, i in seed[again:]]
    assert numbers(final) == expected(case)
    # Nothing was measured in epoch 1, and nothing is claimed of it.
    assert final.history[1] == {}


def test_halt_loop_at_epoch_completed_ends_the_run_there() -> None:
    """B7, B8: as `halt_loop`, and the epoch is complete *and* halted, so that both events fire."""
    case = CASES["halt_loop_at_epoch_completed"]
    trace, final = play(case["config"])
    assert trace == [*case["out"]["trace"], ["epoch_halted", 0, 2]]
    counts = expected(case)["event_counts"] | {"epoch_halted": 1}
    assert numbers(final) == expected(case, metrics_epochs=[0], event_counts=counts)


FILTERS = {
    "always": telic.always,
    "first": telic.first,
    "every_2": telic.every(2, first=True),
    "every_epoch_3": telic.every(3, first=True, per_epoch=True),
    "after_4": telic.after(4),
    "before_3": telic.before(3),
    "once_5": telic.once(5),
    "every_2_after_3": telic.every(2, first=True) & telic.after(3),
    "every_epoch_50": telic.every(50, first=True, per_epoch=True),
}


def fired(event: str, filter: Any) -> list[list[int]]:
    config = CASES["filters_share"]["config"]
    seen: list[list[int]] = []
    loop = counting_loop().handle_event(event, lambda s: seen.append([s.epoch, s.iteration]), filter)
    loop.run([np.float32(1)] * config["batches"], epochs=config["epochs"])
    return seen


@pytest.mark.parametrize("name", list(FILTERS))
def test_filters_let_through_what_the_seed_s_do(name: str) -> None:
    """B3, B49: counts that advance per handler, or per epoch where the run's are meant."""
    for event, expected in CASES["filters_share"]["out"][name].items():
        assert fired(event, FILTERS[name]) == expected, event


def test_the_golden_file_has_no_filter_without_a_test() -> None:
    """A row that nobody reads."""
    assert set(CASES["filters_share"]["out"]) - {"same_in_v0_8_1", "v0_8_1"} == set(FILTERS)
    assert len(CASES) == 7


def test_every_n_fires_on_n_by_default() -> None:
    """B48: the seed's `every: 2` fires on the first event, and misses the last of an even number."""
    assert fired("iteration_completed", telic.every(2)) == [[0, 1], [0, 3], [1, 0], [1, 2], [1, 4], [2, 1], [2, 3]]
