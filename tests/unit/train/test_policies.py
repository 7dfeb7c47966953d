"""Precision through the trainer: what is computed, held, counted and given in which dtype, for every kind of model."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import telic
from telic.ema import EMASpec

SEEN: list[tuple[str, str]] = []
"""(what, dtype) of everything a model or a loss was given, noted while it is traced."""


def note(what: str, x: Any) -> None:
    SEEN.append((what, str(x.dtype)))


def seen(what: str) -> set[str]:
    return {dtype for name, dtype in SEEN if name == what}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        h = nn.Dense(4)(x)
        note("hidden", h)
        h = nn.BatchNorm(use_running_average=not train, momentum=0.5)(h)
        out = nn.Dense(1)(jnp.tanh(h))[..., 0]
        note("inside", out)
        return out


class NNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one = nnx.Linear(3, 4, rngs=rngs)
        # Without a dtype NNX's layer promotes to that of its float32 statistics: docs/guides/precision.md.
        self.norm = nnx.BatchNorm(4, momentum=0.5, dtype=jnp.bfloat16, rngs=rngs)
        self.two = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.one(x)
        note("hidden", h)
        out = self.two(jnp.tanh(self.norm(h)))[..., 0]
        note("inside", out)
        return out


class Equinox(eqx.Module):
    one: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    two: eqx.nn.Linear

    def __init__(self, key: Any):
        a, b = jax.random.split(key)
        self.one = eqx.nn.Linear(3, 4, key=a)
        self.norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="batch")
        self.two = eqx.nn.Linear(4, 1, key=b)

    def __call__(self, x: Any, state: Any) -> Any:
        h = self.one(x)
        note("hidden", h)
        h, state = self.norm(h, state)
        out = self.two(jnp.tanh(h))[0]
        note("inside", out)
        return out, state


def model_of(kind: str) -> Any:
    match kind:
        case "linen":
            return Linen()
        case "nnx":
            return NNX(nnx.Rngs(0))
        case _:
            return eqx.nn.make_with_state(Equinox)(jax.random.key(0))


def batch_of(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, 3)).astype(np.float32)
    return x, (x.sum(1) * 0.5).astype(np.float32)


def loss(targets: Any, prediction: Any) -> Any:
    note("prediction", prediction)
    note("targets", targets)
    return (targets - prediction) ** 2


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


def dtypes(values: Any) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(values) if jnp.issubdtype(x.dtype, jnp.floating)}


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_bfloat16_computes_and_float32_holds(kind: str) -> None:
    """A model that computes in float32 all the same, a loss in bfloat16, statistics or optimizer state that narrow."""
    trainer = telic.Trainer(telic.supervised(model_of(kind), loss), "adam", key=0, precision="bfloat16", accumulate=2)
    step = trainer.train_step()
    batch = batch_of()
    state = step.init(batch)
    SEEN.clear()
    bound = step.bind(batch)
    advance = jax.jit(bound.step)
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    start = jax.tree.map(np.asarray, dict(state.variables))
    for seed in range(2):
        result = advance(state, batch_of(seed))
        state = result.state
    assert seen("hidden") == seen("inside") == {"bfloat16"}
    assert seen("prediction") == seen("targets") == {"float32"}
    assert str(result.outputs["prediction"].dtype) == str(result.outputs["loss"].dtype) == "float32"
    assert dtypes(state.variables) == dtypes(state.opt_state) == {"float32"}
    assert dtypes(state.window) <= {"float32"}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    # The statistics of BatchNorm moved, in their own dtype.
    (name,) = [n for n in state.variables if n != "params" and dtypes(state.variables[n])]
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (start[name], state.variables[name])), strict=True))


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_evaluation_computes_as_training_does(kind: str) -> None:
    """A validation loss in another precision than training's is not comparable."""
    trainer = telic.Trainer(telic.supervised(model_of(kind), loss), "adam", key=0, precision="bfloat16")
    batch = batch_of()
    state = trainer.place(batch)
    SEEN.clear()
    values = trainer.evaluate([batch], state=state)
    assert seen("hidden") == {"bfloat16"}
    # Equinox's BatchNorm promotes to its float32 statistics in inference, and has no dtype to say otherwise.
    assert seen("inside") == {"float32" if kind == "equinox" else "bfloat16"}
    assert seen("prediction") == {"float32"}
    assert np.isfinite(values["loss"])


@pytest.mark.parametrize(
    ("precision", "inside", "given"),
    [
        (None, "float32", "float32"),
        ("compute=bfloat16", "bfloat16", "bfloat16"),
        ("compute=float16,output=float32", "float16", "float32"),
        ("compute=float32,output=bfloat16", "float32", "bfloat16"),
    ],
)
def test_the_output_dtype_is_what_a_loss_gets(precision: Any, inside: str, given: str) -> None:
    """Without an output dtype a loss computes in the model's; with one that only reports it, it does so too."""
    trainer = telic.Trainer(telic.supervised(Linen(), loss), "sgd", key=0, precision=precision)
    step = trainer.train_step()
    state = step.init(batch_of())
    SEEN.clear()
    result = jax.eval_shape(step.bind(batch_of()).step, state, batch_of())
    assert seen("inside") == {inside}
    assert seen("prediction") == {given}
    # Whatever the prediction's dtype, the loss and its sums are at least float32.
    assert str(result.outputs["loss"].dtype) == "float32"
    assert dtypes(result.outputs["statistics"]) == {"float32"}


def test_an_objective_function_gets_the_output_dtype_at_every_call() -> None:
    """Two forward passes, one of them of the averaged weights: each prediction in the output dtype."""

    def consistent(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
        output = forward(variables, inputs)
        teacher = forward(forward.step.averaged, inputs)
        note("student", output.prediction)
        note("teacher", teacher.prediction)
        note("averaged", jax.tree.leaves(forward.step.averaged["params"])[0])
        return (output.prediction - targets) ** 2 + (output.prediction - teacher.prediction) ** 2, output

    objective = telic.objectives.as_objective(consistent, Linen())
    objective.ema = EMASpec(decay=0.9)
    step = telic.Trainer(objective, "sgd", key=0, precision="bfloat16").train_step()
    state = step.init(batch_of())
    SEEN.clear()
    after = jax.eval_shape(step.bind(batch_of()).step, state, batch_of()).state
    assert seen("student") == seen("teacher") == {"float32"}
    assert seen("inside") == seen("averaged") == {"bfloat16"}
    assert dtypes(after.ema) == {"float32"}


def test_a_tree_of_predictions_is_cast_whole() -> None:
    """Of a prediction that is a mapping only the first leaf cast, or its class ids cast too."""

    class Several(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.Dense(2)(x)
            return {"mean": h[:, 0], "spread": h[:, 1], "best": h.argmax(-1)}

    def of_mapping(targets: Any, prediction: Any) -> Any:
        SEEN.extend((name, str(value.dtype)) for name, value in prediction.items())
        return (prediction["mean"] - targets) ** 2 + prediction["spread"] ** 2

    step = telic.Trainer(telic.supervised(Several(), of_mapping), "sgd", key=0, precision="bfloat16").train_step()
    state = step.init(batch_of())
    SEEN.clear()
    jax.eval_shape(step.bind(batch_of()).step, state, batch_of())
    assert seen("mean") == seen("spread") == {"float32"}
    assert seen("best") == {"int32"}
