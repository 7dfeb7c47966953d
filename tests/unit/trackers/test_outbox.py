"""A tracker that fails, hangs or is slow: the run neither waits nor ends because of it, and the user is told once."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from telic.trackers import Outbox, Trackers, as_group, as_tracker


class Kept:
    """Keeps what it is told; may fail or wait at a method."""

    def __init__(self, fails: str = "", waits: threading.Event | None = None):
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.fails = fails
        self.waits = waits

    def _take(self, *call: Any) -> None:
        self.threads.add(threading.current_thread().name)
        if call[0] == "log" and self.waits is not None:
            self.waits.wait(30)
        if call[0] == self.fails:
            raise ConnectionError("refused")
        self.calls.append(call)

    def start(self, config: Mapping[str, Any]) -> None:
        self._take("start", dict(config))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._take("log", dict(scalars), step)

    def artifact(self, name: str, value: Any, step: int) -> None:
        self._take("artifact", name, value, step)

    def close(self) -> None:
        self._take("close")


def test_calls_arrive_in_order_on_a_thread_of_their_own() -> None:
    """Catches a slow service called from the training thread, and values that overtake each other."""
    kept = Kept()
    outbox = Outbox(kept)
    outbox.start({"lr": 0.1})
    for step in range(50):
        outbox.log({"train/loss": float(step)}, step)
    outbox.artifact("validation/w", np.ones(3), 50)
    outbox.close()
    assert [call[0] for call in kept.calls] == ["start", *["log"] * 50, "artifact", "close"]
    assert [call[2] for call in kept.calls if call[0] == "log"] == list(range(50))
    assert kept.threads == {"telic-Kept"}


@pytest.mark.parametrize("method", ["start", "log", "artifact", "close"])
def test_failure_warns_once_and_goes_on(method: str) -> None:
    """Catches an outage that ends training, floods the terminal, or passes without a word."""
    said: list[str] = []
    outbox = Outbox(Kept(fails=method), warn=said.append)
    outbox.start({})
    for step in range(20):
        outbox.log({"a": 1.0}, step)
        outbox.artifact("b", np.ones(2), step)
    outbox.close()
    failures = 1 if method in ("start", "close") else 20
    assert len(said) == 2
    assert "ConnectionError: refused" in said[0]
    assert f"missed {failures} calls ({failures} failed, 0 found no room)" in said[1]


def test_hanging_tracker_is_dropped_not_waited_for() -> None:
    """Catches a queue that grows without limit, and an end of run that waits for ever."""
    said: list[str] = []
    hangs = threading.Event()
    outbox = Outbox(Kept(waits=hangs), room=5, patience_seconds=0.2, warn=said.append)
    outbox.start({})
    for step in range(100):
        outbox.log({"a": 1.0}, step)
    began = time.monotonic()
    outbox.close()
    assert time.monotonic() - began < 20
    assert any("5 calls behind" in line for line in said)
    assert any("did not finish within 0.2 s" in line for line in said)
    hangs.set()


def test_thread_that_hangs_takes_nothing_of_the_next_run() -> None:
    """Catches calls of a second run that the stuck thread of the first one swallows."""
    hangs = threading.Event()
    kept = Kept(waits=hangs)
    outbox = Outbox(kept, patience_seconds=0.1, warn=lambda text: None)
    outbox.start({"run": 1})
    outbox.log({"a": 1.0}, 1)
    outbox.close()
    kept.waits = None
    outbox.start({"run": 2})
    outbox.log({"a": 2.0}, 2)
    outbox._patience_seconds = 10.0
    outbox.close()
    second = kept.calls[kept.calls.index(("start", {"run": 2})) :]
    hangs.set()
    assert [call[0] for call in second[:3]] == ["start", "log", "close"]


def test_one_that_hangs_holds_up_no_other() -> None:
    """Catches several trackers on one thread."""
    hangs, good = threading.Event(), Kept()
    group = Trackers([Kept(waits=hangs), good])
    group.start({})
    for step in range(3):
        group.log({"a": 1.0}, step)
    deadline = time.monotonic() + 20
    while len(good.calls) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    hangs.set()
    group.close()
    assert [call[0] for call in good.calls] == ["start", "log", "log", "log", "close"]


def test_warning_as_error_does_not_end_the_thread() -> None:
    """Catches a user who turns warnings into errors and so loses everything after the first failure."""
    kept = Kept(fails="artifact")

    def strict(text: str) -> None:
        raise RuntimeError(text)

    outbox = Outbox(kept, warn=strict)
    outbox.start({})
    outbox.artifact("a", np.ones(1), 0)
    outbox.log({"a": 1.0}, 1)
    outbox.close()
    assert ("log", {"a": 1.0}, 1) in kept.calls


@pytest.mark.parametrize("given", [Kept, print, "runs/a", [Kept(), 3]])
def test_something_else_is_refused(given: Any) -> None:
    """Catches a path or a class given for a tracker, noticed only when the run is over."""
    with pytest.raises(TypeError, match=r"a tracker has start\(config\)"):
        as_group(given)


def test_group_of_one_and_none() -> None:
    """Catches no tracker becoming a group that starts threads."""
    assert as_group(None) is None
    kept = Kept()
    assert as_tracker(kept) is kept
    assert isinstance(as_group(kept), Trackers)
