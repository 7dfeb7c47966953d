"""Flax NNX: names, ties, random state, and the user's own object."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from telic.errors import ContractError
from telic.models import adapt
from telic.tree import leaf_names

KEY = jax.random.key(3)
X = jax.random.normal(KEY, (4, 5))


class Full(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs) for _ in range(12)])
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(5, 5, use_bias=False, rngs=rngs)
        self.out = self.embed

    def __call__(self, x: Any) -> Any:
        return self.out(jnp.sin(self.embed(x)))


class Loss(nnx.Variable[Any]):
    pass


class Count(nnx.Variable[Any]):
    pass


class EMAStat(nnx.Variable[Any]):
    pass


class Sowing(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(5, 5, rngs=rngs)
        self.count = Count(0)

    def __call__(self, x: Any) -> Any:
        x = self.inner(x)
        self.sow(nnx.Intermediate, "hidden", x)
        self.sow(Loss, "norm", (x**2).mean())
        self.sow("penalties", "size", jnp.abs(x).mean())
        self.count.set_value(self.count.get_value() + 1)
        return {"out": x, "pair": (x, x)}


def snapshot(module: nnx.Module) -> tuple[Any, list[Any]]:
    graphdef, flat = nnx.flatten(module)
    return graphdef, [np.asarray(jax.random.key_data(v) if hasattr(v.dtype, "_impl") else v) for v in leaves(flat)]


def leaves(flat: Any) -> list[Any]:
    return [leaf.get_raw_value() for _, leaf in flat]


def test_the_users_module_stays_as_it_is() -> None:
    """Catches training that flips the mode, moves the statistics or counts the random streams of the given object."""
    module = Full(nnx.Rngs(0))
    module.drop.deterministic = True
    graphdef, before = snapshot(module)
    model = adapt(module)
    variables = model.init(KEY, X)
    for train in (True, False):
        output = model.forward(variables, X, train=train, key=KEY)
    jax.grad(lambda v: model.forward(v, X, train=True, key=KEY).prediction.sum())(variables)
    model.bind({**variables, **output.state})(X)
    after_def, after = snapshot(module)
    assert graphdef == after_def
    for e, a in zip(before, after, strict=True):
        np.testing.assert_array_equal(e, a)
    assert module.drop.deterministic is True


def test_one_value_serves_training_and_inference() -> None:
    """Catches a mode that is taken from the object: dropout off in training because the user had called eval()."""
    module = Full(nnx.Rngs(0))
    module.eval()
    model = adapt(module)
    variables = model.init(KEY, X)
    assert (model.forward(variables, X, train=True, key=KEY).prediction == 0).any()
    module.train()
    assert not (model.forward(variables, X, train=False).prediction == 0).any()


def test_list_indices_become_words_in_the_right_order() -> None:
    """Catches layers that are permuted because "10" sorts before "2"."""
    module = Full(nnx.Rngs(0))
    model = adapt(module)
    variables = model.init(KEY, X)
    assert set(variables["params"]["layers"]) == {str(i) for i in range(12)}
    for i, layer in enumerate(module.layers):
        np.testing.assert_array_equal(layer.kernel[...], variables["params"]["layers"][str(i)]["kernel"])
    module.eval()
    np.testing.assert_allclose(module(X), model.forward(variables, X, train=False).prediction, rtol=1e-5, atol=1e-6)


def test_tied_weights_appear_once_and_get_both_gradients() -> None:
    """Catches a tied weight that is stored twice and drifts apart."""
    model = adapt(Tied(nnx.Rngs(0)))
    variables = model.init(KEY, X)
    assert leaf_names(variables) == ["params/embed/kernel"]
    kernel = variables["params"]["embed"]["kernel"]
    expected = jax.grad(lambda w: (jnp.sin(X @ w) @ w).sum())(kernel)
    actual = jax.grad(lambda v: model.forward(v, X, train=True).prediction.sum())(variables)
    np.testing.assert_allclose(expected, actual["params"]["embed"]["kernel"], rtol=1e-5, atol=1e-5)


def test_random_state_is_no_variable() -> None:
    """Catches keys or counts of streams in the state, where a rejected attempt would replay them."""
    model = adapt(Full(nnx.Rngs(0)))
    variables = model.init(KEY, X)
    assert set(variables) == {"params", "batch_stats"}
    assert not [n for n in leaf_names(variables) if "rngs" in n]
    assert set(model.forward(variables, X, train=True, key=KEY).state) == {"batch_stats"}


def test_streams_differ_from_each_other() -> None:
    """Catches two dropout layers that get one key and draw one mask."""

    class Two(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.a = nnx.Dropout(0.5, rngs=rngs)
            self.b = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.a(x), self.a(x), self.b(x)

    model = adapt(Two(nnx.Rngs(0)))
    masks = [
        np.asarray(p != 0) for p in model.forward({"params": {}}, jnp.ones((8, 8)), train=True, key=KEY).prediction
    ]
    assert len({m.tobytes() for m in masks}) == 3


@pytest.mark.parametrize("train", [True, False])
def test_drawing_without_a_key_is_an_error(train: bool) -> None:
    """Catches a constant key standing in for a missing one: the same noise at every call, unnoticed."""

    class Noisy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.rngs = rngs

        def __call__(self, x: Any) -> Any:
            return x + jax.random.normal(self.rngs.noise(), x.shape)

    model = adapt(Noisy(nnx.Rngs(0)))
    for run in (model.forward, jax.jit(model.forward, static_argnames="train")):
        with pytest.raises(ContractError, match="pass key="):
            run({"params": {}}, X, train=train)
    a, b = (model.forward({"params": {}}, X, train=train, key=jax.random.key(i)).prediction for i in (0, 1))
    assert not np.array_equal(a, b)


def test_inference_without_a_key_passes_through_nnx_transforms() -> None:
    """Catches a stand-in for the key that is no array, which breaks a scan over layers with dropout."""

    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs: nnx.Rngs) -> Full:
                return Block(rngs)

            self.blocks = make(rngs)

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: Any, block: Any) -> Any:
                return block(x)

            return run(x, self.blocks)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(5, 5, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.dense(x))

    model = adapt(Stack(nnx.Rngs(0)))
    variables = model.init(KEY, X)
    assert variables["params"]["blocks"]["dense"]["kernel"].shape == (3, 5, 5)
    expected = model.forward(variables, X, train=False, key=KEY).prediction
    np.testing.assert_array_equal(expected, model.forward(variables, X, train=False).prediction)
    assert not np.array_equal(expected, model.forward(variables, X, train=True, key=KEY).prediction)


def test_sown_values_come_back_and_do_not_grow() -> None:
    """Catches sown values that are kept as state, and a custom kind of them that is dropped."""
    module = Sowing(nnx.Rngs(0))
    model = adapt(module, sown=("loss", "penalties"))
    variables = model.init(KEY, X)
    assert set(variables) == {"params", "count"}
    for i in range(3):
        output = model.forward(variables, X, train=True, key=KEY)
        assert set(output.sown) == {"intermediates", "loss", "penalties"}
        assert len(output.sown["loss"]["norm"]) == 1
        np.testing.assert_array_equal(output.prediction["out"], output.sown["intermediates"]["hidden"][0])
        assert set(output.state) == {"count"}
        assert int(output.state["count"]["count"]) == i + 1
        assert jax.typeof(output.state["count"]["count"]) == jax.typeof(variables["count"]["count"])
        variables = {**variables, **output.state}
    assert model.forward(variables, X, train=False).state == {}
    assert not hasattr(module, "hidden")


def test_values_sown_before_are_left_behind() -> None:
    """Catches activations of an earlier call in the variables, with the batch size of that call."""
    module = Sowing(nnx.Rngs(0))
    with pytest.warns(DeprecationWarning, match="sow"):
        module(X)
    model = adapt(module, sown=("loss", "penalties"))
    variables = model.init(KEY, X)
    assert set(variables) == {"params", "count"}
    output = model.forward(variables, X[:2], train=True, key=KEY)
    assert [h.shape for h in output.sown["intermediates"]["hidden"]] == [(2, 5)]
    assert hasattr(module, "hidden")


def test_collections_are_named_by_kind() -> None:
    """Catches a kind of variable that lands among the parameters, or a parameter that does not."""

    class Kinds(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.lora = nnx.LoRA(5, 2, 5, rngs=rngs)
            self.cache = nnx.Cache(jnp.zeros(2))
            self.ema = EMAStat(jnp.zeros(2))
            self.table = jnp.ones(3)

        def __call__(self, x: Any) -> Any:
            return self.lora(x) + self.table[0]

    variables = adapt(Kinds(nnx.Rngs(0))).init(KEY, X)
    assert leaf_names(variables) == [
        "cache/cache",
        "constants/table",
        "ema_stat/ema",
        "params/lora/lora_a",
        "params/lora/lora_b",
    ]


def test_a_kind_that_would_pass_for_parameters_is_refused() -> None:
    """Catches a variable that is trained only because of its class's name."""
    params = type("Params", (nnx.Variable,), {})
    module = nnx.Dict({"w": params(jnp.ones(2))})
    with pytest.raises(ValueError, match=r"subclass nnx\.Param"):
        adapt(module)


def test_rngs_argument_is_filled() -> None:
    """Catches a module that asks for rngs at the call and gets none."""

    class Asking(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x: Any, *, rngs: nnx.Rngs) -> Any:
            return self.drop(x, rngs=rngs)

    model = adapt(Asking(nnx.Rngs(0)))
    a, b = (model.forward({"params": {}}, X, train=True, key=jax.random.key(i)).prediction for i in (0, 1))
    assert not np.array_equal(a, b)
    np.testing.assert_array_equal(X, model.forward({"params": {}}, X, train=False).prediction)


def test_a_training_flag_of_the_call_is_passed() -> None:
    """Catches an NNX module with a flag in its call that is always run with the default."""

    class Flagged(nnx.Module):
        def __call__(self, x: Any, *, train: bool = False) -> Any:
            return x * 2 if train else x

    model = adapt(Flagged())
    np.testing.assert_array_equal(X * 2, model.forward({"params": {}}, X, train=True).prediction)
    np.testing.assert_array_equal(X, model.forward({"params": {}}, X, train=False).prediction)


def test_a_missing_leaf_is_named() -> None:
    """Catches a KeyError with one word of a path when given weights do not fit the module."""
    model = adapt(Tied(nnx.Rngs(0)))
    with pytest.raises(ContractError, match="params/embed/kernel"):
        model.forward({"params": {"embed": {}}}, X, train=True)


def test_bound_module_has_the_weights_and_is_the_users_class() -> None:
    """Catches a bound model that is another type, or shares variables with the original."""
    module = Full(nnx.Rngs(0))
    model = adapt(module)
    variables = jax.tree.map(lambda x: x + 1, model.init(KEY, X))
    bound = model.bind(variables)
    assert type(bound) is Full
    np.testing.assert_array_equal(variables["params"]["norm"]["scale"], bound.norm.scale[...])
    assert not np.array_equal(module.norm.scale[...], bound.norm.scale[...])
