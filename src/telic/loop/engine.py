"""The run: a nested reduction over epochs and batches that fires events.

It knows when; the driver knows how. Everything that computes, places or stores stands behind a port.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from telic.errors import DataError, Preempted
from telic.loop import events as ev
from telic.loop.attachments import Attachment, Plan
from telic.loop.cursor import open_slot, owes_step
from telic.loop.filters import Firing
from telic.loop.handling import Handling
from telic.loop.ports import Agree, Batches, Driver, Feed, Keeper, Source, View
from telic.loop.reading import OneByOne
from telic.loop.state import LoopState, Metrics, scalars
from telic.loop.status import CONTINUE, HALT_LOOP, Status
from telic.types import Batch

_log = logging.getLogger("telic.loop")


@dataclass
class Engine:
    """One run of a loop.

    Attributes:
      plan: Handlers.
      driver: Runs the compiled step.
      source: Gives batches.
      state: The state handlers see; changed in place.
      period: Attempts per window.
      clock: Monotonic seconds.
      agree: One value for all processes.
      feed: Reads the source; None reads it one batch at a time.
      plans: The step wants to see all batches of a window before the first of them runs.
      leftover: What becomes of batches read ahead when an epoch is halted: "drop" where each epoch reads the data from
        its beginning, "return" where the source goes back to the last batch used, "keep" where it cannot.
      midway: The first epoch was begun by the run that this one continues: it goes on where that stood.
      debug: Log each event with what its handlers answered, how long they took, and what keeps iterations apart.
      keeper: Saves the run between iterations and between epochs, and may end it there.
      events: Events that handlers may fire, beside those of the loop.
    """

    plan: Plan
    driver: Driver
    source: Source
    state: LoopState
    period: int
    clock: Callable[[], float]
    agree: Agree
    feed: Feed | None = None
    plans: bool = False
    leftover: Literal["drop", "return", "keep"] = "drop"
    midway: bool = False
    debug: bool = False
    keeper: Keeper | None = None
    events: tuple[str, ...] = ()
    _ahead: deque[Batches] = field(default_factory=deque[Batches])
    _feed: Feed = field(init=False)
    _handling: Handling = field(init=False)
    _probes: tuple[Attachment, ...] = ()
    _begun: bool = False
    _slot: int = 0
    _uses_last: bool = False
    _starts_last: bool = False
    _shows: bool = False
    _ended: bool = False
    _window: Any = None

    def __post_init__(self) -> None:
        if self.midway:
            self._slot = open_slot(self.state.counts, self.period)
        self._feed = OneByOne(self.source) if self.feed is None else self.feed
        # Filters that remember do so for one handler of one run.
        self.plan = Plan(tuple(replace(a, filter=a.filter.fresh()) for a in self.plan.attachments))
        self._handling = Handling(
            self.plan, self.driver, self.state, self.clock, self.agree, events=self.events, debug=self.debug
        )
        self._probes = tuple(a for a in self.plan.of(ev.ITERATION_COMPLETED) if a.probe is not None)
        self._uses_last = any(a.filter.uses_last for a in self.plan.attachments)
        # Whether a batch is the last must be known before it starts, so nothing is read past it.
        self._starts_last = any(a.filter.uses_last for a in self.plan.of(ev.ITERATION_STARTED))
        self._shows = any(
            self.plan.of(event) for event in (ev.ITERATION_STARTED, ev.ITERATION_COMPLETED, ev.STEP_COMPLETED)
        )

    # -- the run -------------------------------------------------------------------------------------------------

    def stream(self) -> Iterator[LoopState]:
        """Run, giving the state after each epoch."""
        state = self.state
        state.status = None
        if self.debug:
            self._handling.tell_what_keeps_apart(self.period)
        try:
            status = self._fire(ev.STARTED)
            while status is CONTINUE and self._may_start_epoch():
                status = self._epoch()
                if status is not HALT_LOOP and state.max_steps is None:
                    state.epoch += 1
                    state.iteration = 0
                    state.counts.start_epoch()
                    status = CONTINUE
                shown = state.step_state = self.driver.step_state
                yield state
                if state.step_state is not shown:
                    self.driver.step_state = state.step_state
                if status is CONTINUE and state.max_steps is None:
                    self._keep(closed=True)
            state.status = ev.COMPLETED if status is CONTINUE else ev.HALTED
            self.driver.check(wait=True)
        except (KeyboardInterrupt, Preempted):
            state.status = ev.INTERRUPTED
            state.step_state = self.driver.step_state
            self._fire(ev.INTERRUPTED)
            raise
        state.step_state = self.driver.step_state
        self._fire(state.status)

    def _may_start_epoch(self) -> bool:
        state = self.state
        if state.max_steps is not None:
            # The steps of a run are one stream and one epoch, which its end or a halt closes.
            return state.steps < state.max_steps
        return state.max_epoch is None or state.epoch < state.max_epoch

    def _epoch(self) -> Status:
        """Run one epoch to its end or halt, and record it."""
        state = self.state
        began = self.clock()
        self._ended = False
        if self._begun:
            self._begin_reading()
        self._begun = True
        if self.midway:
            self.midway = False
            status = self._catch_up()
        else:
            state.metrics = Metrics()
            status = self._fire(ev.EPOCH_STARTED)
        while status is CONTINUE and self._wants_more():
            batches = self._read()
            if batches is None:
                if state.max_steps is not None:
                    raise DataError(
                        f"the data ended after {state.steps} of {state.max_steps} steps, and an iterator cannot be "
                        "read again; pass a list, a Dataset or a function of the epoch, or ask for fewer steps"
                    )
                break
            status = self._iterate(batches)
        if state.counts.epoch[ev.ITERATION_COMPLETED]:
            # An epoch that was halted before its first batch has no metrics: nothing was measured.
            self._show_metrics()
        if self._slot:
            self.driver.flush()
            self._slot = 0
            planned = status is CONTINUE and self._in_last_epoch()
            status = max(status, self._fire(ev.STEP_COMPLETED, is_last=planned))
        self.driver.check(wait=True)
        halted = status is not CONTINUE
        if not halted:
            answer = self._fire(ev.EPOCH_COMPLETED)
            halted, status = answer is not CONTINUE, answer
        if halted:
            status = max(status, self._fire(ev.EPOCH_HALTED))
        state.history[state.epoch] = scalars(state.metrics)
        state.times[state.epoch] = self.clock() - began
        self.driver.reset("epoch")
        return status

    def _catch_up(self) -> Status:
        """Go on in an epoch that an earlier run began: fire what was still due when its state was taken."""
        state = self.state
        self._show_metrics()
        if not owes_step(state.counts, self.period):
            return CONTINUE
        return self._fire(ev.STEP_COMPLETED, is_last=state.max_steps is not None and state.steps + 1 == state.max_steps)

    def _begin_reading(self) -> None:
        """Start an epoch of the data, and deal with batches that the last one read ahead and did not use."""
        state, keep = self.state, self.leftover == "keep"
        unused = bool(self._ahead)
        if not keep:
            while self._ahead:
                self._ahead.popleft().release()
        self._feed.begin(
            state.epoch,
            continuous=state.max_steps is not None,
            back_to=state.position if self.leftover == "return" else None,
            keep=keep,
            unused=unused,
        )

    def _wants_more(self) -> bool:
        state = self.state
        if state.max_steps is not None and state.steps >= state.max_steps:
            return False
        return state.max_iteration is None or state.iteration < state.max_iteration

    def _left(self) -> int | None:
        """Give how many batches the epoch may still use, the one in hand among them; None where nothing limits it."""
        state = self.state
        if state.max_steps is not None:
            return (state.max_steps - state.steps) * self.period - self._slot
        return None if state.max_iteration is None else state.max_iteration - state.iteration

    def _read(self) -> Batches | None:
        """Give the next batches of the epoch, or None at its end."""
        return self._ahead.popleft() if self._look(1) else None

    def _look(self, count: int) -> bool:
        """Read until `count` batches are ahead; say whether the epoch has that many."""
        while (held := sum(map(len, self._ahead))) < count and not self._ended:
            batches = self._feed.next(self._view(), self._left())
            if batches is None:
                self._ended = True
            else:
                self._ahead.append(batches)
            self.state.waited = self._feed.waited
        return held >= count

    def _view(self) -> View:
        return View(self.driver.step_state, self.state.epoch, self.state.iteration)

    def _iterate(self, batches: Batches) -> Status:
        """Run one batch with its events, and with it as many more as need no host between them."""
        state = self.state
        batches, rest = batches.split(1)
        if rest is not None:
            self._ahead.appendleft(rest)
        is_last = self._uses_last and self._is_last()
        status = self._fire(ev.ITERATION_STARTED, is_last=is_last)
        if status is not CONTINUE:
            batches.release()
            return status
        if self.plans and (self._slot == 0 or self._window is None):
            self._plan(batches)
        batches = self._gather(batches)
        more = len(batches) - 1
        position = batches.position
        self._dispatch(batches)
        state.position = position
        if more:
            self._count(more)
            is_last = self._uses_last and self._is_last()
        state.total_iterations += 1
        self._slot = (self._slot + 1) % self.period
        if self._shows:
            self._show_metrics()
        status = self._fire(ev.ITERATION_COMPLETED, is_last=is_last)
        if self._slot == 0:
            last_step = is_last or (state.max_steps is not None and state.steps + 1 == state.max_steps)
            status = max(status, self._fire(ev.STEP_COMPLETED, is_last=last_step))
        state.iteration += 1
        self.driver.check(wait=False)
        if status is CONTINUE:
            self._keep(closed=False)
        return status

    def _dispatch(self, batches: Batches) -> None:
        """Run gathered batches in one dispatch; where a probe fires at the last of them, that one has its own."""
        state = self.state
        state.probes = {}
        began = self.clock() if self.debug else 0.0
        count, first = len(batches), state.iteration
        due = self._due_probes(count - 1) if self._probes else ()
        if due:
            if count > 1:
                before, last = batches.split(count - 1)
                self._advance(before, first)
                batches = batches if last is None else last
            at = first + count - 1
            state.probes = self.driver.probe(due, batches[-1], epoch=state.epoch, iteration=at, window=self._window)
        self._advance(batches, first + count - len(batches))
        if self.debug:
            seconds = self.clock() - began
            _log.info(
                "iterations %d to %d of epoch %d: given to the device in %.1f ms%s",
                first,
                first + count - 1,
                state.epoch,
                1e3 * seconds,
                f", with the probes {', '.join(due)}" if due else "",
                extra={"telic": {"iterations": count, "probes": due, "seconds": seconds}},
            )

    def _advance(self, batches: Batches, iteration: int) -> None:
        self.driver.advance(batches, epoch=self.state.epoch, iteration=iteration, window=self._window)

    def _due_probes(self, more: int) -> tuple[str, ...]:
        """Name the probes that fire at the iteration `more` after the one in hand; their filters read counts alone."""
        counts = self.state.counts
        firing = Firing(
            count=counts.total[ev.ITERATION_COMPLETED] + more + 1,
            epoch_count=counts.epoch[ev.ITERATION_COMPLETED] + more + 1,
            is_last=self._uses_last and self._is_last(more),
            state=self.state,
            seconds=0.0,
            event=ev.ITERATION_COMPLETED,
        )
        return tuple(a.probe for a in self._probes if a.probe is not None and a.filter.fires(firing))

    def _keep(self, *, closed: bool) -> None:
        """Let the keeper save the run here, if it wants to; nothing is under way."""
        state = self.state
        if self.keeper is None or not self.keeper.wants(state, closed=closed):
            return
        # A state that may not go on is not worth keeping.
        self.driver.check(wait=True)
        state.step_state = self.driver.step_state
        upcoming: Batch | None = None
        if not closed and self.source.read_ahead and self._wants_more() and self._look(1):
            upcoming = self._ahead[0][0]
        self.keeper.keep(state, upcoming)

    def _gather(self, batches: Batches) -> Batches:
        """Give the batches that may run in one dispatch with one that has started."""
        state = self.state
        width = self.driver.width if self.source.read_ahead and not self._starts_last else 1
        if width == 1:
            return batches
        width = min(width, self.plan.horizon(state.counts, self.period, self._slot))
        if self.plans:
            width = min(width, self.period - self._slot)
        left = self._left()
        if left is not None:
            width = min(width, left)
        if self._ahead:
            if width > 1:
                self._take_ahead(batches, width - 1)
        else:
            self._feed.grow(batches, width, self._view())
        return batches

    def _take_ahead(self, batches: Batches, count: int) -> None:
        """Join up to `count` of the batches that are ahead to those in hand, where one dispatch can run them."""
        following, rest = self._ahead.popleft().split(count)
        if rest is not None:
            self._ahead.appendleft(rest)
        if not batches.join(following):
            self._ahead.appendleft(following)

    def _plan(self, batches: Batches) -> None:
        """Let the step see the whole window before it begins."""
        count = self.period - self._slot
        left = self._left()
        if left is not None:
            count = min(count, left)
        self._look(count - 1)
        seen = [batches[0], *(batch for run in self._ahead for batch in _batches_of(run))]
        self._window = self.driver.plan(seen[:count])

    def _count(self, more: int) -> None:
        """Count the events of all but the last batch of a group; no handler answers to any of them."""
        state, counts = self.state, self.state.counts
        windows, self._slot = divmod(self._slot + more, self.period)
        counts.add(ev.ITERATION_COMPLETED, more)
        counts.add(ev.STEP_COMPLETED, windows)
        counts.add(ev.ITERATION_STARTED, more)
        state.iteration += more
        state.total_iterations += more

    def _is_last(self, more: int = 0) -> bool:
        """Whether the batch in hand, or the one `more` after it, is the last of the run, as far as can be known."""
        state = self.state
        if state.max_steps is not None:
            windows, slot = divmod(self._slot + more + 1, self.period)
            return slot == 0 and state.steps + windows == state.max_steps
        if not self._in_last_epoch():
            return False
        if state.max_iteration is not None and state.iteration + more + 1 >= state.max_iteration:
            return True
        return self.source.read_ahead and not self._look(1)

    def _in_last_epoch(self) -> bool:
        state = self.state
        if state.max_steps is not None:
            return True
        return state.max_epoch is not None and state.epoch + 1 >= state.max_epoch

    def _show_metrics(self) -> None:
        added = self.state.metrics.added
        self.state.metrics = Metrics(self.driver.compute("epoch"), self.driver.metric_names)
        self.state.metrics.added = added

    def _fire(self, event: str, *, is_last: bool | None = None) -> Status:
        """Count a firing and run its handlers in order; give the severest answer."""
        if is_last is None:
            is_last = event not in (ev.EPOCH_STARTED, ev.EPOCH_COMPLETED, ev.EPOCH_HALTED) or self._in_last_epoch()
        return self._handling.fire(event, is_last=is_last)


def _batches_of(batches: Batches) -> Iterator[Batch]:
    return (batches[i] for i in range(len(batches)))


def check_totals(epochs: int | None, steps: int | None, iterations: int | None) -> None:
    """Check a run's limits.

    Raises:
      TypeError: One is no whole number.
      ValueError: One is negative, or two contradict each other.
    """
    for name, value in (("epochs", epochs), ("steps", steps), ("iterations", iterations)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < (1 if name == "iterations" else 0):
            least = "at least 1 (None means no limit)" if name == "iterations" else "0 or more"
            raise ValueError(f"{name} must be {least}, got {value}")
    if epochs is not None and steps is not None:
        raise ValueError(f"give epochs= or steps=, not both: got epochs={epochs} and steps={steps}")
    if steps is not None and iterations is not None:
        raise ValueError(
            f"iterations= limits the batches of an epoch and steps= the updates of the run: got {iterations} and "
            f"{steps}; give one"
        )
