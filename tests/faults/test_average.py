"""Moving averages through restarts, evaluations and frozen leaves."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.checkpoints import load_variables
from telic.errors import ContractError
from tests.faults.small import batches, bits, columns, trainer


def warming(updates: Any) -> Any:
    """A decay that begins low: min(.99, (1 + n) / (10 + n))."""
    return jnp.minimum(0.99, (1 + updates) / (10 + updates))


def late(updates: Any) -> Any:
    """An average that begins after three updates."""
    return jnp.where(updates < 3, 0.0, 0.9)


@pytest.mark.parametrize("decay", [warming, late])
def test_a_restart_does_not_begin_the_average_again(decay: Any, tmp_path: Path) -> None:
    """S22, XS079: a decay that warms up once more and wipes the average; XS080: an average that a restart does not
    take up because it was begun late; XS084: a corrected average that is written back and corrected again.
    """
    spec = telic.EMASpec(decay)
    whole = trainer(ema=spec).fit(columns(), steps=8, log_every=0)
    for steps in (5, 5, 8):
        state = trainer(tmp_path, ema=spec).fit(columns(), steps=steps, log_every=0)
        if steps == 5:
            straight = trainer(ema=spec).fit(columns(), steps=5, log_every=0)
            assert bits(state.averaged) == bits(straight.averaged)
    assert bits(state) == bits(whole)


def test_evaluating_before_going_on_changes_nothing(tmp_path: Path) -> None:
    """XS082: an evaluation before fit that leaves the average somewhere else; XS083: an average that is built anew, so
    that validation takes long to come back.
    """
    spec = telic.EMASpec(0.8)
    held_out = batches(3)
    whole = trainer(ema=spec).fit(columns(), steps=8, log_every=0)
    before = trainer(tmp_path, ema=spec)
    state = before.fit(columns(), steps=5, log_every=0)
    expected = before.evaluate(held_out, state=state, averaged=True)
    resumed = trainer(tmp_path, ema=spec)
    back = resumed.fit(columns(), steps=5, log_every=0)
    assert resumed.evaluate(held_out, state=back, averaged=True) == expected
    assert resumed.evaluate(held_out, state=back) != expected
    assert bits(resumed.fit(columns(), steps=8, log_every=0)) == bits(whole)


def test_frozen_leaves_of_an_average_are_the_live_ones(tmp_path: Path) -> None:
    """XS085: averaged weights that cannot be loaded because some leaves have no average, or a missing one that is
    passed over.
    """
    model = (
        lambda key, x: {"still": jnp.full((1, 1), 2.0), "w": jnp.zeros((1, 1))},
        lambda params, x: x @ params["still"] @ params["w"],
    )
    made = trainer(tmp_path, model, ema=telic.EMASpec(0.5), trainable="params/w")
    state = made.fit(columns(), steps=4, log_every=0)
    loaded = load_variables(tmp_path, averaged=True)
    assert bits(loaded) == bits(state.averaged)
    assert float(loaded["params"]["still"][0, 0]) == 2.0
    assert float(loaded["params"]["w"][0, 0]) != float(state.variables["params"]["w"][0, 0])
    by_flag = made.evaluate(batches(2), state=state, averaged=True)
    assert made.evaluate(batches(2), state=loaded) == by_flag
    with pytest.raises(ContractError, match="must have the leaf w"):
        made.evaluate(batches(2), state={"params": {"still": np.asarray(loaded["params"]["still"])}})
