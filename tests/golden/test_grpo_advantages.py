"""Group advantages against TRL and verl, on NumPy arrays and inside a program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.advantages import group_advantages
from tests.golden import cases, load


def weighted(rewards: np.ndarray, weights: list[float] | None) -> np.ndarray:
    """The weighted sum of several rewards; NaN only where no function gave one."""
    known = ~np.isnan(rewards)
    total = np.where(known, rewards, 0) @ np.asarray(weights or [1.0] * rewards.shape[1])
    return np.where(known.any(1), total, np.nan)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("case", cases("grpo_advantages"))
def test_advantages_of_groups(case: dict[str, Any], place: Callable[[Any], Any]) -> None:
    """S46, XS167, XS170: options swapped, the biased deviation, a batch normalised as one group, 0/0 without spread."""
    with jax.enable_x64(True):
        rewards = place(weighted(case["in"]["rewards"], case["config"]["reward_weights"]))
        for name, settings in case["config"]["variants"].items():
            if "agg" in settings:
                continue  # Rewards that are normalised before they are summed are not offered.
            found = group_advantages(rewards, group=case["config"]["num_generations"], scale=settings["scale_rewards"])
            assert isinstance(found, type(rewards))
            np.testing.assert_allclose(found, case["out"][name]["advantages"], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("case", [c for c in load("grpo_verl")["cases"] if c["name"].startswith("outcome")])
def test_outcome_advantages_of_verl(case: dict[str, Any]) -> None:
    """Leave-one-out and mean baselines in groups of any size; verl's groups of one are refused here."""
    rewards = case["in"]["token_level_rewards"].sum(1)
    index = np.asarray(case["config"]["group_index"])
    first = case["in"]["response_mask"].argmax(1)
    for prompt in np.unique(index):
        rows = np.flatnonzero(index == prompt)
        if len(rows) < 2:
            with pytest.raises(ValueError, match="at least 2"):
                group_advantages(rewards[rows], group=len(rows))
            continue
        for name, options in {
            "grpo_std": {"epsilon": case["config"]["epsilon"]},
            "grpo_no_std": {"scale": "none"},
            "rloo": {"scale": "none", "baseline": "leave_one_out"},
        }.items():
            found = group_advantages(rewards[rows], group=len(rows), **options)
            np.testing.assert_allclose(found, case["out"][name][rows, first[rows]], rtol=1e-9, atol=1e-12)
