"""Event names, and how firings are counted."""

from typing import Any

import pytest

from telic.loop.events import EVENTS, Counts, resolve_events


def test_all_stands_for_every_event() -> None:
    """loop.md 1.8: `:all` that leaves out events which fire."""
    assert resolve_events("all") == EVENTS
    assert resolve_events("started") == ("started",)
    assert resolve_events(["epoch_completed", "epoch_halted"]) == ("epoch_completed", "epoch_halted")


@pytest.mark.parametrize(
    ("events", "match"),
    [
        ("epoch_complete", "Did you mean 'epoch_completed'"),
        (["started", "iteration"], "unknown event 'iteration'"),
        ([], "at least one event"),
        ([3], "unknown event 3"),
    ],
)
def test_an_unknown_event_is_refused_when_attached(events: Any, match: str) -> None:
    """B47: a KeyError, or a handler that never runs."""
    with pytest.raises(ValueError, match=match):
        resolve_events(events)


def test_counts_over_the_run_and_in_the_epoch() -> None:
    """One counter that is both: filters that drift between epochs (B49)."""
    counts = Counts()
    counts.add("started")
    counts.add("iteration_completed")
    counts.start_epoch()
    counts.add("iteration_completed")
    assert counts.total["iteration_completed"] == 2
    assert counts.epoch["iteration_completed"] == 1
    assert counts.epoch["started"] == 0
