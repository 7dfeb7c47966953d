"""Firings of events: which handlers answer, what they answer, and what their answers change."""

import logging
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from telic.errors import ContractError, TelicError, unknown_name
from telic.loop import events as ev
from telic.loop.attachments import Attachment, Plan
from telic.loop.filters import Firing
from telic.loop.ports import Agree, Driver
from telic.loop.state import LoopState
from telic.loop.status import CONTINUE, Status

_log = logging.getLogger("telic.loop")


@dataclass
class Handling:
    """The handlers of one run, and what happens when an event fires.

    Attributes:
      plan: Handlers.
      driver: Has the step's state, which a handler may replace.
      state: The state handlers see; changed in place.
      clock: Monotonic seconds.
      agree: One value for all processes.
      events: Events that handlers may fire, beside those of the loop.
      debug: Log each event with what its handlers answered and how long they took.
    """

    plan: Plan
    driver: Driver
    state: LoopState
    clock: Callable[[], float]
    agree: Agree
    events: tuple[str, ...] = ()
    debug: bool = False
    _handlers: dict[str, tuple[Attachment, ...]] = field(init=False)
    _calls: list[Attachment] = field(default_factory=list[Attachment])
    _fired: Status = CONTINUE

    def __post_init__(self) -> None:
        self._handlers = {event: self.plan.of(event) for event in (*ev.EVENTS, *self.events)}
        self.state.counts.register(self.events)

    def fire(self, event: str, *, is_last: bool) -> Status:
        """Count a firing and run its handlers in order; give the severest answer.

        Args:
          event: Name of the event.
          is_last: Whether it is the last firing of the run, as far as can be known.
        """
        state = self.state
        state.counts.add(event)
        handlers = self._handlers[event]
        if not handlers:
            return CONTINUE
        firing = Firing(
            count=state.counts.total[event],
            epoch_count=state.counts.epoch[event],
            is_last=is_last,
            state=state,
            seconds=self.clock() if all(a.filter.is_static for a in handlers) else self.agree(self.clock()),
            event=event,
        )
        status, fired = CONTINUE, False
        before = state.step_state = self.driver.step_state
        for attachment in handlers:
            if attachment.filter.fires(firing):
                began = self.clock() if self.debug else 0.0
                answer, fired = self._call(attachment), True
                status = max(status, answer)
                if self.debug:
                    self._tell(firing, attachment.name, answer, self.clock() - began)
        if self.debug and event not in (ev.ITERATION_STARTED, ev.ITERATION_COMPLETED):
            _log.info("%s #%d at epoch %d, iteration %d", event, firing.count, state.epoch, state.iteration)
        if state.step_state is not before:
            self._hand_over(event, handlers)
        # One process alone may be interrupted, and has nobody to agree with.
        return Status(self.agree(int(status))) if fired and event != ev.INTERRUPTED else status

    def _hand_over(self, event: str, handlers: Sequence[Attachment]) -> None:
        """Give the driver the step state that a handler put in place of its own."""
        try:
            self.driver.step_state = self.state.step_state
        except ContractError as error:
            error.add_note(f"given by a handler of event {event!r}: {', '.join(a.name for a in handlers)}")
            raise
        self.state.step_state = self.driver.step_state

    def _call(self, attachment: Attachment) -> Status:
        """Run a handler; give the severest of its answer and those to the events it fired."""
        outer, self._fired = self._fired, CONTINUE
        self._calls.append(attachment)
        self.state.firer = self._fire_custom
        try:
            return max(self._ask(attachment), self._fired)
        finally:
            self._fired = outer
            self._calls.pop()
            if not self._calls:
                self.state.firer = None

    def _fire_custom(self, event: str) -> Status:
        """Fire a registered event for the handler that is running.

        Raises:
          ValueError: The event is not registered, or one of the loop's own.
          TelicError: It is being handled already.
        """
        if event in ev.EVENTS:
            raise ValueError(f"{event!r} is fired by the loop itself; fire one you registered, or answer with a status")
        if event not in self.events:
            error = unknown_name("event", event, self.events)
            error.add_note("register it before the run: loop.register_event(name)")
            raise error
        if any(a.event == event for a in self._calls):
            raise TelicError(f"event {event!r} is being handled: its handlers may not fire it again")
        running = self._calls[-1]
        if self.state.step_state is not self.driver.step_state:
            self._hand_over(running.event, (running,))
        status = self.fire(event, is_last=False)
        self._fired = max(self._fired, status)
        return status

    def _tell(self, firing: Firing, handler: str, answer: Status, seconds: float) -> None:
        """Log one handler's answer, with the same as data in the record's `telic`."""
        state = self.state
        _log.info(
            "%s #%d: %s answered %s in %.1f ms",
            firing.event,
            firing.count,
            handler,
            answer.name,
            1e3 * seconds,
            extra={
                "telic": {
                    "event": firing.event,
                    "count": firing.count,
                    "epoch": state.epoch,
                    "iteration": state.iteration,
                    "handler": handler,
                    "answer": answer.name,
                    "seconds": seconds,
                }
            },
        )

    def tell_what_keeps_apart(self, period: int) -> None:
        """Log which handlers look at every firing inside an epoch, so that nothing is fused.

        Args:
          period: Iterations per window.
        """
        for event in (ev.ITERATION_STARTED, ev.ITERATION_COMPLETED, ev.STEP_COMPLETED):
            if event == ev.STEP_COMPLETED and period > 1:
                continue
            for a in self._handlers[event]:
                if all(a.filter.next_fire(n, n) == n + 1 for n in (0, 1, 2, 99, 10_000)):
                    _log.info(
                        "handler %s at %s keeps iterations from being fused: %s at every firing; give it a filter such "
                        "as telic.every(100) if it can do with fewer",
                        a.name,
                        event,
                        "it runs" if a.filter.is_static else "its filter must be asked",
                        extra={"telic": {"event": event, "handler": a.name}},
                    )

    def _ask(self, attachment: Attachment) -> Status:
        """Run a handler and take in its answer.

        Raises:
          ContractError: The answer is none of the allowed forms; handler and event are named.
        """
        state = self.state
        try:
            answer = attachment.handler(state)
        except StopIteration as error:
            # It would end the run's generator; a handler means something else by it.
            raise RuntimeError(
                f"handler {attachment.name} at event {attachment.event!r} raised StopIteration, epoch {state.epoch}, "
                f"iteration {state.iteration}: use next(iterator, default) in it, or "
                "return telic.HALT_LOOP to end the run"
            ) from error
        except Exception as error:
            error.add_note(
                f"raised by handler {attachment.name} at event {attachment.event!r}, epoch {state.epoch}, "
                f"iteration {state.iteration}"
            )
            if "deleted" in str(error):
                error.add_note(
                    "A LoopState is borrowed until its handler returns: its arrays are given to the next step. "
                    "Keep a copy with state.keep()."
                )
            raise
        match answer:
            case None:
                return CONTINUE
            case Status():
                return answer
            case LoopState():
                self._take(answer)
                return CONTINUE
            case (Status() as status, LoopState() as new):
                self._take(new)
                return status
            case _:
                raise ContractError(
                    f"handler {attachment.name} at event {attachment.event!r} must return None, a status "
                    f"(telic.CONTINUE, HALT_EPOCH, HALT_LOOP), a LoopState or (status, LoopState), got "
                    f"{reprlib.repr(answer)}"
                )

    def _take(self, new: LoopState) -> None:
        """Copy a handler's new state into the one everybody holds."""
        if new is self.state:
            return
        for name in new.__dataclass_fields__:
            # A kept copy cannot fire events; the one everybody holds goes on to.
            if name == "firer":
                continue
            setattr(self.state, name, getattr(new, name))
