"""Measure what a step costs through Telic, against the loop one would write by hand.

The step is small on purpose: a 64 → 128 → 10 multilayer perceptron on batches of 64 digits with Adam, so that what the
library adds shows. Telic's side computes the running loss, the accuracy and the guard against non-finite values, and
keeps a history; the hand-written side is one jitted function with donated state that is only told to train. Both read
the same host arrays and both wait for the device before the clock is read.

The two sides take turns in one process: a handler at the end of each epoch reads Telic's clock, runs the hand-written
loop for as many steps, and starts Telic's clock again. The first epochs, with the compilation, are not counted.

    python benchmarks/loop_overhead.py
    python benchmarks/loop_overhead.py --side hand --repeats 5
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax

import telic

BATCH = 64
INPUTS = 64
CLASSES = 10
LEARNING_RATE = 1e-3

Batches = list[tuple[np.ndarray, np.ndarray]]


class MLP(nn.Module):
    """64 → 128 → 10 with a ReLU between."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Give logits, [batch, classes]."""
        return nn.Dense(CLASSES)(nn.relu(nn.Dense(128)(x)))


def load_batches(steps: int) -> tuple[str, Batches]:
    """Give a name of the data and `steps` batches of 64 rows, repeating the data as often as needed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        name = "random data of the digits' shape (scikit-learn is not installed)"
        generator = np.random.default_rng(0)
        inputs = generator.normal(size=(1797, INPUTS)).astype(np.float32)
        targets = generator.integers(0, CLASSES, 1797).astype(np.int32)
    else:
        name = "scikit-learn's digits"
        digits = load_digits()
        inputs, targets = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    whole = len(inputs) // BATCH
    rows = [slice(i % whole * BATCH, (i % whole + 1) * BATCH) for i in range(steps)]
    return name, [(inputs[r].copy(), targets[r].copy()) for r in rows]


def make_hand_written(batches: Batches) -> Callable[[], float]:
    """Give a function that trains by hand on all batches and returns the seconds it took; the first call compiles."""
    model, optimizer = MLP(), optax.adam(LEARNING_RATE)

    def loss_fn(params: Any, inputs: Any, targets: Any) -> jax.Array:
        logits = model.apply({"params": params}, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(state: Any, inputs: Any, targets: Any) -> Any:
        params, opt_state = state
        grads = jax.grad(loss_fn)(params, inputs, targets)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    jitted = jax.jit(step, donate_argnums=0)
    params = model.init(jax.random.key(0), batches[0][0])["params"]
    state = (params, optimizer.init(params))

    def run() -> float:
        nonlocal state
        jax.block_until_ready(state)
        start = time.perf_counter()
        for inputs, targets in batches:
            state = jitted(state, inputs, targets)
        jax.block_until_ready(state)
        return time.perf_counter() - start

    return run


def measure_hand_written(batches: Batches, repeats: int, warmup: int) -> list[float]:
    """Give the seconds of each repeat of the hand-written loop alone."""
    run = make_hand_written(batches)
    return [run() for _ in range(warmup + repeats)][warmup:]


def measure_telic(
    batches: Batches, repeats: int, warmup: int, between: Callable[[], float] | None
) -> tuple[list[float], list[float], dict[str, float]]:
    """Give the seconds of each epoch, those of `between` run after each, and the last epoch's metrics."""
    seconds: list[float] = []
    other: list[float] = []
    start = 0.0

    def clock(state: telic.LoopState) -> None:
        nonlocal start
        jax.block_until_ready(jax.tree.leaves(state.step_state))
        seconds.append(time.perf_counter() - start)
        if between is not None:
            other.append(between())
        start = time.perf_counter()

    loop = telic.trainer(MLP(), "softmax_cross_entropy", optax.adam(LEARNING_RATE), log=0)
    loop = loop.metric("accuracy").handle_event("epoch_completed", clock)
    start = time.perf_counter()
    end = loop.run(batches, epochs=warmup + repeats)
    history = end.history[max(end.history)]
    return seconds[warmup:], other[warmup:], {name: float(value) for name, value in history.items()}


def describe(name: str, seconds: list[float], steps: int) -> str:
    """Give one line of a side's microseconds per step."""
    us = [1e6 * s / steps for s in seconds]
    low, _, high = statistics.quantiles(us, n=4) if len(us) > 1 else (us[0],) * 3
    return (
        f"{name:13s} median {statistics.median(us):7.1f}  min {min(us):7.1f}  max {max(us):7.1f}  "
        f"quartiles {low:.1f} to {high:.1f}  us/step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=15, help="repeats that count, at least 1")
    parser.add_argument("--warmup", type=int, default=2, help="repeats that do not count, at least 1: they compile")
    parser.add_argument("--side", choices=["both", "hand", "telic"], default="both")
    args = parser.parse_args()
    if min(args.steps, args.repeats, args.warmup) < 1:
        parser.error("--steps, --repeats and --warmup must be at least 1")

    name, batches = load_batches(args.steps)
    device = jax.devices()[0]
    print(
        f"{args.repeats} repeats of {args.steps} steps, batch {BATCH}, {name}; {device.platform} "
        f"({device.device_kind}), {platform.machine()}, Python {platform.python_version()}, jax {jax.__version__}"
    )
    hand: list[float] = []
    ours: list[float] = []
    if args.side == "hand":
        hand = measure_hand_written(batches, args.repeats, args.warmup)
    else:
        between = make_hand_written(batches) if args.side == "both" else None
        ours, hand, metrics = measure_telic(batches, args.repeats, args.warmup, between)
        print("last epoch    " + "  ".join(f"{key} {value:.4f}" for key, value in metrics.items()))
    if hand:
        print(describe("hand-written", hand, args.steps))
    if ours:
        print(describe("telic", ours, args.steps))
    if hand and ours:
        ratios = [a / b for a, b in zip(ours, hand, strict=True)]
        print(
            f"{'ratio':13s} median {statistics.median(ours) / statistics.median(hand):7.2f}  "
            f"min {min(ours) / min(hand):7.2f}  of each pair {min(ratios):.2f} to {max(ratios):.2f}"
        )


if __name__ == "__main__":
    main()
