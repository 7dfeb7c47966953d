"""What it takes to build a state where it is to lie."""

from typing import Any

import jax
import numpy as np
import pytest

from telic.driver.stepping import building

WIDTH, LAYERS = 256, 8


def build(key: Any) -> Any:
    keys = jax.random.split(key, LAYERS)
    return [[jax.random.normal(k, (WIDTH, WIDTH)) for k in keys], [np.zeros((WIDTH, WIDTH), np.float32)] * LAYERS]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the order of a program is chosen for the CPU")
def test_a_placed_state_is_built_without_temporaries_of_its_size() -> None:
    """Catches leaves that are all drawn before any is finished: another copy of the parameters beside them."""
    key = jax.random.key(0)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = jax.tree.map(lambda _: here, jax.eval_shape(build, key))
    memory = building(build, where).lower(key).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * WIDTH * WIDTH
    free = building(build, None).lower(key).compile().memory_analysis()
    assert free.output_size_in_bytes == memory.output_size_in_bytes


def test_the_order_of_building_does_not_change_what_is_built() -> None:
    """Catches an option that makes a state on a mesh another one than on a device."""
    key = jax.random.key(0)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = building(build, jax.tree.map(lambda _: here, jax.eval_shape(build, key)))(key)
    jax.tree.map(np.testing.assert_array_equal, placed, building(build, None)(key))
