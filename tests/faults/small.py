"""The smallest runs that can go wrong: one weight, records that differ, and what a run read and did."""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import telic
from telic import tree
from telic.errors import Preempted

MODEL = (lambda key, x: {"w": jnp.full((1, 1), 0.5)}, lambda params, x: x @ params["w"])


def noisy(params: Any, x: Any, *, train: bool, key: Any = None) -> Any:
    """Give a prediction that draws in training, as dropout does."""
    noise = jax.random.normal(key, x.shape) if train else 0.0
    return (x + 0.1 * noise) @ params["w"]


NOISY = (MODEL[0], noisy)


def columns(records: int = 12, batch: int = 2, seed: int = 0) -> telic.data.Dataset:
    """Give records whose targets are their numbers."""
    x = np.linspace(-1, 1, records, dtype=np.float32)[:, None]
    return telic.data.columns(
        {"inputs": x, "targets": np.arange(records, dtype=np.float32)[:, None]}, batch=batch, seed=seed
    )


def batches(count: int, rows: int = 2) -> list[Any]:
    """Give batches whose targets are their numbers."""
    x = np.ones((rows, 1), np.float32)
    return [(x, i * x) for i in range(count)]


def trainer(
    directory: Path | None = None,
    model: Any = MODEL,
    optimizer: Any = "sgd",
    *,
    ema: Any = None,
    keep: int = 99,
    **options: Any,
) -> telic.Trainer:
    """Give a trainer that saves itself where a directory is given."""
    objective = telic.supervised(model, "mean_squared_error")
    objective.ema = ema
    if directory is not None:
        options["checkpoints"] = telic.Checkpoints(directory, keep=keep, every=options.pop("every", None))
    return telic.Trainer(objective, optimizer, key=0, **options)


def summing(directory: Path) -> telic.Loop:
    """Give a loop that adds batches and saves itself."""
    return telic.Loop(lambda total, batch: total + batch, lambda batch: 0.0).save(telic.Checkpoints(directory))


def reading(loop: telic.Loop, read: list[Any]) -> telic.Loop:
    """Note the records of each batch the loop trains on."""
    loop.metric(lambda targets: targets, "records", reads="targets", reduce="last")
    return loop.handle_event("iteration_completed", lambda s: read.append(np.asarray(s.metrics["records"]).tolist()))


def stopped(loop: telic.Loop, data: Any, at: int, **limits: int) -> telic.LoopState:
    """Run until SIGTERM comes in an iteration; give the state that was reached."""

    def stop(state: telic.LoopState) -> None:
        if state.total_iterations == at:
            os.kill(os.getpid(), signal.SIGTERM)

    loop.handle_event("iteration_completed", stop)
    try:
        loop.run(data, **limits)
    except Preempted as stop_:
        state = stop_.state
        assert isinstance(state, telic.LoopState)
        return state
    raise AssertionError("the run was not stopped")


def bits(value: Any) -> dict[str, bytes]:
    """Give the bytes of every leaf by name."""
    found = {}
    for name, leaf in tree.named_leaves(value).items():
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[name] = np.asarray(leaf).tobytes()
    return found
