"""One network in four libraries: the same numbers, and the same laws of variables, keys and transforms."""

import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from telic.models import Forward, adapt
from telic.tree import leaf_names, shape_structs

KEY = jax.random.key(7)
X = jax.random.normal(jax.random.key(1), (8, 64))
Y = jax.random.normal(jax.random.key(2), (8, 10))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(10, name="second")(nn.relu(nn.Dense(32, name="first")(x)))


class NNXMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.second = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(nnx.relu(self.first(x)))


class EquinoxMLP(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, key: Any):
        a, b = jax.random.split(key)
        self.first = eqx.nn.Linear(64, 32, key=a)
        self.second = eqx.nn.Linear(32, 10, key=b)

    def __call__(self, x: Any) -> Any:
        return self.second(jax.nn.relu(self.first(x)))


def pair_init(key: Any, x: Any) -> Any:
    a, b = jax.random.split(key)
    return {
        "first": {"kernel": jax.random.normal(a, (x.shape[-1], 32)) / 8, "bias": jnp.zeros(32)},
        "second": {"kernel": jax.random.normal(b, (32, 10)) / 6, "bias": jnp.zeros(10)},
    }


def pair_apply(params: Any, x: Any) -> Any:
    x = jax.nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
    return x @ params["second"]["kernel"] + params["second"]["bias"]


class LinenFull(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool) -> Any:
        x = nn.Dense(16, name="dense")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


class NNXFull(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(64, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.dense(x)))


class EquinoxFull(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout

    def __init__(self, key: Any):
        self.dense = eqx.nn.Linear(64, 16, key=key)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", momentum=0.9, mode="batch")
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x: Any, state: eqx.nn.State, *, key: Any = None) -> Any:
        x, state = self.norm(self.dense(x), state)
        return self.drop(x, key=key), state


def full_pair_init(key: Any, x: Any) -> Any:
    return {"params": {"w": jax.random.normal(key, (x.shape[-1], 16))}, "batch_stats": {"mean": jnp.zeros(16)}}


def full_pair_apply(variables: Any, x: Any, *, train: bool, key: Any) -> Any:
    x = x @ variables["params"]["w"]
    if not train:
        return x - variables["batch_stats"]["mean"]
    mean = 0.9 * variables["batch_stats"]["mean"] + 0.1 * x.mean(0)
    return (x - x.mean(0)) * jax.random.bernoulli(key, shape=x.shape), {"batch_stats": {"mean": mean}}


MLPS: dict[str, Callable[[], Any]] = {
    "linen": LinenMLP,
    "nnx": lambda: NNXMLP(nnx.Rngs(0)),
    "equinox": lambda: EquinoxMLP(jax.random.key(0)),
    "pair": lambda: (pair_init, pair_apply),
    "nnx_constructor": lambda: lambda key: NNXMLP(nnx.Rngs(key)),
    "equinox_constructor": lambda: lambda key: EquinoxMLP(key),
}

FULL: dict[str, Callable[[], Any]] = {
    "linen": LinenFull,
    "nnx": lambda: NNXFull(nnx.Rngs(0)),
    "equinox": lambda: eqx.nn.make_with_state(EquinoxFull)(jax.random.key(0)),
    "pair": lambda: (full_pair_init, full_pair_apply),
    "nnx_constructor": lambda: lambda key: NNXFull(nnx.Rngs(key)),
    "equinox_constructor": lambda: lambda key: eqx.nn.make_with_state(EquinoxFull)(key),
}

STATE = {"linen": "batch_stats", "nnx": "batch_stats", "pair": "batch_stats", "equinox": "state"}


def state_of(kind: str) -> str:
    return STATE[kind.split("_")[0]]


@pytest.fixture(params=MLPS)
def mlp(request: pytest.FixtureRequest) -> Any:
    return adapt(MLPS[request.param]())


@pytest.fixture(params=FULL)
def full(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, adapt(FULL[request.param]())


def weights_for(kind: str, weights: Any) -> Any:
    """Put the weights of the pair into the layout of another library."""
    if not kind.startswith("equinox"):
        return {"params": weights}
    return {"params": {n: {"weight": layer["kernel"].T, "bias": layer["bias"]} for n, layer in weights.items()}}


def loss(model: Any, variables: Any) -> Any:
    return ((model.forward(variables, X, train=True).prediction - Y) ** 2).mean()


@pytest.mark.parametrize("kind", MLPS)
def test_same_weights_give_same_predictions_and_gradients(kind: str) -> None:
    """Catches leaves that are named or laid out so that a weight lands in another place."""
    weights = pair_init(KEY, X)
    model = adapt(MLPS[kind]())
    variables = weights_for(kind, weights)
    assert leaf_names(model.init(KEY, X)) == leaf_names(variables)
    assert shape_structs(model.init(KEY, X)) == shape_structs(variables)
    expected = pair_apply(weights, X)
    grads = jax.grad(lambda w: ((pair_apply(w, X) - Y) ** 2).mean())(weights)
    for train in (True, False):
        actual = model.forward(variables, X, train=train).prediction
        np.testing.assert_allclose(expected, actual, rtol=1e-5, atol=1e-6)
    actual_grads = jax.grad(lambda v: loss(model, v))(variables)
    jax.tree.map(
        lambda e, a: np.testing.assert_allclose(e, a, rtol=1e-5, atol=1e-6), weights_for(kind, grads), actual_grads
    )


def test_variables_are_plain_nested_dictionaries(full: tuple[str, Any]) -> None:
    """Catches a FrozenDict, a State or an integer key in the variables or in what a forward returns."""
    kind, model = full
    variables = model.init(KEY, X)
    output = model.forward(variables, X, train=True, key=KEY)
    check_plain(variables)
    check_plain(output.state)
    assert set(output.state) == {state_of(kind)}
    assert set(variables) == {"params", state_of(kind)}


def check_plain(tree: Any) -> None:
    if isinstance(tree, jax.Array):
        return
    assert type(tree) is dict
    for name, inner in tree.items():
        assert type(name) is str
        check_plain(inner)


def test_init_under_eval_shape_and_jit(full: tuple[str, Any]) -> None:
    """Catches an init that needs concrete arrays, or whose structure differs under trace."""
    _, model = full
    eager = model.init(KEY, X)
    assert jax.eval_shape(model.init, KEY, X) == shape_structs(eager)
    jitted = jax.jit(model.init)(KEY, X)
    jax.tree.map(lambda e, a: np.testing.assert_allclose(e, a, rtol=1e-5, atol=1e-6), eager, jitted)
    repeat = model.init(KEY, X)
    jax.tree.map(np.testing.assert_array_equal, eager, repeat)


@pytest.mark.parametrize("kind", ["nnx_constructor", "equinox_constructor"])
def test_a_constructor_initialises_inside_the_program(kind: str) -> None:
    """Catches weights that are computed outside and compiled in as constants, and a key that is ignored."""
    model = adapt(FULL[kind]())
    assert model.held() is None
    jaxpr = jax.make_jaxpr(lambda key: model.init(key, X))(KEY)
    assert [c for c in jaxpr.consts if jnp.size(c) > 1] == []
    first, second = (model.init(jax.random.key(i), X)["params"]["dense"] for i in (0, 1))
    name = "kernel" if kind.startswith("nnx") else "weight"
    assert not np.array_equal(first[name], second[name])


def test_state_is_a_fixed_point(full: tuple[str, Any]) -> None:
    """Catches state whose structure, shape, dtype or weak type changes, so that the second step compiles again."""
    kind, model = full
    variables = model.init(KEY, X)
    name = state_of(kind)
    types = jax.tree.map(jax.typeof, variables[name])
    for i in range(3):
        output = model.forward(variables, X, train=True, key=jax.random.key(i))
        assert jax.tree.map(jax.typeof, output.state) == {name: types}
        assert not jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), variables[name], output.state[name]))
        variables = {**variables, **output.state}


def test_running_statistics_move_in_training_and_serve_inference(full: tuple[str, Any]) -> None:
    """Catches inference that normalises by its own batch, or that moves the statistics."""
    _, model = full
    variables = model.init(KEY, X)
    before = model.forward(variables, X, train=False)
    assert before.state == {}
    moved = {**variables, **model.forward(variables, X, train=True, key=KEY).state}
    after = model.forward(moved, X, train=False)
    assert not np.allclose(before.prediction, after.prediction)
    alone = model.forward(moved, X[:1], train=False).prediction
    np.testing.assert_allclose(after.prediction[:1], alone, rtol=1e-5, atol=1e-6)


def test_dropout_follows_the_key(full: tuple[str, Any]) -> None:
    """Catches a mask that repeats at each step, that depends on more than the key, or that is on in inference."""
    _, model = full
    variables = model.init(KEY, X)

    def run(key: Any, train: bool = True) -> Any:
        return model.forward(variables, X, train=train, key=key).prediction

    a, b = jax.random.split(KEY)
    np.testing.assert_array_equal(run(a), run(a))
    assert not np.array_equal(run(a), run(b))
    assert 0.3 < float((run(a) == 0).mean()) < 0.7
    np.testing.assert_array_equal(run(a, train=False), run(None, train=False))
    assert not (run(None, train=False) == 0).any()
    # Each example has a mask of its own.
    assert len({tuple(row) for row in np.asarray(run(a) == 0).tolist()}) > 1


def test_two_forwards_in_one_trace_draw_by_their_own_keys(full: tuple[str, Any]) -> None:
    """Catches a count or a key that is kept between two calls of one trace."""
    _, model = full
    variables = model.init(KEY, X)

    @jax.jit
    def twice(v: Any, a: Any, b: Any) -> Any:
        return [model.forward(v, X, train=True, key=key).prediction for key in (a, b, a)]

    first, second, third = twice(variables, *jax.random.split(KEY))
    assert not np.array_equal(first == 0, second == 0)
    np.testing.assert_array_equal(first == 0, third == 0)


def test_transforms(full: tuple[str, Any]) -> None:
    """Catches tracers that leak out of a forward, and state that cannot be carried through a scan."""
    kind, model = full
    variables = model.init(KEY, X)
    keys = jax.random.split(KEY, 3)

    def step(v: Any, key: Any) -> tuple[Any, Any]:
        output = model.forward(v, X, train=True, key=key)
        return {**v, **output.state}, output.prediction

    expected = variables
    predictions = []
    for key in keys:
        expected, prediction = step(expected, key)
        predictions.append(prediction)
    scanned, stacked = jax.jit(lambda v: jax.lax.scan(step, v, keys))(variables)
    np.testing.assert_allclose(jnp.stack(predictions), stacked, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda e, a: np.testing.assert_allclose(e, a, rtol=1e-5, atol=1e-6), expected, scanned)

    mapped = jax.vmap(lambda key: step(variables, key)[1])(keys)
    np.testing.assert_allclose(predictions[0], mapped[0], rtol=1e-4, atol=1e-5)

    params = {"params": variables["params"]}
    grads = jax.grad(lambda p: (step({**variables, **p}, KEY)[1] ** 2).sum())(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert any(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))
    assert state_of(kind) in variables


def test_bind_gives_the_trained_model(mlp: Any) -> None:
    """Catches a bound model that still has its first weights."""
    variables = jax.tree.map(lambda x: x + 0.5, mlp.init(KEY, X))
    bound = mlp.bind(variables)
    run = jax.vmap(bound) if isinstance(bound, eqx.Module) else bound
    np.testing.assert_allclose(mlp.forward(variables, X, train=False).prediction, run(X), rtol=1e-5, atol=1e-6)


def test_bind_is_in_inference_mode(full: tuple[str, Any]) -> None:
    """Catches a bound model whose dropout still draws, or that lost its statistics."""
    kind, model = full
    variables = model.init(KEY, X)
    variables = {**variables, **model.forward(variables, X, train=True, key=KEY).state}
    bound = model.bind(variables)
    match kind.split("_")[0]:
        case "linen":
            actual = bound(X, train=False)
        case "equinox":
            module, state = bound
            actual = jax.vmap(lambda x: module(x, state)[0], axis_name="batch")(X)
        case _:
            actual = bound(X)
    np.testing.assert_allclose(model.forward(variables, X, train=False).prediction, actual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_a_value_that_holds_weights_gives_those(kind: str) -> None:
    """Catches weights that are silently initialised afresh when a trained module is adapted."""
    value = MLPS[kind]()
    model = adapt(value)
    own = value.first.kernel[...] if kind == "nnx" else value.first.weight
    name = "kernel" if kind == "nnx" else "weight"
    for variables in (model.held(), model.init(KEY, X), model.init(jax.random.key(99), X)):
        assert variables is not None
        np.testing.assert_array_equal(own, variables["params"]["first"][name])


@pytest.mark.parametrize("kind", ["linen", "pair"])
def test_a_description_holds_no_weights(kind: str) -> None:
    """Catches held weights where there are none, which would override the key."""
    assert adapt(FULL[kind]()).held() is None


def test_adapting_twice_is_adapting_once(mlp: Any) -> None:
    """Catches a second wrapper around an adapted model."""
    assert adapt(mlp) is mlp
    assert isinstance(hash(mlp), int)


@pytest.mark.parametrize("kind", FULL)
def test_foreign_collections_are_ignored(kind: str) -> None:
    """Catches a forward that stumbles over, or returns, a collection of somebody else such as a frozen teacher."""
    model = adapt(FULL[kind]())
    variables = model.init(KEY, X)
    output = model.forward({**variables, "teacher": {"w": jnp.ones(3)}}, X, train=True, key=KEY)
    assert set(output.state) == {state_of(kind)}
    assert output.sown == {}


def test_forward_crosses_jit_and_replaces_fields() -> None:
    """Catches a Forward that is no pytree, or whose replace accepts a misspelt field."""
    output = Forward(jnp.ones(2), {"batch_stats": jnp.zeros(1)})
    through = jax.jit(lambda o: o.replace(prediction=o.prediction * 3))(output)
    assert isinstance(through, Forward)
    np.testing.assert_array_equal(np.full(2, 3.0), through.prediction)
    assert through.sown == {}
    with pytest.raises(TypeError):
        operator.methodcaller("replace", predictions=1)(output)
