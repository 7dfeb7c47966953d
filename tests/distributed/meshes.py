"""What eight simulated devices do besides training: one process that prints what the tests look at."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import telic
from benchmarks.scale import traffic_of
from telic import tree
from telic.compose.fitting import step_bytes
from telic.contract import as_result
from telic.data import columns
from telic.driver import compile_step
from telic.metrics import Metric
from telic.models import Decoder, DecoderConfig
from telic.objectives import LMObjective
from telic.placement import MeshPlacement, SingleDevice, placement_for
from tests.distributed.problems import BATCH, PROBLEMS


class Value(telic.Objective):
    """A loss that is the mean of the records' values."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.zeros(())}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        values = batch["x"] + variables["params"]["w"]
        return telic.Mean(values.sum(), jnp.asarray(values.size, jnp.float32))


def remainder() -> dict[str, Any]:
    """Evaluate 70 records in batches of 16, and 5 in one: 6 and 5 rows do not divide over eight devices."""
    made = telic.Trainer(Value(), "sgd", key=0, mesh=telic.MeshSpec())
    weights = {"params": {"w": jnp.zeros(())}}
    results: dict[str, Any] = {}
    for name, count in (("seventy", 70), ("five", 5)):
        values = np.arange(count, dtype=np.float32)
        batches = [{"x": values[i : i + 16]} for i in range(0, count, 16)]
        results[name] = [made.evaluate(batches, state=weights)["loss"], len(batches)]
    return results


def resharded(directory: Path) -> list[dict[str, Any]]:
    """Train on 1, 2, 4 and 1 devices in turn, from checkpoint to checkpoint, and on one likewise."""
    problem = PROBLEMS["decoder"]()
    data = columns(problem.data, batch=BATCH, seed=3)
    runs: list[dict[str, Any]] = []
    # A stop closes the mean that is looked at, so both stop.
    for name, plan in (("turns", {3: 1, 6: 2, 9: 4, 12: 1}), ("one", {3: 1, 6: 1, 9: 1, 12: 1})):
        losses: dict[int, float] = {}
        for steps, count in plan.items():
            mesh = None
            if count > 1:
                mesh = telic.MeshSpec(data=count // 2, fsdp=2).build(jax.devices()[:count])
            layout = None if mesh is None else telic.Layout(smallest=64, allow_replicated=0.5)
            made = telic.Trainer(
                problem.objective(),
                problem.optimizer,
                key=1,
                accumulate=2,
                mesh=mesh,
                layout=layout,
                checkpoints=telic.Checkpoints(directory / name, every=3),
            )
            loop = made.loop(log=0).handle_event(
                "step_completed", lambda s, seen=losses: seen.update({s.steps: s.metrics["loss"]})
            )
            loop.run(data, steps=steps)
        runs.append({str(n): x for n, x in losses.items()})
    return runs


def logical() -> dict[str, Any]:
    """Lay a model out by the names that it gives its dimensions."""

    class Named(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
            return nn.Dense(64, kernel_init=init)(x)

    objective = telic.supervised(Named(), "mean_squared_error")
    layout = telic.Layout(logical={"embed": "fsdp", "mlp": "tensor"}, smallest=1)
    example = {"inputs": np.zeros((8, 32), np.float32), "targets": np.zeros((8, 64), np.float32)}
    mesh = telic.MeshSpec(data=1, fsdp=4, tensor=2)
    made = telic.Trainer(objective, "adam", key=0, mesh=mesh, layout=layout)
    state = made.place(example)
    return {
        "table": str(layout.explain(objective, mesh=mesh, example=example)),
        "specs": {n: str(getattr(x.sharding, "spec", None)) for n, x in tree.named_leaves(state).items()},
    }


def refused() -> dict[str, str]:
    """Collect what is refused, and with which words."""
    found: dict[str, str] = {}
    example = {"inputs": np.zeros((8, 63), np.float32), "targets": np.zeros((8, 65), np.float32)}
    asked = {
        "replicated": ({"fsdp": 8, "data": 1}, telic.Layout(smallest=1)),
        "indivisible": ({"fsdp": 8, "data": 1}, telic.Layout({"params/**/kernel": ("fsdp",)})),
        "no leaf": ({"fsdp": 8, "data": 1}, telic.Layout({"params/kernal": ("fsdp",)})),
        "devices": ({"data": 3}, None),
    }
    for name, (axes, layout) in asked.items():
        made = telic.Trainer(
            telic.supervised(nn.Dense(65), "mean_squared_error"),
            "adam",
            key=0,
            mesh=telic.MeshSpec(**axes),
            layout=layout,
        )
        try:
            made.place(example)
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def placements() -> dict[str, Any]:
    """Look at what is placed: rows over devices, and one device that stays what it was."""
    made = placement_for(telic.MeshSpec(data=2, fsdp=4))
    assert isinstance(made, MeshPlacement)
    full, rest = (made.put({"x": np.zeros((rows, 3))}, fresh=True)["x"] for rows in (16, 6))
    single = telic.MeshSpec().build(jax.devices()[:1])
    flags = jax.ShapeDtypeStruct((4096,), bool)
    lies = made.shardings({"learner": {"rejections": {"finite": flags}, "other": flags}})["learner"]
    return {
        "flags": [str(lies["rejections"]["finite"].spec), str(lies["other"].spec)],
        "full": [len({str(s.index) for s in full.addressable_shards}), len(full.sharding.device_set)],
        "rest": len({str(s.index) for s in rest.addressable_shards}),
        "single": isinstance(placement_for(single), SingleDevice),
        "none": isinstance(placement_for(None), SingleDevice),
    }


def exchanged() -> float:
    """Count what one step of a decoder brings to a device, its head in blocks, over the bytes of its parameters."""
    config = DecoderConfig(vocab_size=512, d_model=64, num_layers=3, num_heads=4, d_ff=256, scan=True, tied=True)
    mesh, layout = telic.MeshSpec(data=2, fsdp=4), telic.Layout(smallest=256)
    objective = LMObjective(Decoder(config), head_chunks=4)
    made = telic.Trainer(objective, telic.optimizers.sgd(0.1), key=0, mesh=mesh, layout=layout)
    batch = {"tokens": np.zeros((64, 65), np.int32)}
    state = made.place(batch)
    placement = MeshPlacement(mesh.build(), layout)
    step = made.train_step().bind(batch)

    def run(state: Any, batch: Any) -> Any:
        with placement.on_mesh():
            return as_result(step.step(state, batch)).state

    placed = placement.put(batch, fresh=True)
    program = jax.jit(run, donate_argnums=0, out_shardings=placement.pins(state)).lower(state, placed).compile()
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.variables))
    return sum(traffic_of(program.as_text(), 8).values()) / num_bytes


def sliced() -> dict[str, Any]:
    """Train in slices on one device and on eight; let a limit choose the slices, and count operations of a step."""
    rng = np.random.default_rng(0)
    batch = (rng.normal(size=(2048, 16)).astype(np.float32), rng.normal(size=(2048, 2)).astype(np.float32))
    model = nn.Sequential([nn.Dense(512), nn.relu, nn.Dense(2)])
    found: dict[str, Any] = {}
    for name, mesh in (("one", None), ("eight", telic.MeshSpec())):
        made = telic.Trainer(telic.supervised(model, "mse"), "sgd", key=0, mesh=mesh, microbatch=512)
        placement = placement_for(mesh, None)
        step = made.train_step().bind(batch)
        start = jax.eval_shape(step.initial_state, step.objective.initializer, step.key)
        cost = compile_step(step, start, batch, placement).cost_analysis()
        end = made.fit([batch] * 3, log_every=0)
        needs = {
            size: step_bytes(replace(step, microbatch=size), start, batch, placement) for size in (2048, 1024, 512)
        }
        auto = telic.Trainer(
            telic.supervised(model, "mse"), "sgd", key=0, mesh=mesh, microbatch="auto", memory_limit_bytes=needs[512]
        )
        found[name] = {
            "flops": cost["flops"],
            "weights": float(sum(jnp.abs(x).sum() for x in jax.tree.leaves(end.variables))),
            "bytes": list(needs.values()),
            "chosen": auto.train_step(batch).microbatch,
            "said": str(auto.check([batch])),
        }
    return found


def host_metric() -> float:
    """Compute a metric on the host from outputs that lie on eight devices."""
    rows: list[int] = []

    class Count:
        name, mode, reads, host = "rows", None, ("prediction",), True

        def init(self, *args: Any) -> int:
            return 0

        def update(self, acc: int, *args: Any, weights: Any = None) -> int:
            rows.append(len(args[0]))
            return acc + len(args[0])

        def merge(self, a: int, b: int) -> int:
            return a + b

        def compute(self, acc: int) -> float:
            return float(acc)

    metric: Metric = Count()  # pyright: ignore[reportAssignmentType]
    made = telic.Trainer(telic.supervised(nn.Dense(2), "mean_squared_error"), "sgd", key=0, mesh=telic.MeshSpec())
    data = columns({"inputs": np.ones((38, 3)), "targets": np.ones((38, 2))}, batch=8, held_out=22)
    state = made.fit(data, steps=2, log_every=0)
    return made.evaluate(data, state=state, metrics=[metric])["rows"]


class Mixed(nn.Module):
    """A layer of bfloat16 parameters between two of float32, of sizes that eight devices do not divide."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.Dense(12, name="first")(x))
        return nn.Dense(3, name="last")(nn.Dense(10, param_dtype=jnp.bfloat16, name="middle")(x))


def alike() -> dict[str, Any]:
    """Train, evaluate and run a step of one's own on one device and on eight, with rows that the devices do not divide.

    One row is spoilt, one layer is frozen, one is in bfloat16, and no leaf is as large as the mesh would have it.
    """
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(22, 5)).astype(np.float32)
    targets = rng.normal(size=(22, 3)).astype(np.float32)
    spoilt = inputs.copy()
    spoilt[9, 1] = np.nan
    found: dict[str, Any] = {}
    for name, mesh in (("one", None), ("eight", telic.MeshSpec(data=2, fsdp=4))):
        layout = None if mesh is None else telic.Layout(smallest=1, allow_replicated=1.0)
        objective = telic.supervised(Mixed(), "mean_squared_error")
        objective.ema = telic.EMASpec(decay=0.5)
        made = telic.Trainer(
            objective,
            "sgd",
            key=0,
            accumulate=2,
            trainable=["params/middle/**", "params/last/**"],
            loss_scale="dynamic",
            mesh=mesh,
            layout=layout,
        )
        batches = [(spoilt[i : i + 8], targets[i : i + 8]) for i in range(0, 22, 8)]
        state = made.fit(batches, epochs=2, log_every=0)
        weights = jax.device_get(state.variables["params"])
        loop = telic.evaluator(Mixed(), "mean_squared_error", log=0, mesh=mesh, layout=layout)
        scores = loop.metric("mean_absolute_error").run(
            [(inputs[:16], targets[:16]), (inputs[16:], targets[16:])], state=state
        )
        total = telic.Loop(lambda total, batch: total + batch.sum(0), lambda batch: jnp.zeros(5))
        if mesh is not None:
            total.drive(mesh=mesh, layout=layout)
        found[name] = {
            "updates": int(state.updates),
            "rejected": int(state.rejections.total),
            "scale": float(state.loss_scale.value),
            "weights": {n: [float(np.float32(x).sum()), str(x.dtype)] for n, x in tree.named_leaves(weights).items()},
            "scores": [scores.metrics["loss"], scores.metrics["mean_absolute_error"]],
            "total": np.asarray(total.run([inputs[:16], inputs[16:]]).step_state).tolist(),
        }
    return found


def main(directory: str) -> None:
    print(
        json.dumps(
            {
                "remainder": remainder(),
                "resharded": resharded(Path(directory)),
                "logical": logical(),
                "refused": refused(),
                "placements": placements(),
                "host metric": host_metric(),
                "exchanged": exchanged(),
                "sliced": sliced(),
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "alike":
        print(json.dumps(alike()))
    else:
        main(sys.argv[1])
