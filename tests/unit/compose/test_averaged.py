"""Evaluating averaged weights: the numbers of the average itself, and a clear word where there is none."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

import telic
from telic.contract import Objective
from telic.ema import EMASpec
from telic.errors import ContractError, TelicError


class Small(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(x))[..., 0]


def batches(count: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(count, 6, 3)).astype(np.float32)
    return [(x, x.sum(1)) for x in inputs]


def objective(ema: EMASpec | None) -> Objective:
    made = telic.supervised(Small(), "mean_squared_error")
    made.ema = ema
    return made


def trainer(ema: EMASpec | None) -> telic.Trainer:
    return telic.Trainer(objective(ema), telic.optimizers.adam(0.1), key=0)


def test_evaluating_the_average_is_evaluating_its_weights() -> None:
    """A flag that is ignored gives the live weights' numbers; statistics of BatchNorm come from the live state."""
    made = trainer(EMASpec(decay=0.8))
    state = made.fit(batches(12), log_every=0)
    held_out = batches(3, seed=1)
    by_flag = made.evaluate(held_out, state=state, metrics=["mean_absolute_error"], averaged=True)
    by_hand = made.evaluate(held_out, state=state.averaged, metrics=["mean_absolute_error"])
    assert by_flag == by_hand
    stats = jax.tree.map(np.array_equal, state.averaged["batch_stats"], state.variables["batch_stats"])
    assert all(jax.tree.leaves(stats))


def test_validation_of_the_average_in_a_run() -> None:
    """Validation that reads the average of the run's start, or the live weights."""
    made = trainer(EMASpec(decay=0.8))
    held_out = batches(3, seed=1)
    loop = made.loop(log=0).validate(held_out, averaged=True).validate(held_out, name="live")
    state = loop.run(batches(12), epochs=2)
    expected = made.evaluate(held_out, state=state.step_state.averaged)
    assert state.history[1]["validation_loss"] == expected["loss"]
    assert state.history[1]["validation_live_loss"] == made.evaluate(held_out, state=state.step_state)["loss"]
    assert state.history[0]["validation_loss"] != state.history[1]["validation_loss"]


def test_without_an_average_the_run_does_not_start() -> None:
    """An epoch trained before the first validation says so is an epoch lost."""
    began: list[int] = []
    loop = trainer(None).loop(log=0).validate(batches(2), averaged=True)
    loop.handle_event("started", lambda _: began.append(1))
    with pytest.raises(ContractError, match=r"Supervised keeps none: set objective.ema = telic.EMASpec"):
        loop.run(batches(3))
    assert not began


def test_evaluate_needs_an_average_to_evaluate() -> None:
    """Bare variables hold no average: their own numbers, given as the average's, would be wrong without a word."""
    made = trainer(None)
    state = made.fit(batches(2), log_every=0)
    with pytest.raises(TelicError, match=r"keeps no moving average: set objective\.ema"):
        made.evaluate(batches(2), state=state, averaged=True)
    with pytest.raises(ContractError, match=r"needs the TrainState that holds the moving average, .* given variables"):
        made.evaluate(batches(2), state=state.variables, averaged=True)
