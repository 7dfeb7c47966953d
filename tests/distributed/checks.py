"""What runs of two processes are checked for, one thing after another in one launch: a program for `telic launch`.

Starting a process costs more than most of what is tried in it. The checks of `ALIKE` run in one process too, and must
give the same there.
"""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import telic
from telic.artifacts import ImageGrid, Representations
from telic.axes import BATCH_AXES
from telic.data import DataPartition, columns
from telic.errors import DataError, NonFiniteError, ProcessError, ShapeError
from telic.metrics import Metric
from telic.placement import ManyProcesses
from tests.distributed.member import PAIR as PAIR_MESH
from tests.distributed.member import run
from tests.distributed.problems import FIFTY, PROBLEMS, train

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(65, 16)).astype(np.float32)
TARGETS = (INPUTS @ RNG.normal(size=(16, 8)) / 4).astype(np.float32)
SPOILT = 21


class Net(nn.Module):
    """Two dense layers, whose kernels two processes have halves of."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8)(nn.relu(nn.Dense(32)(x)))


def small(objective: Any = None, **options: Any) -> telic.Trainer:
    """Give a trainer of a small model: on two processes, whose parameters are in halves, or on one device."""
    where: dict[str, Any] = {}
    if jax.process_count() > 1:
        where["mesh"] = telic.MeshSpec(data=1, fsdp=-1)
        where["layout"] = telic.Layout(smallest=16, allow_replicated=0.5)
    made = telic.supervised(Net(), "mean_squared_error") if objective is None else objective
    return telic.Trainer(made, telic.optimizers.adam(0.01), key=0, **{**where, **options})


def share() -> DataPartition:
    return DataPartition(jax.process_index(), jax.process_count())


def batches(size: int, count: int, **more: Any) -> list[dict[str, Any]]:
    """Give this process's shares of the batches of some records, the rest that is left over included."""
    columns_of = {"inputs": INPUTS[:count], "targets": TARGETS[:count], **more}
    found: list[dict[str, Any]] = []
    for first in range(0, count, size):
        rows = share().even_rows(min(size, count - first))
        found.append({name: x[first + rows.start : first + rows.stop] for name, x in columns_of.items()})
    return found


# -- alike in one process and in two -----------------------------------------------------------------------------


def windows(place: Path) -> Any:
    """Go on twice with windows of another size: none, then two batches, then none."""
    losses: dict[str, float] = {}
    for epochs, accumulate in enumerate((1, 2, 1), start=1):
        made = small(accumulate=accumulate, checkpoints=telic.Checkpoints(place))
        loop = made.loop(log=0).handle_event(
            "step_completed", lambda s: losses.update({f"{s.epoch} {s.steps}": s.metrics["loss"]})
        )
        end = loop.run(columns({"inputs": INPUTS[:64], "targets": TARGETS[:64]}, batch=8, seed=1), epochs=epochs)
    return {"losses": losses, "updates": int(end.step_state.updates)}


def evaluated(place: Path) -> Any:
    """Evaluate records that neither processes nor devices divide: by an evaluator, by a trainer and by a raw loop."""
    weights = Net().init(jax.random.key(3), INPUTS[:1])
    mesh = small().mesh
    found: dict[str, Any] = {}
    # Of 65 the last batch has one record, and one process has none of it.
    for size, count in ((8, 61), (8, 65), (4, 1)):
        loop = telic.evaluator(Net(), "mean_squared_error", log=0, mesh=mesh).metric("mean_absolute_error")
        end = loop.run(batches(size, count), state=weights)
        rest = small().evaluate(lambda size=size, count=count: batches(size, count), state=weights)
        found[f"{count} by {size}"] = [end.metrics["loss"], end.metrics["mean_absolute_error"], rest["loss"]]
    held_out = columns({"inputs": INPUTS, "targets": TARGETS}, batch=8, held_out=33)
    found["held out"] = [small().evaluate(held_out, state=weights)["loss"]]
    total = telic.Loop(lambda total, batch: total + batch["inputs"].sum(), lambda batch: 0.0)
    if mesh is not None:
        total.drive(mesh=mesh)
    found["a raw loop"] = [float(total.run(batches(8, 64)).step_state)]
    return found


def scaled(place: Path) -> Any:
    """Train with an average, windows and a loss scale, one record being spoilt; evaluate the average."""
    objective = telic.supervised(Net(), "mean_squared_error")
    objective.ema = telic.EMASpec(decay=0.8)
    inputs = INPUTS.copy()
    inputs[SPOILT, 3] = np.nan
    made = small(objective, accumulate=2, loss_scale="dynamic", checkpoints=telic.Checkpoints(place, every=3))
    data = columns({"inputs": inputs[:64], "targets": TARGETS[:64]}, batch=8, seed=1)
    state = made.fit(data, steps=8, log_every=0)
    return {
        "loss": made.evaluate(lambda: batches(8, 61), state=state, averaged=True)["loss"],
        "rejected": int(state.rejections.total),
        "updates": int(state.updates),
        "scale": float(state.loss_scale.value),
    }


class Two(telic.Objective):
    """Two means with masses of their own: a window is planned before its first attempt."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jax.random.normal(key, (16, 8))}}

    def _errors(self, variables: Any, batch: Any) -> Any:
        return ((batch["inputs"] @ variables["params"]["w"] - batch["targets"]) ** 2).mean(-1)

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        errors, mask = self._errors(variables, batch), jnp.abs(batch["inputs"][:, 0])
        every = telic.Mean(errors.sum(), jnp.asarray(errors.size, jnp.float32))
        return telic.Terms({"all": (1.0, every), "some": (0.5, telic.Mean((errors * mask).sum(), mask.sum()))})


class Contrast(Two):
    """Rows of the whole window against each other: its batches are kept in the state and replayed."""

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        return {"left": telic.Rows(batch["inputs"] @ variables["params"]["w"]), "right": telic.Rows(batch["targets"])}

    def reduce_loss(self, statistics: Any) -> Any:
        logits = statistics["left"].values @ statistics["right"].values.T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits))), jnp.asarray(True)


def terms(place: Path) -> Any:
    """Train with windows that are planned, and with windows that are replayed; these in two runs."""
    found: dict[str, list[float]] = {}
    for objective, plan in ((Two(), (4,)), (Contrast(), (3, 6))):
        name = type(objective).__name__
        losses = found[name] = []
        for steps in plan:
            made = small(objective, accumulate=2, checkpoints=telic.Checkpoints(place / name, every=2))
            loop = made.loop(log=0).handle_event(
                "step_completed", lambda s, seen=losses: seen.append(s.metrics["loss"])
            )
            loop.run(columns({"inputs": INPUTS[:64], "targets": TARGETS[:64]}, batch=8, seed=1), steps=steps)
    return found


def best(place: Path) -> Any:
    """Stop early and give the best state back; go on from the saved run, whose record holds that state too."""
    found: list[Any] = []
    data = columns({"inputs": INPUTS, "targets": TARGETS}, batch=8, seed=1, held_out=33)
    for epochs in (3, 6):
        # The third epoch is the best: those after it begin with worse weights.
        objective = telic.supervised(Net(), "mean_squared_error")
        made = small(objective, checkpoints=telic.Checkpoints(place, every=2))
        loop = made.loop(log=0).validate(data)
        loop.early_stop("validation_loss", patience=9, mode="min", restore_best=True)
        loop.handle_event("epoch_started", spoil, telic.after(3))
        end = loop.run(data, epochs=epochs)
        found.append([end.history[n]["validation_loss"] for n in sorted(end.history)])
        found.append(made.evaluate(data, state=end.step_state)["loss"])
    return found


def spoil(state: Any) -> Any:
    """Make the weights worse."""
    held = state.step_state
    worse = jax.tree.map(lambda x: x * 3, held.variables)
    return state.replace(step_state=held.replace(variables=worse))


class Shown(telic.Objective):
    """An objective that scores and shows: artifacts with rows that lie on all devices."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.ones((16, 8))}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        errors = (batch["inputs"] @ variables["params"]["w"] - batch["targets"]) ** 2
        return telic.Mean(errors.sum(), jnp.asarray(errors.size, jnp.float32))

    def evaluate(self, variables: Any, batch: Any, step: Any) -> Any:
        features = batch["inputs"] @ variables["params"]["w"]
        return Representations(features), ImageGrid(jnp.abs(jnp.tanh(features)).reshape(-1, 2, 4, 1))


class Rows:
    """A metric on the host: the rows it has seen, and their sum."""

    name, mode, reads, host = "rows", None, Representations, True

    def init(self, *args: Any) -> Any:
        return np.zeros(2)

    def update(self, acc: Any, *args: Any, weights: Any = None) -> Any:
        return acc + np.array([len(args[0].features), np.abs(args[0].features).sum()])

    def merge(self, a: Any, b: Any) -> Any:
        return a + b

    def compute(self, acc: Any) -> Any:
        return acc


SINKS = ("previews", "own")


def shown(place: Path) -> Any:
    """Evaluate with artifacts, a metric on the host and a preview, inside a run and by itself."""
    made = small(Shown(), checkpoints=telic.Checkpoints(place, every=4))
    metric: Metric = Rows()  # pyright: ignore[reportAssignmentType]
    data = columns({"inputs": INPUTS, "targets": TARGETS}, batch=8, seed=1, held_out=29)
    state = made.fit(data, steps=4, log_every=0, eval_every=2, preview=True)
    values = made.evaluate(data, state=state, metrics=[metric], preview=place / "own")
    multihost_utils.sync_global_devices("all that is shown is written")
    files = sorted(f"{path.parent.name}/{path.name}" for path in place.rglob("*.*") if path.parent.name in SINKS)
    return {"rows": [float(x) for x in values["rows"]], "loss": [values["loss"]], "files": files}


def checked(place: Path) -> Any:
    """Ask `Trainer.check` for everything once."""
    data = columns({"inputs": INPUTS, "targets": TARGETS}, batch=8, seed=1, held_out=33)
    report = small(accumulate=2).check(data, metrics=["mean_absolute_error"])
    return {"ok": report.ok, "failures": report.failures, "lines": [line.split()[0] for line in report.splitlines()]}


ALIKE: dict[str, Callable[[Path], Any]] = {
    check.__name__: check for check in (windows, evaluated, scaled, terms, best, shown, checked)
}

# -- of two processes alone --------------------------------------------------------------------------------------


def fails(act: Callable[[], Any], *kinds: type[Exception]) -> str:
    """Give what an error says that must come."""
    try:
        act()
    except kinds as error:
        return str(error)
    return "nothing was raised"


def goes_on(name: str, mesh: telic.MeshSpec | None) -> Callable[[Path], Any]:
    """Give the check that runs the decoder in a directory, where another launch may have begun."""
    return lambda place: run(place.parent / name, mesh)


def quiet(place: Path) -> Any:
    """Save in the middle of an epoch, with metrics, while gathering over the devices is forbidden."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a save gathered over the devices")

    before, multihost_utils.process_allgather = multihost_utils.process_allgather, forbidden
    try:
        made = small(accumulate=2, checkpoints=telic.Checkpoints(place, every=1))
        loop = made.loop(log=0, metrics=["mean_absolute_error"])
        loop.early_stop("mean_absolute_error", restore_best=True, patience=5)
        loop.run(columns({"inputs": INPUTS[:64], "targets": TARGETS[:64]}, batch=8, seed=1), epochs=2)
    finally:
        multihost_utils.process_allgather = before
    return sorted(path.name for path in place.iterdir() if path.name.isdigit())


def probed(place: Path) -> Any:
    """Look at gradients and predictions, of which no process has all."""
    seen: list[Any] = []

    def look(outputs: Any) -> Any:
        return {"gradient": outputs["gradients"]["Dense_0"]["kernel"], "prediction": outputs["prediction"]}

    loop = small().loop(log=0)
    loop.probe(look, telic.every(2), to=lambda values, state: seen.append(jax.tree.map(np.shape, values)))
    loop.run(columns({"inputs": INPUTS[:64], "targets": TARGETS[:64]}, batch=8, seed=1), steps=2)
    return seen


def placed(place: Path) -> Any:
    """Train on batches that lie on all devices already, with saves between."""
    mesh = telic.MeshSpec(data=1, fsdp=-1).build()
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def whole(epoch: int) -> Any:
        for batch in batches(8, 64):
            yield {name: jax.make_array_from_process_local_data(rows, x) for name, x in batch.items()}

    made = small(mesh=mesh, checkpoints=telic.Checkpoints(place, every=3))
    losses: list[float] = []
    loop = made.loop(log=0).handle_event("step_completed", lambda s: losses.append(s.metrics["loss"]))
    state = loop.run(whole, epochs=1).step_state
    return {"losses": losses, "loss": made.evaluate(lambda: whole(0), state=state)["loss"]}


def refused(place: Path) -> Any:
    """Collect what is refused in both processes, and with which words."""
    rows = 8 if jax.process_index() == 0 else 4
    unequal = [{"inputs": INPUTS[:rows], "targets": TARGETS[:rows]}]
    odd = [{"inputs": INPUTS[:3], "targets": TARGETS[:3]}]
    spoilt = INPUTS.copy()
    spoilt[SPOILT] = np.nan
    bad = columns({"inputs": spoilt[:64], "targets": TARGETS[:64]}, batch=8, shuffle=False)
    many = telic.MeshSpec(data=1, fsdp=1, tensor=-1)
    kinds = batches(8, 8) if jax.process_index() == 0 else [{"inputs": INPUTS[:4, :3], "targets": TARGETS[:4]}]
    return {
        "unequal": fails(lambda: small().fit(lambda epoch: unequal, steps=2, log_every=0), ProcessError),
        "no mesh": fails(lambda: small(mesh=None, layout=None).fit(odd, epochs=1, log_every=0), ValueError),
        "no mesh of an evaluator": fails(lambda: telic.evaluator(Net()).run(odd, state={"params": {}}), ValueError),
        "not finite": fails(
            lambda: small(nonfinite="raise", checkpoints=telic.Checkpoints(place / "bad")).fit(
                bad, epochs=1, log_every=0
            ),
            NonFiniteError,
        ),
        "a file of one process": fails(lambda: small().loop(log=0).checkpoint(place).run(odd), ValueError),
        "a state as text": fails(lambda: telic.serialize_state(telic.LoopState(step_state=a_state())), ValueError),
        "other shapes": fails(lambda: small().evaluate(lambda: kinds, state=a_state()), DataError),
        "tensor": fails(lambda: small(mesh=many).place(batches(8, 8)[0]), ValueError),
    }


def a_state() -> Any:
    return small().place(batches(8, 8)[0])


def late(place: Path) -> Any:
    """Come late in one process."""
    if jax.process_index() == 1:
        time.sleep(3)
    return fails(lambda: ManyProcesses(patience_seconds=1).exchange("a late one", 0), ProcessError)


PAIR: dict[str, Callable[[Path], Any]] = {check.__name__: check for check in (quiet, probed, placed, refused, late)} | {
    name: goes_on(name, PAIR_MESH) for name in ("straight", "killed", "ended", "begun_alone")
}

ALONE: dict[str, Callable[[Path], Any]] = {name: goes_on(name, None) for name in ("killed_first", "begun_alone")}

# -- fifty steps on eight devices, and on one --------------------------------------------------------------------


def fifty(problem: str, mesh: telic.MeshSpec | None) -> Callable[[Path], Any]:
    return lambda place: train(PROBLEMS[problem](), mesh, FIFTY)


def indivisible(place: Path) -> Any:
    """Train on six rows, which eight devices do not divide."""
    rows = [{"inputs": INPUTS[:3], "targets": TARGETS[:3]}]
    return fails(lambda: small().fit(rows, epochs=1, log_every=0), ShapeError)


LONG = ("decoder", "digits", "dit")
EIGHT: dict[str, Callable[[Path], Any]] = {
    **{name: fifty(name, telic.MeshSpec(data=2, fsdp=4)) for name in LONG},
    "indivisible": indivisible,
}


def main(place: Path, names: list[str]) -> None:
    known = ALIKE | (ALONE if jax.process_count() == 1 else PAIR | EIGHT)
    results: dict[str, Any] = {}
    for name in names:
        mine = place / name
        mine.mkdir(exist_ok=True)
        began = time.monotonic()
        try:
            results[name] = {"gave": known[name](mine)}
        except Exception:
            results[name] = {"failed": traceback.format_exc()}
        results[name]["seconds"] = time.monotonic() - began
        (place / f"results.{jax.process_index()}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
