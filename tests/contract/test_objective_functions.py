"""Objective functions of four arguments: what they get, what they must return, and what a run makes of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import telic
from telic.errors import ContractError


class Dense(nn.Module):
    """Two layers whose names tests can tell apart."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2, name="head")(nn.tanh(nn.Dense(8, name="body")(x)))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not train, name="norm")(x))


def batches(count: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    x = random.normal(1.0, 2.0, size=(count, 16, 3)).astype(np.float32)
    y = np.stack([x.sum(-1), x[..., 0]], axis=-1)
    return list(zip(x, y, strict=True))


def squared(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
    """The objective that says what the loss "mean_squared_error" says."""
    output = forward(variables, inputs)
    return jnp.mean((targets - output.prediction) ** 2, axis=-1), output


def contrastive(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
    """Two forward passes and a penalty read from the parameters."""
    anchor = forward(variables, inputs)
    positive = forward(variables, inputs + 0.01)
    logits = anchor.prediction @ positive.prediction.T
    penalty = jnp.sum(variables["params"]["body"]["kernel"] ** 2)
    losses = -jnp.diagonal(jax.nn.log_softmax(logits, axis=-1))
    return losses + 1e-3 * penalty, anchor.replace(prediction=logits)


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_two_forwards_and_a_penalty_reduce_the_loss() -> None:
    """Catches a second pass, or a penalty, that the gradient does not see."""
    step = telic.train_step(Dense(), contrastive, telic.optimizers.adam(1e-2))
    batch = batches()[0]
    state, advance = step.init(batch), jax.jit(step.step)
    structure = jax.tree.structure(state)
    found: list[float] = []
    for _ in range(5):
        result = advance(state, batch)
        state = result.state
        found.append(float(result.outputs["loss"]))
    assert jax.tree.structure(state) == structure
    assert result.outputs["prediction"].shape == (16, 16)
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


@pytest.mark.parametrize("loss_scale", [None, "dynamic"])
def test_objective_equal_to_a_loss_gives_its_bits(loss_scale: str | None) -> None:
    """Catches a second path for objective functions: parameters, loss and loss scale must be those of the loss form."""
    runs: list[Any] = []
    for loss in ("mean_squared_error", squared):
        loop = telic.trainer(Dense(), loss, "adam", log=0, loss_scale=loss_scale)
        runs.append(loop.run(batches(), epochs=2))
    a, b = (run.step_state for run in runs)
    same(a.variables, b.variables)
    same(a.opt_state, b.opt_state)
    same(a.loss_scale, b.loss_scale)
    assert runs[0].history == runs[1].history
    assert set(runs[0].history[1]) == {"loss"}


def test_batchnorm_moves_through_an_objective() -> None:
    """Catches a forward in inference mode, and layer state that is computed and dropped."""
    step = telic.train_step(Normalised(), squared, "sgd")
    batch = batches()[0]
    before = step.init(batch)
    after = jax.jit(step.step)(before, batch).state
    moved = after.variables["batch_stats"]["norm"]["mean"]
    np.testing.assert_array_equal(before.variables["batch_stats"]["norm"]["mean"], np.zeros(3))
    np.testing.assert_allclose(moved, 0.01 * batch[0].mean(axis=0), rtol=1e-5)


def test_validation_of_an_objective_leaves_batchnorm_alone() -> None:
    """Catches an evaluation in training mode: the running mean of validation data would leak into the weights."""
    plain = telic.trainer(Normalised(), squared, "sgd", log=0).run(batches())
    validated = telic.trainer(Normalised(), squared, "sgd", log=0).validate(batches(2)).run(batches())
    same(plain.step_state.variables, validated.step_state.variables)


def test_frozen_parameters_stay() -> None:
    """Catches weight decay, or a gradient, that reaches a leaf which is not trainable."""
    step = telic.train_step(
        Dense(), contrastive, telic.optimizers.adamw(1e-2, weight_decay=0.1), trainable=telic.paths("params/head/**")
    )
    batch = batches()[0]
    before = step.init(batch)
    after = jax.jit(step.step)(before, batch).state
    same(before.variables["params"]["body"], after.variables["params"]["body"])
    assert not np.array_equal(before.variables["params"]["head"]["kernel"], after.variables["params"]["head"]["kernel"])


def returns_loss_alone(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
    return jnp.mean(forward(variables, inputs).prediction)


def returns_bare_prediction(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
    prediction = forward(variables, inputs).prediction
    return jnp.mean(prediction), prediction


def returns_nothing(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
    forward(variables, inputs)


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (returns_loss_alone, r"got an array of shape \(\) alone"),
        (returns_bare_prediction, r"got \(loss, an array of shape \(16, 2\)\)"),
        (returns_nothing, "got None"),
    ],
)
def test_wrong_return_raises_before_compiling(wrong: Callable[..., Any], got: str) -> None:
    """Catches an objective that returns only the loss and fails deep inside a compiled step, or not at all."""
    compiled: list[str] = []

    class Listener:
        def compiling(self, what: str) -> None:
            compiled.append(what)

        def compiled(self, what: str, seconds: float) -> None: ...

    loop = telic.trainer(Dense(), wrong, "sgd", log=0)
    loop._listener = Listener()
    with pytest.raises(ContractError, match=rf"{wrong.__name__} must return \(loss, output\).*{got}"):
        loop.run(batches())
    assert compiled == []


def test_wrong_return_raises_at_init() -> None:
    """Catches a contract that is checked at the first step only: `init` has seen the batch already."""
    with pytest.raises(ContractError, match=r"must return \(loss, output\)"):
        telic.train_step(Dense(), returns_loss_alone, "sgd").init(batches()[0])


def test_three_arguments_are_refused_with_both_forms() -> None:
    """Catches dispatch by guess."""

    def neither(variables: Any, inputs: Any, targets: Any) -> Any: ...

    with pytest.raises(TypeError, match=r"neither a loss nor an objective.*\(targets, prediction\).*\(forward, var"):
        telic.trainer(Dense(), neither, "sgd")


def test_validation_has_the_metrics_and_the_loss() -> None:
    """Catches the gap of the seed: a loop built from an objective had no validation_loss."""
    loop = telic.trainer(Dense(), squared, "adam", log=0).metric("mean_absolute_error").validate(batches(2))
    final = loop.run(batches())
    assert set(final.history[0]) == {
        "loss",
        "mean_absolute_error",
        "validation_loss",
        "validation_mean_absolute_error",
    }
    model = final.model
    errors = [y - model(x) for x, y in batches(2)]
    # float32 sums of 64 values.
    np.testing.assert_allclose(final.history[0]["validation_loss"], np.mean(np.square(errors)), rtol=1e-5)
    np.testing.assert_allclose(final.history[0]["validation_mean_absolute_error"], np.mean(np.abs(errors)), rtol=1e-5)
