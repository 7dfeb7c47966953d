"""Advantages by hand: what the references' files do not show."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from telic.advantages import generalized_advantages, group_advantages
from telic.errors import ShapeError


def test_by_hand() -> None:
    """Row 67 and XS167: mean and deviation of a group, the mean of the others; none, group and batch not swapped."""
    quarters = np.asarray([0.75, -0.25, -0.25, -0.25])
    one = np.asarray([1.0, 0, 0, 0])
    np.testing.assert_allclose(group_advantages(one, group=4, epsilon=1e-6), quarters / 0.500001)
    others = group_advantages(one, group=4, scale="none", baseline="leave_one_out")
    np.testing.assert_allclose(others, [1, -1 / 3, -1 / 3, -1 / 3])
    rewards = np.asarray([0.0, 1, 0, 3])
    found = {scale: group_advantages(rewards, group=2, scale=scale, epsilon=0) for scale in ("none", "group", "batch")}
    np.testing.assert_allclose(found["none"], [-0.5, 0.5, -1.5, 1.5])
    np.testing.assert_allclose(found["group"], np.asarray([-1, 1, -1, 1]) / np.sqrt(2))
    np.testing.assert_allclose(found["batch"], [-0.353553, 0.353553, -1.06066, 1.06066], atol=1e-5)


def test_groups_are_compared_within() -> None:
    """XS170: a batch that is normalised as one group makes all of a good prompt's completions good."""
    found = group_advantages(np.asarray([0.0, 1, 10, 11]), group=2)
    np.testing.assert_allclose(found[:2], found[2:])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_equal_rewards_are_exactly_zero(scale: Any, baseline: Any, place: Any) -> None:
    """S46: the mean of seven times 0.1 is not 0.1, and the rounding over an epsilon is an advantage."""
    rewards = np.concatenate([np.full(7, 0.1), np.arange(7)]).astype(np.float32)
    found = group_advantages(place(rewards), group=7, scale=scale, baseline=baseline)
    np.testing.assert_array_equal(found[:7], 0)
    assert (np.asarray(found)[[7, 13]] != 0).all()


def test_rewards_of_integers() -> None:
    """Catches integer division, and advantages cut to whole numbers."""
    np.testing.assert_allclose(group_advantages(np.asarray([0, 1]), group=2, scale="none"), [-0.5, 0.5])
    np.testing.assert_allclose(group_advantages(np.asarray([False, True]), group=2, scale="none"), [-0.5, 0.5])


def test_generalized_advantages_by_hand() -> None:
    """Row 68: returns of (.75, 1, 1); a step that does not count hands the reward on."""
    rewards, values = np.asarray([[0.0, 0, 1]], np.float32), np.asarray([[0.5, 0.5, 1]], np.float32)
    _, returns = generalized_advantages(rewards, values, np.ones((1, 3)), decay=0.5)
    np.testing.assert_allclose(returns, [[0.75, 1, 1]])
    hole = np.asarray([[1, 0, 1]])
    values[0, 1] = np.nan
    advantages, returns = generalized_advantages(rewards, values, hole, decay=0.5)
    np.testing.assert_allclose(returns, [[1, 1, 1]])
    np.testing.assert_allclose(advantages, [[0.5, 0, 0]])


def test_the_trace_of_later_steps_is_kept() -> None:
    """XS171: a dropped carry leaves one-step advantages, which differ wherever λ is not 0."""
    draw = np.random.default_rng(0)
    rewards, values = (draw.normal(size=(2, 5)) for _ in range(2))
    found, returns = generalized_advantages(rewards, values, np.ones((2, 5)), discount=0.9, decay=0.8)
    expected, after = np.zeros((2, 6)), np.concatenate([values, np.zeros((2, 1))], axis=1)
    for t in reversed(range(5)):
        expected[:, t] = rewards[:, t] + 0.9 * after[:, t + 1] - values[:, t] + 0.72 * expected[:, t + 1]
    np.testing.assert_allclose(found, expected[:, :5], rtol=1e-5)
    np.testing.assert_allclose(returns, expected[:, :5] + values, rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    """Catches a group of one, which learns nothing, and rows that do not fill groups."""
    for group in (1, 0, True, 2.0):
        with pytest.raises(ValueError, match="at least 2"):
            group_advantages(np.zeros(4), group=group)  # pyright: ignore
    with pytest.raises(ShapeError, match=r"whole groups of 3, got shape \(4,\)"):
        group_advantages(np.zeros(4), group=3)
    with pytest.raises(ShapeError, match="one number per completion"):
        group_advantages(np.zeros((2, 2)), group=2)
    with pytest.raises(ValueError, match="unknown scale 'std'"):
        group_advantages(np.zeros(4), group=2, scale="std")  # pyright: ignore
    with pytest.raises(ValueError, match="unknown baseline"):
        group_advantages(np.zeros(4), group=2, baseline="best")  # pyright: ignore
    with pytest.raises(ShapeError, match="rewards, values and mask"):
        generalized_advantages(np.zeros((2, 3)), np.zeros((2, 2)), np.zeros((2, 3)))
    with pytest.raises(ValueError, match="decay must be"):
        generalized_advantages(np.zeros((2, 3)), np.zeros((2, 3)), np.ones((2, 3)), decay=1.5)
