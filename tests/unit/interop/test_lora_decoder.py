"""Adapters on a decoder: in hidden states and continuations, alone in training, merged for scanned layers too."""

from typing import Any

import jax
import numpy as np
import pytest

import telic
from telic import tree
from telic.interop.lora import Lora, add_lora
from telic.models import Experts, generate
from telic.objectives import LMObjective
from tests.decoders import random_decoder

pytest.importorskip("qwix")

# qwix 0.1.8 asks Flax for names that Flax has changed.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*")

SMALL: dict[str, Any] = {"vocab_size": 13, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 12, "max_length": 16}
TOKENS = np.random.default_rng(0).integers(1, 13, (2, 7)).astype(np.int32)
MODULES = ("**/attention/*", "**/mlp/*")


def adapted(scan: bool, **config: Any) -> tuple[Lora, Any, Any]:
    """Give a decoder with adapters, its variables, and those of the decoder without."""
    decoder, weights = random_decoder(**SMALL, scan=scan, **config)
    lora = add_lora(decoder, rank=2, alpha=4.0, modules=MODULES)
    return lora, jax.jit(lambda key: lora.init(key, TOKENS, weights))(jax.random.key(2)), weights


def hidden(model: Any, variables: Any) -> Any:
    return jax.jit(lambda v: model.hidden_states(v, TOKENS).hidden)(variables)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_only_adapters_train_and_merge_into_the_decoder(scan: bool) -> None:
    """Catches adapters that hidden_states or a continuation leave out, and layers merged with another's adapters."""
    lora, start, weights = adapted(scan)
    np.testing.assert_array_equal(hidden(lora.model, start), hidden(lora.base, weights))
    objective = LMObjective(lora.model, variables=start)
    trainer = telic.Trainer(objective, telic.optimizers.adamw(0.05, weight_decay=0.1), key=0, trainable=lora.trainable)
    state = trainer.fit([{"tokens": TOKENS}] * 3, log_every=0)
    before, after = (tree.named_leaves(v["params"]) for v in (start, state.variables))
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith(("_lora_a", "_lora_b"))}
    assert len(moved) == 2 * 7 * (1 if scan else 2)
    assert not any(name.startswith(("head", "embedding")) for name in moved)

    trained = hidden(lora.model, state.variables)
    assert not np.allclose(trained, hidden(lora.base, weights), atol=1e-3)
    merged = lora.merge(state.variables)
    assert jax.tree.structure(merged) == jax.tree.structure(weights)
    np.testing.assert_allclose(hidden(lora.base, merged), trained, rtol=1e-4, atol=1e-5)
    with_adapters = generate(lora.model, state.variables, TOKENS[:, :3], max_new_tokens=4, temperature=0)
    without = generate(lora.base, merged, TOKENS[:, :3], max_new_tokens=4, temperature=0)
    np.testing.assert_array_equal(with_adapters.tokens, without.tokens)


@pytest.mark.parametrize("dispatch", ["dense", "sorted"])
def test_head_and_experts_get_no_adapter(dispatch: Any) -> None:
    """Catches an adapter in the model's own logits that a chunked loss lacks, and one that cannot be merged."""
    decoder, weights = random_decoder(**SMALL, experts=Experts(num_experts=2, top_k=1, dispatch=dispatch))
    lora = add_lora(decoder, rank=2)
    start = lora.init(jax.random.key(2), TOKENS, weights)
    names = tree.leaf_names(lora.adapters(start)["params"])
    assert {name.split("/")[0] for name in names} == {"layers_0", "layers_1"}
    assert {name.split("/")[2] for name in names} == {"query", "key", "value", "output", "router"}
    assert jax.tree.structure(lora.merge(start)) == jax.tree.structure(weights)
