"""`LMObjective` and packed rows against transformers, TRL, torchtune, Megatron and torchtitan."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic.data import DataPartition, TokenDocuments, pack
from telic.mean import Mean
from telic.objectives.language import LMObjective
from telic.objectives.language.batch import token_rows
from telic.objectives.language.router import bias_change, router_z, sequence_balance
from tests.golden import cases
from tests.unit.objectives.language.tiny import Head
from tests.unit.train.tiny import split, step_of


class Linear:
    """``hidden = table[token]`` and a head: the model of the file on accumulation."""

    def __init__(self, table: Any, head: Any):
        self.params = {"table": table, "head": head}

    def init_variables(self, key: Any, tokens: Any) -> Any:
        del key, tokens
        return {"params": self.params}

    def hidden_states(self, variables: Any, tokens: Any, **around: Any) -> Any:
        del around
        return SimpleNamespace(hidden=variables["params"]["table"][tokens], state={}, router=None, qk_max=None)

    def head(self, variables: Any) -> Any:
        return Head(variables["params"]["head"])


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("case", cases("lm_accumulation"))
def test_a_window_of_an_objective_is_the_whole_batch(case: dict[str, Any], chunks: int) -> None:
    """S01: the mean of microbatch means, in place of the sum over all tokens; labels of -100 are weights of 0."""
    with jax.enable_x64(True):
        given, out = case["in"], case["out"]
        model = Linear(*(jnp.asarray(given[n], jnp.float64) for n in ("table", "head")))
        batch = {"tokens": given["input_ids"], "weights": (given["labels"] != -100).astype(np.float64)}
        pieces = split(batch, case["config"]["micro_batch_rows"])
        recorder = optax.chain(optax.trace(0.0), optax.scale(-1.0))
        step = step_of(LMObjective(model, head_chunks=chunks), recorder, accumulate=len(pieces)).bind(pieces[0])
        state, run, means = step.init(pieces[0]), jax.jit(step.step), []
        for piece in pieces:
            result = run(state, piece)
            state = result.state
            means.append(result.outputs["statistics"])
        gradient = state.opt_state[0].trace
        for name in ("table", "head"):
            np.testing.assert_allclose(gradient[name], out[f"grad_{name}_whole"], rtol=1e-9, atol=1e-12)
        total = Mean(sum(float(m.total) for m in means), sum(float(m.mass) for m in means))
        assert total.mass == out["token_count"]
        np.testing.assert_allclose(total.value(), out["loss_whole"], rtol=1e-9)


@pytest.mark.parametrize("case", cases("lm_packing"))
def test_packed_rows_are_those_of_torchtune_and_trl(case: dict[str, Any]) -> None:
    """Catches positions that run on, documents numbered otherwise than their tokens, a label at a document's start."""
    tokens, out = case["in"]["input_ids"], case["out"]
    for row, lengths in enumerate(case["config"]["lengths"]):
        ends = np.cumsum(lengths)
        documents = TokenDocuments.of(np.split(tokens[row], ends[:-1]))
        data = pack(documents, length=int(ends[-1]) - 1, batch=1, shuffle=False)
        batch = next(iter(data.train(DataPartition())))
        np.testing.assert_array_equal(batch["tokens"][0], tokens[row])
        np.testing.assert_array_equal(batch["positions"][0], out["position_ids"][row])
        np.testing.assert_array_equal(batch["segment_ids"][0] - 1, out["document_ids"][row])
        segments = batch["segment_ids"][0]
        visible = (segments[:, None] == segments[None]) & np.tri(len(segments), dtype=bool)
        np.testing.assert_array_equal(visible, out["mask"][row])
        # No document predicts the first token of the next one.
        weights = np.asarray(token_rows(batch).weights)[0]
        np.testing.assert_array_equal(weights == 0, out["position_ids"][row][1:] == 0)


def routed(logits: Any, top_k: int, mask: Any = None) -> Any:
    """Give what a softmax router of one layer did on one row of tokens [tokens, experts]."""
    counted = jnp.ones(len(logits), bool) if mask is None else jnp.asarray(mask)
    shares = jax.nn.softmax(logits, axis=-1)
    chosen = jax.lax.top_k(shares, top_k)[1]
    times = jax.nn.one_hot(chosen, logits.shape[1], dtype=logits.dtype).sum(1)
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    kept = counted[:, None]
    return SimpleNamespace(
        counts=jnp.where(kept, times, 0).sum(0)[None, None],
        probabilities=jnp.where(kept, shares, 0).sum(0)[None, None],
        z=jnp.where(counted, squares, 0).sum()[None, None],
        tokens=counted.sum()[None],
    )


@pytest.mark.parametrize("case", cases("moe"))
def test_router_losses_are_those_of_megatron_and_mixtral(case: dict[str, Any]) -> None:
    """Catches f that sums to top_k, a z-loss over experts in place of their log-sum, padding that is counted."""
    with jax.enable_x64(True):
        given, out, k = case["in"], case["out"], case["config"]["top_k"]
        logits = jnp.asarray(given["logits"], jnp.float64)
        aux = out["megatron_aux_softmax"]

        def balance(logits: Any) -> Any:
            return aux["coefficient"] * sequence_balance(routed(logits, k)).value()

        value, slope = jax.value_and_grad(balance)(logits)
        np.testing.assert_allclose(value, aux["loss"], rtol=1e-6)
        np.testing.assert_allclose(slope, aux["grad_logits"], rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(
            k * sequence_balance(routed(logits, k)).value(), out["mixtral_aux"]["one_layer"], rtol=1e-6
        )
        z = out["router_z_loss"]
        value, slope = jax.value_and_grad(lambda x: z["coefficient"] * router_z(routed(x, k)).value())(logits)
        np.testing.assert_allclose(value, z["loss"], rtol=1e-6)
        np.testing.assert_allclose(slope, z["grad_logits"], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("case", cases("moe"))
def test_biases_move_as_in_megatron_and_torchtitan(case: dict[str, Any]) -> None:
    """Catches a move by the size of the error, one in the wrong direction, or a mean over the wrong axis."""
    with jax.enable_x64(True):
        given, out = case["in"]["bias"], case["out"]["bias_update"]
        rate = out["rate"]
        bias = jnp.asarray(given, jnp.float64)
        first = jnp.asarray(out["counts_first"])[None]
        centered = bias + bias_change(first, rate=rate, centered=True)[0]
        np.testing.assert_allclose(centered, out["torchtitan_first"], rtol=1e-9, atol=1e-12)
        bias = bias + bias_change(first, rate=rate)[0]
        np.testing.assert_allclose(bias, out["megatron_first"], rtol=1e-9, atol=1e-12)
        for counts, expected in zip(out["counts_next"], out["megatron_sequence"], strict=True):
            bias = bias + bias_change(jnp.asarray(counts)[None], rate=rate)[0]
            np.testing.assert_allclose(bias, expected, rtol=1e-9, atol=1e-12)
