"""Curves of a run: values by batch, thinned for drawing, with what belongs together in one panel."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from telic.reports.reading import Line, Run

MAX_POINTS = 600
"""Points of one curve that are drawn."""

_VALIDATION = "validation_"


@dataclass(frozen=True)
class Curve:
    """Values of one name over a run.

    Attributes:
      run: Name of the run.
      name: What it is, such as "training" or "validation".
      points: (batches done, value); a value that is not finite is None.
    """

    run: str
    name: str
    points: tuple[tuple[int, float | None], ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return all(value is None for _, value in self.points)


def metric_panels(runs: Iterable[Run]) -> dict[str, list[Curve]]:
    """Give the curves of all metrics by panel: a metric in training and in each validation are one panel."""
    panels: dict[str, list[Curve]] = {}
    for run in runs:
        names = list(dict.fromkeys(name for line in run.lines for name in line.metrics))
        bases = [name for name in names if not name.startswith(_VALIDATION)]
        for name in names:
            base, label = _placed(name, bases)
            made = curve(run, label, lambda line, name=name: line.metrics.get(name))
            panels.setdefault(base, []).append(made)
    # The loss first, in the order they were recorded otherwise.
    return dict(sorted(panels.items(), key=lambda item: item[0] != "loss"))


def curve(run: Run, name: str, read: Callable[[Line], float | None]) -> Curve:
    """Give one curve of a run, the later of two values at one batch."""
    values: dict[int, float | None] = {}
    for line in run.lines:
        value = read(line)
        if value is not None:
            values[line.batches] = value if math.isfinite(value) else None
    return Curve(run.name, name, thinned(tuple(sorted(values.items()))))


def thinned(points: tuple[tuple[int, float | None], ...]) -> tuple[tuple[int, float | None], ...]:
    """Give about `MAX_POINTS` points that look the same: of each stretch its first, lowest and highest."""
    if len(points) <= MAX_POINTS:
        return points
    size = math.ceil(3 * len(points) / MAX_POINTS)
    kept: list[tuple[int, float | None]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        numbers = [(value, at) for at, value in stretch if value is not None]
        ends = {stretch[0], *((at, value) for value, at in ((min(numbers), max(numbers)) if numbers else ()))}
        kept += sorted(ends, key=lambda point: point[0])
    return (*kept, points[-1]) if kept[-1] != points[-1] else tuple(kept)


def split(run: Run) -> Mapping[str, float]:
    """Give the seconds of a run's time by part, over all its lines; of its profile where no line has any."""
    total: dict[str, float] = {}
    for line in run.lines:
        for part, seconds in line.parts.items():
            if math.isfinite(seconds):
                total[part] = total.get(part, 0.0) + max(0.0, seconds)
    found = run.profile.get("seconds")
    if not total and isinstance(found, dict):
        numbers = {str(k): v for k, v in found.items() if isinstance(v, int | float)}  # pyright: ignore[reportUnknownVariableType] JSON
        total = {part: float(seconds) for part, seconds in numbers.items() if seconds > 0}
    return total


def measured_utilisation(run: Run) -> Callable[[Line], float | None]:
    """Give the function that reads a line's share of what the device was measured to do when the run ended."""
    flops, peak = run.profile.get("flops"), run.profile.get("peak_flops")

    def read(line: Line) -> float | None:
        rate = line.speed.get("batches_per_second")
        if rate is None or not isinstance(flops, int | float) or not isinstance(peak, int | float) or peak <= 0:
            return None
        return float(flops) * rate / float(peak)

    return read


def _placed(name: str, bases: list[str]) -> tuple[str, str]:
    """Give the panel of a metric, and what its curve is called there."""
    if not name.startswith(_VALIDATION):
        return name, "training"
    rest = name.removeprefix(_VALIDATION)
    if rest in bases or "_" not in rest:
        return rest, "validation"
    # Of a named set: validation_<set>_<metric>.
    for base in sorted(bases, key=len, reverse=True):
        if rest.endswith(f"_{base}"):
            return base, f"validation {rest.removesuffix(f'_{base}')}"
    return rest, "validation"
