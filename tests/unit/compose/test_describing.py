"""What a loop, a trainer and a state say of themselves: a screen at most, and true."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import telic
from telic.loop.filters import Filter

FILTERS = [
    telic.always,
    telic.first,
    telic.last,
    telic.every(3),
    telic.every(3, first=True, per_epoch=True),
    telic.once(4),
    telic.once(1, per_epoch=True),
    telic.before(5),
    telic.after(6, per_epoch=True),
    telic.every(2) & ~telic.first | telic.last,
]


@pytest.mark.parametrize("made", FILTERS, ids=repr)
def test_a_filter_says_how_it_is_written(made: Filter) -> None:
    """Catches a drawing that shows another filter than the one that is attached."""
    assert eval(repr(made), {name: getattr(telic, name) for name in telic.__all__}) == made


def test_filters_of_functions_name_them() -> None:
    """Catches an address in memory where a name is known."""

    def late(state: Any) -> bool:
        return True

    assert repr(telic.when(late)).endswith("late)")
    assert "0x" not in repr(telic.when(late))
    assert repr(telic.every_seconds(2.5)) == "every_seconds(2.5)"


def trainer(**options: Any) -> telic.Trainer:
    return telic.Trainer(telic.supervised(nn.Dense(1), "mean_squared_error"), "adam", key=7, **options)


def test_a_drawing_has_every_handler_at_its_event_in_order() -> None:
    """Catches a handler that is left out, or drawn where it does not run."""
    loop = trainer(accumulate=2).loop(log=25, metrics=["mean_absolute_error"])
    loop.register_event("mine").handle_event("mine", lambda state: None, name="own")
    loop.handle_event("iteration_completed", lambda state: None, telic.every(3), name="look")
    loop.handle_event("step_completed", lambda state: None, name="step")
    lines = loop.describe().splitlines()
    assert lines[0] == "Loop: TrainStep of Supervised, 2 microbatches an update"
    assert "mean_absolute_error" in lines[1]
    names = [line.replace("│", "").replace("├─", "").strip() for line in lines]
    order = [names.index("started"), names.index("epoch_started"), names.index("iteration_started")]
    order += [names.index("the step"), names.index("iteration_completed")]
    assert order == sorted(order)
    at = names.index("iteration_completed")
    assert names[at + 1].split() == ["log", "every(25,", "per_epoch=True)"]
    assert names[at + 2].split() == ["look", "every(3)"]
    assert names[names.index("step_completed  (where a window closes)") + 1] == "step"
    assert names[names.index("mine  (fired by handlers)") + 1] == "own"
    assert sum(line.split()[:1] == ["look"] for line in names) == 1


def test_a_bare_loop_names_its_function() -> None:
    """Catches a drawing that only loops of objectives have."""

    def count(state: Any, batch: Any) -> Any:
        return state + 1

    loop = telic.Loop(count, lambda batch: 0)
    assert "count" in loop.describe().splitlines()[0]
    assert repr(loop).startswith("Loop(")
    assert "count" in repr(loop)


def test_reprs_fit_a_screen() -> None:
    """Catches a repr that prints a million numbers, or memory addresses."""
    made = trainer(accumulate=3, checkpoints=telic.Checkpoints("runs/x"))
    assert repr(made) == "Trainer(Supervised, key=7, accumulate=3, checkpoints='runs/x')"
    assert repr(trainer()) == "Trainer(Supervised, key=7)"
    loop = trainer().loop()
    for i in range(30):
        loop.metric(jnp.mean, f"m{i}", reads=("prediction",))
    assert len(repr(loop)) < 400
    assert "and 22 more" in repr(loop)
    batch = (np.ones((4, 500), np.float32), np.ones((4, 1), np.float32))
    state = trainer().fit([batch] * 3, log_every=0)
    assert repr(state) == (
        "TrainState(updates=3, attempts=3, rejected=0, params: 501 values in 2 arrays of float32, "
        f"optimizer: {_values(state.opt_state)})"
    )


def _values(tree: Any) -> str:
    leaves = jax.tree.leaves(tree)
    dtypes = "/".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves))
    return f"{sum(leaf.size for leaf in leaves):,} values in {len(leaves)} arrays of {dtypes}"


def test_the_repr_of_a_state_survives_jit_vmap_and_donation() -> None:
    """Catches a repr that raises where it is needed most: in a trace, and of a state that was given away."""
    step = trainer().train_step()
    batch = (np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
    state = step.init(batch)
    seen: list[str] = []

    def look(state: Any) -> Any:
        seen.append(repr(state))
        return state

    jax.jit(look)(state)
    jax.vmap(look)(jax.tree.map(lambda x: jnp.stack([x, x]), state))
    shapes = jax.eval_shape(lambda: state)
    seen.append(repr(shapes))
    assert all(text.startswith("TrainState(updates=<") for text in seen)
    gone = jax.tree.map(lambda x: x.copy(), state)
    jax.tree.map(lambda x: x.delete(), gone)
    assert "updates=deleted" in repr(gone)
