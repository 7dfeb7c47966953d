"""What a loss over a vocabulary needs of the logits, one row of numbers per token, without keeping the logits.

Shapes: N tokens, D width of the hidden states, V vocabulary, C columns of one block.

A cross entropy, its label smoothing and z-loss, a log-probability and an entropy are functions of four sums over the
vocabulary. In blocks of columns those sums are carried along (the log-normalizer as a running maximum and sum), and the
backward pass computes each block of logits again. So no array of N · V elements exists, forward or backward.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic.axes import AXES, constrain
from telic.errors import ShapeError
from telic.mean import wide
from telic.types import Array

_WHOLE_ELEMENTS = 2**26
"""Logits (256 MiB of float32) up to which the automatic choice keeps them whole: that saves a matrix product."""

_BLOCK_ELEMENTS = 2**24
"""Logits of one block (64 MiB of float32) that the automatic choice aims at."""

_LEAST_COLUMNS = 1024
"""Columns below which a block is too narrow for a matrix unit."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStatistics:
    """Sums over the vocabulary, for each token, in at least float32.

    Attributes:
      log_normalizer: log Σ exp(logits).
      target_logit: Logit of the target; NaN for a target outside the vocabulary.
      mean_logit: Mean of the logits over the vocabulary.
      expected_logit: Mean of the logits under the softmax.
      top_logit: The largest logit; not differentiable.
      predicted: Its id, the lowest of equals; int32.
    """

    log_normalizer: Array
    target_logit: Array
    mean_logit: Array
    expected_logit: Array
    top_logit: Array
    predicted: Array

    @property
    def log_prob(self) -> Array:
        """Log-probability of the target, in nats."""
        return self.target_logit - self.log_normalizer

    @property
    def entropy(self) -> Array:
        """Entropy of the predicted distribution, in nats."""
        return self.log_normalizer - self.expected_logit


def token_statistics(hidden: Array, head: Any, targets: Array, *, chunks: int | None = None) -> TokenStatistics:
    """Give what losses read of the logits ``head`` makes of hidden states.

    Products are accumulated in at least float32, whatever the dtype of hidden states and kernel.

    Args:
      hidden: [..., d_model].
      head: A `telic.objectives.language.protocol.Head`.
      targets: Token ids, int [...]; each is predicted by the hidden state at its place: nothing is shifted here.
      chunks: Blocks the vocabulary is cut into, all of one size but the last; 1 keeps the logits whole. None chooses:
        whole up to 64 Mi logits (256 MiB), else blocks of about 16 Mi.
    Raises:
      ShapeError: Shapes do not fit each other.
      ValueError: `chunks` is less than 1, or leaves a block without columns.
    Example:
      >>> import types, numpy as np
      >>> head = types.SimpleNamespace(kernel=np.zeros((2, 4), "f"), bias=None, soft_cap=None, scale=1.0)
      >>> print(token_statistics(np.zeros((3, 2), "f"), head, np.zeros(3, int)).log_prob.round(4))
      [-1.3863 -1.3863 -1.3863]
    """
    hidden, kernel, targets = jnp.asarray(hidden), jnp.asarray(head.kernel), jnp.asarray(targets)
    bias = None if head.bias is None else jnp.asarray(head.bias)
    _check(hidden, kernel, bias, targets)
    vocab = kernel.shape[1]
    columns = block_columns(targets.size, vocab, chunks)
    curve = Curve(head.soft_cap, float(head.scale))
    # On a mesh each device works on tokens of its own: a block of columns is then at hand and not somewhere else.
    flat = constrain(hidden.reshape(-1, hidden.shape[-1]), AXES)
    ids = constrain(targets.reshape(-1), AXES)
    made: tuple[Array, ...]
    if columns >= vocab:
        made = _whole(curve, flat, kernel, bias, ids)
    else:
        made = _differentiable(curve, columns, flat, kernel, bias, ids)
    known = (ids >= 0) & (ids < vocab)
    target = jnp.where(known, made[1], jnp.nan)
    parts = (made[0], target, made[2], made[3], *jax.lax.stop_gradient(made[4:]))
    return TokenStatistics(*(part.reshape(targets.shape) for part in parts))


def chunk_sizes(vocab: int, chunks: int) -> tuple[int, ...]:
    """Give the columns of each of some blocks of a vocabulary: ⌈vocab / chunks⌉, and what is left in the last.

    Raises:
      ValueError: `chunks` is less than 1, or leaves a block without columns.
    Example:
      >>> chunk_sizes(97, 4)
      (25, 25, 25, 22)
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"chunks must be a whole number of at least 1, got {chunks!r}")
    columns = -(-vocab // chunks)
    last = vocab - (chunks - 1) * columns
    if last < 1:
        raise ValueError(
            f"a vocabulary of {vocab} in {chunks} chunks of {columns} columns leaves the last without any; give "
            f"{-(-vocab // columns)} chunks"
        )
    return (*[columns] * (chunks - 1), last)


def block_columns(tokens: int, vocab: int, chunks: int | None) -> int:
    """Give the columns of a block for a number of tokens; the whole vocabulary where it is not cut.

    Args:
      tokens: Tokens of the batch.
      vocab: Columns of the vocabulary.
      chunks: Blocks, or None to choose as `token_statistics` says.
    """
    if chunks is not None:
        return chunk_sizes(vocab, chunks)[0]
    if tokens * vocab <= _WHOLE_ELEMENTS:
        return vocab
    wanted = max(_BLOCK_ELEMENTS // max(tokens, 1), _LEAST_COLUMNS)
    # Equal blocks, rounded up to whole matrix tiles.
    columns = math.ceil(vocab / math.ceil(vocab / wanted))
    return min(math.ceil(columns / 128) * 128, vocab)


def _check(hidden: Array, kernel: Array, bias: Array | None, targets: Array) -> None:
    if kernel.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != kernel.shape[0]:
        raise ShapeError(
            f"hidden states [..., d_model] and a head's kernel [d_model, vocab] must fit, got {hidden.shape} and "
            f"{kernel.shape}; a tied head gives the transposed embedding"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ShapeError(
            f"targets must have the shape of the hidden states without their last dimension, {hidden.shape[:-1]}, got "
            f"{targets.shape}"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise TypeError(f"targets must be integer token ids, got {targets.dtype}")
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ShapeError(f"a head's bias must have shape {kernel.shape[1:]}, got {bias.shape}")


@dataclass(frozen=True)
class Curve:
    """What happens to a product before it is a logit: ``scale · cap · tanh(x / cap)``. Static."""

    soft_cap: float | None
    scale: float

    def __call__(self, raw: Array) -> Array:
        """Give logits."""
        if self.soft_cap is not None:
            raw = self.soft_cap * jnp.tanh(raw / self.soft_cap)
        return raw if self.scale == 1 else raw * self.scale

    def pull_back(self, gradient: Array, logits: Array) -> Array:
        """Give the gradient of the products from that of the logits."""
        if self.soft_cap is not None:
            gradient = gradient * (1 - jnp.square(logits / (self.soft_cap * self.scale)))
        return gradient if self.scale == 1 else gradient * self.scale


def _product(hidden_ND: Array, kernel_DC: Array, bias_C: Array | None) -> Array:
    dtype = jnp.promote_types(jnp.promote_types(hidden_ND.dtype, kernel_DC.dtype), jnp.float32)
    raw_NC = jnp.matmul(hidden_ND, kernel_DC, preferred_element_type=dtype)
    return raw_NC if bias_C is None else raw_NC + bias_C.astype(dtype)


def _whole(curve: Curve, hidden_ND: Array, kernel_DV: Array, bias_V: Array | None, ids_N: Array) -> tuple[Array, ...]:
    logits_NV = curve(_product(hidden_ND, kernel_DV, bias_V))
    normalizer_N = jax.nn.logsumexp(logits_NV, axis=-1)
    safe_N = jnp.clip(ids_N, 0, kernel_DV.shape[1] - 1)
    target_N = jnp.take_along_axis(logits_NV, safe_N[:, None], axis=-1)[:, 0]
    share_NV = jnp.exp(logits_NV - normalizer_N[:, None])
    expected_N = jnp.where(share_NV > 0, share_NV * logits_NV, 0).sum(-1)
    top_N = logits_NV.max(-1)
    return normalizer_N, target_N, logits_NV.mean(-1), expected_N, top_N, _first(logits_NV, top_N)


def _first(logits_NC: Array, top_N: Array) -> Array:
    """Give the first column that holds each row's maximum: cheaper than an argmax where the maximum is known."""
    columns = logits_NC.shape[1]
    place_C = jnp.arange(columns, dtype=jnp.int32)
    return jnp.where(logits_NC == top_N[:, None], place_C, columns - 1).min(-1)


def _starts(vocab: int, columns: int) -> Array:
    return jnp.arange(-(-vocab // columns), dtype=jnp.int32) * columns


def _cut(array: Array, start: Array, columns: int) -> Array:
    """Give the columns of a block; the last block begins early enough to be whole."""
    return jax.lax.dynamic_slice_in_dim(array, start, columns, axis=-1)


def _place(start: Array, vocab: int, columns: int) -> tuple[Array, Array]:
    """Give where a block is read, and which of its columns belong to it rather than to the block before."""
    begin = jnp.minimum(start, vocab - columns)
    return begin, begin + jnp.arange(columns, dtype=jnp.int32) >= start


def _blocks(
    curve: Curve, columns: int, hidden_ND: Array, kernel_DV: Array, bias_V: Array | None, ids_N: Array
) -> tuple[Array, ...]:
    """Give log-normalizer, target, mean, expected and top logit and the predicted id, [N] each, block by block."""
    vocab = kernel_DV.shape[1]
    kernel_DV = constrain(kernel_DV)
    dtype = jnp.promote_types(jnp.promote_types(hidden_ND.dtype, kernel_DV.dtype), jnp.float32)
    least = jnp.asarray(jnp.finfo(dtype).min, dtype)

    def step(carry: tuple[Array, ...], start: Array) -> tuple[tuple[Array, ...], None]:
        top_N, sum_N, weighted_N, plain_N, target_N, best_N = carry
        begin, own_C = _place(start, vocab, columns)
        bias_C = None if bias_V is None else _cut(bias_V, begin, columns)
        logits_NC = curve(_product(hidden_ND, _cut(kernel_DV, begin, columns), bias_C))
        shown_NC = jnp.where(own_C, logits_NC, least)
        block_N = shown_NC.max(-1)
        new_N = jnp.maximum(top_N, block_N)
        shrink_N = jnp.exp(top_N - new_N)
        share_NC = jnp.where(own_C, jnp.exp(logits_NC - new_N[:, None]), 0)
        local_N = ids_N - begin
        inside_N = (ids_N >= start) & (local_N < columns)
        at_N = jnp.clip(local_N, 0, columns - 1)
        found_N = jnp.take_along_axis(logits_NC, at_N[:, None], axis=-1)[:, 0]
        return (
            new_N,
            sum_N * shrink_N + share_NC.sum(-1),
            weighted_N * shrink_N + jnp.where(share_NC > 0, share_NC * logits_NC, 0).sum(-1),
            plain_N + jnp.where(own_C, logits_NC, 0).sum(-1),
            jnp.where(inside_N, found_N, target_N),
            # A later block wins only by more, so that of equals the lowest id stays.
            jnp.where(block_N > top_N, begin + _first(shown_NC, block_N), best_N),
        ), None

    zero_N = jnp.zeros(ids_N.shape, dtype)
    first = (zero_N + least, zero_N, zero_N, zero_N, zero_N, jnp.zeros(ids_N.shape, jnp.int32))
    (top_N, sum_N, weighted_N, plain_N, target_N, best_N), _ = jax.lax.scan(step, first, _starts(vocab, columns))
    return top_N + jnp.log(sum_N), target_N, plain_N / vocab, weighted_N / sum_N, top_N, best_N


def _blocks_forward(
    curve: Curve, columns: int, hidden_ND: Array, kernel_DV: Array, bias_V: Array | None, ids_N: Array
) -> tuple[tuple[Array, ...], Any]:
    made = _blocks(curve, columns, hidden_ND, kernel_DV, bias_V, ids_N)
    return made, (hidden_ND, kernel_DV, bias_V, ids_N, made[0], made[3])


def _blocks_backward(curve: Curve, columns: int, kept: Any, cotangents: Any) -> tuple[Any, ...]:
    hidden_ND, kernel_DV, bias_V, ids_N, normalizer_N, expected_N = kept
    to_normalizer_N, to_target_N, to_mean_N, to_expected_N, *_ = cotangents
    vocab = kernel_DV.shape[1]
    # Gathered before the loop, and not in it.
    kernel_DV = constrain(kernel_DV)
    dtype = normalizer_N.dtype

    def step(carry: tuple[Any, ...], start: Array) -> tuple[tuple[Any, ...], None]:
        grad_hidden_ND, grad_kernel_DV, grad_bias_V = carry
        begin, own_C = _place(start, vocab, columns)
        kernel_DC = _cut(kernel_DV, begin, columns)
        bias_C = None if bias_V is None else _cut(bias_V, begin, columns)
        logits_NC = curve(_product(hidden_ND, kernel_DC, bias_C))
        share_NC = jnp.exp(logits_NC - normalizer_N[:, None])
        pull_N = to_normalizer_N[:, None] + to_expected_N[:, None] * jnp.where(
            share_NC > 0, 1 + logits_NC - expected_N[:, None], 0
        )
        is_target_NC = (begin + jnp.arange(columns, dtype=jnp.int32)) == ids_N[:, None]
        grad_NC = share_NC * pull_N + to_mean_N[:, None] / vocab + jnp.where(is_target_NC, to_target_N[:, None], 0)
        grad_NC = curve.pull_back(jnp.where(own_C, grad_NC, 0), logits_NC)
        # The products run in the dtype of what they multiply, as they would without blocks.
        narrow_NC = grad_NC.astype(jnp.promote_types(hidden_ND.dtype, kernel_DV.dtype))
        grad_hidden_ND += jnp.matmul(narrow_NC, kernel_DC.T, preferred_element_type=dtype)
        grad_DC = constrain(jnp.matmul(hidden_ND.T, narrow_NC, preferred_element_type=dtype), "fsdp")
        grad_kernel_DV = _add_at(grad_kernel_DV, grad_DC, begin)
        if grad_bias_V is not None:
            grad_bias_V = _add_at(grad_bias_V, grad_NC.sum(0), begin)
        return (grad_hidden_ND, grad_kernel_DV, grad_bias_V), None

    first = (
        jnp.zeros(hidden_ND.shape, dtype),
        constrain(jnp.zeros(kernel_DV.shape, dtype), "fsdp"),
        None if bias_V is None else jnp.zeros(bias_V.shape, dtype),
    )
    (grad_hidden, grad_kernel, grad_bias), _ = jax.lax.scan(step, first, _starts(vocab, columns))
    return (
        grad_hidden.astype(hidden_ND.dtype),
        grad_kernel.astype(kernel_DV.dtype),
        None if bias_V is None else grad_bias.astype(bias_V.dtype),
        None,
    )


def _add_at(array: Array, block: Array, begin: Array) -> Array:
    """Add a block of columns; the overlap of the last block with the one before it adds zeros there."""
    columns = block.shape[-1]
    return jax.lax.dynamic_update_slice_in_dim(array, _cut(array, begin, columns) + block, begin, axis=-1)


_differentiable: Any = jax.custom_vjp(_blocks, nondiff_argnums=(0, 1))
_differentiable.defvjp(_blocks_forward, _blocks_backward)


def next_token_loss(statistics: TokenStatistics, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Array:
    """Give the loss of each token in nats.

    ``(1 - e) · nll + e · (log_normalizer - mean_logit) + z · log_normalizer²``: e moves the target to (1 - e) on the
    token and e / vocab on every token; the z-loss stays outside of it.

    Args:
      statistics: What `token_statistics` gave.
      label_smoothing: e, in [0, 1).
      z_loss: z, ≥ 0: keeps the log-normalizer near 0.
    Source: torch `cross_entropy` and Optax for smoothing, Chowdhery et al. 2022 (PaLM) for z; golden lm_cross_entropy.
    """
    loss = -statistics.log_prob
    if label_smoothing:
        uniform = statistics.log_normalizer - statistics.mean_logit
        loss = (1 - label_smoothing) * loss + label_smoothing * uniform
    if z_loss:
        loss = loss + z_loss * jnp.square(statistics.log_normalizer)
    return wide(loss)
