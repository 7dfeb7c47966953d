"""`LMObjective` with the decoder that comes along: documents in a row, experts, adapters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic import optimizers
from telic.models import Decoder, DecoderConfig, Experts
from telic.objectives import LMObjective
from tests.unit.objectives.language.tiny import rows
from tests.unit.train.tiny import step_of

CONFIG = DecoderConfig(vocab_size=11, d_model=8, num_layers=2, num_heads=2, d_ff=16, max_length=16)


def test_only_the_document_mask_keeps_documents_apart() -> None:
    """XS148: positions that begin anew do not stop a document from seeing the one before it."""
    decoder = Decoder(CONFIG)
    tokens = rows(1, 8)
    other = tokens.copy()
    other[0, :3] = (tokens[0, :3] + 1) % 11
    segments = np.asarray([[1] * 3 + [2] * 5])
    positions = np.asarray([[0, 1, 2, 0, 1, 2, 3, 4]])
    variables = decoder.init_variables(jax.random.key(0), tokens)
    hidden = jax.jit(lambda tokens, around: decoder.hidden_states(variables, tokens, **around).hidden[:, 3:])

    def change(**around: Any) -> float:
        return float(jnp.abs(hidden(tokens, around) - hidden(other, around)).max())

    assert change() > 1e-3
    assert change(positions=positions) > 1e-3
    assert change(positions=positions, segment_ids=segments) == 0
    assert change(segment_ids=segments) == 0


@pytest.mark.slow
def test_experts_are_balanced_and_logits_clipped() -> None:
    """Catches biases that effects do not reach, and largest logits under names that qk_clip does not find."""
    decoder = Decoder(CONFIG.replace(experts=Experts(num_experts=4, top_k=2, bias=True)))
    objective = LMObjective(decoder, balance_loss=0.01, router_z_loss=1e-3, balance_rate=0.1, qk_stats=True)
    batch = {"tokens": rows()}
    step = step_of(objective, optax.chain(optax.sgd(0.1), optimizers.qk_clip(tau=1e-4))).bind(batch)
    state = step.init(batch)
    result = jax.jit(step.step)(state, batch)
    assert int(result.state.updates) == 1
    for i in range(2):
        bias = np.asarray(result.state.variables["router_bias"][f"layers_{i}"]["experts"]["bias"])
        np.testing.assert_allclose(np.abs(bias[bias != 0]), 0.1, rtol=1e-6)
        assert (bias != 0).any()
        before, after = (
            s.variables["params"][f"layers_{i}"]["attention"]["query"]["kernel"] for s in (state, result.state)
        )
        # A tiny tau shrinks every head, by far more than the gradient moves it.
        assert float(jnp.abs(after).max()) < 0.9 * float(jnp.abs(before).max())
    assert set(result.outputs["metrics"]) >= {"next_token", "balance", "router_z", "largest_expert_load"}
    # Even use gives 1; no use of 4 experts by 2 gives more than 2.
    assert 0.9 < float(result.outputs["metrics"]["balance"].value()) < 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*")
def test_adapters_are_trained_and_nothing_else() -> None:
    """Catches adapters that hidden_states does not pass, and a frozen head that moves."""
    lora: Any = pytest.importorskip("telic.interop.lora")
    pytest.importorskip("qwix")
    decoder = Decoder(CONFIG)
    weights = decoder.init_variables(jax.random.key(0), rows()[:, :-1])
    made = lora.add_lora(decoder, rank=2, modules="**/attention/*")
    variables = made.init(jax.random.key(1), rows()[:, :-1], weights)
    objective = LMObjective(made.model, variables=variables)
    step = step_of(objective, optax.adam(0.1), trainable=made.trainable).bind({"tokens": rows()})
    state, run = step.init({"tokens": rows()}), jax.jit(step.step)
    first = run(state, {"tokens": rows()})
    second = run(first.state, {"tokens": rows()})
    assert float(second.outputs["loss"]) < float(first.outputs["loss"])
    after = made.merge(second.state.variables)["params"]
    moved = [
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(weights["params"]), strict=True
        )
        if not np.array_equal(a, b)
    ]
    assert moved
    assert all("attention" in name for name in moved)
