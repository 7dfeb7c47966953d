"""Losses over a vocabulary in blocks: what they give, what they refuse, and what they hold in memory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ShapeError
from telic.objectives.language.vocabulary import block_columns, chunk_sizes, next_token_loss, token_statistics
from tests.unit.objectives.language.tiny import Head

HIDDEN = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(6, 97)).astype(np.float32)
TARGETS = np.random.default_rng(2).integers(0, 97, (2, 5)).astype(np.int32)


@partial(jax.jit, static_argnames=("chunks", "cap"))
def everything(hidden: Any, kernel: Any, bias: Any, *, chunks: int, cap: float | None) -> Any:
    """Give a sum that every output but the predicted id has its own weight in, and its gradients."""

    def total(hidden: Any, kernel: Any, bias: Any) -> Any:
        found = token_statistics(hidden, Head(kernel, bias, cap, 0.5), TARGETS, chunks=chunks)
        weights = jnp.arange(1.0, 11.0).reshape(2, 5)
        loss = next_token_loss(found, label_smoothing=0.2, z_loss=0.01)
        return (weights * (loss + 0.3 * found.entropy)).sum(), (found.predicted, found.top_logit)

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(hidden, kernel, bias)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_blocks_give_what_the_whole_gives(cap: float | None) -> None:
    """Row 61: an error that grows with the number of blocks, a bias or cap missing from one gradient."""
    bias = np.linspace(-1, 1, 97, dtype=np.float32)
    (value, (ids, top)), slopes = everything(HIDDEN, KERNEL, bias, chunks=1, cap=cap)
    for chunks in (2, 8):
        (blocked, (same_ids, same_top)), same = everything(HIDDEN, KERNEL, bias, chunks=chunks, cap=cap)
        np.testing.assert_allclose(blocked, value, rtol=1e-5)
        np.testing.assert_array_equal(same_ids, ids)
        np.testing.assert_allclose(same_top, top, rtol=1e-5)
        for a, b in zip(same, slopes, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(b).max()))


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_of_equal_logits_the_lowest_id_is_predicted(chunks: int) -> None:
    """Catches a later block that wins a tie."""
    kernel = np.zeros((6, 8), np.float32)
    found = token_statistics(HIDDEN, Head(kernel), np.zeros((2, 5), np.int32), chunks=chunks)
    assert not np.asarray(found.predicted).any()
    np.testing.assert_allclose(found.log_prob, -np.log(8), rtol=1e-6)
    np.testing.assert_allclose(found.entropy, np.log(8), rtol=1e-6)


def test_sizes_of_blocks() -> None:
    """Row 62: a remainder that is lost, and blocks without columns."""
    assert chunk_sizes(97, 4) == (25, 25, 25, 22)
    assert chunk_sizes(8, 8) == (1,) * 8
    with pytest.raises(ValueError, match=r"9 in 4 chunks of 3 columns leaves the last without any; give 3 chunks"):
        chunk_sizes(9, 4)
    with pytest.raises(ValueError, match="give 4 chunks"):
        chunk_sizes(4, 8)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="at least 1"):
            chunk_sizes(8, wrong)  # type: ignore[arg-type]


def test_the_automatic_choice_keeps_small_heads_whole_and_cuts_large_ones() -> None:
    """Catches a byte-level model that pays for blocks, and a large head that keeps [tokens, vocab]."""
    assert block_columns(16 * 256, 257, None) == 257
    columns = block_columns(4096, 128 * 1024, None)
    assert columns * 4096 <= 2**24
    assert columns % 128 == 0
    assert block_columns(10**6, 10**5, None) >= 1024


def temporary_bytes(tokens: int, vocab: int, width: int, chunks: int | None) -> int:
    """Give the temporary memory of the compiled loss with its gradients."""

    def loss(hidden: Any, kernel: Any, targets: Any) -> Any:
        return -token_statistics(hidden, Head(kernel), targets, chunks=chunks).log_prob.mean()

    shapes = ((tokens, width), jnp.float32), ((width, vocab), jnp.float32), ((tokens,), jnp.int32)
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def test_blocks_need_a_sixth_of_the_memory() -> None:
    """Catches a [tokens, vocab] array that is kept for the backward pass, or a second gradient of the kernel.

    The size that the issue names; nothing of it is run.
    """
    size = (4096, 128 * 1024, 512)
    assert temporary_bytes(*size, chunks=None) * 6 <= temporary_bytes(*size, chunks=1)


def test_a_frozen_head_costs_no_gradient() -> None:
    """Catches a head that adapters leave alone, and whose gradient is computed all the same."""

    def flops(argnums: Any) -> float:
        def loss(hidden: Any, kernel: Any) -> Any:
            return -token_statistics(hidden, Head(kernel), TARGETS[0], chunks=4).log_prob.mean()

        text = jax.jit(jax.grad(loss, argnums)).lower(HIDDEN[0], KERNEL).compile().as_text()
        return text.count(" dot(")

    assert flops(0) < flops((0, 1))


def test_a_target_outside_the_vocabulary_is_not_another_token() -> None:
    """Catches an id of -100 or V that is clipped to a real one; where it is masked it reaches no gradient."""
    for chunks in (1, 3):

        def loss(hidden: Any, weights: Any, chunks: int = chunks) -> Any:
            targets = jnp.asarray([[97, 1, 2, 3, -100]] * 2)
            found = token_statistics(hidden, Head(KERNEL), targets, chunks=chunks)
            return jnp.where(weights > 0, -found.log_prob, 0).sum()

        differentiated = jax.jit(jax.value_and_grad(loss))
        assert np.isnan(differentiated(HIDDEN, np.ones((2, 5), np.float32))[0])
        masked = np.asarray([[0, 1, 1, 1, 0]] * 2, np.float32)
        assert np.isfinite(differentiated(HIDDEN, masked)[1]).all()


def test_half_precision_accumulates_in_float32() -> None:
    """Catches logits, or their sum, in bfloat16."""
    found = token_statistics(HIDDEN.astype(jnp.bfloat16), Head(KERNEL.astype(jnp.bfloat16)), TARGETS, chunks=4)
    assert found.log_prob.dtype == jnp.float32
    exact = token_statistics(
        HIDDEN.astype(jnp.bfloat16).astype(np.float32), Head(KERNEL.astype(jnp.bfloat16).astype(np.float32)), TARGETS
    )
    np.testing.assert_allclose(found.log_prob, exact.log_prob, rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    """Catches an untransposed embedding and targets that were not shifted with the hidden states."""
    with pytest.raises(ShapeError, match=r"\(2, 5, 6\) and \(97, 6\); a tied head gives the transposed embedding"):
        token_statistics(HIDDEN, Head(KERNEL.T), TARGETS)
    with pytest.raises(ShapeError, match=r"\(2, 5\), got \(2, 4\)"):
        token_statistics(HIDDEN, Head(KERNEL), TARGETS[:, 1:])
    with pytest.raises(TypeError, match="float32"):
        token_statistics(HIDDEN, Head(KERNEL), TARGETS.astype(np.float32))
    with pytest.raises(ShapeError, match="bias"):
        token_statistics(HIDDEN, Head(KERNEL, np.zeros(3)), TARGETS)
