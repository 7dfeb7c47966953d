"""Moving averages against diffusers, torch, Optax and EDM, in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.ema import EMASpec
from tests.golden import cases

CASES = cases("ema")


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def averages(decay: float | Callable[[Any], Any], case: dict[str, Any], *, start: Any = None) -> Any:
    spec = EMASpec(decay)
    first = {"params": {"w": jnp.asarray(case["in"]["start"] if start is None else start)}}
    average = spec.start(first, first)
    move = jax.jit(spec.move)
    rows = []
    for i, online in enumerate(case["in"]["online"]):
        average = move(average, {"params": {"w": jnp.asarray(online)}}, jnp.asarray(i, jnp.int32), jax.random.key(0))
        rows.append(average["params"]["w"])
    return np.stack(rows)


def from_table(values: Any) -> Callable[[Any], Any]:
    table = jnp.asarray(values)
    return lambda updates: table[updates]


@pytest.mark.parametrize("case", CASES)
def test_a_constant_decay_is_optaxs(case: dict[str, Any]) -> None:
    """XS086: the decay put on the new value, which is nearly the live model."""
    expected = case["out"]["optax_incremental_update"]["averaged"]
    np.testing.assert_allclose(averages(case["config"]["decay"], case), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["diffusers_default", "diffusers_warmup", "diffusers_min_decay_after2"])
@pytest.mark.parametrize("case", CASES)
def test_a_schedule_reads_the_updates_before_the_commit(case: dict[str, Any], name: str) -> None:
    """A decay read one update too late, or a warm-up that starts at 1."""
    expected = case["out"][name]
    got = averages(from_table(expected["decays"]), case)
    np.testing.assert_allclose(got, expected["averaged"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_torchs_average_starts_at_the_first_parameters(case: dict[str, Any]) -> None:
    decay = case["config"]["decay"]
    got = averages(lambda updates: jnp.where(updates == 0, 0.0, decay), case)
    np.testing.assert_allclose(got, case["out"]["torch_averaged_model"]["averaged"], rtol=1e-9, atol=1e-12)


def test_decay_one_is_the_start_exactly() -> None:
    """A frozen reference that drifts by rounding."""
    case = CASES[-1].values[0]
    for decay in (1.0, 1, lambda updates: jnp.ones(())):
        rows = averages(decay, case)
        np.testing.assert_array_equal(rows, np.broadcast_to(case["in"]["start"], rows.shape))
