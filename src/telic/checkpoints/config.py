"""Where a run's checkpoints go, which of them stay, and when one is written: a value."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from telic.checkpoints.files import Order
from telic.places import local


@dataclass(frozen=True)
class Checkpoints:
    """Say where a run saves itself, how often, and which of its checkpoints stay.

    A run that is given this continues from the newest whole checkpoint in the directory, whatever ended the last
    process, and ends with the same bits as one that was never ended. Constructing it opens nothing; a directory belongs
    to one run at a time.

    Args:
      directory: The run's own directory; made when the run starts.
      keep: Newest checkpoints that stay, at least 1. With 2, one damaged checkpoint costs one interval.
      every: Updates between checkpoints; None saves at each epoch's end. A run saves at its end in any case.
      keep_best: Best checkpoints by `metric` that stay beside the newest.
      keep_every: The first checkpoint at or after each multiple of so many updates stays for good: an archive beside
        the newest. None keeps none.
      metric: Name of what ranks them, such as "validation_loss"; a value that is not finite ranks nowhere.
      mode: "min" when a smaller value is better, "max" when a larger one is.
      check_data: Refuse to continue when the next batch is not the one that would have come. Turn it off for data that
        is random by itself; the run then continues, with other bits.
    Raises:
      ValueError: A count is no positive integer, `keep_best` comes without metric and mode, or `directory` is the
        address of a bucket: mount it.
    Example:
      >>> Checkpoints("runs/first", every=500).keep
      2
    """

    directory: Path
    keep: int = 2
    every: int | None = None
    keep_best: int = 0
    metric: str | None = None
    mode: Literal["min", "max"] | None = None
    check_data: bool = True
    keep_every: int | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 2,
        every: int | None = None,
        keep_best: int = 0,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        check_data: bool = True,
        keep_every: int | None = None,
    ):
        put: dict[str, Any] = {"directory": local(directory), "keep": keep, "every": every, "keep_best": keep_best}
        put |= {"metric": metric, "mode": mode, "check_data": check_data, "keep_every": keep_every}
        for name, value in put.items():
            object.__setattr__(self, name, value)
        check_count("keep", keep, least=1)
        check_count("keep_best", keep_best, least=0)
        for name, count in (("every", every), ("keep_every", keep_every)):
            if count is not None:
                check_count(name, count, least=1)
        if keep_best and (metric is None or mode not in ("min", "max")):
            raise ValueError(
                f"keep_best={keep_best} needs metric= and mode='min' or 'max' to say what is best, got "
                f"metric={metric!r} and mode={mode!r}"
            )
        if not keep_best and metric is not None:
            raise ValueError(f"metric={metric!r} ranks the best checkpoints: say how many stay with keep_best=")


def check_count(name: str, value: object, *, least: int) -> None:
    """Raise unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def superfluous(config: Checkpoints, scores: Mapping[Order, float | None]) -> list[Order]:
    """Give the checkpoints that need not stay: neither among the newest, nor the best, nor in the archive.

    Args:
      config: How many stay.
      scores: All checkpoints of the run with their scores.
    """
    stay = set(sorted(scores)[-config.keep :])
    stay.update(best(scores, config.mode)[: config.keep_best])
    if config.keep_every is not None:
        stay.update(archive(scores, config.keep_every))
    return sorted(set(scores) - stay)


def archive(orders: Iterable[Order], every: int) -> list[Order]:
    """Give the first checkpoint at or after each multiple of so many updates, from the first multiple on."""
    firsts: dict[int, Order] = {}
    for order in sorted(orders):
        if order[0] >= every:
            firsts.setdefault(order[0] // every, order)
    return list(firsts.values())


def best(scores: Mapping[Order, float | None], mode: str | None) -> list[Order]:
    """Give the checkpoints that have a finite score, the best first; of equal ones the oldest."""
    sign = -1.0 if mode == "max" else 1.0
    ranked = [(sign * score, order) for order, score in scores.items() if score is not None and math.isfinite(score)]
    return [order for _, order in sorted(ranked)]
