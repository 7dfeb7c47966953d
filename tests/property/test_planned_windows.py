"""Law: a loop over one-pass `Terms` gives what the replayed windows of the bare step give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic import Mean, Objective, Terms


class TwoTerms(Objective):
    """Two terms whose masses depend on the batch in different ways."""

    def init(self, key: jax.Array, variables: Any = None) -> Any:
        return {"params": {"w": jax.random.normal(key, (3, 2))}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        prediction = batch["x"] @ variables["params"]["w"]
        first = Mean((prediction[:, 0] ** 2 * batch["m"]).sum(), batch["m"].sum())
        second = Mean(jnp.abs(prediction[:, 1]).sum(), (batch["x"][:, 0] > 0).sum())
        return Terms({"first": (1.0, first), "second": (0.3, second)})


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    return [
        {"x": rng.normal(size=(4, 3)).astype(np.float32), "m": rng.integers(0, 3, 4).astype(np.float32)}
        for _ in range(count)
    ]


@pytest.mark.parametrize("every", [None, 1])
def test_a_planned_window_equals_a_replayed_one(every: int | None) -> None:
    """Would catch masses of the wrong window, a short last window planned as a full one, a group over two windows."""
    data = batches(8)
    trainer = telic.Trainer(TwoTerms(), optax.sgd(0.1), key=0, accumulate=3)
    loop = trainer.loop(log=0)
    if every is not None:
        loop.handle_event("iteration_completed", lambda s: None, telic.every(every))
    final = loop.run(data, epochs=2)
    assert final.step_state.window.planned is not None

    step = trainer.train_step()
    state = step.init(data[0])
    for _ in range(2):
        for batch in data:
            state = step.step(state, batch).state
        state = step.flush(state)
    assert int(final.step_state.updates) == int(state.updates) == 6
    np.testing.assert_allclose(final.step_state.variables["params"]["w"], state.variables["params"]["w"], rtol=2e-6)
    assert {"loss", "first", "second"} <= set(final.history[0])


def test_a_window_cut_short_by_a_handler_is_given_up() -> None:
    """Would catch a half window committed with the masses of a whole one."""
    data = batches(8)
    trainer = telic.Trainer(TwoTerms(), optax.sgd(0.1), key=0, accumulate=3)
    loop = trainer.loop(log=0).handle_event("iteration_completed", lambda s: telic.HALT_LOOP, telic.once(4))
    final = loop.run(data)
    assert int(final.step_state.updates) == 1
    whole = trainer.loop(log=0).run(data, iterations=3)
    np.testing.assert_array_equal(final.step_state.variables["params"]["w"], whole.step_state.variables["params"]["w"])
