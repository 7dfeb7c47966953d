"""What it takes to build a state where it is to lie."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from telic.driver.building import build_state, building

WIDTH, LAYERS = 256, 8


def build(key: Any) -> Any:
    keys = jax.random.split(key, LAYERS)
    return [[jax.random.normal(k, (WIDTH, WIDTH)) for k in keys], [np.zeros((WIDTH, WIDTH), np.float32)] * LAYERS]


def everywhere(shapes: Any) -> Any:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda _: here, shapes)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the order of a program is chosen for the CPU")
def test_a_placed_state_is_built_without_temporaries_of_its_size() -> None:
    """Catches leaves that are all drawn before any is finished: another copy of the parameters beside them."""
    key = jax.random.key(0)
    where = everywhere(jax.eval_shape(build, key))
    memory = building(build, where).lower(key).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * WIDTH * WIDTH
    free = building(build, None).lower(key).compile().memory_analysis()
    assert free.output_size_in_bytes == memory.output_size_in_bytes


def test_the_order_of_building_does_not_change_what_is_built() -> None:
    """Catches an option that makes a state on a mesh another one than on a device."""
    key = jax.random.key(0)
    placed = building(build, everywhere(jax.eval_shape(build, key)))(key)
    jax.tree.map(np.testing.assert_array_equal, placed, building(build, None)(key))


@pytest.mark.parametrize("shardings", [lambda _: None, everywhere], ids=["free", "placed"])
def test_equal_draws_are_compiled_once(shardings: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Catches one program of all draws, which takes XLA a minute for 300 leaves; and a forward pass nobody reads."""

    def drawn(key: Any) -> Any:
        keys = jax.random.split(key, 8)
        leaves = [jax.random.normal(k, (3, 5)) for k in keys]
        jnp.cosh(sum(leaves)).sum()
        return leaves, [jax.random.normal(k, (7,)).astype(jnp.bfloat16) for k in keys]

    with jax.log_compiles(), caplog.at_level("WARNING"):
        made = build_state(drawn, jax.random.key(0), shardings=shardings)
    compiled = [line for line in caplog.messages if line.startswith("Finished XLA compilation")]
    assert sum("lambda" in line for line in compiled) == 2
    assert not any("cosh" in line for line in compiled)
    jax.tree.map(np.testing.assert_array_equal, made, jax.jit(drawn)(jax.random.key(0)))


@pytest.mark.parametrize("shardings", [lambda _: None, everywhere], ids=["free", "placed"])
def test_draws_may_read_what_was_drawn(shardings: Any) -> None:
    """Catches a draw that runs before the one it reads, a number that is a part of two leaves, and one of none."""

    def build(key: Any) -> Any:
        keys = jax.random.split(key, 9)
        scales = [jax.random.uniform(k, (4,)) for k in keys]
        leaves = [jax.random.uniform(k, (4,), maxval=scale) for k, scale in zip(keys, scales, strict=True)]
        unlike = [jax.random.normal(k, (5,)).sum() for k in keys]
        return leaves, scales, [a + b for a, b in zip(scales, leaves, strict=True)], unlike

    made = build_state(build, jax.random.key(0), shardings=shardings)
    # Sums of one program may be in another order.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), made, jax.jit(build)(jax.random.key(0)))


@pytest.mark.parametrize("consume", [(), (0,)])
def test_a_state_built_apart_owns_its_leaves(consume: tuple[int, ...]) -> None:
    """Catches a leaf that is the caller's own array, or that is there twice: a step gives its state away."""
    held = {"w": jnp.arange(3.0), "host": np.arange(4.0, dtype=np.float32)}
    captured = jnp.ones(2)

    def build(held: Any) -> Any:
        return {"params": held, "ema": held, "captured": captured, "number": 1.5}

    made = build_state(build, held, shardings=lambda _: None, consume=consume)
    jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)(made)
    assert captured.sum() == 2
    np.testing.assert_array_equal(held["host"], np.arange(4.0))
    if not consume:
        np.testing.assert_array_equal(held["w"], np.arange(3.0))


def test_an_effect_that_draws_read_happens_once() -> None:
    """Catches a counter that numbers the draws and moves on before the rest of the state is made of it."""
    calls = 0

    def number() -> np.uint32:
        nonlocal calls
        calls += 1
        return np.uint32(calls)

    def build(key: Any) -> Any:
        seed = io_callback(number, jax.ShapeDtypeStruct((), jnp.uint32))
        keys = jax.random.split(jax.random.fold_in(key, seed), 9)
        return [jax.random.normal(k, (4,)) for k in keys], seed

    drawn, seed = build_state(build, jax.random.key(0), shardings=lambda _: None)
    assert (calls, int(seed)) == (1, 1)
    key = jax.random.split(jax.random.fold_in(jax.random.key(0), 1), 9)[8]
    np.testing.assert_array_equal(drawn[8], jax.random.normal(key, (4,)))
