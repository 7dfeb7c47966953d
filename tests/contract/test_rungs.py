"""Every rung of the ladder through one suite: training, validation with a loss, weights, one engine."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import telic
from telic.objectives.base import Aux, Mean, Objective


def init(key: Any, inputs: Any) -> dict[str, Any]:
    return {"w": jnp.full((inputs.shape[-1],), 0.5)}


MODEL = (init, lambda params, inputs: inputs @ params["w"])


def squared(targets: Any, prediction: Any) -> Any:
    return (targets - prediction) ** 2


@telic.objective
def function(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
    output = forward(variables, inputs)
    return squared(targets, output.prediction), output


class Own(Objective):
    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.full((3,), 0.5)}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        prediction = batch[0] @ variables["params"]["w"]
        errors = squared(batch[1], prediction)
        weights = batch[2] if len(batch) > 2 else jnp.ones_like(errors)
        outputs = {"prediction": prediction, "targets": batch[1], "weights": weights}
        return Mean((errors * weights).sum(), weights.sum()), Aux(outputs=outputs)


RUNGS: dict[str, Any] = {
    "name": lambda: telic.supervised(MODEL, "mean_squared_error"),
    "loss": lambda: telic.supervised(MODEL, squared),
    "mean": lambda: telic.supervised(MODEL, lambda t, p: Mean(squared(t, p).sum(), jnp.float32(t.shape[0]))),
    "function": lambda: telic.supervised(MODEL, function),
    "class": Own,
}


def batches(*sizes: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [(x, x.sum(-1)) for x in (random.normal(size=(n, 3)).astype(np.float32) for n in sizes)]


TRAIN, HELD = batches(4, 4), batches(4, 4, 2, seed=1)


def trainer(rung: str, **options: Any) -> telic.Trainer:
    return telic.Trainer(RUNGS[rung](), optax.sgd(0.1), key=0, **options)


def reference(data: list[Any], epochs: int) -> np.ndarray:
    """Give the weights by hand, in float64: mean squared error, gradient descent."""
    w = np.full(3, 0.5)
    for _ in range(epochs):
        for x, y in data:
            x = x.astype(np.float64)
            w = w - 0.1 * 2 * x.T @ (x @ w - y) / len(x)
    return w


def held_loss(w: Any) -> float:
    return float(np.concatenate([(x.astype(np.float64) @ np.asarray(w, np.float64) - y) ** 2 for x, y in HELD]).mean())


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_trains_and_validates(rung: str) -> None:
    """Objectives without a validation loss (the limitation of seed 000); a rung with an engine of its own."""
    final = trainer(rung).loop(log=0, validate=HELD, metrics=["mean_absolute_error"]).run(TRAIN, epochs=2)
    w = final.step_state.params["params"]["w"]
    np.testing.assert_allclose(w, reference(TRAIN, 2), rtol=1e-5)
    values = final.history[1]
    assert set(values) == {n for m in ("loss", "mean_absolute_error") for n in (m, f"validation_{m}")}
    assert values["validation_loss"] == pytest.approx(held_loss(w), rel=1e-5)
    assert trainer(rung).evaluate(HELD, state=final)["loss"] == values["validation_loss"]


@pytest.mark.parametrize("rung", ["name", "function", "class"])
def test_weights_are_mass_in_loss_and_metric(rung: str) -> None:
    """XS062, XS063: a weighted loss divided by the number of examples, a metric that ignores the weights."""
    x, y = batches(4)[0]
    weighted = [(x, y, np.float32([1, 1, 0, 0])), (x, y, np.float32([0, 0, 0, 3]))]
    errors = (x.astype(np.float64) @ np.full(3, 0.5) - y) ** 2
    frozen = telic.Trainer(RUNGS[rung](), optax.sgd(0.0), key=0)
    loop = frozen.loop(log=0).metric(squared, "error")
    values = loop.run(weighted).history[0]
    expected = (errors[0] + errors[1] + 3 * errors[3]) / 5
    assert values["loss"] == pytest.approx(expected, rel=1e-5)
    assert values["error"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("loss", "expected"), [("scalar", 1.75), ("mean", 1.686)])
def test_validation_loss_is_a_mean_whatever_the_loss_returns(loss: str, expected: float) -> None:
    """Objectives.md 2.10: a scalar loss summed over 4 batches (7.0), repeated rows of a padded batch counted (2.60)."""
    if loss == "scalar":
        values = [np.full(4, v, np.float32) for v in (1, 1, 2, 3)]
        fn: Any = lambda t, p: (p - t).mean()
    else:
        # 70 records, batches of 16: the last has 6 rows.
        records = np.concatenate([np.ones(64), np.full(6, 9.0)]).astype(np.float32)
        values = [records[i : i + 16] for i in range(0, 70, 16)]
        fn = lambda t, p: Mean((p - t).sum(), jnp.float32(p.shape[0]))
    model = (lambda key, x: {"b": jnp.zeros(())}, lambda params, x: x + params["b"])
    data = [(v, np.zeros_like(v)) for v in values]
    found = telic.Trainer(telic.supervised(model, fn), "sgd", key=0).evaluate(
        data, state={"params": {"b": jnp.zeros(())}}
    )
    assert found["loss"] == pytest.approx(expected, abs=5e-4)


# -- one engine --------------------------------------------------------------------------------------------------


def recorded(loop: telic.Loop) -> list[tuple[str, int, int, tuple[float, ...]]]:
    trace: list[tuple[str, int, int, tuple[float, ...]]] = []
    for event in ("started", "epoch_started", "step_completed", "epoch_completed", "completed"):
        loop.handle_event(
            event, lambda s, event=event: trace.append((event, s.epoch, s.iteration, tuple(s.metrics.values())))
        )
    return trace


def bits(state: Any) -> list[bytes]:
    leaves = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)
    ]
    return [np.asarray(x).tobytes() for x in leaves]


@pytest.mark.parametrize("limits", [{"epochs": 2}, {"steps": 3}])
def test_fit_is_loop_and_run(limits: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products: fit with bits or events of its own."""
    traces: list[Any] = []
    own = telic.Trainer.loop

    def watched(self: telic.Trainer, **options: Any) -> telic.Loop:
        loop = own(self, **options)
        traces.append(recorded(loop))
        return loop

    monkeypatch.setattr(telic.Trainer, "loop", watched)
    fitted = trainer("name", accumulate=2).fit(batches(4, 4, 4), log_every=0, **limits)
    looped = trainer("name", accumulate=2).loop(log=0).run(batches(4, 4, 4), **limits)
    assert bits(fitted) == bits(looped.step_state)
    assert traces[0] == traces[1]


def test_trainer_is_supervised_and_trainer() -> None:
    """A thin name that is thick: another key, another default."""
    thin = telic.trainer(MODEL, "mean_squared_error", "adam", key=3, log=0, accumulate=2)
    full = telic.Trainer(telic.supervised(MODEL, "mean_squared_error"), "adam", key=3, accumulate=2).loop(log=0)
    raw = telic.Loop(telic.train_step(MODEL, "mean_squared_error", "adam", key=3, accumulate=2))
    traces = [recorded(loop) for loop in (thin, full, raw)]
    finals = [bits(loop.run(TRAIN, epochs=2).step_state) for loop in (thin, full, raw)]
    assert finals[0] == finals[1] == finals[2]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("key", [0, "typed"])
def test_a_seed_and_its_key_are_one(key: Any) -> None:
    """Objectives.md section 4 row 19: key=0 and jax.random.key(0) that give different runs."""
    random = (lambda key, x: {"w": jax.random.normal(key, (3,))}, MODEL[1])
    given = jax.random.key(0) if key == "typed" else key
    found = telic.trainer(random, "mean_squared_error", "sgd", key=given, log=0).run(TRAIN).step_state
    expected = telic.trainer(random, "mean_squared_error", "sgd", log=0).run(TRAIN).step_state
    assert bits(found) == bits(expected)


# -- one program for every library -------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(x)[..., 0]


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dense(x)[..., 0]


class Equinox(eqx.Module):
    dense: eqx.nn.Linear

    def __init__(self, key: Any):
        self.dense = eqx.nn.Linear(3, 1, key=key)

    def __call__(self, x: Any) -> Any:
        return self.dense(x)[0]


LIBRARIES: dict[str, Any] = {
    "linen": Linen,
    "nnx": lambda: Nnx(nnx.Rngs(0)),
    "equinox": lambda: Equinox(jax.random.key(0)),
    "pair": lambda: (
        lambda key, x: {"kernel": jnp.zeros((3, 1)), "bias": jnp.zeros(1)},
        lambda p, x: (x @ p["kernel"] + p["bias"])[..., 0],
    ),
}


def leveled(variables: Any) -> Any:
    """Give every parameter the same start, whatever its name and orientation."""
    return jax.tree.map(lambda x: jnp.full(x.shape, 0.25, x.dtype), variables)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_program_trains_every_library(library: str) -> None:
    """An adapter that changes the numbers, or a library that needs a program of its own."""
    objective = telic.supervised(LIBRARIES[library](), squared)
    start = leveled(telic.Trainer(objective, "sgd", key=0).place(example=TRAIN[0]).params)
    loop = telic.Trainer(objective, optax.sgd(0.1), key=0).loop(log=0, validate=HELD, metrics=["mean_absolute_error"])
    final = loop.run(TRAIN, epochs=2, state=start)
    w, b = np.full(3, 0.25), 0.25
    for _ in range(2):
        for x, y in TRAIN:
            error = x.astype(np.float64) @ w + b - y
            w, b = w - 0.2 * x.T @ error / len(x), b - 0.2 * error.mean()
    found = sorted(float(v) for leaf in jax.tree.leaves(final.step_state.params["params"]) for v in np.ravel(leaf))
    np.testing.assert_allclose(found, sorted([*w, b]), rtol=1e-5)
    errors = np.concatenate([x.astype(np.float64) @ w + b - y for x, y in HELD])
    assert final.history[1]["validation_loss"] == pytest.approx((errors**2).mean(), rel=1e-5)
    assert final.history[1]["validation_mean_absolute_error"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert final.model is not None
