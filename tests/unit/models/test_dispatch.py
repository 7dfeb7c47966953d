"""What adapt accepts, and what it says about the rest."""

import functools
import importlib
from collections import namedtuple
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import telic.models
from telic.errors import ContractError
from telic.models import Forward, adapt

X = jnp.ones((4, 5))
KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (nn.Dense, r"write Dense\(\.\.\.\)"),
        (nnx.Linear, r"write lambda key: Linear\(\.\.\., rngs=nnx\.Rngs\(key\)\)"),
        (eqx.nn.MLP, r"write lambda key: MLP\(\.\.\., key=key\)"),
        (int, "got the class int"),
    ],
)
def test_a_class_is_refused_with_what_to_write(kind: type, advice: str) -> None:
    """Catches a class being called with a key as if it were a constructor."""
    with pytest.raises(TypeError, match=advice):
        adapt(kind)


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        "mlp",
        {"params": X},
        lambda targets, prediction: targets,
        lambda: nn.Dense(2),
        functools.partial(nn.Dense, 3),
        optax.adam(1e-3),
        (jnp.sin, 3),
        (jnp.sin, jnp.sin, jnp.sin),
    ],
)
def test_anything_else_names_the_forms(value: Any) -> None:
    """Catches an optimizer or a loss being taken for a model, and an error that does not say what a model is."""
    with pytest.raises(TypeError, match=r"a model is a Flax Linen module, .* or a constructor lambda key"):
        adapt(value)


def test_a_named_pair_is_accepted() -> None:
    """Catches (init, apply) of libraries that name the two being refused."""
    Transformed = namedtuple("Transformed", "init apply")
    model = adapt(Transformed(lambda key, x: {"w": jnp.ones(())}, lambda p, x: x * p["w"]))
    assert set(model.init(KEY, X)) == {"params"}


def test_constructors_may_have_defaults_and_be_partial() -> None:
    """Catches a constructor being recognised by its number of parameters instead of those it requires."""

    def make(width: int, key: Any, depth: int = 1) -> nnx.Module:
        return nnx.Linear(5, width * depth, rngs=nnx.Rngs(key))

    model = adapt(functools.partial(make, 3))
    assert model.forward(model.init(KEY, X), X, train=True).prediction.shape == (4, 3)


@pytest.mark.parametrize("built", [nn.Dense(2), 3, None])
def test_a_constructor_of_something_else_is_said(built: Any) -> None:
    """Catches a loss of one argument that fails far away, in the middle of initialisation."""
    with pytest.raises(ContractError, match="a constructor must return an NNX or Equinox module"):
        adapt(lambda key: built).init(KEY, X)


def test_a_constructor_leaks_no_tracer() -> None:
    """Catches a structure that was traced inside one program and holds its tracers in the next."""
    model = adapt(lambda key: nnx.Linear(5, 3, rngs=nnx.Rngs(key)))
    with jax.checking_leaks():
        variables = jax.jit(model.init)(KEY, X)
        first = jax.jit(lambda v: model.forward(v, X, train=True, key=KEY).prediction)(variables)
    second = model.forward(variables, X, train=False).prediction
    assert jnp.allclose(first, second, rtol=1e-5)


@pytest.mark.parametrize("value", [nn.Dense(2), nnx.Linear(5, 2, rngs=nnx.Rngs(0)), (jnp.sin, jnp.sin)])
def test_batched_belongs_to_equinox(value: Any) -> None:
    """Catches an option that is taken and has no effect."""
    with pytest.raises(ValueError, match="batched=True is for Equinox"):
        adapt(value, batched=True)


def test_sown_is_a_sequence() -> None:
    """Catches sown="losses" naming six collections of one letter."""
    with pytest.raises(TypeError, match=r"write sown=\('losses',\)"):
        adapt(nn.Dense(2), sown="losses")


def test_a_module_without_a_call_is_said() -> None:
    """Catches a missing __call__ that shows up as an attribute error in the first step."""

    class Encoder(nn.Module):
        @nn.compact
        def encode(self, x: Any) -> Any:
            return nn.Dense(2)(x)

    with pytest.raises(TypeError, match="Encoder must define __call__"):
        adapt(Encoder())


def test_a_model_of_ones_own_is_returned() -> None:
    """Catches a class that implements the protocol being refused."""

    class Own:
        def init(self, key: Any, inputs: Any) -> dict[str, Any]:
            return {"params": {}}

        def forward(self, variables: Any, inputs: Any, *, train: bool, key: Any = None) -> Forward:
            return Forward(inputs)

        def bind(self, variables: Any) -> Any:
            return self

        def held(self) -> None:
            return None

    own = Own()
    assert adapt(own) is own
    with pytest.raises(ValueError, match="adapted already"):
        adapt(own, sown=("losses",))


def test_public_names_stay_functions() -> None:
    """Catches a submodule that takes the place of the function adapt."""
    dispatch = importlib.import_module("telic.models.dispatch")
    assert telic.models.adapt is dispatch.adapt
    assert set(telic.models.__all__) <= set(dir(telic.models))
    with pytest.raises(AttributeError, match="no attribute 'adept'"):
        _ = telic.models.adept
