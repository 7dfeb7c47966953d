"""Curves drawn with characters, for terminals and logs."""

import itertools
import math
from collections.abc import Mapping, Sequence

_MARKS = "•+×o*#"


def draw_characters(
    series: Mapping[str, Sequence[Sequence[float]]],
    *,
    width: int = 72,
    height: int = 14,
    log_x: bool = False,
    log_y: bool = False,
    title: str = "",
) -> str:
    """Draw series of points, each with a mark of its own, as lines of text.

    Points that are not finite, and on a logarithmic axis those that are not positive, are left out.

    Args:
      series: ``{name: (xs, ys)}``, xs ascending.
      width: Characters of a line, at most.
      height: Lines of the drawing itself.
      log_x: Logarithmic x axis.
      log_y: Logarithmic y axis.
      title: Text above.
    Example:
      >>> print(draw_characters({"loss": ([1, 2, 3], [4.0, 2.0, 1.0])}, width=24, height=4))
           4 ┤••
             │  ••••
             │      •••••
           1 ┤           ••••
             └───────────────
              1             3
              • loss
    """
    points = {
        name: [(_scaled(x, log_x), _scaled(y, log_y)) for x, y in zip(xs, ys, strict=True)]
        for name, (xs, ys) in series.items()
    }
    points = {name: [(x, y) for x, y in p if x is not None and y is not None] for name, p in points.items()}
    everything = [p for some in points.values() for p in some]
    legend = "   ".join(f"{_MARKS[i % len(_MARKS)]} {name}" for i, name in enumerate(series))
    head = [title] if title else []
    if not everything:
        return "\n".join([*head, f"nothing to draw yet: {legend}"])
    (left, right), (low, high) = _range([x for x, _ in everything]), _range([y for _, y in everything])
    top, bottom = _number(_back(high, log_y)), _number(_back(low, log_y))
    margin = max(len(top), len(bottom), 6)
    columns = max(8, width - margin - 3)
    canvas = [[" "] * columns for _ in range(height)]
    for i, name in enumerate(series):
        for column, y in _by_column(points[name], left, right, columns):
            row = round((high - y) / (high - low) * (height - 1)) if high > low else height // 2
            canvas[row][column] = _MARKS[i % len(_MARKS)]
    lines = [f"{'':{margin}} │{''.join(row)}".rstrip() for row in canvas]
    lines[0] = f"{top:>{margin}} ┤{''.join(canvas[0])}".rstrip()
    lines[-1] = f"{bottom:>{margin}} ┤{''.join(canvas[-1])}".rstrip()
    first, last = _number(_back(left, log_x)), _number(_back(right, log_x))
    axis = first + last.rjust(max(len(last) + 1, columns - len(first)))
    pad = " " * (margin + 1)
    return "\n".join([*head, *lines, f"{pad}└{'─' * columns}", f"{pad} {axis}".rstrip(), f"{pad} {legend}"])


def _by_column(
    points: Sequence[tuple[float, float]], left: float, right: float, columns: int
) -> list[tuple[int, float]]:
    """Give one value for each column between a series' first and last point: those between points are interpolated."""
    if not points:
        return []
    span = right - left
    at: dict[int, list[float]] = {}
    for x, y in points:
        column = round((x - left) / span * (columns - 1)) if span else 0
        at.setdefault(column, []).append(y)
    means = {column: sum(ys) / len(ys) for column, ys in at.items()}
    known = sorted(means)
    found: list[tuple[int, float]] = []
    for a, b in itertools.pairwise(known):
        found += [(c, means[a] + (means[b] - means[a]) * (c - a) / (b - a)) for c in range(a, b)]
    return [*found, (known[-1], means[known[-1]])]


def _range(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _scaled(value: float, log: bool) -> float | None:
    if not math.isfinite(value) or (log and value <= 0):
        return None
    return math.log10(value) if log else float(value)


def _back(value: float, log: bool) -> float:
    return 10**value if log else value


def _number(value: float) -> str:
    return f"{value:.4g}"
