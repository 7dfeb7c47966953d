"""A window whose masses were planned before its first microbatch goes on in its middle."""

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic import tree
from telic.errors import Preempted


class Masked(telic.Objective):
    """Two means with denominators of their own: the window is planned, and the plan is part of the state."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.full((3,), 0.5)}}

    def loss(self, variables: Any, batch: Any, step: telic.Step) -> Any:
        error = (batch["inputs"] @ variables["params"]["w"] - batch["targets"]) ** 2
        mask = batch["mask"]
        inside = telic.Mean((error * mask).sum(), mask.sum())
        outside = telic.Mean((jnp.abs(error) * (1 - mask)).sum(), (1 - mask).sum())
        return telic.Terms({"inside": (1.0, inside), "outside": (0.3, outside)}), telic.Aux()


def run(directory: Path | None = None, stop_at: int | None = None) -> telic.LoopState | None:
    draw = np.random.default_rng(0)
    data = {"inputs": draw.normal(size=(14, 3)).astype(np.float32), "targets": draw.normal(size=14).astype(np.float32)}
    data["mask"] = (draw.random(14) > 0.5).astype(np.float32)
    places = None if directory is None else telic.Checkpoints(directory)
    loop = telic.Trainer(Masked(), "adam", key=0, accumulate=3, checkpoints=places).loop(log=0)
    loop.handle_event(
        "iteration_completed",
        lambda s: os.kill(os.getpid(), signal.SIGTERM) if s.total_iterations == stop_at else None,
    )
    try:
        return loop.run(telic.data.columns(data, batch=2), epochs=2)
    except Preempted:
        return None


@pytest.mark.slow
def test_stopped_inside_a_planned_window(tmp_path: Path) -> None:
    """Catches a plan made anew from the rest of the window, and one that the program is not given."""
    whole = run()
    assert whole is not None
    assert whole.step_state.window.planned is not None
    for stop_at in (1, 4, 8):
        assert run(tmp_path, stop_at) is None
    again = run(tmp_path)
    assert again is not None
    assert again.history == whole.history
    leaves = {
        name: jax.random.key_data(x) if name == "key" else x for name, x in tree.named_leaves(again.step_state).items()
    }
    for name, leaf in tree.named_leaves(whole.step_state).items():
        data = jax.random.key_data(leaf) if name == "key" else leaf
        assert np.asarray(leaves[name]).tobytes() == np.asarray(data).tobytes(), name
