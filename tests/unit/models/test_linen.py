"""Flax Linen: sown values, streams of random numbers, boxes, inputs."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import FrozenDict

from telic.models import adapt
from telic.tree import leaf_names

KEY = jax.random.key(3)
X = jax.random.normal(KEY, (4, 5))


class Sowing(nn.Module):
    summed: bool = False

    @nn.compact
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))
        self.sow("intermediates", "hidden", x)
        if self.summed:
            self.sow("losses", "norm", (x**2).mean(), init_fn=lambda: 0.0, reduce_fn=lambda a, b: a + b)
        else:
            self.sow("losses", "norm", (x**2).mean())
            self.sow("losses", "norm", x.mean())
        return x


class Noise(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(5)(x)
        first = jax.random.normal(self.make_rng("noise"), x.shape)
        second = jax.random.normal(self.make_rng("noise"), x.shape)
        other = jax.random.normal(self.make_rng("other"), x.shape)
        return {"first": first, "second": second, "other": other, "x": x}


@pytest.mark.parametrize(("summed", "sown"), [(False, ()), (False, ("losses",)), (True, ("losses",))])
def test_sown_losses_do_not_grow(summed: bool, sown: tuple[str, ...]) -> None:
    """Catches sown values kept as state: the tuple grows, or the sum runs on, and each step compiles anew."""
    model = adapt(Sowing(summed), sown=sown)
    variables = model.init(KEY, X)
    assert set(variables) == {"params", "batch_stats"}
    seen = []
    for _ in range(3):
        output = model.forward(variables, X, train=True, key=KEY)
        assert set(output.state) == {"batch_stats"}
        assert set(output.sown) == {"losses", "intermediates"}
        variables = {**variables, **output.state}
        seen.append(output.sown["losses"]["norm"])
    expected = (output.prediction**2).mean()
    actual = seen[-1] if summed else seen[-1][0]
    np.testing.assert_allclose(expected, actual, rtol=1e-5)
    assert len({str(jax.tree.map(jnp.shape, s)) for s in seen}) == 1
    # The batch is the same, so a value that differs has accumulated.
    np.testing.assert_allclose(np.asarray(seen[0]), np.asarray(seen[2]), rtol=1e-6)


def test_sown_values_are_there_in_inference() -> None:
    """Catches an auxiliary loss that is missing in validation."""
    model = adapt(Sowing())
    output = model.forward(model.init(KEY, X), X, train=False)
    assert output.state == {}
    assert set(output.sown) == {"losses", "intermediates"}
    np.testing.assert_array_equal(output.prediction, output.sown["intermediates"]["hidden"][0])


def test_a_tuple_in_state_is_no_sown_value() -> None:
    """Catches a variable that holds a tuple being taken for something sown, and so never kept."""

    class Carry(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            carry = self.variable("carry", "hc", lambda: (jnp.zeros(5), jnp.ones(5)))
            h, c = carry.value
            if not self.is_initializing():
                carry.value = (h + x.mean(0), c * 2)
            return nn.Dense(5)(x) + h + c

    model = adapt(Carry())
    variables = model.init(KEY, X)
    np.testing.assert_array_equal(np.ones(5), variables["carry"]["hc"][1])
    output = model.forward(variables, X, train=True)
    np.testing.assert_array_equal(np.full(5, 2.0), output.state["carry"]["hc"][1])


def test_unnamed_streams_draw_distinct_numbers() -> None:
    """Catches a model with make_rng("noise") that fails, or that draws the same numbers twice."""
    model = adapt(Noise())
    variables = model.init(KEY, X)

    def draws(key: Any) -> list[Any]:
        p = model.forward(variables, X, train=True, key=key).prediction
        return [np.asarray(p[name]) for name in ("first", "second", "other")]

    one, two = draws(jax.random.key(0)), draws(jax.random.key(1))
    arrays = [*one, *two]
    assert len({a.tobytes() for a in arrays}) == 6
    for a, b in zip(one, draws(jax.random.key(0)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("train", [True, False])
def test_a_missing_key_is_said(train: bool) -> None:
    """Catches Flax's error without a word on what to pass to forward."""
    model = adapt(Noise())
    variables = model.init(KEY, X)
    with pytest.raises(flax.errors.InvalidRngError) as caught:
        model.forward(variables, X, train=train)
    assert any("pass key=" in note for note in caught.value.__notes__)


def test_inference_may_draw_when_there_is_a_key() -> None:
    """Catches a key that is dropped in inference, where a sampling model needs it."""
    model = adapt(Noise())
    variables = model.init(KEY, X)
    prediction = model.forward(variables, X, train=False, key=KEY).prediction
    assert float(jnp.abs(prediction["first"]).max()) > 0


@pytest.mark.parametrize("flag", ["train", "training", "is_training", "deterministic", "use_running_average"])
def test_every_training_flag_is_passed(flag: str) -> None:
    """Catches a flag that is missed or passed with the wrong sign: dropout off in training."""
    namespace: dict[str, Any] = {}
    exec(f"def __call__(self, x, {flag}):\n    return x * 0 + {flag}", namespace)
    module = type("Flagged", (nn.Module,), {"__call__": namespace["__call__"]})()
    model = adapt(module)
    means_training = flag in ("train", "training", "is_training")
    assert model.init(KEY, X) == {"params": {}}
    for train in (True, False):
        actual = float(model.forward({"params": {}}, X, train=train).prediction[0, 0])
        assert float(train == means_training) == actual


def test_init_gives_the_parameters_that_flax_gives() -> None:
    """Catches an init that derives another key, so that a run cannot be compared with hand-written Flax."""
    module = Sowing()
    expected = module.init(KEY, X, train=True)["params"]
    actual = adapt(module).init(KEY, X)["params"]
    jax.tree.map(np.testing.assert_array_equal, expected, actual)


def test_frozen_variables_are_accepted_and_never_returned() -> None:
    """Catches a FrozenDict that comes back as state and changes the tree's type between two steps."""
    model = adapt(Sowing())
    frozen = FrozenDict(model.init(KEY, X))
    output = model.forward(frozen, X, train=True)
    assert type(output.state["batch_stats"]["BatchNorm_0"]) is dict
    assert jax.tree.structure(output.state) == jax.tree.structure(
        {"batch_stats": dict(frozen.unfreeze()["batch_stats"])}
    )


def test_boxes_are_opened() -> None:
    """Catches nn.Partitioned boxes in the variables, whose leaves have other names."""
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    model = adapt(nn.Dense(3, kernel_init=init))
    variables = model.init(KEY, X)
    assert leaf_names(variables) == ["params/bias", "params/kernel"]
    assert isinstance(variables["params"]["kernel"], jax.Array)
    assert model.forward(variables, X, train=True).prediction.shape == (4, 3)


def test_forgotten_statistics_are_an_error() -> None:
    """Catches running statistics that are made afresh at every call when the collection was left out."""
    model = adapt(Sowing())
    params = {"params": model.init(KEY, X)["params"]}
    for train in (True, False):
        with pytest.raises(flax.errors.ScopeCollectionNotFound):
            model.forward(params, X, train=train)


def test_perturbations_are_no_variables() -> None:
    """Catches zeros of the batch's shape in the variables, which break the last, smaller batch."""

    class Perturbed(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return self.perturb("hidden", nn.Dense(3)(x))

    model = adapt(Perturbed())
    variables = model.init(KEY, X)
    assert set(variables) == {"params"}
    output = model.forward(variables, X[:2], train=True)
    assert output.prediction.shape == (2, 3)
    assert output.sown == {}


def test_bfloat16_statistics_keep_their_dtype() -> None:
    """Catches state that is widened or weakly typed after one step."""

    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            count = self.variable("counts", "n", lambda: 0)
            if not self.is_initializing():
                count.value = count.value + 1
            return nn.Dense(2, param_dtype=jnp.bfloat16)(x)

    model = adapt(Counting())
    variables = model.init(KEY, X)
    output = model.forward(variables, X, train=True)
    assert jax.typeof(variables["counts"]["n"]) == jax.typeof(output.state["counts"]["n"])
    assert int(output.state["counts"]["n"]) == 1
    assert variables["params"]["Dense_0"]["kernel"].dtype == jnp.bfloat16


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, image: Any, text: Any, *, train: bool = False) -> Any:
        return nn.Dense(2)(image), {"text": text}


class OneInput(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any = None) -> Any:
        return jax.tree.map(jnp.shape, x), mask


def test_inputs_are_laid_out_by_the_signature() -> None:
    """Catches a tuple or mapping that is spread over a model that takes it whole, and the reverse."""
    two = adapt(TwoInputs())
    words = jnp.arange(4)
    variables = two.init(KEY, (X, words))
    for inputs in ((X, words), {"text": words, "image": X}):
        logits, text = two.forward(variables, inputs, train=True).prediction
        assert logits.shape == (4, 2)
        np.testing.assert_array_equal(words, text["text"])
    one = adapt(OneInput())
    assert one.forward({"params": {}}, (X, words), train=False).prediction == (((4, 5), (4,)), None)
    assert one.forward({"params": {}}, {"a": X, "b": words}, train=False).prediction == (
        {"a": (4, 5), "b": (4,)},
        None,
    )
    # The required name and an optional one: spread.
    assert one.forward({"params": {}}, {"x": X, "mask": 1}, train=False).prediction == ((4, 5), 1)
    # The required name and one that the model does not take: the mapping is the input.
    assert one.forward({"params": {}}, {"x": X, "z": X}, train=False).prediction == ({"x": (4, 5), "z": (4, 5)}, None)


def test_names_the_model_does_not_take_are_said() -> None:
    """Catches a field of the batch that is passed over in silence."""
    model = adapt(TwoInputs())
    with pytest.raises(ValueError, match="others that it does not accept: id"):
        model.init(KEY, {"image": X, "text": X, "id": X})


def test_arguments_may_have_the_names_of_flax() -> None:
    """Catches an input called `method` or `rngs` being taken for an argument of Flax' own apply."""

    class Named(nn.Module):
        @nn.compact
        def __call__(self, method: Any, rngs: Any) -> Any:
            return nn.Dense(2)(method) + rngs

    model = adapt(Named())
    inputs = {"method": X, "rngs": jnp.ones(2)}
    variables = model.init(KEY, inputs)
    assert model.forward(variables, inputs, train=True, key=KEY).prediction.shape == (4, 2)
