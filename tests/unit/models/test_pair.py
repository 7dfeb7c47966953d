"""A pair of functions: bare parameters of any structure, collections of state, predictions that are tuples."""

from collections import namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ContractError
from telic.models import adapt
from telic.tree import leaf_names

KEY = jax.random.key(3)
X = jax.random.normal(KEY, (4, 5))


def with_state_init(key: Any, x: Any) -> Any:
    return {"params": {"w": jnp.ones(5)}, "batch_stats": {"mean": jnp.zeros(5)}, "cache": [jnp.zeros(1)]}


def returning(second: Any) -> Any:
    def apply(variables: Any, x: Any) -> Any:
        return x * variables["params"]["w"], second

    return adapt((with_state_init, apply))


def test_bare_parameters_of_any_structure() -> None:
    """Catches apply getting another structure than init gave: a dictionary where it indexes a list."""
    Layer = namedtuple("Layer", "weight bias")

    def init(key: Any, x: Any) -> Any:
        return [Layer(jax.random.normal(key, (5, 5)), jnp.zeros(5)), (jnp.ones(5), {3: jnp.ones(())})]

    def apply(params: Any, x: Any) -> Any:
        first, (scale, more) = params
        return (x @ first.weight + first.bias) * scale * more[3]

    model = adapt((init, apply))
    variables = model.init(KEY, X)
    assert leaf_names(variables) == ["params/0/bias", "params/0/weight", "params/1/0", "params/1/1/3"]
    # A fresh adapter has not seen an init.
    for fresh in (model, adapt((init, apply))):
        np.testing.assert_array_equal(apply(init(KEY, X), X), fresh.forward(variables, X, train=True).prediction)
    np.testing.assert_array_equal(apply(init(KEY, X), X), model.bind(variables)(X))


def test_state_comes_back_by_collection() -> None:
    """Catches a changed collection that is lost, one that is unchanged counted as changed, or state in inference."""
    model = returning({"batch_stats": {"mean": jnp.ones(5)}, "cache": [jnp.ones(1)]})
    variables = model.init(KEY, X)
    assert set(variables) == {"params", "batch_stats", "cache"}
    output = model.forward(variables, X, train=True)
    assert output.prediction.shape == (4, 5)
    assert jax.tree.structure(output.state) == jax.tree.structure({k: variables[k] for k in ("batch_stats", "cache")})
    assert model.forward(variables, X, train=False).state == {}


def test_an_unchanged_collection_is_no_state() -> None:
    """Catches every collection being written at each step because apply passes it on."""

    def apply(variables: Any, x: Any) -> Any:
        return x, {"batch_stats": variables["batch_stats"]}

    model = adapt((with_state_init, apply))
    assert model.forward(model.init(KEY, X), X, train=True).state == {}


@pytest.mark.parametrize("second", [{"logits": jnp.ones(2)}, jnp.ones(3), [jnp.ones(1)]])
def test_a_prediction_may_be_a_pair(second: Any) -> None:
    """Catches the second half of a prediction being taken for state."""
    model = returning(second)
    variables = model.init(KEY, X)
    output = model.forward(variables, X, train=True)
    assert output.state == {}
    assert jax.tree.structure(output.prediction) == jax.tree.structure((X, second))


@pytest.mark.parametrize("second", [{"batch_stats": {"mean": jnp.ones(5)}, "other": 1}, {"params": {"w": jnp.ones(5)}}])
def test_collections_that_are_no_state_are_refused(second: Any) -> None:
    """Catches parameters replaced through the state, and a misspelt collection."""
    model = returning(second)
    with pytest.raises(ContractError, match="are no collections of state"):
        model.forward(model.init(KEY, X), X, train=True)


def test_recorded_collections_are_sown() -> None:
    """Catches what apply only records becoming state."""
    model = adapt((with_state_init, lambda v, x: (x, {"losses": {"l2": x.sum()}})), sown=("losses",))
    output = model.forward(model.init(KEY, X), X, train=False)
    assert set(output.sown) == {"losses"}
    assert output.state == {}


def test_train_and_key_are_passed_where_asked_for() -> None:
    """Catches a flag or key that apply has a parameter for and does not get."""
    seen: list[Any] = []

    def apply(params: Any, x: Any, key: Any, deterministic: bool) -> Any:
        seen.append((key, deterministic))
        return x

    model = adapt((lambda key, x: {"w": jnp.ones(1)}, apply))
    variables = model.init(KEY, X)
    model.forward(variables, X, train=True, key=KEY)
    model.forward(variables, X, train=False)
    assert seen == [(KEY, False), (None, True)]


def test_several_inputs_are_spread() -> None:
    """Catches a tuple of inputs given whole to functions of several arguments."""
    model = adapt((lambda key, a, b: {"w": jnp.ones(())}, lambda p, a, b: p["w"] * a + b))
    variables = model.init(KEY, (X, X))
    np.testing.assert_array_equal(X + X, model.forward(variables, (X, X), train=True).prediction)


def test_a_jitted_apply_keeps_its_signature() -> None:
    """Catches a wrapper that hides the parameters, so that train is never passed."""
    apply = jax.jit(lambda p, x, *, train: x * (2 if train else 1), static_argnames="train")
    model = adapt((lambda key, x: {"w": jnp.ones(())}, apply))
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(X * 2, model.forward(variables, X, train=True).prediction)
