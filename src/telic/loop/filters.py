"""Filters: which firings of an event a handler answers to, as data.

Counts start at 1. Static filters know when they fire next, so that the loop knows how far it can run without the
host. Combine them with ``&``, ``|`` and ``~``.
"""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telic.loop.state import LoopState

_SEARCH = 4096
"""How many candidates a conjunction is searched for; beyond, it reports an earlier count, which is always safe."""


@dataclass(frozen=True)
class Firing:
    """One firing, as a filter sees it.

    Attributes:
      count: Firings of this event over the run, this one included.
      epoch_count: Firings of this event in this epoch, this one included.
      is_last: Whether this is known to be the event's last firing of the run.
      state: The loop state.
      seconds: Monotonic time, the same on every process.
      event: The event's name.
    """

    count: int
    epoch_count: int
    is_last: bool
    state: "LoopState"
    seconds: float
    event: str


class Filter(abc.ABC):
    """A condition on firings."""

    @abc.abstractmethod
    def fires(self, firing: Firing) -> bool:
        """Say whether the handler runs at this firing."""

    @abc.abstractmethod
    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        """Give the first count above `count` at which this may fire; None for never.

        Args:
          count: Firings so far over the run.
          epoch_count: Firings so far in this epoch; None means the same as `count`.
        """

    @property
    def uses_last(self) -> bool:
        """Whether the loop must know that a firing is the run's last."""
        return False

    @property
    def is_static(self) -> bool:
        """Whether counts alone decide: not what a state holds, nor the clock."""
        return True

    def fresh(self) -> "Filter":
        """Give a filter for one handler and one run: itself, unless it remembers anything."""
        return self

    def __and__(self, other: "Filter") -> "Filter":
        return _Both(self, as_filter(other))

    def __or__(self, other: "Filter") -> "Filter":
        return _Either(self, as_filter(other))

    def __invert__(self) -> "Filter":
        return _Not(self)


def as_filter(value: Any) -> Filter:
    """Check that a value is a filter.

    Raises:
      TypeError: It is not; a bare function is told about `when`.
    """
    if isinstance(value, Filter):
        return value
    hint = "; wrap a function of the state as telic.when(fn)" if callable(value) else ""
    raise TypeError(
        f"a filter is telic.always, first, last, every(n), once(n), before(n), after(n), every_seconds(s), when(fn), "
        f"or a combination with & | ~, got {value!r}{hint}"
    )


@dataclass(frozen=True)
class _Always(Filter):
    def __repr__(self) -> str:
        return "always"

    def fires(self, firing: Firing) -> bool:
        return True

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        return count + 1


@dataclass(frozen=True)
class _AtHand(Filter):
    def __repr__(self) -> str:
        return "at_hand"

    def fires(self, firing: Firing) -> bool:
        return True

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        return None

    @property
    def is_static(self) -> bool:
        return False


@dataclass(frozen=True)
class _Last(Filter):
    def __repr__(self) -> str:
        return "last"

    def fires(self, firing: Firing) -> bool:
        return firing.is_last

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        # The loop ends its groups at the end of the run, so the last firing is never inside one.
        return None

    @property
    def uses_last(self) -> bool:
        return True


@dataclass(frozen=True)
class _Every(Filter):
    n: int
    first: bool = False
    per_epoch: bool = False

    def __repr__(self) -> str:
        return f"every({self.n}{', first=True' if self.first else ''}{_per_epoch(self)})"

    def fires(self, firing: Firing) -> bool:
        count = firing.epoch_count if self.per_epoch else firing.count
        return (count - 1 if self.first else count) % self.n == 0

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        own = epoch_count if self.per_epoch and epoch_count is not None else count
        offset = 1 if self.first else 0
        following = ((own - offset) // self.n + 1) * self.n + offset
        return count + following - own


@dataclass(frozen=True)
class _Range(Filter):
    low: int
    high: int | None
    per_epoch: bool = False

    def __repr__(self) -> str:
        if self.high is None:
            return f"after({self.low - 1}{_per_epoch(self)})"
        if self.low == self.high:
            return "first" if self.low == 1 and not self.per_epoch else f"once({self.low}{_per_epoch(self)})"
        return f"before({self.high + 1}{_per_epoch(self)})"

    def fires(self, firing: Firing) -> bool:
        count = firing.epoch_count if self.per_epoch else firing.count
        return self.low <= count and (self.high is None or count <= self.high)

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        own = epoch_count if self.per_epoch and epoch_count is not None else count
        following = max(own + 1, self.low)
        if self.high is not None and following > self.high:
            return None
        return count + following - own


@dataclass(frozen=True, eq=False)
class _EverySeconds(Filter):
    seconds: float
    # When it last fired, by event. On the host: a run that resumes starts its clock anew.
    fired: dict[str, float] = field(default_factory=dict[str, float], repr=False)

    def __repr__(self) -> str:
        return f"every_seconds({self.seconds:g})"

    def fires(self, firing: Firing) -> bool:
        since = self.fired.setdefault(firing.event, firing.seconds)
        if firing.seconds - since < self.seconds:
            return False
        self.fired[firing.event] = firing.seconds
        return True

    @property
    def is_static(self) -> bool:
        return False

    def fresh(self) -> Filter:
        return _EverySeconds(self.seconds)

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        return count + 1


@dataclass(frozen=True, eq=False)
class _When(Filter):
    fn: Callable[["LoopState"], Any]

    def __repr__(self) -> str:
        return f"when({getattr(self.fn, '__qualname__', self.fn)})"

    def fires(self, firing: Firing) -> bool:
        return bool(self.fn(firing.state))

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        return count + 1

    @property
    def is_static(self) -> bool:
        return False


@dataclass(frozen=True)
class _Pair(Filter):
    left: Filter
    right: Filter

    @property
    def uses_last(self) -> bool:
        return self.left.uses_last or self.right.uses_last

    @property
    def is_static(self) -> bool:
        return self.left.is_static and self.right.is_static

    def fresh(self) -> Filter:
        return type(self)(self.left.fresh(), self.right.fresh())


@dataclass(frozen=True)
class _Both(_Pair):
    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"

    def fires(self, firing: Firing) -> bool:
        # Both sides are asked, so that a clock on one side is read whatever the other says.
        left, right = self.left.fires(firing), self.right.fires(firing)
        return left and right

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        own = count if epoch_count is None else epoch_count
        at = count
        for _ in range(_SEARCH):
            shift = at - count
            left = self.left.next_fire(at, own + shift)
            right = self.right.next_fire(at, own + shift)
            if left is None or right is None:
                return None
            if left == right:
                return left
            at = max(left, right) - 1
        return at + 1


@dataclass(frozen=True)
class _Either(_Pair):
    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"

    def fires(self, firing: Firing) -> bool:
        left, right = self.left.fires(firing), self.right.fires(firing)
        return left or right

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        both = [f.next_fire(count, epoch_count) for f in (self.left, self.right)]
        return min((n for n in both if n is not None), default=None)


@dataclass(frozen=True)
class _Not(Filter):
    inner: Filter

    def __repr__(self) -> str:
        return f"~{self.inner!r}"

    def fires(self, firing: Firing) -> bool:
        return not self.inner.fires(firing)

    def next_fire(self, count: int, epoch_count: int | None = None) -> int | None:
        return count + 1

    @property
    def uses_last(self) -> bool:
        return self.inner.uses_last

    @property
    def is_static(self) -> bool:
        return self.inner.is_static

    def fresh(self) -> Filter:
        return _Not(self.inner.fresh())


def _per_epoch(of: "_Every | _Range") -> str:
    return ", per_epoch=True" if of.per_epoch else ""


def _positive(name: str, n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{name} takes a whole number of firings, got {n!r}")
    if n < 1:
        raise ValueError(f"{name} counts from 1, got {n}")
    return n


always: Filter = _Always()
"""Fires every time."""

at_hand: Filter = _AtHand()
"""Fires wherever the host is anyway, between two dispatches: for displays, which need no firing in particular."""

first: Filter = _Range(1, 1)
"""Fires at the first firing of the run."""

last: Filter = _Last()
"""Fires at the last firing of the run, when the run ends as planned."""


def every(n: int, *, first: bool = False, per_epoch: bool = False) -> Filter:
    """Fire at n, 2n, 3n, ...

    Args:
      n: Period, in firings of the event.
      first: Fire at 1, n+1, 2n+1, ... instead.
      per_epoch: Count from the start of each epoch.
    """
    return _Every(_positive("every", n), first, per_epoch)


def once(n: int, *, per_epoch: bool = False) -> Filter:
    """Fire at the n-th firing only."""
    n = _positive("once", n)
    return _Range(n, n, per_epoch)


def before(n: int, *, per_epoch: bool = False) -> Filter:
    """Fire at every firing before the n-th."""
    return _Range(1, _positive("before", n) - 1, per_epoch)


def after(n: int, *, per_epoch: bool = False) -> Filter:
    """Fire at every firing after the n-th."""
    return _Range(_positive("after", n) + 1, None, per_epoch)


def every_seconds(seconds: float) -> Filter:
    """Fire when at least this many seconds have passed since it last fired, or since the event's first firing."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise TypeError(f"every_seconds takes a number of seconds, got {seconds!r}")
    if not seconds > 0:
        raise ValueError(f"every_seconds takes a positive number of seconds, got {seconds!r}")
    return _EverySeconds(float(seconds))


def when(fn: Callable[["LoopState"], Any]) -> Filter:
    """Fire when a function of the loop state is true. The host must look at every firing, so nothing is fused."""
    if not callable(fn):
        raise TypeError(f"when takes a function of the loop state, got {fn!r}")
    return _When(fn)
