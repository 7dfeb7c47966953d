"""Losses, gradients, log-probs and entropies from hidden states and a head, whole and in blocks of the vocabulary."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.mean import Mean
from telic.objectives.language.vocabulary import token_statistics
from tests.golden import cases

CHUNKS = [1, 2, 5]


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("case", cases("lm_chunked_head"))
def test_blocks_of_the_vocabulary_change_nothing(case: dict[str, Any], chunks: int, double: bool) -> None:
    """Catches a block counted twice (the last one overlaps), a cap left out of the gradient, a masked share."""
    rtol, atol = (1e-9, 1e-12) if double else (2e-5, 2e-6)
    with jax.enable_x64(double):
        config, given, out = case["config"], case["in"], case["out"]
        dtype = jnp.float64 if double else jnp.float32
        target = jnp.asarray(given["target"])
        bias = jnp.asarray(given["head_bias"], dtype) if config["bias"] else None

        def loss(hidden: Any, weight: Any) -> Any:
            head = SimpleNamespace(
                kernel=weight.T, bias=bias, soft_cap=config["softcap"], scale=1 / config["temperature"]
            )
            found = token_statistics(hidden, head, target, chunks=chunks)
            return Mean.of(-found.log_prob, target != config["ignore_index"]).value(), found

        arguments = (jnp.asarray(given["hidden"], dtype), jnp.asarray(given["head"], dtype))
        (value, found), (to_hidden, to_head) = jax.value_and_grad(loss, (0, 1), has_aux=True)(*arguments)
        kept = np.asarray(target != config["ignore_index"])
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
        close(value, out["loss_f64"])
        close(to_hidden, out["grad_hidden_f64"])
        close(to_head, out["grad_head_f64"])
        close(np.asarray(found.log_prob)[kept], np.asarray(out["log_probs_f64"])[kept])
        close(np.asarray(found.entropy)[kept], np.asarray(out["entropy_f64"])[kept])
        assert kept.sum() == out["token_count"]
