"""Filters are data: what they let through and what they announce, against counting by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import telic
from telic.loop.filters import Filter, Firing


@dataclass(frozen=True)
class Known:
    """A filter beside what it should do: a predicate of (count, epoch_count, is_last)."""

    filter: Filter
    fires: Callable[[int, int, bool], bool]
    exact: bool = True
    """Whether `next_fire` must give the very next firing, and not merely none after it."""


NUMBERS = st.integers(1, 7)


@st.composite
def plain(draw: Any) -> Known:
    n, per_epoch = draw(NUMBERS), draw(st.booleans())

    def own(count: int, epoch_count: int) -> int:
        return epoch_count if per_epoch else count

    match draw(st.sampled_from(["always", "first", "last", "every", "every_first", "once", "before", "after"])):
        case "always":
            return Known(telic.always, lambda c, e, last: True)
        case "first":
            return Known(telic.first, lambda c, e, last: c == 1)
        case "last":
            return Known(telic.last, lambda c, e, last: last)
        case "every":
            return Known(telic.every(n, per_epoch=per_epoch), lambda c, e, last: own(c, e) % n == 0)
        case "every_first":
            return Known(
                telic.every(n, first=True, per_epoch=per_epoch), lambda c, e, last: own(c, e) in range(1, 1000, n)
            )
        case "once":
            return Known(telic.once(n, per_epoch=per_epoch), lambda c, e, last: own(c, e) == n)
        case "before":
            return Known(telic.before(n, per_epoch=per_epoch), lambda c, e, last: own(c, e) < n)
        case _:
            return Known(telic.after(n, per_epoch=per_epoch), lambda c, e, last: own(c, e) > n)


def combined(inner: st.SearchStrategy[Known]) -> st.SearchStrategy[Known]:
    def both(a: Known, b: Known) -> Known:
        return Known(
            a.filter & b.filter, lambda c, e, last: a.fires(c, e, last) and b.fires(c, e, last), a.exact and b.exact
        )

    def either(a: Known, b: Known) -> Known:
        return Known(
            a.filter | b.filter, lambda c, e, last: a.fires(c, e, last) or b.fires(c, e, last), a.exact and b.exact
        )

    def inverted(a: Known) -> Known:
        return Known(~a.filter, lambda c, e, last: not a.fires(c, e, last), exact=False)

    return st.one_of(st.builds(both, inner, inner), st.builds(either, inner, inner), st.builds(inverted, inner))


FILTERS = st.recursive(plain(), combined, max_leaves=4)

EPOCHS, LENGTH = 3, 60
"""Longer than the least common multiple of what the filters count, so that a conjunction fires in every epoch."""


def firing(count: int, epoch_count: int, *, is_last: bool = False, seconds: float = 0.0, event: str = "x") -> Firing:
    return Firing(count, epoch_count, is_last, telic.LoopState(), seconds, event)


@given(FILTERS)
def test_a_filter_fires_when_it_says(known: Known) -> None:
    """A count off by one, a per-epoch count taken for the run's, `&` that asks only one side."""
    for epoch in range(EPOCHS):
        for i in range(1, LENGTH + 1):
            count, is_last = epoch * LENGTH + i, epoch == EPOCHS - 1 and i == LENGTH
            assert known.filter.fires(firing(count, i, is_last=is_last)) == known.fires(count, i, is_last)


@given(FILTERS, st.integers(0, EPOCHS - 1), st.integers(0, LENGTH))
def test_next_fire_is_never_late_and_exact_without_not(known: Known, epoch: int, done: int) -> None:
    """A group of iterations run past a firing: a handler that is late, or never called.

    Groups end with the epoch and with the run, so that only firings of this epoch, and not the run's last, count.
    """
    count = epoch * LENGTH + done
    true = next(
        (epoch * LENGTH + i for i in range(done + 1, LENGTH + 1) if known.fires(epoch * LENGTH + i, i, False)), None
    )
    announced = known.filter.next_fire(count, done)
    if true is not None:
        assert announced is not None
        assert count < announced <= true
    if known.exact and true is not None:
        assert announced == true
    if known.exact and true is None:
        assert announced is None or announced > (epoch + 1) * LENGTH


@given(st.floats(0.1, 10), st.lists(st.floats(0, 5), min_size=1, max_size=30))
def test_every_seconds_fires_when_that_long_has_passed(period: float, gaps: list[float]) -> None:
    """A clock that starts anew at each firing of the event, so that the handler never runs."""
    rule = telic.every_seconds(period).fresh()
    now, since = 0.0, 0.0
    assert not rule.fires(firing(1, 1, seconds=0.0))
    for i, gap in enumerate(gaps, start=2):
        now += gap
        expected = now - since >= period
        assert rule.fires(firing(i, i, seconds=now)) == expected
        since = now if expected else since


def test_every_seconds_keeps_a_clock_per_handler() -> None:
    """B58: one filter value on two handlers shares one memory, and the second handler never runs."""
    rule = telic.every_seconds(1.0) | telic.once(100)
    a, b = rule.fresh(), rule.fresh()
    for one in (a, b):
        assert not one.fires(firing(1, 1, seconds=0.0))
    assert [one.fires(firing(2, 2, seconds=2.0)) for one in (a, b)] == [True, True]
    assert (~rule).fresh().fires(firing(1, 1, seconds=50.0))
    assert telic.every(3).fresh() == telic.every(3)


def test_every_1000_or_last_fires_at_the_end() -> None:
    """B48: "every 10,000" that misses the last iteration."""
    rule = telic.every(1000) | telic.last
    assert rule.uses_last
    assert rule.next_fire(0) == 1000
    assert rule.fires(firing(5, 5, is_last=True))
    assert not rule.fires(firing(5, 5))


def test_filters_are_values_that_compare_by_what_they_say() -> None:
    """A filter that cannot be compared or shown: a plan that cannot be read."""
    assert telic.every(3) & telic.last == telic.every(3) & telic.last
    assert telic.every(3) != telic.every(4)
    assert telic.first == telic.once(1)


@pytest.mark.parametrize("make", [telic.every, telic.once, telic.before, telic.after])
@pytest.mark.parametrize(
    ("bad", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError), ("2", TypeError)]
)
def test_a_period_that_is_no_count_is_refused_when_written(make: Any, bad: Any, error: type[Exception]) -> None:
    """B47: `every: 0` is an arithmetic error in the first batch, and a nonsense argument is silently always true."""
    with pytest.raises(error, match=f"{make.__name__}|{bad!r}"):
        make(bad)


@pytest.mark.parametrize(
    ("bad", "error"),
    [(0, ValueError), (-1.0, ValueError), (float("nan"), ValueError), (True, TypeError), ("1", TypeError)],
)
def test_seconds_that_are_no_duration_are_refused(bad: Any, error: type[Exception]) -> None:
    """B47: a period that never or always fires."""
    with pytest.raises(error, match="every_seconds"):
        telic.every_seconds(bad)


def test_a_function_is_no_filter_without_when() -> None:
    """B47: an arity nobody documents; the error says what to write."""
    with pytest.raises(TypeError, match=r"telic\.when\(fn\)"):
        telic.every(2) & (lambda state: True)  # pyright: ignore
    with pytest.raises(TypeError, match="function of the loop state"):
        telic.when(3)  # pyright: ignore
    assert telic.when(lambda state: state.epoch == 0).fires(firing(1, 1))
    assert telic.when(lambda state: state.epoch == 0).next_fire(41) == 42
