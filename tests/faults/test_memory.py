"""What a run leaves behind, and what it costs while it runs."""

import gc
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

import telic
from tests.faults.small import batches, columns, trainer


def test_runs_leave_nothing_behind() -> None:
    """XS111: engine and handlers that hold each other, with the weights of every run."""

    def once() -> None:
        loop = trainer().loop(log=0).validate(batches(2)).early_stop("loss", mode="min", patience=9)
        loop.metric("mean_absolute_error").run(columns(), epochs=1)

    once()
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(5):
        once()
    gc.collect()
    assert len(jax.live_arrays()) <= before


def test_the_step_of_an_nnx_model_gives_its_state_away() -> None:
    """XS112: a step whose state costs its memory twice because the module is not a plain tree."""
    data = [(np.ones((2, 3), np.float32), np.ones((2, 1), np.float32))] * 3
    olds: list[Any] = []
    loop = telic.trainer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), "mean_squared_error", "adam", log=0)
    loop.handle_event("iteration_completed", lambda s: olds.append(jax.tree.leaves(s.step_state.variables)))
    loop.run(data)
    assert [all(leaf.is_deleted() for leaf in leaves) for leaves in olds] == [True, True, False]
    assert all(isinstance(leaf, jnp.ndarray) for leaf in olds[-1])
