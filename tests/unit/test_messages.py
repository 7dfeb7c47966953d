"""Users' mistakes: each is answered with what was expected, what came and what to do, before anything runs."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import telic
from telic.data import columns

X, Y = np.ones((8, 3), np.float32), np.zeros((8, 2), np.float32)
BATCH = [(X, Y)]
TWO = (lambda key, x: {"w": jnp.zeros((3, 2))}, lambda params, x: (x @ params["w"], x @ params["w"]))
NAMED = (lambda key, x: {"w": jnp.zeros((3, 2))}, lambda params, x: {"a": x @ params["w"]})
ONE_RULE: Any = "fsdp"


class TwoArguments(nn.Module):
    """Requires more than one input."""

    @nn.compact
    def __call__(self, x: Any, scale: Any) -> Any:
        return nn.Dense(2)(x) * scale


def make(loss: Any = "mse", optimizer: Any = "adam", *, model: Any = None, **options: Any) -> telic.Loop:
    return telic.trainer(nn.Dense(2) if model is None else model, loss, optimizer, log=0, **options)


class Says(telic.Objective):
    """Gives text beside its loss."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.zeros(3)}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        return (batch[0] @ variables["params"]["w"]).mean(), telic.Aux(outputs={"kind": "digits"})


NEAREST: dict[str, tuple[Callable[[], Any], str, str]] = {
    "loss": (lambda: make("mean_square_error"), "unknown loss 'mean_square_error'", "mean_squared_error"),
    "loss in a list": (lambda: make([("mean_square_error", 1.0)]), "unknown loss", "mean_squared_error"),
    "optimizer": (lambda: make(optimizer="adm"), "unknown optimizer 'adm'", "adam"),
    "metric": (lambda: make().metric("acuracy"), "unknown metric 'acuracy'", "accuracy"),
    "reduction": (lambda: make().metric("accuracy", reduce="runing_sum"), "unknown reduce", "running_sum"),
    "event": (lambda: make().handle_event("epoch_complete", print), "unknown event", "epoch_completed"),
    "option": (lambda: make(acumulate=2), "unknown option 'acumulate'", "accumulate"),
    "stream option": (lambda: make().stream(BATCH, epoch=1), "unknown option 'epoch'", "epochs"),
    "filter": (lambda: telic.evry, "no attribute 'evry'", "every"),
    "loss scale": (lambda: make(loss_scale="dynamc"), "unknown loss scale 'dynamc'", "dynamic"),
    "precision": (lambda: make(precision="bfloat"), "unknown dtype for compute 'bfloat'", "bfloat16"),
    "reads": (lambda: make().metric("mse", reads=("target", "prediction")).run(BATCH), "reads 'target'", "targets"),
    "result": (lambda: make().run(BATCH, epochs=0).metrics["los"], "no metric 'los'", ""),
}


@pytest.mark.parametrize("case", NEAREST)
def test_unknown_name_tells_the_nearest(case: str) -> None:
    """Catches a misspelt name that is accepted in silence, or refused without the right one."""
    call, message, nearest = NEAREST[case]
    with pytest.raises((ValueError, TypeError, AttributeError, KeyError), match=message) as caught:
        call()
    if nearest:
        assert f"Did you mean {nearest!r}?" in str(caught.value)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "an Optax loss": (lambda: make(optax.squared_error), r"write `lambda targets, prediction: optax\.squared_error\("),
    "arguments reversed": (lambda: make(lambda logits, labels: 0), "the other way round"),
    "three arguments": (lambda: make(lambda a, b, c: 0), "neither a loss nor an objective function"),
    "an objective's class": (lambda: make(telic.Objective), "pass an instance"),
    "a model for an objective": (
        lambda: telic.Trainer(nn.Dense(2), "adam", key=0),
        r"telic\.supervised\(model, loss\)",
    ),
    "an optimizer not called": (lambda: make(optimizer=telic.optimizers.adam), r"call it: adam\(\)"),
    "averaging microbatches": (lambda: make(optimizer=optax.MultiSteps(optax.sgd(0.1), 2)), r"accumulate=K"),
    "a line search": (lambda: make(optimizer=optax.lbfgs()).run(BATCH), r"asks for arguments .*linesearch=None"),
    "a model of two arguments": (
        lambda: make(model=TwoArguments()).run(BATCH),
        r"requires 2 arguments \(x, scale\), and a batch's inputs are one array \(8, 3\)",
    ),
    "a tuple that is too short": (lambda: make(model=TwoArguments()).run([((X,), Y)]), "inputs are a tuple of 1"),
    "other names": (lambda: make(model=TwoArguments()).run([({"x": X, "y": X}, Y)]), "inputs are a mapping with x, y"),
    "a rate for an optimizer": (lambda: make(optimizer=0.1), r"telic\.optimizers\.adam\(1e-3\), got 0\.1"),
    "a model's class": (lambda: make(model=nn.Dense), r"write Dense\(\.\.\.\)"),
    "no model": (lambda: make(model=3), r"a pair of functions .* got 3 \(int\)"),
    "a key that is none": (lambda: make(key="a"), "a whole number or a JAX PRNG key, got 'a'"),
    "two ways to slice": (lambda: make(accumulate=2, microbatch=2), "give one"),
    "two metrics of a name": (lambda: make().metric("accuracy").metric("accuracy"), "give another name="),
    "a filter not called": (lambda: make().handle_event("completed", print, telic.every), r"a filter is telic\.always"),
    "every zeroth": (lambda: telic.every(0), "every counts from 1, got 0"),
    "no batches": (lambda: make().run([]), "the list gave no batches"),
    "no data": (lambda: make().run(3), r"telic\.data\.columns"),
    "one array": (lambda: make().run(X), r"one batch as \[batch\]"),
    "an exhausted generator": (lambda: make().run(iter(BATCH), epochs=2), "read only once; pass a list"),
    "inputs alone": (lambda: make().run([X]), r"a supervised batch is \(inputs, targets\).* got ndarray of shape"),
    "lists of numbers": (
        lambda: make().run([(X.tolist(), Y)]),
        r"inputs of a supervised batch must be an array .* numpy\.asarray\(inputs\)",
    ),
    "targets in a list": (lambda: make().run([(X, Y.tolist())]), "targets of a supervised batch must be an array"),
    "fields of other names": (lambda: make().run([{"input": X, "target": Y}]), r"mapping with \['input', 'target'\]"),
    "negative epochs": (lambda: make().run(BATCH, epochs=-1), "epochs must be 0 or more, got -1"),
    "epochs and steps": (lambda: make().run(BATCH, epochs=1, steps=1), "epochs= or steps=, not both"),
    "a handler's nonsense": (
        lambda: make().handle_event("started", lambda s: 3).run(BATCH),
        r"must return None.*got 3",
    ),
    "too few losses": (lambda: make(["mse"], model=TWO).run([(X, (Y, Y))]), "1 losses but prediction has 2 parts"),
    "losses of other names": (lambda: make({"b": "mse"}, model=NAMED).run([(X, {"a": Y})]), r"losses for \['b'\]"),
    "class ids as floats": (
        lambda: make("softmax_cross_entropy").run([(X, np.zeros(8, np.float32))]),
        r"class ids must be integers: targets\.astype\(int\)",
    ),
    "a step of one argument": (lambda: telic.Loop(lambda s: s), r"called with \(state, batch\), got <lambda>\(s\)"),
    "an init of no batch": (lambda: telic.Loop(lambda s, b: s, lambda: 0), r"init of a Loop is called with \(batch\)"),
    "a step that forgets its state": (
        lambda: telic.Loop(lambda s, b: None, lambda b: 0).run([1]),
        r"got None: end it with `return state`",
    ),
    "a stream without partition": (
        lambda: telic.data.Dataset(train=lambda: iter(())),
        r"Dataset train is called with \(partition\), got <lambda>\(\)",
    ),
    "metrics by one name": (
        lambda: telic.Trainer(telic.supervised(nn.Dense(2), "mse"), "adam", key=0).loop(metrics="accuracy"),
        r"metrics is a list, such as \['accuracy'\]",
    ),
    "a layout of one rule": (lambda: telic.Layout(ONE_RULE), "Layout rules is a mapping"),
    "a filter that is none": (lambda: make(trainable=3), "a path filter is a glob, a list of globs or a function"),
    "a filter that keeps nothing": (lambda: make(trainable=telic.paths("params/nope")).run(BATCH), "names no leaf"),
    "validation of a raw step": (lambda: telic.Loop(lambda s, b: s).validate(BATCH), r"validate\(data, model=\.\.\.\)"),
    "validation read once": (lambda: make().validate(iter(BATCH)), "readable many times"),
    "an evaluator without weights": (lambda: telic.evaluator(nn.Dense(2)).run(BATCH), r"run\(data, state=variables\)"),
    "no held-out data": (
        lambda: telic.Trainer(telic.supervised(nn.Dense(2), "mse"), "adam", key=0).fit(
            columns((X, Y), batch=4), eval_every="epoch", log_every=0
        ),
        "held_out=",
    ),
    "an option that XLA lacks": (
        lambda: make().run(BATCH, compiler_options={"nope": 1}),
        r"compiler_options: XLA here \(.*\) knows no option 'nope' with the value 1",
    ),
    "an option that is no value": (lambda: make().run(BATCH, compiler_options={"nope": [1]}), "no option 'nope'"),
    "text beside a loss": (
        lambda: telic.Trainer(Says(), "sgd", key=0).fit(BATCH, log_every=0),
        r"Says: Aux\.outputs holds str 'digits' at 'kind'",
    ),
    "an event nobody registered": (
        lambda: make().handle_event("started", lambda s: s.fire("mine")).run(BATCH),
        r"unknown event 'mine'\. Known: none\.",
    ),
    "a raw step without a start": (lambda: telic.Loop(lambda s, b: s).run(BATCH), r"telic\.Loop\(step, init\)"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake_is_told_with_the_remedy(case: str) -> None:
    """Catches a mistake that trains to nonsense, or ends in an error that does not say what to write."""
    call, message = MISTAKES[case]
    with pytest.raises((ValueError, TypeError, telic.errors.TelicError), match=message) as caught:
        call()
    assert "Tracer" not in str(caught.value)


@pytest.mark.parametrize("loss", ["mse", lambda targets, prediction: (targets - prediction) ** 2])
@pytest.mark.parametrize("swap", [False, True])
def test_column_against_vector_is_refused(loss: Any, swap: bool) -> None:
    """Catches targets (n,) against prediction (n, 1): an n by n broadcast that trains without a word."""
    vector, column = (lambda key, x: {"w": jnp.zeros(3)}, lambda p, x: x @ p["w"]), nn.Dense(1)
    model, targets = (vector, Y[:, :1]) if swap else (column, Y[:, 0])
    with pytest.raises(telic.errors.ShapeError, match=r"\(8,\).*\(8, 1\)|\(8, 1\).*\(8,\)"):
        make(loss, model=model).run([(X, targets)])


def test_line_search_left_out_trains() -> None:
    """Catches the remedy named for a line search being no remedy."""
    assert np.isfinite(make(optimizer=optax.lbfgs(1e-2, linesearch=None)).run(BATCH).metrics["loss"])


def test_square_losses_of_another_kind_pass() -> None:
    """Catches the refusal above reaching losses that are n by n on purpose."""
    make(lambda targets, prediction: prediction @ prediction.T).run(BATCH)
