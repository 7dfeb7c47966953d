"""Measure what a probe costs: when it never fires, and when it fires every 100 steps.

A 64 → 128 → 10 multilayer perceptron on batches of 64 random rows with Adam, so that what the library adds shows. The
probe takes the norm of each layer's gradient. The runs take turns in one process: plain, with a probe that never fires,
with one that fires every 100 steps; the first epoch of each, with the compilation, is not counted.

    python -m benchmarks.probe
    python -m benchmarks.probe --steps 2000 --repeats 15
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import telic
from benchmarks import models
from benchmarks.timing import machine

EVERY = 100


def norms(outputs: Any) -> Any:
    return jax.tree.map(jnp.linalg.norm, outputs["gradients"])


def epochs(data: Any, count: int, filter: Any) -> Iterator[float]:
    """Train, and give the seconds of each epoch."""
    loop = telic.trainer(models.MLP(), "softmax_cross_entropy", "adam", log=0)
    if filter is not None:
        loop.probe(norms, filter)
    start = time.perf_counter()
    for state in loop.stream(data, epochs=count):
        jax.block_until_ready(jax.tree.leaves(state.step_state))
        yield time.perf_counter() - start
        start = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="steps per epoch")
    parser.add_argument("--repeats", type=int, default=9, help="epochs that count")
    args = parser.parse_args()
    data = models.rows(args.steps)
    filters = {"plain": None, "never fires": telic.once(10**9), f"every {EVERY}": telic.every(EVERY)}
    runs = {name: epochs(data, args.repeats + 1, chosen) for name, chosen in filters.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats + 1):
        for name, run in runs.items():
            seconds[name].append(next(run))
    print(f"{args.repeats} epochs of {args.steps} steps; {machine()}")
    plain = statistics.median(seconds["plain"][1:])
    for name, values in seconds.items():
        median = statistics.median(values[1:])
        print(f"{name:12s} median {1e6 * median / args.steps:7.1f} us/step, ratio {median / plain:.3f}")


if __name__ == "__main__":
    main()
