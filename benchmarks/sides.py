"""The two sides of each comparison: a loop of Telic, and the jitted loop one would write by hand."""

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

import telic
from benchmarks import models
from benchmarks.timing import Side, waited
from telic.cli.digits import shifted
from telic.loop.state import LoopState

Loss = Callable[[Any, Any, Any], Any]
"""``(params, batch, key) -> scalar``."""

Guard = Literal["none", "select", "cond"]


def of_loop(loop: telic.Loop, data: Any, **options: Any) -> Side:
    """Give a side that runs one epoch of a loop at each call; the loop goes on where it stood."""
    running: Iterator[LoopState] = loop.stream(data, epochs=1 << 30, **options)

    def run() -> float:
        began = time.perf_counter()
        waited(next(running).step_state)
        return time.perf_counter() - began

    return run


def trainer(objective: telic.Objective, **options: Any) -> telic.Trainer:
    """Give a trainer with Adam."""
    return telic.Trainer(objective, optax.adam(models.LEARNING_RATE), key=0, **options)


def mlp_loop(**options: Any) -> telic.Loop:
    """Give the loop of the small network: accuracy, running loss, progress."""
    made = telic.trainer(models.MLP(), "softmax_cross_entropy", optax.adam(models.LEARNING_RATE), log=0, **options)
    return made.metric("accuracy").progress(plain=True)


def by_hand(
    loss: Loss,
    params: Any,
    batches: models.Batches,
    *,
    guard: Guard = "none",
    compiler_options: dict[str, Any] | None = None,
) -> Side:
    """Give a side that trains by hand: one jitted function, its state donated, told to do nothing else.

    Args:
      loss: Loss of a batch.
      params: First parameters.
      batches: Batches on the host.
      guard: "select" keeps the old state where a gradient is not finite, "cond" updates inside `lax.cond`.
      compiler_options: Handed to XLA.
    """
    optimizer = optax.adam(models.LEARNING_RATE)

    def update(grads: Any, params: Any, state: Any) -> Any:
        updates, after = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), after

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        state, count = opt_state
        key = jax.random.fold_in(jax.random.key(0), count)
        value, grads = jax.value_and_grad(loss)(params, batch, key)
        if guard == "none":
            params, state = update(grads, params, state)
            return params, (state, count + 1)
        fine = jnp.isfinite(value) & jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        if guard == "cond":
            params, state = jax.lax.cond(fine, update, lambda g, p, s: (p, s), grads, params, state)
        else:
            new = update(grads, params, state)
            params, state = jax.tree.map(lambda n, o: jnp.where(fine, n, o), new, (params, state))
        return params, (state, count + 1)

    compiled = jax.jit(step, donate_argnums=(0, 1), compiler_options=compiler_options)
    return timed(compiled, (params, (optimizer.init(params), jnp.zeros((), jnp.int32))), batches)


def timed(compiled: Any, start: Any, items: Any) -> Side:
    """Give a side that runs ``(params, state) = compiled(params, state, item)`` over items, and goes on from there."""
    held = [start]

    def run() -> float:
        waited(held)
        began = time.perf_counter()
        params, state = held[0]
        for item in items:
            params, state = compiled(params, state, item)
        held[0] = (params, state)
        waited(held)
        return time.perf_counter() - began

    return run


def scanned_by_hand(objective: models.GPT, batches: models.Batches, count: int) -> Side:
    """Give a side that accumulates by hand: a window of `count` microbatches in one dispatch, without a guard."""
    optimizer = optax.adam(models.LEARNING_RATE)
    params = objective.init(jax.random.key(0))["params"]
    windows = [jax.tree.map(lambda *x: jnp.stack(x), *batches[i : i + count]) for i in range(0, len(batches), count)]

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
    return timed(compiled, (params, optimizer.init(params)), windows)


def evaluated_by_hand(loss: Loss, params: Any, batches: models.Batches) -> Side:
    """Give a side that sums a loss over batches, and reads it."""
    compiled = jax.jit(lambda total, params, batch: total + loss(params, batch, None), donate_argnums=0)

    def run() -> float:
        began = time.perf_counter()
        total = jnp.zeros(())
        for batch in batches:
            total = compiled(total, params, batch)
        float(total)
        return time.perf_counter() - began

    return run


def cross_entropy(model: Any) -> Loss:
    """Give the mean loss of a Linen model on (inputs, targets)."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        del key
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return loss


def moved_digits(model: Any) -> Loss:
    """Give the demonstration's loss: digits moved a little, dropout."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        pictures = shifted(key, batch[0])
        logits = model.apply({"params": params}, pictures, train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    return loss


def squared_error(model: Any) -> Loss:
    """Give the mean squared error of a Linen model on (inputs, targets)."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        del key
        return ((model.apply({"params": params}, batch[0]) - batch[1]) ** 2).mean()

    return loss


def next_token(objective: models.GPT) -> Loss:
    """Give the mean loss of the tokens that count."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        del key
        return (objective.nll(params, batch["tokens"])[0] * batch["mask"]).sum() / batch["mask"].sum()

    return loss


def params_of(model: Any, example: Any) -> Any:
    """Give a Linen model's first parameters."""
    return model.init(jax.random.key(0), example)["params"]
