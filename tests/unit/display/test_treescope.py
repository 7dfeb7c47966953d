"""States as treescope draws them in notebooks: a tree to unfold, with each array's shape and numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic

treescope = pytest.importorskip("treescope")


def trained() -> telic.TrainState:
    pair = (lambda key, x: {"w": jnp.full((2, 1), 0.5)}, lambda params, x: x @ params["w"])
    batch = (np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
    trainer = telic.Trainer(telic.supervised(pair, "mean_squared_error"), telic.optimizers.adam(0.1), key=0)
    return trainer.fit([batch] * 2, steps=2, log_every=0)


def test_a_state_is_a_tree_and_not_its_one_line() -> None:
    """Catches a repr of its own that hides the leaves from the drawing, and a field that the drawing leaves out."""
    state = trained()
    text = treescope.render_to_text(state)
    assert "\n" not in repr(state)
    for part in ("TrainState(\n", "'w': <jax.Array float32(2, 1)", "learner=Learner(", "rejections=Rejections(", "mu="):
        assert part in text, part
    assert "TrainState" in treescope.render_to_html(state, compressed=False)
    assert "step_state=" in treescope.render_to_text(telic.Loop(lambda s, b: s, lambda b: 0.0).run([np.ones(2)]))


def test_a_donated_state_is_drawn_as_deleted() -> None:
    """Catches a cell that fails because the state in it was given to a later step."""
    state = trained()
    jax.tree.map(lambda x: x.delete(), state)
    assert "'w': <jax.Array float32(2, 1) - deleted!>" in treescope.render_to_text(state)


def test_a_state_inside_a_compiled_function_is_drawn() -> None:
    """Catches a drawing that reads numbers where there are none yet."""
    drawn: list[str] = []
    jax.eval_shape(lambda state: drawn.append(treescope.render_to_text(state)), trained())
    assert "float32[2,1]" in drawn[0]
