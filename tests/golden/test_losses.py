"""Losses against Axon 0.5 on given predictions (float32, rtol 1e-5, atol 1e-6)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from telic import losses
from tests.golden import cases

CASES = cases("axon_metrics_losses")

LIKE_FOR_LIKE = {
    "binary_cross_entropy": lambda i: losses.binary_cross_entropy(i["binary"], i["binary_probability"]),
    "binary_cross_entropy_from_logits": lambda i: losses.sigmoid_cross_entropy(i["binary"], i["logits"][:, :1]),
    "categorical_cross_entropy": lambda i: losses.categorical_cross_entropy(i["one_hot"], i["probabilities"]),
    "categorical_cross_entropy_from_logits": lambda i: losses.softmax_cross_entropy(i["one_hot"], i["logits"]),
    "categorical_cross_entropy_sparse_from_logits": lambda i: losses.softmax_cross_entropy(i["labels"], i["logits"]),
    "categorical_hinge": lambda i: losses.categorical_hinge(i["one_hot"], i["probabilities"]),
    "hinge": lambda i: losses.hinge(i["plus_minus"], i["logits"]),
    "kl_divergence": lambda i: losses.kl_divergence(i["positive_target"], i["positive_prediction"]),
    "log_cosh": lambda i: losses.log_cosh(i["target"], i["prediction"]),
    "mean_absolute_error": lambda i: losses.mean_absolute_error(i["target"], i["prediction"]),
    "mean_squared_error": lambda i: losses.mean_squared_error(i["target"], i["prediction"]),
    "poisson": lambda i: losses.poisson(i["positive_target"], i["positive_prediction"]),
}


def inputs(case: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x, jnp.int32 if name == "labels" else jnp.float32) for name, x in case["in"].items()}


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(LIKE_FOR_LIKE))
@pytest.mark.parametrize("case", CASES)
def test_per_example_values_are_axons(case: dict[str, Any], name: str) -> None:
    """A wrong formula, axis or clip in any loss that the trainer takes by name."""
    close(LIKE_FOR_LIKE[name](inputs(case)), case["out"]["losses"][name]["none"])


@pytest.mark.parametrize("case", CASES)
def test_cosine_loss_is_one_minus_axons_similarity(case: dict[str, Any]) -> None:
    """Axon's value is a similarity: minimising it would turn the vectors apart (B44)."""
    given = inputs(case)
    expected = 1 - case["out"]["losses"]["cosine_similarity"]["none"]
    close(losses.cosine_similarity(given["target"], given["prediction"]), expected)


@pytest.mark.parametrize("case", CASES)
def test_soft_margin_has_axons_terms_without_its_sum_over_the_batch(case: dict[str, Any]) -> None:
    """Axon sums over the batch axis (B44); its sums are those of our elementwise values, column by column."""
    given = inputs(case)
    columns = zip(given["plus_minus"].T, given["logits"].T, strict=True)
    close([losses.soft_margin(y, p).sum() for y, p in columns], case["out"]["losses"]["soft_margin"]["none"])
    assert losses.soft_margin(given["plus_minus"], given["logits"]).shape == (len(given["labels"]),)


@pytest.mark.parametrize("case", CASES)
def test_every_golden_loss_is_compared(case: dict[str, Any]) -> None:
    """A loss added to the reference file that no test reads."""
    assert set(case["out"]["losses"]) == {*LIKE_FOR_LIKE, "cosine_similarity", "soft_margin"}
