"""A bare TrainState in a run of steps: its attempts are its place in the stream."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic.data import columns


def make_trainer(accumulate: int = 1) -> telic.Trainer:
    pair = (lambda key, x: {"w": jax.random.normal(key, (3, 1))}, lambda params, x: x @ params["w"])
    return telic.Trainer(telic.supervised(pair, "mean_squared_error"), optax.adam(0.1), key=0, accumulate=accumulate)


def make_data() -> telic.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)).astype(np.float32)
    return columns({"inputs": x, "targets": x.sum(1, keepdims=True)}, batch=4, seed=3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_steps_and_two_more_are_four(accumulate: int) -> None:
    """Catches data read again from its start, steps counted as further ones, a key used twice (row 52)."""
    straight = make_trainer(accumulate).fit(make_data(), steps=7, log_every=0)
    half = make_trainer(accumulate).fit(make_data(), steps=3, log_every=0)
    whole = make_trainer(accumulate).fit(make_data(), steps=7, log_every=0, state=half)
    assert int(whole.updates) == int(straight.updates) == 7
    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(whole), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_steps_already_done_do_nothing() -> None:
    """Catches a total that is taken as a further amount."""
    done = make_trainer().fit(make_data(), steps=3, log_every=0)
    again = make_trainer().fit(make_data(), steps=3, log_every=0, state=done)
    assert int(again.updates) == 3
