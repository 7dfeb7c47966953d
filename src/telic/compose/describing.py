"""What a loop and a trainer are, in words that fit a screen: their repr, and the drawing of a loop."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from telic.compose.recording import seed_of
from telic.loop import events as ev
from telic.loop.attachments import Attachment
from telic.loop.filters import always

_NAMED = 8
"""Names of a list that are shown; the others are counted."""

_TREE: tuple[tuple[int, str, str], ...] = (
    (0, ev.STARTED, ""),
    (0, "", "each epoch"),
    (1, ev.EPOCH_STARTED, ""),
    (1, "", "each batch"),
    (2, ev.ITERATION_STARTED, ""),
    (2, "", "the step"),
    (2, ev.ITERATION_COMPLETED, ""),
    (2, ev.STEP_COMPLETED, "where a window closes"),
    (1, ev.EPOCH_COMPLETED, ""),
    (1, ev.EPOCH_HALTED, "instead, where a handler halted the epoch"),
    (0, ev.COMPLETED, "or one of the next two"),
    (0, ev.HALTED, ""),
    (0, ev.INTERRUPTED, ""),
)
"""Events as a run fires them: depth, name, and a remark; a place without a name is what happens between them."""


def named(names: Iterable[str]) -> str:
    """Give a list of names, the first few of a long one."""
    found = list(names)
    more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"[{', '.join(found[:_NAMED])}{more}]"


def step_name(program: Any) -> str:
    """Name a step: its class and its objective, or the function that it is."""
    objective = getattr(program, "objective", None)
    if objective is not None:
        period = getattr(program, "period", 1)
        times = f", {period} microbatches an update" if period > 1 else ""
        return f"{type(program).__name__} of {type(objective).__name__}{times}"
    fn = getattr(program, "fn", program)
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)


def loop_line(program: Any, metrics: Iterable[str], attachments: Sequence[Attachment]) -> str:
    """Give the repr of a loop."""
    handlers: dict[str, int] = {}
    for a in attachments:
        handlers[a.event] = handlers.get(a.event, 0) + 1
    return f"Loop({step_name(program)}, metrics={named(metrics)}, handlers={handlers})"


def trainer_line(objective: Any, key: Any, options: Mapping[str, tuple[Any, Any]]) -> str:
    """Give the repr of a trainer: its objective, its seed, and what is not as usual.

    Args:
      objective: The objective.
      key: The root key.
      options: By name the value and the usual one.
    """
    said = [f"{name}={_short(value)}" for name, (value, usual) in options.items() if value != usual]
    return f"Trainer({', '.join([type(objective).__name__, f'key={seed_of(key)}', *said])})"


def drawing(
    program: Any,
    metrics: Mapping[str, Any],
    probes: Iterable[str],
    attachments: Sequence[Attachment],
    events: Sequence[str],
) -> str:
    """Draw a loop: its metrics, and its events in the order a run fires them, each with its handlers and their filters.

    Args:
      program: The step.
      metrics: By name.
      probes: Names.
      attachments: Handlers in the order they were attached.
      events: Names of events that the user registered.
    """
    lines = [f"Loop: {step_name(program)}", f"metrics: {', '.join(metrics) or 'none of its own'}"]
    if found := list(probes):
        lines.append(f"probes: {', '.join(found)}")
    width = max([len(a.name) for a in attachments], default=0)
    for depth, event, remark in (*_TREE, *((0, event, "fired by handlers") for event in events)):
        rail = "│  " * depth
        if not event:
            lines.append(f"{rail}├─ {remark}")
            continue
        own = sorted((a for a in attachments if a.event == event), key=lambda a: a.late)
        if not own and remark and event not in events:
            # What nobody listens to and is not always there is left out.
            continue
        lines.append(f"{rail}├─ {event}" + (f"  ({remark})" if remark else ""))
        for a in own:
            filtered = "" if a.filter is always else repr(a.filter)
            lines.append(f"{rail}│     {a.name:<{width}}  {filtered}{'  after the others' if a.late else ''}".rstrip())
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"<{type(value).__name__}>"
