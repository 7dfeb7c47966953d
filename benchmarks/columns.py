"""Measure how long `telic.data.columns` takes to give a batch of 64 digits, [64, 28, 28, 1] float32.

Run: python benchmarks/columns.py
"""

import platform
import statistics
import time

from telic.data import DataPartition, columns, digits_split

BATCH = 64
BATCHES = 2_000
LIMIT_MS = 0.2


def main() -> None:
    """Print median and 99th percentile in milliseconds, over several epochs, reshuffling included."""
    stream = columns(digits_split("train"), batch=BATCH).train(DataPartition())
    batches = iter(stream)
    next(batches)
    times: list[float] = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        next(batches)
        times.append(1e3 * (time.perf_counter() - start))
    median, slow = statistics.median(times), statistics.quantiles(times, n=100)[-1]
    mean = statistics.fmean(times)
    print(f"{BATCHES:,} batches of {BATCH} digits on {platform.machine()}, {platform.python_version()}")
    print(f"median {median:.4f} ms, mean {mean:.4f} ms, 99th percentile {slow:.4f} ms; the limit is {LIMIT_MS} ms")
    if median > LIMIT_MS:
        raise SystemExit(f"a batch takes {median:.4f} ms, more than {LIMIT_MS} ms")


if __name__ == "__main__":
    main()
