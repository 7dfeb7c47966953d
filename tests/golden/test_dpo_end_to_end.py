"""DPO from token ids against TRL: loss, log-probs, metrics and gradients of tiny pretrained models, in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.contract import Step
from telic.interop import load_huggingface
from telic.objectives import DPOObjective
from tests.golden import DATA, cases
from tests.golden.test_hf import their_names

CLOSE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.mark.parametrize("case", cases("dpo_end_to_end"))
def test_loss_and_gradient_from_token_ids(case: dict[str, Any]) -> None:
    """Catches an error that spans parts: the shift, padding, the reference's weights, the sum over tokens."""
    given, out, config = case["in"], case["out"], case["config"]
    decoder, variables = load_huggingface(DATA / config["checkpoint"])
    reference = jax.tree.map(lambda x: config["reference_scale"] * x, variables)

    def paired(rows: Any) -> Any:
        return np.stack(np.split(np.asarray(rows), 2), axis=1)

    batch = {
        "tokens": paired(given["input_ids"]),
        "completion_mask": paired(given["completion_mask"]),
        "segment_ids": paired(given["attention_mask"]),
    }
    objective = DPOObjective(
        decoder,
        loss_type=config["loss_type"],
        beta=config["beta"],
        length_normalized=config["loss_type"] == "ipo",
    ).bind(batch)

    @jax.jit
    def differentiated(variables: Any, reference: Any) -> Any:
        def loss(variables: Any) -> Any:
            mean, aux = objective.loss(variables, batch, Step(averaged=reference, train=False))
            return mean.value(), {name: metric.value() for name, metric in aux.metrics.items()}

        return jax.value_and_grad(loss, has_aux=True)(variables)

    (value, metrics), gradient = differentiated(variables, reference)
    np.testing.assert_allclose(value, out["loss"], **CLOSE)
    for ours, theirs in {
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "reward_margin": "rewards/margins",
        "reward_accuracy": "rewards/accuracies",
        "log_prob_chosen": "logps/chosen",
        "log_prob_rejected": "logps/rejected",
    }.items():
        np.testing.assert_allclose(metrics[ours], out["metrics"][theirs], err_msg=ours, **CLOSE)
    named = their_names(config["checkpoint"].removeprefix("hf_"), decoder, gradient["params"])
    assert named.keys() == out["grad_norm"].keys()
    for name, expected in out["grad_norm"].items():
        np.testing.assert_allclose(jnp.linalg.norm(named[name].ravel()), expected, err_msg=name, **CLOSE)
    for name, expected in out["grad_sum"].items():
        # A sum of terms that cancel, so its error is that of the terms.
        np.testing.assert_allclose(named[name].sum(), expected, err_msg=name, rtol=2e-4, atol=2e-4)
