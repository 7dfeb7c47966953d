"""Numbers, times and foreign names as text that a person reads and nothing obeys."""

import math
from typing import Any


def visible(text: Any, limit: int = 200) -> str:
    """Give a text of unknown origin for showing: what a terminal or browser would obey is written out as an escape.

    Args:
      text: Anything; its string.
      limit: Characters at most; longer texts end in an ellipsis.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def number(value: Any) -> str:
    """Give a number in five significant digits; anything else as it is, made visible."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return visible(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.5g}"


def duration(seconds: float) -> str:
    """Give seconds as text in the unit that suits them."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{1e3 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def bytes_text(count: float) -> str:
    """Give a number of bytes as text, in steps of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def scaled(value: float, unit: str) -> str:
    """Give a positive number in the steps of 1000 of its unit, three digits of it: 2.5e11 and FLOP/s as 250 GFLOP/s."""
    for prefix in ("", "k", "M", "G", "T"):
        # What rounds to 1000 belongs to the next step.
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:,.3g} P{unit}"
