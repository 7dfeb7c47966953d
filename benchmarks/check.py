"""Compare a short run of the benchmarks with recorded ratios, and say what became slower or larger.

    python -m benchmarks.check            report; the exit code is 0 whatever it finds
    python -m benchmarks.check --record   write the ratios of this machine into reference.json

Ratios are compared, never seconds: both sides of each run on the same machine in the same process. A row counts as a
regression when its ratio is above the recorded one by more than the row's tolerance, and again in a second try.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measures import convolution, evaluation, feeding, mlp
from benchmarks.memory import memory
from benchmarks.timing import Ratio, machine

REFERENCE = Path(__file__).with_name("reference.json")

LIMIT_SECONDS = 110.0
"""No further measure begins after this long: CI waits for the report."""

TOLERANCE, EXACT_TOLERANCE = 0.25, 0.02
"""Of ratios of times, and of bytes, which do not vary."""

SHORT: dict[str, Callable[[], list[Ratio]]] = {
    "mlp": lambda: mlp(5, steps=500),
    "memory": memory,
    "evaluation": lambda: evaluation(5, count=200),
    "feeding": lambda: feeding(5, steps=500),
    "convolution": lambda: convolution(3, steps=5),
}


def regressions(rows: list[Ratio], recorded: dict[str, Any]) -> list[str]:
    """Give a line for each row that is worse than recorded.

    Args:
      rows: What was measured now.
      recorded: Ratios by name.
    """
    found: list[str] = []
    for row in rows:
        before = recorded.get(row.name)
        if before is None:
            continue
        is_exact = row.low == row.high
        allowed = before * (1 + (EXACT_TOLERANCE if is_exact else TOLERANCE))
        # A lucky median is not enough: most of the pairs must be worse.
        if row.value > allowed and row.low > before:
            found.append(f"{row.name}: {row.value:.3f}, recorded {before:.3f} ({row.value / before - 1:+.0%})")
    return found


def report(*, record: bool) -> list[str]:
    """Measure, print, and give the regressions that a second try confirms."""
    began = time.monotonic()
    recorded: dict[str, Any] = json.loads(REFERENCE.read_text())["ratios"] if REFERENCE.exists() else {}
    measured: dict[str, float] = {}
    confirmed: list[str] = []
    print(machine())
    for name, measure in SHORT.items():
        if not record and time.monotonic() - began > LIMIT_SECONDS:
            print(f"{name}: left out, {LIMIT_SECONDS:.0f} s are over")
            continue
        rows = measure()
        for row in rows:
            print(f"{row.name:<52} {row.value:6.3f}  recorded {recorded.get(row.name, float('nan')):6.3f}  {row.note}")
            measured[row.name] = round(row.value, 4)
        if not record and regressions(rows, recorded) and time.monotonic() - began < LIMIT_SECONDS:
            confirmed += regressions(measure(), recorded)
    if record:
        REFERENCE.write_text(json.dumps({"machine": machine(), "ratios": measured}, indent=2) + "\n")
    return confirmed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the ratios of this machine")
    args = parser.parse_args()
    found = report(record=args.record)
    print("\n".join(["worse than recorded, twice:", *found]) if found else "nothing is worse than recorded")


if __name__ == "__main__":
    main()
