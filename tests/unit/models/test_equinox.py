"""Equinox: mapping over the batch, constants, state."""

import json
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ContractError
from telic.models import adapt
from telic.tree import leaf_names

KEY = jax.random.key(3)
X = jax.random.normal(KEY, (4, 5))


class Mixed(eqx.Module):
    layers: list[eqx.nn.Linear]
    table: jax.Array
    scale: np.ndarray
    name: str = eqx.field(static=True)

    def __init__(self) -> None:
        self.layers = [eqx.nn.Linear(5, 5, key=k) for k in jax.random.split(KEY, 12)]
        self.table = jnp.arange(3)
        self.scale = np.ones(2, np.float32)
        self.name = "mixed"

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return {"x": x * self.scale[0], "row": (self.table[1],)}


class Sampling(eqx.Module):
    def __call__(self, x: Any, *, key: Any) -> Any:
        a, _ = jax.random.split(key)
        return x + jax.random.normal(a, x.shape)


class Splitting(eqx.Module):
    drop: eqx.nn.Dropout

    def __call__(self, x: Any, *, key: Any) -> Any:
        a, b = jax.random.split(key)
        return self.drop(self.drop(x, key=a), key=b)


class Spectral(eqx.Module):
    norm: eqx.nn.BatchNorm
    layers: list[eqx.nn.BatchNorm]

    def __init__(self) -> None:
        self.norm = eqx.nn.BatchNorm(5, axis_name="batch", mode="ema")
        self.layers = [eqx.nn.BatchNorm(5, axis_name="batch", mode="batch") for _ in range(2)]

    def __call__(self, x: Any, state: eqx.nn.State) -> Any:
        x, state = self.norm(x, state)
        for layer in self.layers:
            x, state = layer(x, state)
        return x, state


def test_leaves_are_sorted_into_collections() -> None:
    """Catches an integer table among the parameters, and layers that are permuted because "10" sorts before "2"."""
    module = Mixed()
    model = adapt(module)
    variables = model.init(KEY, X)
    assert set(variables) == {"params", "constants"}
    assert set(variables["params"]) == {"layers", "scale"}
    assert leaf_names(variables["constants"]) == ["table"]
    output = model.forward(variables, X, train=True)
    np.testing.assert_allclose(jax.vmap(module)(X)["x"], output.prediction["x"], rtol=1e-5)
    np.testing.assert_array_equal(np.full(4, 1), output.prediction["row"][0])
    assert output.state == {}
    assert isinstance(variables["params"]["scale"], jax.Array)


def test_a_batched_module_is_not_mapped() -> None:
    """Catches a module for whole batches that is mapped over them a second time."""

    class Whole(eqx.Module):
        weight: jax.Array

        def __call__(self, x: Any) -> Any:
            assert x.ndim == 2
            return x @ self.weight

    model = adapt(Whole(jnp.ones((5, 2))), batched=True)
    assert model.forward(model.init(KEY, X), X, train=True).prediction.shape == (4, 2)


def test_several_inputs_are_mapped_together() -> None:
    """Catches a tuple or mapping of which only the first part is mapped."""

    class Two(eqx.Module):
        def __call__(self, image: Any, label: Any) -> Any:
            assert label.ndim == 0
            return image * label

    model = adapt(Two())
    labels = jnp.arange(4.0)
    for inputs in ((X, labels), {"label": labels, "image": X}):
        np.testing.assert_array_equal(X * labels[:, None], model.forward({"params": {}}, inputs, train=True).prediction)


@pytest.mark.parametrize("train", [True, False])
def test_drawing_without_a_key_is_an_error(train: bool) -> None:
    """Catches a constant key standing in for a missing one."""
    model = adapt(Sampling())
    with pytest.raises(ContractError, match="pass key="):
        model.forward({"params": {}}, X, train=train)
    noise = model.forward({"params": {}}, X, train=train, key=KEY).prediction - X
    assert len({tuple(row) for row in np.asarray(noise).tolist()}) == 4


def test_a_key_may_be_split_in_inference() -> None:
    """Catches inference that fails on None in a module that splits its key before it looks at the mode."""
    model = adapt(Splitting(eqx.nn.Dropout(0.5)))
    np.testing.assert_array_equal(X, model.forward({"params": {}}, X, train=False).prediction)
    assert (model.forward({"params": {}}, X, train=True, key=KEY).prediction == 0).any()


def test_inference_flags_follow_train() -> None:
    """Catches a module that was left in inference mode and then trains without dropout."""
    module = eqx.nn.inference_mode(Splitting(eqx.nn.Dropout(0.5)))
    model = adapt(module)
    assert (model.forward({"params": {}}, X, train=True, key=KEY).prediction == 0).any()
    np.testing.assert_array_equal(X, model.forward({"params": {}}, X, train=False, key=KEY).prediction)
    assert module.drop.inference is True


def test_a_layer_of_equinox_is_a_model() -> None:
    """Catches the deprecated `deterministic` argument of Equinox' own layers being passed."""
    model = adapt(eqx.nn.Dropout(0.5))
    assert (model.forward({"params": {}}, X, train=True, key=KEY).prediction == 0).any()
    np.testing.assert_array_equal(X, model.forward({"params": {}}, X, train=False).prediction)


def test_state_leaves_are_named_by_their_layers() -> None:
    """Catches state leaves named by position, which move when a layer is added."""
    model = adapt(eqx.nn.make_with_state(Spectral)())
    variables = model.init(KEY, X)
    assert leaf_names(variables["state"]) == [
        "layers/0/batch_counter",
        "layers/0/batch_state_index/0",
        "layers/0/batch_state_index/1",
        "layers/1/batch_counter",
        "layers/1/batch_state_index/0",
        "layers/1/batch_state_index/1",
        "norm/ema_first_time_index",
        "norm/ema_state_index/0",
        "norm/ema_state_index/1",
    ]
    output = model.forward(variables, X, train=True)
    assert not bool(output.state["state"]["norm"]["ema_first_time_index"])
    np.testing.assert_allclose(X.mean(0), output.state["state"]["norm"]["ema_state_index"]["0"], rtol=1e-5, atol=1e-6)


def test_the_given_state_stays_usable() -> None:
    """Catches the user's State being used up by a forward."""
    module, state = eqx.nn.make_with_state(Spectral)()
    model = adapt((module, state))
    variables = model.init(KEY, X)
    for _ in range(2):
        model.forward(variables, X, train=True)
    assert len(jax.tree.leaves(state)) == 9


def test_a_stateful_module_without_its_state_is_refused() -> None:
    """Catches an error deep inside a layer about a missing argument."""
    with pytest.raises(TypeError, match="make_with_state"):
        adapt(Spectral())


def test_state_that_differs_by_example_is_said() -> None:
    """Catches a vmap error about out_axes without a word on the state."""

    class PerExample(eqx.Module):
        index: eqx.nn.StateIndex[Any]

        def __init__(self) -> None:
            self.index = eqx.nn.StateIndex(jnp.zeros(5))

        def __call__(self, x: Any, state: eqx.nn.State) -> Any:
            return x, state.set(self.index, x)

    model = adapt(eqx.nn.make_with_state(PerExample)())
    with pytest.raises(ValueError, match="out_axes") as caught:
        model.forward(model.init(KEY, X), X, train=True)
    assert any("pmean" in note for note in caught.value.__notes__)


def test_equinox_stays_unloaded() -> None:
    """Catches a Linen user paying for, or needing, the optional dependency; and JAX loaded by the import alone."""
    program = """
import json, sys
import telic.models
before = sorted(sys.modules)
telic.models.adapt
print(json.dumps([before, sorted(sys.modules)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    before, after = json.loads(done.stdout)
    assert not {"jax", "flax", "equinox"} & set(before)
    assert "flax" in after
    assert "equinox" not in after
