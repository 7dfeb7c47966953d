"""Watching one metric: what is an improvement, how long without one is too long, and what is done then."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from telic.errors import ContractError, closest
from telic.loop.ports import State

Mode = Literal["min", "max"]
"""Which direction is better."""

LOSSES = ("loss", "validation_loss")
"""The only metrics whose direction follows from their name."""


def as_mode(mode: object, metric: str, carried: Mode | None = None) -> Mode:
    """Give the direction of a metric: the one given, else the metric's own, else "min" for the loss.

    Args:
      mode: What the user gave: "min", "max" or None.
      metric: Name of the metric.
      carried: The metric's own direction, where it has one.
    Raises:
      ValueError: It is neither, or nothing says which: a name is never guessed from.
    """
    match mode:
        case "min":
            return "min"
        case "max":
            return "max"
        case None if carried is not None:
            return carried
        case None if metric in LOSSES:
            return "min"
        case None:
            raise ValueError(
                f"which direction of {metric!r} is better? Pass mode='min' or mode='max'; it is known by itself only "
                "for the loss and for metrics of telic.metrics that were attached before"
            )
        case _:
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")


def record_name(kind: str, metric: str | None, name: str | None, taken: Iterable[str]) -> str:
    """Give the unique name of a handler's record.

    Args:
      kind: What the handler is, such as "early_stop".
      metric: What it watches, or None.
      name: The user's own name, or None.
      taken: Names in use in this loop.
    Raises:
      ValueError: The user's own name is in use already.
    """
    taken = set(taken)
    if name is not None:
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise ValueError(f"a handler's name must be text, got {name!r}")
        if name in taken:
            raise ValueError(f"this loop has a handler named {name!r} already; give another name=")
        return name
    base = kind if metric is None else f"{kind}/{metric}"
    made, n = base, 1
    while made in taken:
        n += 1
        made = f"{base}#{n}"
    return made


def read_metric(state: State, metric: str, what: str) -> float | None:
    """Give a metric's present value as a float, or None when it is not there.

    Raises:
      ValueError: It is no scalar.
    """
    if metric not in state.metrics:
        return None
    value = state.metrics[metric]
    if np.ndim(value) != 0:
        raise ValueError(
            f"{what} watches {metric!r}, which is not a scalar (shape {np.shape(value)}); watch a mean of it"
        )
    return float(value)


def check_may_come(state: State, metric: str, record: str, awaits: Callable[[], bool] | None) -> None:
    """Raise unless an absent metric was there before or may still come.

    A metric that was seen once is waited for: validation need not run at each event, and a run that is continued in the
    middle of an epoch has none of it until it runs again.

    Raises:
      ContractError: It cannot come; the metrics that are there are named.
    """
    if record in state.handler_state:
        return
    validated = any(name.startswith("validation_") for name in state.metrics)
    if awaits is not None and not validated and awaits():
        return
    raise ContractError(
        f"{record} reads the metric {metric!r}, which is not there.{closest(metric, state.metrics)} At this event: "
        f"{', '.join(state.metrics) or 'none'}. Attach the metric, and attach validate before what reads its results"
    )


@dataclass(frozen=True, eq=False)
class Monitor:
    """Handler that acts when a metric has not improved for some events in a row.

    The record in `handler_state` is ``{"best", "best_epoch", "since_last_improvement", "cooldown"}``. `best` is the
    best value ever seen, also after the action; NaN and infinities are never best and count as no improvement. After
    the action the counter begins again.

    Args:
      metric: Name in `LoopState.metrics`.
      action: ``(state) -> answer``, a handler of its own.
      record: Unique name of the record.
      mode: Which direction is better; None with `improved` or `trigger`.
      improved: ``(current, best) -> bool`` instead of a mode.
      trigger: ``(current) -> bool`` instead of improvement: events where it holds are counted.
      patience: The action runs at this event, counted from 1, without improvement; 0 is the same as 1.
      min_delta: An improvement is at least more than this.
      cooldown: Events after an action that are not counted.
      awaits: Says whether an absent metric may still come; None means that it may not.
      on_best: Gives further entries of the record at each improvement.
    """

    metric: str
    action: Callable[[Any], Any]
    record: str
    mode: Mode | None = None
    improved: Callable[[float, float], Any] | None = None
    trigger: Callable[[float], Any] | None = None
    patience: int = 3
    min_delta: float = 0.0
    cooldown: int = 0
    awaits: Callable[[], bool] | None = None
    on_best: Callable[[Any], dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        what = self.record
        if not callable(self.action):
            raise TypeError(f"{what}: the action must be a function of the LoopState, got {self.action!r}")
        for name, value in (("patience", self.patience), ("cooldown", self.cooldown)):
            if isinstance(value, bool) or not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
                raise TypeError(f"{what}: {name} must be a whole number of events, got {value!r}")
            if value < 0:
                raise ValueError(f"{what}: {name} must be 0 or more, got {value}")
        if isinstance(self.min_delta, bool) or not isinstance(self.min_delta, int | float):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"{what}: min_delta must be a number, got {self.min_delta!r}")
        if not 0 <= self.min_delta < math.inf:
            raise ValueError(f"{what}: min_delta must be 0 or more, got {self.min_delta!r}")
        given = [name for name in ("mode", "improved", "trigger") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"{what}: give exactly one of mode, improved and trigger, got {' and '.join(given) or 'none'}"
            )
        if self.min_delta and self.mode is None:
            raise ValueError(f"{what}: min_delta belongs to mode; {given[0]} decides by itself")
        for name in ("improved", "trigger"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{what}: {name} must be a function, got {value!r}")

    def __call__(self, state: State) -> Any:
        """Look at the metric once, and act when it is time.

        Raises:
          ContractError: The metric does not exist; the known ones are named.
        """
        old: dict[str, Any] | None = state.handler_state.get(self.record)
        current = read_metric(state, self.metric, self.record)
        if current is None:
            check_may_come(state, self.metric, self.record, self.awaits)
            return None
        record = {"best": None, "best_epoch": None, "since_last_improvement": 0, "cooldown": 0, **(old or {})}
        acts = self._observe(record, current, state)
        # A new dictionary each time: states that were kept hold the old one.
        state.handler_state[self.record] = record
        return self.action(state) if acts else None

    def _observe(self, record: dict[str, Any], current: float, state: State) -> bool:
        """Bring the record up to date with one value; say whether to act."""
        if self._is_better(current, record["best"]):
            record |= {"best": current, "best_epoch": state.epoch, "since_last_improvement": 0}
            if self.on_best is not None:
                record |= self.on_best(state)
            counts = False
        else:
            counts = True
        if self.trigger is not None:
            counts = bool(self.trigger(current))
            if not counts:
                record["since_last_improvement"] = 0
        if record["cooldown"]:
            record["cooldown"] -= 1
            record["since_last_improvement"] = 0
            return False
        if not counts:
            return False
        record["since_last_improvement"] += 1
        if record["since_last_improvement"] < self.patience:
            return False
        record |= {"since_last_improvement": 0, "cooldown": self.cooldown}
        return True

    def _is_better(self, current: float, best: float | None) -> bool:
        if self.trigger is not None or not math.isfinite(current):
            return False
        if best is None:
            return True
        if self.improved is not None:
            return bool(self.improved(current, best))
        return current < best - self.min_delta if self.mode == "min" else current > best + self.min_delta
