"""Moving averages: what is averaged, in which dtype, and how it is read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic.contract import Objective, Step
from telic.ema import EMASpec
from telic.errors import TelicError
from telic.mean import Mean
from tests.unit.train.tiny import batch_of, step_of


class Climb(Objective):
    """The parameter moves by +1 at each update of sgd(1), whatever the batch."""

    def __init__(self, ema: EMASpec | None, dtype: Any = jnp.float32):
        self.ema = ema
        self.dtype = dtype

    def init(self, key: Any, variables: Any = None) -> Any:
        del key, variables
        return {"params": {"w": jnp.zeros((), self.dtype), "v": jnp.zeros((), self.dtype)}, "ids": jnp.arange(3)}

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        del batch, step
        return Mean(-variables["params"]["w"].astype(jnp.float32), 1.0)


def climbed(ema: EMASpec | None, batches: int, **options: Any) -> Any:
    step = step_of(Climb(ema), optax.sgd(1.0), **options)
    one, batch = jax.jit(step.step), batch_of(0, 4)
    state = step.init(batch)
    for _ in range(batches):
        state = one(state, batch).state
    return state


def test_it_moves_once_per_commit() -> None:
    """S21: moved at every microbatch, two updates of four give another number than 1.25."""
    state = climbed(EMASpec(0.5), 8, accumulate=4)
    assert float(state.averaged["params"]["w"]) == 1.25


def test_the_decay_reads_the_updates_before_the_commit() -> None:
    state = climbed(EMASpec(lambda updates: jnp.where(updates == 0, 0.0, 0.5)), 2)
    assert float(state.averaged["params"]["w"]) == 0.5 * 1 + 0.5 * 2


def test_only_trainable_floats_are_averaged_unless_selected() -> None:
    """XS081: counters and buffers in the average."""
    state = climbed(EMASpec(0.5), 1, trainable="params/w")
    assert state.ema["params"]["v"] is None
    assert state.ema["ids"] is None
    assert state.averaged["ids"] is state.variables["ids"]
    chosen = climbed(EMASpec(0.5, select="params/v"), 1)
    assert chosen.ema["params"]["w"] is None
    assert float(chosen.averaged["params"]["w"]) == 1


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ValueError, match="names no leaf"):
        climbed(EMASpec(0.5, select="params/u"), 0)
    with pytest.raises(ValueError, match="selects no floating-point leaf"):
        climbed(EMASpec(0.5, select="ids"), 0)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        EMASpec(1.5)
    with pytest.raises(ValueError, match="'float32' or 'leaf'"):
        EMASpec(0.5, storage="wide")  # pyright: ignore[reportArgumentType] what is tested
    with pytest.raises(TelicError, match="keeps no moving average"):
        _ = climbed(None, 0).averaged


def drift(storage: Any) -> Any:
    spec = EMASpec(0.999, storage=storage)
    start = {"params": jnp.ones(4096, jnp.bfloat16)}
    live = {"params": jnp.full(4096, 2.0, jnp.bfloat16)}

    def body(average: Any, i: Any) -> Any:
        return spec.move(average, live, i, jax.random.fold_in(jax.random.key(0), i)), None

    average, _ = jax.jit(lambda a: jax.lax.scan(body, a, jnp.arange(500)))(spec.start(start, start))
    return average["params"]


def test_a_bfloat16_leaf_moves() -> None:
    """S23: an average kept in bfloat16 stays at 1.0 for ever; 2 - .999^500 = 1.3936."""
    kept = drift("float32")
    assert kept.dtype == jnp.float32
    np.testing.assert_allclose(kept, 2 - 0.999**500, rtol=1e-5)
    rounded = drift("leaf")
    assert rounded.dtype == jnp.bfloat16
    assert abs(float(rounded.astype(jnp.float32).mean()) - 1.39) <= 0.02


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_decay_one_keeps_every_bit(dtype: Any) -> None:
    """A frozen reference whose NaN payloads XLA rewrites, or whose values drift by rounding."""
    word = jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else jnp.uint32
    payload = {jnp.bfloat16: 0x7FA5, jnp.float16: 0x7D55, jnp.float32: 0x7FA12345}[dtype]
    odd = jax.lax.bitcast_convert_type(jnp.asarray([payload, 1, 0x8000, 0x3F81], word), dtype)
    spec = EMASpec(lambda updates: 1.0 + 0 * updates, storage="leaf")
    moved = jax.jit(spec.move)({"w": odd}, {"w": jnp.ones(4, dtype)}, jnp.zeros((), jnp.int32), jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(moved["w"]).view(np.uint8), np.asarray(odd).view(np.uint8))


def test_the_objective_sees_the_average_and_does_not_differentiate_it() -> None:
    """A teacher that is the student, or that is trained with it."""

    class Follow(Climb):
        def loss(self, variables: Any, batch: Any, step: Step) -> Any:
            del batch
            teacher = step.averaged["params"]["w"]
            return Mean((variables["params"]["w"] - 1 - teacher) ** 2, 1.0)

    step = step_of(Follow(EMASpec(0.5)), optax.sgd(0.25))
    batch = batch_of(0, 4)
    state = jax.jit(step.step)(step.init(batch), batch).state
    assert float(state.variables["params"]["w"]) == 0.5
    again = jax.jit(step.step)(state, batch).state
    assert float(again.variables["params"]["w"]) == 0.5 - 0.25 * 2 * (0.5 - 1 - 0.25)
