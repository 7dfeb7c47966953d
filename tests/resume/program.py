"""A run as people write one, for a process that a test kills: ``python -m tests.resume.program '<json>'``."""

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import telic
from telic import tree
from telic.checkpoints import points

DEFAULTS: dict[str, Any] = {
    "directory": None,
    "out": None,
    "model": "mlp",
    "data": "columns",
    "accumulate": 3,
    "ema": True,
    "epochs": 2,
    "steps": None,
    "every": 1,
    "keep": 2,
    "records": 22,
    "batch": 2,
    "seed": 0,
    "optimizer": "adam",
    "width": 8,
    "key": 0,
    "early_stop": False,
    "record": None,
    # How the process dies: at the n-th time a point is reached, or by a signal in the n-th iteration.
    "kill_at": None,
    "kill_number": 1,
    "signal_at": None,
    "signal": "SIGTERM",
    "pause": 0.0,
    # What a fault of the library would leave out of a checkpoint: negative controls.
    "forget": None,
    "hits": None,
}


class MLP(nn.Module):
    """Dropout and batch statistics, so that keys and layer state matter."""

    width: int = 8

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.Dense(self.width)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(1)(x)


class Conv(nn.Module):
    """A convolution, whose step runs straight-line on the CPU."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = x.reshape((x.shape[0], 2, 2, 1))
        x = nn.relu(nn.Conv(4, (2, 2))(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(1)(x.reshape((x.shape[0], -1)))


def make_data(o: dict[str, Any]) -> Any:
    draw = np.random.default_rng(o["seed"])
    inputs = draw.normal(size=(o["records"], 4)).astype(np.float32)
    targets = inputs.sum(axis=1, keepdims=True)
    match o["data"]:
        case "columns":
            return telic.data.columns({"inputs": inputs, "targets": targets}, batch=o["batch"], seed=o["seed"])
        case "list":
            n = o["batch"]
            # The last batch is smaller.
            return [(inputs[i : i + n], targets[i : i + n]) for i in range(0, len(inputs), n)]
        case "generator":
            # Asked for: it is made anew and read up to the position.
            batches = make_data({**o, "data": "list"})[: len(inputs) // o["batch"]]
            return telic.data.Dataset(train=lambda partition: (batch for batch in batches))
        case "hf":
            return hugging_face(inputs, targets, o)
        case "torch" | "torch2" | "stateful" | "stateful2":
            return loaders(inputs, targets, o)
        case "grain" | "grain2":
            pairs = [{"inputs": x, "targets": y} for x, y in zip(inputs, targets, strict=True)]
            made = grain.MapDataset.source(pairs).seed(o["seed"]).shuffle()
            rows = made.random_map(lambda r, rng: {**r, "inputs": r["inputs"] + rng.normal(0, 0.1, 4).astype("f4")})
            batches = rows.to_iter_dataset().batch(o["batch"], drop_remainder=True)
            if o["data"] == "grain2":
                # Grain's workers read flags, which a program without absl.app has to declare parsed.
                flags.FLAGS.mark_as_parsed()
                batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
            return telic.data.Dataset(train=lambda partition: iter(batches))
        case _:
            raise ValueError(o["data"])


def hugging_face(inputs: Any, targets: Any, o: dict[str, Any]) -> Any:
    """Give a map-style data set of Hugging Face, shuffled by the number of the epoch."""
    import datasets
    import pyarrow

    rows = datasets.Dataset(pyarrow.table({"inputs": inputs.tolist(), "targets": targets.tolist()}), fingerprint="t")
    rows = rows.with_format("numpy", dtype=np.float32)
    return lambda epoch: rows.shuffle(seed=epoch, new_fingerprint=f"t{epoch}").iter(
        batch_size=o["batch"], drop_last_batch=True
    )


def loaders(inputs: Any, targets: Any, o: dict[str, Any]) -> Any:
    """Give a torch DataLoader in order, or one that keeps its position, shuffled by the number of the epoch."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    stored = TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))
    workers = 2 if o["data"].endswith("2") else 0
    if o["data"].startswith("torch"):
        return DataLoader(stored, batch_size=o["batch"], num_workers=workers, drop_last=True)
    from torchdata.stateful_dataloader import StatefulDataLoader

    return lambda epoch: StatefulDataLoader(
        stored,
        batch_size=o["batch"],
        num_workers=workers,
        drop_last=True,
        shuffle=True,
        generator=torch.Generator().manual_seed(epoch),
    )


def make_model(o: dict[str, Any]) -> Any:
    match o["model"]:
        case "conv":
            return Conv()
        case "linear":
            return (lambda key, x: {"w": jnp.full((4, 1), 0.1)}, lambda params, x: x @ params["w"])
        case _:
            return MLP(o["width"])


def make_loop(o: dict[str, Any]) -> telic.Loop:
    objective = telic.supervised(make_model(o), "mean_squared_error")
    if o["ema"]:
        objective.ema = telic.EMASpec(decay=lambda updates: 0.9)
    trainer = telic.Trainer(objective, o["optimizer"], key=o["key"], accumulate=o["accumulate"])
    places = telic.Checkpoints(o["directory"], keep=o["keep"]) if o["directory"] else None
    every = o["every"] if places else None
    loop = trainer.loop(log=0, metrics=["mean_absolute_error"], checkpoints=places, checkpoint_every=every)
    if o["early_stop"]:
        loop.early_stop("loss", mode="min", patience=3)
        loop.reduce_lr_on_plateau("loss", mode="min", patience=1)
    if o["record"]:
        loop.record(o["record"], interval=2)
    return loop


def digests(state: telic.LoopState) -> dict[str, str]:
    """Give the bits of everything a run ends with, by name, except how long it took."""
    found = {}
    for name, leaf in tree.named_leaves(state.step_state).items():
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found[name] = hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()[:16]
    host = {
        "history": state.history,
        "counts": state.event_counts,
        "total_iterations": state.total_iterations,
        "epoch": state.epoch,
        "position": state.position,
        "handler_state": state.handler_state,
    }
    return found | {name: repr(value) for name, value in host.items()}


def arm(o: dict[str, Any], loop: telic.Loop) -> None:
    """Arrange for this process's death."""
    seen: dict[str, int] = {}

    def at_point(point: str) -> None:
        seen[point] = seen.get(point, 0) + 1
        if o["hits"]:
            Path(o["hits"]).write_text(json.dumps(seen))
        if point == o["kill_at"] and seen[point] == o["kill_number"]:
            os.kill(os.getpid(), signal.SIGKILL)

    points.listen(at_point)
    if o["signal_at"] is not None or o["pause"]:

        def at_iteration(state: telic.LoopState) -> None:
            time.sleep(o["pause"])
            if state.total_iterations == o["signal_at"]:
                os.kill(os.getpid(), getattr(signal, o["signal"]))

        loop.handle_event("iteration_completed", at_iteration)


def forget(what: str | None) -> None:
    """Break the library the way its author might have: leave something out of what is taken up again."""
    if what is None:
        return
    from telic.compose.resume import Session

    fill, cursor = Session.fill, Session.cursor

    def forgetful_fill(self: Session, like: Any, program: Any, *, over: bool = False) -> Any:
        state = fill(self, like, program, over=over)
        match what:
            case "key":
                return state.replace(key=jax.random.key(99))
            case "ema":
                return state.replace(ema=like.ema)
            case "window":
                return state.replace(window=like.window)
            case "optimizer":
                return state.replace(opt_state=like.opt_state)
            case _:
                return state

    def forgetful_cursor(self: Session) -> telic.LoopState:
        state = cursor(self)
        if what == "position":
            state.position = None
        return state

    Session.fill = forgetful_fill  # type: ignore[method-assign]
    Session.cursor = forgetful_cursor  # type: ignore[method-assign]
    if what == "position":
        Session.check_batch = lambda self, first, read: None  # type: ignore[method-assign]


def main(o: dict[str, Any]) -> None:
    forget(o["forget"])
    loop = make_loop(o)
    arm(o, loop)
    limit = {"steps": o["steps"]} if o["steps"] is not None else {"epochs": o["epochs"]}
    state = loop.run(make_data(o), **limit)
    if o["out"]:
        Path(o["out"]).write_text(json.dumps(digests(state), indent=0))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main({**DEFAULTS, **json.loads(sys.argv[1])})
