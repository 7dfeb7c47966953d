"""Taking turns: sides of a comparison that run one after the other in one process, and their ratios."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

Side = Callable[[], float]
"""Runs a fixed piece of work, waits for the device, and gives the seconds it took."""


@dataclass(frozen=True)
class Ratio:
    """One row of a table.

    Attributes:
      name: What was compared.
      value: Median of the ratios of neighbouring runs.
      low: Their lower quartile.
      high: Their upper quartile.
      aim: What it should be at most; None where nothing was promised.
      note: What one unit of each side took, or where the number comes from.
    """

    name: str
    value: float
    low: float
    high: float
    aim: float | None = None
    note: str = ""

    def markdown(self) -> str:
        """Give the row of a table in Markdown."""
        aim = "" if self.aim is None else f"≤ {self.aim:g}"
        spread = "" if self.low == self.high else f"{self.low:.2f} to {self.high:.2f}"
        return f"| {self.name} | {self.value:.3f} | {spread} | {aim} | {self.note} |"

    def __str__(self) -> str:
        aim = "" if self.aim is None else f"≤ {self.aim:g}"
        mark = "" if self.aim is None else ("" if self.value <= self.aim else "  above")
        return f"{self.name:<52} {self.value:6.3f}  {self.low:6.3f} to {self.high:6.3f}  {aim:>7}  {self.note}{mark}"


def take_turns(sides: Mapping[str, Side], rounds: int) -> dict[str, list[float]]:
    """Run each side once a round, in an order that turns about; the first round is not counted."""
    names = list(sides)
    for name in names:
        sides[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            seconds[name].append(sides[name]())
    return seconds


def ratio(
    name: str, ours: Sequence[float], theirs: Sequence[float], *, aim: float | None = None, units: int = 1
) -> Ratio:
    """Compare two sides round by round.

    Args:
      name: Name of the row.
      ours: Seconds of one side, by round.
      theirs: Seconds of the other.
      aim: What the ratio should be at most.
      units: Steps, or other units, of one run: the note gives the time of one.
    """
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(each, n=4) if len(each) > 1 else (each[0],) * 3
    a, b = (1e6 * statistics.median(side) / units for side in (ours, theirs))
    return Ratio(name, statistics.median(each), low, high, aim, f"{a:,.1f} µs, {b:,.1f} µs")


def exact(name: str, value: float, *, aim: float | None = None, note: str = "") -> Ratio:
    """Give a row whose number is no measurement of time."""
    return Ratio(name, value, value, value, aim, note)


def machine() -> str:
    """Describe where the numbers come from."""
    return (
        f"{jax.devices()[0].device_kind} ({jax.default_backend()}), {platform.machine()}, {os.cpu_count()} CPUs, "
        f"Python {platform.python_version()}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def heading() -> str:
    """Give the line above rows."""
    return f"{'':<52} {'ratio':>6}  {'quartiles':>16}  {'aim':>7}  times of one unit"


def waited(value: Any) -> Any:
    """Wait for all arrays of a tree."""
    return jax.block_until_ready(jax.tree.leaves(value))
