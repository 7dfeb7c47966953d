"""The plateau: which rate is lowered, by how much, and where it is refused."""

import itertools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from optax import contrib

import telic
from telic import optimizers
from telic.errors import ContractError

X = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
DATA = [(X, X.sum(1, keepdims=True))]


def fit(optimizer, epochs: int = 7, **options):
    """Train with a metric that never improves."""
    loop = telic.trainer(nn.Dense(1), "mean_squared_error", optimizer, log=0)
    loop.handle_event("epoch_completed", lambda state: state.metrics.add({"flat": 1.0}))
    loop.reduce_lr_on_plateau("flat", mode="min", **{"factor": 0.5, "patience": 2, **options})
    return loop.run(DATA, epochs=epochs)


def rate(final, name: str = "learning_rate") -> float:
    return float(optimizers.hyperparams(final.step_state.opt_state)[name])


def test_a_named_rate_is_lowered_three_times() -> None:
    """loop.md 4.1: a rate of 10 halved at epochs 2, 4 and 6 (the seed, with its later patience: twice)."""
    final = fit(optimizers.sgd(10.0))
    assert rate(final) == 1.25
    assert final.handler_state["reduce_lr/flat"]["factor"] == 0.125
    assert float(final.step_state.rate_factor) == 1.0


def test_the_next_update_uses_the_new_rate() -> None:
    """A rate that is lowered in a state nobody trains with."""
    seen: list[np.ndarray] = []
    loop = telic.trainer(nn.Dense(1, use_bias=False), lambda t, p: p.sum(-1), optimizers.sgd(1.0), log=0)
    loop.handle_event(
        "iteration_completed", lambda s: seen.append(np.array(s.step_state.variables["params"]["kernel"], copy=True))
    )
    loop.handle_event("epoch_completed", lambda s: s.metrics.add({"flat": 1.0}))
    loop.reduce_lr_on_plateau("flat", mode="min", factor=0.5, patience=1).run(DATA, epochs=3)
    steps = [b - a for a, b in itertools.pairwise(seen)]
    np.testing.assert_allclose(steps[1], steps[0] * 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.rmsprop(0.1, momentum=0.9),
        lambda: optimizers.noisy_sgd(0.1),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optimizers.adamw(0.1)),
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    ],
    ids=["rmsprop", "noisy_sgd", "chain", "injected"],
)
def test_every_named_rate_is_found(make) -> None:
    """B25: element 0 of the optimizer state taken for the rate, which fails for all of these."""
    assert rate(fit(make())) == pytest.approx(0.0125, rel=1e-6)


def test_a_schedule_is_scaled() -> None:
    """A scheduled rate that is set, and set back by the schedule at the next update."""
    final = fit(optimizers.sgd(optimizers.linear_decay(0.1, steps=100)))
    assert rate(final, "learning_rate_scale") == 0.125
    assert float(final.step_state.rate_factor) == 1.0


def test_every_rule_of_several_optimizers_is_lowered() -> None:
    """One rate set for all rules, or only the first rule lowered."""
    final = fit(optimizers.by_path({"**/bias": optimizers.sgd(0.8), "**": optimizers.adam(0.1)}))
    held = optimizers.hyperparams(final.step_state.opt_state)
    assert float(held["learning_rate[**/bias]"]) == pytest.approx(0.1)
    assert float(held["learning_rate[**]"]) == pytest.approx(0.0125)


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1), optax.inject_hyperparams(optax.sgd)(lambda count: 0.1)]
)
def test_other_optimizers_have_their_updates_scaled(optimizer) -> None:
    """An optimizer without a named rate, or with a schedule nobody can scale, that is left as it is."""
    assert float(fit(optimizer).step_state.rate_factor) == 0.125


@pytest.mark.parametrize(
    "make", [lambda r: optax.sgd(r, momentum=0.9), lambda r: optax.adam(r), lambda r: optax.lion(r)]
)
def test_scaled_updates_are_those_of_the_lower_rate(make) -> None:
    """A factor that is not the same as a lower rate, momentum included."""
    scaled = fit(make(0.1), epochs=4, patience=1)
    named = fit(
        optax.inject_hyperparams(lambda learning_rate: make(learning_rate))(learning_rate=0.1), epochs=4, patience=1
    )
    for a, b in zip(
        jax.tree.leaves(scaled.step_state.variables), jax.tree.leaves(named.step_state.variables), strict=True
    ):
        # One rounding of each update apart: the rate is multiplied before or after the direction.
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "optimizer",
    [
        contrib.prodigy(),
        contrib.schedule_free_sgd(),
        contrib.dog(1.0),
        contrib.mechanize(optax.sgd(0.1)),
        optax.lbfgs(),
    ],
    ids=["prodigy", "schedule_free", "dog", "mechanic", "lbfgs"],
)
def test_optimizers_whose_update_is_no_multiple_of_a_rate_are_refused(optimizer) -> None:
    """A plateau that scales an update which is not proportional to the rate."""
    state = telic.TrainState(
        variables={},
        learner=_learner(optimizer.init({"w": np.ones(2, np.float32)})),
        key=jax.random.key(0),
        attempts=np.int32(0),
    )
    held = telic.LoopState(step_state=state, handler_state={"r": {}})
    with pytest.raises(ContractError, match="scaling its updates is not scaling its rate"):
        telic.handlers.ReduceRate("r")(held)


def _learner(opt_state):
    plain = telic.train_step(nn.Dense(1), "mean_squared_error", "sgd").init(DATA[0]).learner
    return type(plain)(**{**{f: getattr(plain, f) for f in plain.__dataclass_fields__}, "opt_state": opt_state})


def test_the_rate_stays_above_its_floor() -> None:
    """B25: a rate that becomes 0; and a floor that raises a rate which is below it already."""
    assert rate(fit(optimizers.sgd(0.1), min_lr=0.03)) == pytest.approx(0.03)
    assert rate(fit(optimizers.sgd(0.01), min_lr=0.03)) == pytest.approx(0.01)
    assert rate(fit(optimizers.sgd(0.1), min_factor=0.2)) == pytest.approx(0.02)
    assert float(fit(optax.sgd(0.1), min_factor=0.2).step_state.rate_factor) == pytest.approx(0.2)
    scheduled = fit(optimizers.sgd(lambda count: 0.1 + 0.0 * count), min_lr=0.03)
    assert rate(scheduled, "learning_rate_scale") == pytest.approx(0.3)


def test_a_floor_of_a_rate_nobody_knows_is_refused() -> None:
    """min_lr accepted and without effect."""
    with pytest.raises(ContractError, match="min_lr needs an optimizer whose learning rate has a name"):
        fit(optax.sgd(0.1), min_lr=0.01)


def test_a_raw_loop_is_refused() -> None:
    """A state without an optimizer that fails somewhere inside."""
    loop = telic.Loop(lambda s, b: s, lambda b: np.float32(0))
    loop.handle_event("epoch_completed", lambda s: s.metrics.add({"loss": 1.0}))
    with pytest.raises(ContractError, match="lowers the learning rate of a TrainState"):
        loop.reduce_lr_on_plateau("loss", patience=1).run(DATA, epochs=2)


@pytest.mark.parametrize(
    "options", [{"factor": 1.0}, {"factor": 0.0}, {"factor": 2}, {"min_lr": -1}, {"min_factor": 1.5}]
)
def test_bad_factors_are_refused_when_attached(options: dict) -> None:
    """A factor that raises the rate."""
    with pytest.raises(ValueError, match="reduce_lr/loss"):
        telic.trainer(nn.Dense(1), "mean_squared_error", "sgd").reduce_lr_on_plateau("loss", **options)
