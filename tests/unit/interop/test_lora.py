"""Adapters: only they train, they start as nothing, and merged they are the same model."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import telic
from telic.errors import ContractError
from telic.interop.lora import add_lora

pytest.importorskip("qwix")

# qwix 0.1.8 asks Flax for names that Flax has changed.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*")


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = nn.relu(nn.Dense(8, name="first")(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        x = nn.DenseGeneral((2, 3), name="heads")(x)
        return nn.DenseGeneral(1, axis=(-2, -1), name="last")(x)[..., 0]


class NNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.heads = nnx.LinearGeneral(8, (2, 3), rngs=rngs)
        self.last = nnx.LinearGeneral((2, 3), 1, axis=(-2, -1), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.heads(nnx.relu(self.norm(self.first(x)))))[..., 0]


X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCHES = [(X, X.sum(1))] * 6


def model_of(kind: str) -> Any:
    return Linen() if kind == "linen" else NNX(nnx.Rngs(0))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_only_adapters_train_and_merge_into_the_base(kind: str) -> None:
    """A frozen weight that decays, an adapter that starts by changing the model, a merge with another scale."""
    base = telic.models.adapt(model_of(kind))
    weights = base.init(jax.random.key(1), X)
    lora = add_lora(model_of(kind), rank=2, alpha=6.0, modules=["first", "heads", "last"], inputs=X)
    start = lora.init(jax.random.key(2), X, weights)
    with_adapters = telic.models.adapt(lora.model)
    np.testing.assert_array_equal(
        with_adapters.forward(start, X, train=False).prediction, base.forward(weights, X, train=False).prediction
    )
    trainer = telic.Trainer(
        telic.supervised(lora.model, "mean_squared_error", variables=start),
        telic.optimizers.adamw(0.05, weight_decay=0.1),
        key=0,
        trainable=lora.trainable,
    )
    state = trainer.fit(BATCHES, log_every=0)
    before, after = (telic.tree.named_leaves(v["params"]) for v in (start, state.variables))
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {n for n in before if n.endswith(("_lora_a", "_lora_b"))}
    assert len(moved) == 6
    count = sum(x.size for n, x in before.items() if n in moved)
    assert sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim) == 2 * count

    merged = lora.merge(state.variables, inputs=X)
    assert jax.tree.structure(merged["params"]) == jax.tree.structure(weights["params"])
    expected = with_adapters.forward(state.variables, X, train=False).prediction
    np.testing.assert_allclose(base.forward(merged, X, train=False).prediction, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(expected, base.forward(weights, X, train=False).prediction, atol=1e-3)


def test_exported_adapters_give_the_model_back() -> None:
    """Adapters are what one saves: laid over the base weights they are the trained model."""
    lora = add_lora(Linen(), rank=1, modules="heads")
    weights = telic.models.adapt(Linen()).init(jax.random.key(1), X)
    start = lora.init(jax.random.key(2), X, weights)
    trained = jax.tree.map(lambda x: x + 1, lora.adapters(start))
    assert sorted(telic.tree.named_leaves(trained)) == ["params/heads/kernel_lora_a", "params/heads/kernel_lora_b"]
    whole, _, unknown = telic.tree.overlay(start, trained, what="adapters")
    assert not unknown
    merged = lora.merge(whole)
    np.testing.assert_array_equal(merged["params"]["first"]["kernel"], weights["params"]["first"]["kernel"])
    assert not np.array_equal(merged["params"]["heads"]["kernel"], weights["params"]["heads"]["kernel"])


def test_a_convolution_merges() -> None:
    model = nn.Conv(5, (3,))
    inputs = np.random.default_rng(1).normal(size=(2, 7, 4)).astype(np.float32)
    lora = add_lora(model, rank=2)
    made = jax.tree.map(lambda x: x + 0.1, lora.init(jax.random.key(0), inputs))
    expected = telic.models.adapt(lora.model).forward(made, inputs, train=False).prediction
    merged = lora.merge(made, inputs=inputs)
    got = telic.models.adapt(model).forward(merged, inputs, train=False).prediction
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


class Backwards(nn.Module):
    """Contracts the second dimension of a square weight: its shapes do not tell."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.normal(), (3, 3))
        return jax.lax.dot_general(x, kernel, (((1,), (1,)), ((), ())))


def test_a_merge_that_would_be_wrong_is_refused_by_inputs() -> None:
    """A square weight that is used transposed merges to another model without a word."""
    lora = add_lora(Backwards(), rank=2)
    made = lora.init(jax.random.key(0), X)
    drawn = [jax.random.normal(jax.random.key(i), x.shape) for i, x in enumerate(jax.tree.leaves(made))]
    made = jax.tree.unflatten(jax.tree.structure(made), drawn)
    with pytest.raises(ContractError, match="the merged model differs"):
        lora.merge(made, inputs=X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: add_lora(Linen(), rank=0), ValueError, "at least 1, got 0"),
        (lambda: add_lora(lambda x: x, rank=1), TypeError, "Linen and NNX modules, got function"),
        (lambda: add_lora(NNX(nnx.Rngs(0)), rank=1), ValueError, "give inputs="),
        (lambda: add_lora(NNX(nnx.Rngs(0)), rank=1, inputs=X, modules="frist"), ContractError, "names no layer"),
        (lambda: add_lora(Linen(), rank=1, modules=[]), ValueError, "modules= is empty"),
    ],
)
def test_what_cannot_be_adapted_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_globs_name_layers() -> None:
    """A name that is a part of another name: adapters in layers nobody asked for."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(3, name="two")(nn.Dense(3, name="one")(x))

    class Nested(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return Block(name="a")(nn.Dense(3, name="ab")(x))

    def adapted(modules: Any) -> list[str]:
        lora = add_lora(Nested(), rank=1, modules=modules)
        found = lora.adapters(lora.init(jax.random.key(0), X))
        return sorted({name.rsplit("/", 1)[0] for name in telic.tree.named_leaves(found)})

    assert adapted("a/*") == ["params/a/one", "params/a/two"]
    assert adapted("ab") == ["params/ab"]
    assert adapted(["ab", "**/two"]) == ["params/a/two", "params/ab"]
    assert adapted("**") == ["params/a/one", "params/a/two", "params/ab"]
