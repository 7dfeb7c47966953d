"""Token losses, smoothing, z-loss and their gradients from given logits."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.mean import Mean
from telic.objectives.language.vocabulary import next_token_loss, token_statistics
from tests.golden import cases


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("case", cases("lm_cross_entropy"))
def test_losses_and_gradients(case: dict[str, Any], double: bool, chunks: int) -> None:
    """Catches e/(V-1) smoothing, a z-loss that smoothing scales, a row mean, weights outside of the denominator."""
    rtol, atol = (1e-9, 1e-12) if double else (2e-5, 2e-6)
    with jax.enable_x64(double):
        config, given, out = case["config"], case["in"], case["out"]
        dtype = jnp.float64 if double else jnp.float32
        logits = jnp.asarray(given["logits"], dtype)
        target = jnp.asarray(out["target"])
        kept = target != config["ignore_index"]
        weights = jnp.asarray(given["weights"], dtype)
        head = SimpleNamespace(kernel=jnp.eye(logits.shape[-1], dtype=dtype), bias=None, soft_cap=None, scale=1.0)

        def mean(logits: Any, weights: Any, **options: Any) -> Any:
            found = token_statistics(logits, head, target, chunks=chunks)
            mean = Mean.of(next_token_loss(found, **options), weights)
            return mean.value(), (mean, found)

        def check(weights: Any, value: str, gradient: str | None, **options: Any) -> Any:
            (got, kept), slope = jax.value_and_grad(mean, has_aux=True)(logits, weights, **options)
            np.testing.assert_allclose(got, out[value], rtol=rtol, atol=atol)
            if gradient is not None:
                np.testing.assert_allclose(slope, out[gradient], rtol=rtol, atol=atol)
            return kept

        total, found = check(kept, "token_mean", "grad_token_mean")
        np.testing.assert_allclose(total.total, out["loss_sum"], rtol=rtol, atol=atol)
        assert total.mass == out["token_count"]
        mask = np.asarray(kept)
        per_token = np.where(mask, -np.asarray(found.log_prob), 0)
        np.testing.assert_allclose(per_token, out["per_token_nll"], rtol=rtol, atol=atol)
        np.testing.assert_allclose(found.log_normalizer, out["logsumexp"], rtol=rtol, atol=atol)
        hits = (np.asarray(found.predicted) == np.asarray(target)) & mask
        np.testing.assert_array_equal(hits[mask], np.asarray(out["correct"])[mask])

        check(kept * weights, "weighted_mean", "grad_weighted_mean")
        smoothing, z = config["label_smoothing"], config["z_loss"]
        check(kept, "smoothed_token_mean", "grad_smoothed_token_mean", label_smoothing=smoothing)
        check(kept, "z_token_mean", "grad_z_token_mean", z_loss=z)
        both = mean(logits, kept, label_smoothing=smoothing, z_loss=z)[0]
        np.testing.assert_allclose(both, out["liger_smoothed_z_token_mean_f32"], rtol=max(rtol, 2e-5))
