"""The contract's own rules: what a loss returns, how it is reduced, and how held weights reach programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.contract import (
    Aux,
    Objective,
    Result,
    Step,
    as_result,
    call_loss,
    is_marked,
    loss_mean,
    mean_loss,
    objective,
    owns_statistics,
    reduce_statistics,
    scalar_loss,
)
from telic.errors import ContractError
from telic.mean import Mean, Terms


class Returns(Objective):
    def __init__(self, value: Any):
        self.value = value

    def init(self, key: Any, variables: Any = None) -> Any:
        del key
        return {"params": variables or {"w": jnp.ones(2)}}

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        return self.value


class Held(Returns):
    def held_variables(self) -> Any:
        return {"w": jnp.full(2, 3.0)}


class Deaf(Held):
    def init(self, key: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] what is tested
        del key
        return {"params": {}}


BATCH = np.zeros((4, 2), np.float32)


def test_statistics_alone_are_statistics_with_an_empty_aux() -> None:
    """Row 18."""
    mean = Mean(jnp.asarray(2.0), jnp.asarray(4.0))
    for value in (mean, (mean, Aux()), (mean, None)):
        loss, aux = scalar_loss(Returns(value), {}, BATCH, Step())
        assert float(loss) == 0.5
        assert aux == Aux()


def test_an_array_is_a_mean_over_its_elements() -> None:
    statistics, _ = call_loss(Returns(jnp.ones((4, 3))), {}, BATCH, Step())
    assert (float(statistics.total), float(statistics.mass)) == (12, 12)
    with pytest.raises(ContractError, match=r"leading dimension \(4\)"):
        call_loss(Returns(jnp.ones((2, 4))), {}, BATCH, Step())
    weighted = loss_mean(jnp.ones((4, 3)), jnp.asarray([1.0, 0, 0, 1]), BATCH)
    assert float(weighted.mass) == 6


def test_reducing_is_at_least_float32_and_a_scalar() -> None:
    value, has_data = reduce_statistics(Returns(None), jnp.asarray(2.0, jnp.float16))
    assert (value.dtype, bool(has_data)) == (jnp.float32, True)
    assert float(mean_loss(Mean(1.0, 2.0))[0]) == 0.5
    with pytest.raises(ContractError, match="must implement reduce_loss"):
        reduce_statistics(Returns(None), {"a": 1.0})
    with pytest.raises(ContractError, match=r"scalar, got shape \(2,\)"):
        reduce_statistics(Returns(None), Mean(jnp.ones(2), 1.0))


def test_terms_reduce_themselves() -> None:
    class Both(Returns):
        def reduce_loss(self, statistics: Any) -> Any:
            return statistics.value(), True

    assert owns_statistics(Both(None))
    with pytest.raises(ContractError, match="leave reduce_loss out"):
        call_loss(Both(Terms({"a": (1.0, Mean(1.0, 1.0))})), {}, BATCH, Step())


def test_held_weights_are_arguments() -> None:
    """Row 22, S26: weights compiled into the initialiser as constants."""
    assert jax.tree.leaves(Returns(None).initializer) == []
    held = Held(None).initializer
    assert len(jax.tree.leaves(held)) == 1
    program = jax.make_jaxpr(lambda init, key: init(key))(held, jax.random.key(0))
    assert program.consts == []
    with pytest.raises(ContractError, match="def init"):
        _ = Deaf(None).initializer


def test_a_marked_function_is_known_by_its_mark() -> None:
    assert is_marked(objective(lambda *a: a))
    assert not is_marked(lambda *a: a)


def test_results_pass() -> None:
    result = Result(1)
    assert as_result(result) is result
    assert as_result(3).state == 3
