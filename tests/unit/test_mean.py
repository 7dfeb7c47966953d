"""Mean, Terms and Rows: arithmetic, dtypes, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ContractError, ShapeError
from telic.mean import Mean, Rows, Terms, merge_statistics, spread_weights, wide


def test_total_over_total() -> None:
    """S01, XS002: sums 10 and 3 over 10 and 1 tokens are 13 / 11, not the mean of 1 and 3."""
    assert float(Mean(10.0, 10.0).merge(Mean(3.0, 1.0)).value()) == pytest.approx(13 / 11)


def test_a_dropped_element_may_be_nan() -> None:
    values = jnp.asarray([1.0, jnp.nan, 3.0])
    mean, gradient = jax.value_and_grad(lambda v: Mean.of(v, jnp.asarray([1.0, 0.0, 3.0])).value())(values)
    assert float(mean) == 2.5
    np.testing.assert_allclose(gradient, [0.25, 0, 0.75])


def test_weights_take_the_leading_shape_or_are_refused() -> None:
    mean = Mean.of(jnp.ones((2, 3)), jnp.asarray([1.0, 2.0]))
    assert (float(mean.total), float(mean.mass)) == (9.0, 9.0)
    with pytest.raises(ShapeError, match=r"\(2, 3\).*got \(3,\)"):
        spread_weights(jnp.ones(3), jnp.ones((2, 3)))


def test_half_precision_is_summed_in_float32() -> None:
    """70,000 ones are infinite in float16."""
    mean = Mean.of(jnp.ones(70_000, jnp.float16))
    assert mean.total.dtype == jnp.float32
    assert float(mean.value()) == 1
    assert wide(jnp.ones((), jnp.int32)).dtype == jnp.float32


def test_no_mass_is_no_data() -> None:
    mean = Mean(jnp.zeros(()), jnp.zeros(()))
    assert float(mean.value()) == 0
    assert not bool(mean.has_data())
    assert float(jax.grad(lambda t: Mean(t, 0.0).value())(1.0)) == 0


def test_a_penalty_keeps_its_full_weight() -> None:
    """XS001: window loss 8 / 4 + 1, the penalty divided by no mass and counted once."""
    one, two = Mean(6.0, 3.0) + 1.0, 1.0 + Mean(2.0, 1.0)
    assert float(one.merge(two).value()) == 3.0
    assert float((2.0 * Mean(6.0, 3.0)).value()) == 4.0


def test_two_means_do_not_add() -> None:
    with pytest.raises(ContractError, match="ambiguous"):
        Mean(1.0, 1.0) + Mean(1.0, 1.0)


def test_terms_round_trip_and_are_checked() -> None:
    terms = Terms({"b": (0.5, Mean(1.0, 1.0)), "a": (1.0, Mean(2.0, 4.0))})
    leaves, structure = jax.tree.flatten(terms)
    assert leaves == [1.0, 2.0, 4.0, 0.5, 1.0, 1.0]
    assert float(structure.unflatten(leaves).value()) == 1.0
    assert jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(terms)[0][0]).startswith("['a']")
    for wrong in ({}, [1], {"a": Mean(1.0, 1.0)}, {"a": (1.0, 2.0)}):
        with pytest.raises(ContractError):
            Terms(wrong)  # pyright: ignore[reportArgumentType] what is tested


def test_rows_concatenate_where_sums_add() -> None:
    one = {"n": jnp.asarray(1), "rows": Rows(jnp.zeros((2, 3)))}
    both = merge_statistics(one, {"n": jnp.asarray(2), "rows": Rows(jnp.ones((1, 3)))})
    assert int(both["n"]) == 3
    assert both["rows"].values.shape == (3, 3)
