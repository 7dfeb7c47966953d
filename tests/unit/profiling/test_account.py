"""The account of a run's time: every moment in one part, so that the parts add up."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telic.profiling import PARTS, Account


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_part_inside_another_is_not_counted_twice() -> None:
    """Catches handlers that are charged for the device they wait for, and sums above the wall time."""
    clock = Clock()
    account = Account(clock)
    clock.now = 1
    account.rest("loop")
    with account.part("handlers/log"):
        clock.now = 3
        with account.part("device"):
            clock.now = 7
        clock.now = 8
    clock.now = 10
    seconds = account.seconds
    assert {name: spent for name, spent in seconds.items() if spent} == {
        "start": 1,
        "handlers": 3,
        "device": 4,
        "loop": 2,
    }
    assert account.details["handlers/log"] == 3
    assert sum(seconds.values()) == 10


@given(st.lists(st.tuples(st.sampled_from(["in", "out", "fail"]), st.sampled_from(PARTS), st.integers(1, 9))))
def test_the_parts_add_up_to_the_wall_time(moves: list[tuple[str, str, int]]) -> None:
    """Catches a second that is counted twice or lost when parts nest, end or are left by an error."""
    clock = Clock()
    account = Account(clock)
    open_parts = []
    for move, name, spent in moves:
        clock.now += spent
        if move == "in":
            part = account.part(name)
            part.__enter__()
            open_parts.append(part)
        elif open_parts:
            # "fail" leaves an outer part while the inner one is open, as an error between two calls does.
            index = 0 if move == "fail" else -1
            open_parts.pop(index).__exit__(None, None, None)
            del open_parts[index if index == 0 else len(open_parts) :]
    assert sum(account.seconds.values()) == clock.now
    assert all(spent >= 0 for spent in account.seconds.values())


def test_other_threads_are_not_counted() -> None:
    """Catches a feeding thread whose time is charged to the run, which would make the parts exceed the wall time."""
    clock = Clock()
    account = Account(clock)

    def feed() -> None:
        with account.part("data"):
            clock.now += 5

    thread = threading.Thread(target=feed)
    thread.start()
    thread.join()
    assert account.seconds["data"] == 0
    assert account.seconds["start"] == 5


def test_an_unknown_part_is_refused() -> None:
    """Catches a misspelt part whose time would vanish from the table."""
    with pytest.raises(ValueError, match=r"'dat' is no part .* data"), Account().part("dat"):
        pass
