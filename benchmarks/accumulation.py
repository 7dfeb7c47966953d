"""Time per microbatch of accumulating windows, as ratios to K plain steps, in one process.

A GPT of 4 layers, width 128, 128 tokens of a vocabulary of 256, batch 8. Each variant runs whole windows of K
microbatches, one dispatch per microbatch; rounds of the variants alternate, and the median of a variant's rounds
counts. Run it as ``python benchmarks/accumulation.py [rounds]``.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from telic.contract import Objective, Step
from telic.mean import Mean, Terms
from telic.train.step import TrainStep

LAYERS, WIDTH, HEADS, TIME, BATCH, VOCAB, K = 4, 128, 4, 128, 8, 256, 4


class GPT(Objective):
    """A small decoder. `kind` says what its loss is made of: a Mean, two Terms, or statistics that are replayed."""

    def init(self, key: Any, variables: Any = None) -> Any:
        del variables
        keys = iter(jax.random.split(key, 3 + 4 * LAYERS))

        def dense(rows: int, columns: int) -> Any:
            return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        params = {f"block_{i}": {name: dense(*size) for name, size in sizes.items()} for i in range(LAYERS)}
        tables = {"tokens": dense(VOCAB, WIDTH), "positions": dense(TIME, WIDTH), "head": dense(WIDTH, VOCAB)}
        return {"params": {**params, **tables}}

    def nll(self, params: Any, tokens: Any) -> Any:
        """Give the loss of each next token, [batch, time], and the logits' log normaliser."""
        x = params["tokens"][tokens[:, :-1]] + params["positions"]
        seen = jnp.tril(jnp.ones((TIME, TIME), bool))
        for i in range(LAYERS):
            p = params[f"block_{i}"]
            q, k, v = jnp.split(norm(x) @ p["qkv"], 3, -1)
            q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
            x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        logits = norm(x) @ params["head"]
        total = jax.nn.logsumexp(logits, -1)
        return total - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0], total

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        del step
        losses, _ = self.nll(variables["params"], batch["tokens"])
        return Mean.of(losses, batch["mask"])


class TwoTerms(GPT):
    """The same model with a z-loss that has a denominator of its own."""

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        del step
        losses, normaliser = self.nll(variables["params"], batch["tokens"])
        z = Mean.of(normaliser**2, 1 - batch["mask"])
        return Terms({"fit": (1.0, Mean.of(losses, batch["mask"])), "z": (1e-4, z)})


def norm(x: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        {
            "tokens": jnp.asarray(rng.integers(0, VOCAB, (BATCH, TIME + 1)), jnp.int32),
            "mask": jnp.asarray(rng.random((BATCH, TIME)) < 0.8, jnp.float32),
        }
        for _ in range(K)
    ]


def variant(objective: Objective, **options: Any) -> Callable[[], float]:
    """Give a function that runs K microbatches and gives the seconds per microbatch."""
    optimizer = optax.with_extra_args_support(optax.adam(1e-3))
    step = TrainStep(objective, optimizer, jax.random.key(0), **options)
    data = batches()
    held = [step.init(data[0])]
    one, plan = jax.jit(step.step, donate_argnums=0), jax.jit(step.window_of)

    def run() -> float:
        began = time.perf_counter()
        window = plan(held[0], data) if step.plans else None
        for batch in data:
            held[0] = one(held[0], batch, window).state
        jax.block_until_ready(held[0])
        return (time.perf_counter() - began) / K

    run()
    return run


def scanned(objective: GPT) -> Callable[[], float]:
    """Give a hand-written accumulating scan: one dispatch for the window, no guard."""
    optimizer = optax.adam(1e-3)
    params = objective.init(jax.random.key(0))["params"]
    data = jax.tree.map(lambda *x: jnp.stack(x), *batches())

    def window(params: Any, state: Any, data: Any) -> Any:
        def fold(sums: Any, batch: Any) -> Any:
            def total(params: Any) -> Any:
                return (objective.nll(params, batch["tokens"])[0] * batch["mask"]).sum()

            gradient = jax.grad(total)(params)
            return (jax.tree.map(jnp.add, sums[0], gradient), sums[1] + batch["mask"].sum()), None

        zero = (jax.tree.map(jnp.zeros_like, params), jnp.zeros(()))
        (gradient, mass), _ = jax.lax.scan(fold, zero, data)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / mass, gradient), state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(window, donate_argnums=(0, 1))
    held = [(params, optimizer.init(params))]

    def run() -> float:
        began = time.perf_counter()
        held[0] = compiled(*held[0], data)
        jax.block_until_ready(held[0])
        return (time.perf_counter() - began) / K

    run()
    return run


def main(rounds: int) -> None:
    variants = {
        "plain steps": variant(GPT()),
        "plain steps, no guard": variant(GPT(), nonfinite="allow"),
        "Mean window": variant(GPT(), accumulate=K),
        "two-term planned window": variant(TwoTerms(), accumulate=K, plans=True),
        "two-term replayed window": variant(TwoTerms(), accumulate=K),
        "hand-written scan": scanned(GPT()),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            times[name].append(run())
    base = statistics.median(times["plain steps"])
    print(f"K={K}, {jax.devices()[0].platform}, {rounds} rounds; ms per microbatch, ratio to plain steps")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:<26} {median * 1e3:8.2f} ms  {median / base:5.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
