"""What a microbatch costs in a window: ``python -m benchmarks.accumulation``.

A Mean window, two planned terms and a replayed window of eight against a hand-written scan, and against eight plain
steps; the same rows as ``python -m benchmarks --only windows``.
"""

from benchmarks.measures import windows
from benchmarks.timing import heading, machine

if __name__ == "__main__":
    print(machine())
    print(heading())
    for row in windows(7):
        print(row, flush=True)
