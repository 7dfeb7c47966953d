"""GRPO from token ids against TRL: loss, log-probs, metrics and gradients of tiny pretrained models, in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.contract import Step
from telic.interop import load_huggingface
from telic.objectives import GRPOObjective
from tests.golden import DATA, cases
from tests.golden.test_hf import their_names

CLOSE = {"rtol": 2e-4, "atol": 2e-5}

OVER = {"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean"}


@pytest.mark.parametrize("case", cases("grpo_end_to_end"))
def test_loss_and_gradient_from_token_ids(case: dict[str, Any]) -> None:
    """Catches an error that spans parts: padding on the left, the temperature, old and reference log-probs."""
    given, out, config = case["in"], case["out"], case["config"]
    decoder, variables = load_huggingface(DATA / config["checkpoint"])
    tokens = np.concatenate([given["prompt_ids"], given["completion_ids"]], axis=1)
    prompt = given["prompt_ids"].shape[1]
    mask = np.concatenate([np.zeros_like(given["prompt_mask"]), given["completion_mask"]], axis=1)
    batch: dict[str, Any] = {
        "tokens": tokens,
        "completion_mask": mask,
        "segment_ids": np.concatenate([given["prompt_mask"], given["completion_mask"]], axis=1),
        # As TRL calls these models: places are counted over the padding.
        "positions": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
        "advantages": given["advantages"],
    }
    objective = GRPOObjective(
        decoder,
        importance=config["importance_sampling_level"],
        aggregate=OVER[config["loss_type"]],  # pyright: ignore
        beta=config["beta"],
        epsilon_low=config["epsilon_low"],
        epsilon_high=config["epsilon_high"],
        temperature=config["temperature"],
    ).bind(batch)
    scaled = {n: jax.tree.map(lambda x, n=n: config[n] * x, variables) for n in ("old_scale", "reference_scale")}

    def log_probs(variables: Any) -> Any:
        return jnp.pad(objective.score(variables, batch, Step(train=False)).log_prob, ((0, 0), (1, 0)))

    @jax.jit
    def differentiated(variables: Any, old: Any, reference: Any) -> Any:
        scored = {**batch, "old_log_probs": log_probs(old)}

        def loss(variables: Any) -> Any:
            mean, aux = objective.loss(variables, scored, Step(averaged=reference, train=False))
            return mean.value(), {name: metric.value() for name, metric in aux.metrics.items()}

        return jax.value_and_grad(loss, has_aux=True)(variables), log_probs(variables), scored["old_log_probs"]

    ((value, metrics), gradient), new, old = differentiated(variables, scaled["old_scale"], scaled["reference_scale"])
    kept = given["completion_mask"] != 0
    np.testing.assert_allclose(np.asarray(new)[:, prompt:][kept], out["token_logps"][kept], **CLOSE)
    np.testing.assert_allclose(np.asarray(old)[:, prompt:][kept], out["old_token_logps"][kept], **CLOSE)
    np.testing.assert_allclose(value, out["loss"], **CLOSE)
    for ours, theirs in {
        "kl": "kl",
        "entropy": "entropy",
        "clip_low": "clip_ratio/low_mean",
        "clip_high": "clip_ratio/high_mean",
    }.items():
        np.testing.assert_allclose(metrics[ours], out["metrics"][theirs], err_msg=ours, **CLOSE)
    named = their_names(config["checkpoint"].removeprefix("hf_"), decoder, gradient["params"])
    assert named.keys() == out["grad_norm"].keys()
    for name, expected in out["grad_norm"].items():
        np.testing.assert_allclose(jnp.linalg.norm(named[name].ravel()), expected, err_msg=name, **CLOSE)
