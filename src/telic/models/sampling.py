"""Continuing texts: one compiled loop that draws a token at a time from a decoder with a cache.

B prompts, P time of the padded prompts, N new tokens, V vocabulary.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from telic.errors import DataError, ShapeError
from telic.types import Array, Key, Variables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Continuations:
    """What `generate` gives for each prompt.

    Attributes:
      tokens: Drawn tokens, int32 [batch, max_new_tokens]; those after a stop token are `pad_token`.
      lengths: How many were drawn, the stop token among them, int32 [batch].
      is_stopped: Whether a stop token ended the text, bool [batch].
      log_probs: Log-probability of each token under the model itself, temperature 1 and nothing left out, in nats,
        [batch, max_new_tokens]; 0 after the end.
      sampling_log_probs: The same under the distribution it was drawn from; 0 for a greedy choice.
    """

    tokens: Any
    lengths: Any
    is_stopped: Any
    log_probs: Any
    sampling_log_probs: Any

    def texts(self) -> list[list[int]]:
        """Give the drawn tokens of each row without padding, as lists on the host."""
        tokens, lengths = jax.device_get((self.tokens, self.lengths))
        return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Filter:
    """Which tokens may be drawn, and how. Numbers are traced: another temperature compiles nothing."""

    temperature: Any
    top_p: Any
    min_p: Any
    top_k: int | None = field(default=None, metadata={"static": True})
    is_greedy: bool = field(default=False, metadata={"static": True})

    def filtered(self, logits_BV: Array) -> Array:
        """Give logits over the temperature, -inf for tokens that may not be drawn."""
        if self.is_greedy:
            best = jnp.arange(logits_BV.shape[-1]) == logits_BV.argmax(-1, keepdims=True)
            return jnp.where(best, 0.0, -jnp.inf).astype(logits_BV.dtype)
        # Over the largest, so that no temperature overflows.
        logits_BV = (logits_BV - logits_BV.max(-1, keepdims=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            least = jax.lax.top_k(logits_BV, self.top_k)[0][..., -1:]
            logits_BV = jnp.where(logits_BV >= least, logits_BV, -jnp.inf)
        if self.top_p is not None:
            logits_BV = _nucleus(logits_BV, self.top_p)
        if self.min_p is not None:
            least = logits_BV.max(-1, keepdims=True) + jnp.log(self.min_p)
            logits_BV = jnp.where(logits_BV >= least, logits_BV, -jnp.inf)
        return logits_BV


def _nucleus(logits_BV: Array, top_p: Array) -> Array:
    """Keep the likeliest tokens up to and with the one that brings their sum to `top_p`."""
    descending = -jnp.sort(-logits_BV, axis=-1)
    shares = jax.nn.softmax(descending, axis=-1)
    # A token stays while those before it sum to less; the first always stays.
    stays = jnp.cumsum(shares, axis=-1) - shares < top_p
    least = jnp.where(stays, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits_BV >= least, logits_BV, -jnp.inf)


def generate(
    model: Any,
    variables: Variables,
    prompts: Any,
    *,
    max_new_tokens: int,
    key: Key | int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    pad_token: int = 0,
    mask: Any = None,
    pad_to: int | None = None,
) -> Continuations:
    """Continue prompts token by token, with a cache, in one compiled loop that ends when all texts have.

    A program is compiled once per shape (number of prompts, padded length, `max_new_tokens`); another temperature,
    `top_p`, `min_p` or key compiles nothing. Each row draws from its own stream, ``fold_in(key, row)`` and then one
    key per token, so that its draws depend neither on padding nor on the other rows.

    Args:
      model: A `Decoder`, or what has its ``prefill``, ``decode``, ``head`` and ``config``; one with adapters too.
      variables: Its variables.
      prompts: Sequences of token ids of any lengths, or an int array [batch, time] with `mask`. Inside another program
        only their shapes can be checked.
      max_new_tokens: Most tokens to draw for each.
      key: PRNG key or seed; a key array [batch] gives each row its own. Not needed for greedy choice.
      temperature: Logits are divided by it; 0 takes the likeliest token, the lowest id of equals.
      top_k: Draw among the k likeliest only; ties with the last are all kept.
      top_p: Draw among the likeliest tokens that together reach this share, after `top_k`, in (0, 1].
      min_p: Draw among tokens at least this share as likely as the likeliest, after the others, in (0, 1].
      stop_tokens: Tokens that end a text; they are drawn and counted.
      pad_token: What stands after the end.
      mask: Which entries of a prompt array are tokens, bool [batch, time]; padding is on the left.
      pad_to: Length that prompts are padded to, so that prompts of many lengths share a program. None: the longest.
    Raises:
      DataError: There is no prompt, one is empty or holds ids outside of the vocabulary, or a prompt and its new tokens
        are longer than the model's ``max_length``.
      ShapeError: Prompts or mask have another shape, or padding stands elsewhere than on the left.
      ValueError: A number is out of its range, or the key is missing.
    Example:
      >>> from telic.models import Decoder, DecoderConfig
      >>> decoder = Decoder(DecoderConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2))
      >>> variables = decoder.init_variables(jax.random.key(0), np.zeros((1, 4), int))
      >>> generate(decoder, variables, [[1, 2], [3]], max_new_tokens=3, key=0).tokens.shape
      (2, 3)
    """
    if isinstance(prompts, Tracer) or isinstance(mask, Tracer):
        tokens, valid = _as_traced(prompts, mask)
        longest = tokens.shape[1]
    else:
        tokens, valid = _as_rows(prompts, mask, pad_to)
        longest = _checked_rows(tokens, valid, model.config)
    _check_length(longest, max_new_tokens, model.config)
    _check_numbers(temperature, top_k, top_p, min_p)
    stops = np.asarray(list(stop_tokens), np.int32).reshape(-1)
    is_greedy = temperature == 0
    filter = _Filter(
        # A smaller one is zero where denormals are flushed.
        temperature=jnp.float32(1 if is_greedy else max(temperature, 1e-30)),
        top_p=None if top_p is None or is_greedy else jnp.float32(top_p),
        min_p=None if min_p is None or is_greedy else jnp.float32(min_p),
        top_k=None if is_greedy else top_k,
        is_greedy=is_greedy,
    )
    keys = _row_keys(key, len(tokens), is_greedy=is_greedy)
    given = (jnp.asarray(tokens), jnp.asarray(valid), keys, filter, jnp.asarray(stops), jnp.int32(pad_token))
    return _compiled(model, max_new_tokens, variables, *given)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(
    model: Any,
    number: int,
    variables: Variables,
    tokens_BP: Array,
    valid_BP: Array,
    keys_B: Key,
    filter: _Filter,
    stops: Array,
    pad: Array,
) -> Continuations:
    head = model.head(variables)
    # The last token drawn is never read, so it needs no slot.
    hidden_BD, cache = model.prefill(variables, tokens_BP, valid_BP, slots=tokens_BP.shape[1] + number - 1)
    batch = tokens_BP.shape[0]
    logits_BV = head.logits(hidden_BD)
    first = Continuations(
        tokens=jnp.full((batch, number), pad, jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        is_stopped=jnp.zeros(batch, bool),
        log_probs=jnp.zeros((batch, number), logits_BV.dtype),
        sampling_log_probs=jnp.zeros((batch, number), logits_BV.dtype),
    )

    def drawn(at: Array, logits_BV: Array, so_far: Continuations) -> tuple[Array, Continuations]:
        allowed_BV = filter.filtered(logits_BV)
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, at)
        token_B = jax.vmap(jax.random.categorical)(keys, allowed_BV).astype(jnp.int32)
        is_live = ~so_far.is_stopped
        scores = (
            jnp.where(is_live, jnp.take_along_axis(jax.nn.log_softmax(x), token_B[:, None], axis=-1)[:, 0], 0)
            for x in (logits_BV, allowed_BV)
        )
        columns = (so_far.tokens, so_far.log_probs, so_far.sampling_log_probs)
        tokens, raw, sampling = (
            jax.lax.dynamic_update_slice_in_dim(old, new[:, None].astype(old.dtype), at, axis=1)
            for old, new in zip(columns, (jnp.where(is_live, token_B, pad), *scores), strict=True)
        )
        is_stopped = so_far.is_stopped | (is_live & (token_B[:, None] == stops).any(-1))
        return token_B, Continuations(tokens, so_far.lengths + is_live, is_stopped, raw, sampling)

    def goes_on(carry: Any) -> Array:
        at, _, so_far, _ = carry
        return (at < number) & ~so_far.is_stopped.all()

    def step(carry: Any) -> Any:
        at, token_B, so_far, cache = carry
        hidden_BD, cache = model.decode(variables, token_B, cache)
        token_B, so_far = drawn(at, head.logits(hidden_BD), so_far)
        return at + 1, token_B, so_far, cache

    token_B, so_far = drawn(jnp.int32(0), logits_BV, first)
    return jax.lax.while_loop(goes_on, step, (jnp.int32(1), token_B, so_far, cache))[2]


def _as_rows(prompts: Any, mask: Any, pad_to: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Give prompts as int32 [batch, time] padded on the left, and which entries are tokens."""
    if mask is None and not isinstance(prompts, np.ndarray | jax.Array):
        rows = [np.asarray(jax.device_get(row)) for row in prompts]
        for i, row in enumerate(rows):
            if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
                raise ShapeError(f"prompt {i} must be a sequence of token ids, got {row.dtype} of shape {row.shape}")
        longest = max((row.size for row in rows), default=0)
        tokens = np.zeros((len(rows), longest), np.int64)
        valid = np.zeros((len(rows), longest), bool)
        for i, row in enumerate(rows):
            tokens[i, longest - row.size :] = row
            valid[i, longest - row.size :] = True
    else:
        tokens = np.asarray(jax.device_get(prompts))
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
            raise ShapeError(f"prompts must be integers [batch, time], got {tokens.dtype} of shape {tokens.shape}")
        valid = np.ones(tokens.shape, bool) if mask is None else np.asarray(jax.device_get(mask)).astype(bool)
        if valid.shape != tokens.shape:
            raise ShapeError(f"mask must have the shape of prompts, {tokens.shape}, got {valid.shape}")
        if (valid[:, :-1] & ~valid[:, 1:]).any():
            row = int((valid[:, :-1] & ~valid[:, 1:]).any(1).argmax())
            raise ShapeError(f"prompts are padded on the left, and row {row} has padding after a token")
    if pad_to is not None:
        more = pad_to - tokens.shape[1]
        if more < 0:
            raise ShapeError(f"pad_to={pad_to} is less than the longest prompt, {tokens.shape[1]}")
        tokens, valid = (np.pad(x, ((0, 0), (more, 0))) for x in (tokens, valid))
    return np.where(valid, tokens, 0), valid


def _as_traced(prompts: Any, mask: Any) -> tuple[Any, Any]:
    """Give prompts inside another program: only shapes can be checked there."""
    tokens = jnp.asarray(prompts)
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ShapeError(f"prompts must be integers [batch, time], got {tokens.dtype} of shape {tokens.shape}")
    valid = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask).astype(bool)
    if valid.shape != tokens.shape:
        raise ShapeError(f"mask must have the shape of prompts, {tokens.shape}, got {valid.shape}")
    return jnp.where(valid, tokens, 0), valid


def _checked_rows(tokens: np.ndarray, valid: np.ndarray, config: Any) -> int:
    """Check prompts and give the length of the longest."""
    lengths = valid.sum(1)
    if not len(tokens):
        raise DataError("there is no prompt")
    if not lengths.all():
        raise DataError(f"prompt {int(lengths.argmin())} is empty; give it the token that begins a text")
    wrong = (tokens < 0) | (tokens >= config.vocab_size)
    if wrong.any():
        row, place = np.argwhere(wrong)[0]
        place_in_prompt = place - (tokens.shape[1] - lengths[row])
        raise DataError(
            f"prompt {row} holds the token {tokens[row, place]} at {place_in_prompt}, and the vocabulary is [0, "
            f"{config.vocab_size})"
        )
    return int(lengths.max())


def _check_length(longest: int, number: int, config: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {number!r}")
    if longest + number > config.max_length:
        raise DataError(
            f"a prompt of {longest} tokens and {number} new ones are longer than the model's "
            f"max_length={config.max_length}: cut the prompt, or ask for fewer"
        )


def _check_numbers(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be a number ≥ 0, got {temperature!r}")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"top_k must be a whole number of at least 1, got {top_k!r}")
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 < value <= 1:
            raise ValueError(f"{name} must be in (0, 1], got {value!r}")


def _row_keys(key: Any, batch: int, *, is_greedy: bool) -> Key:
    if key is None:
        if not is_greedy:
            raise ValueError("drawing needs a key: pass key=0, or temperature=0 for the likeliest token")
        key = 0
    if isinstance(key, int | np.integer):
        key = jax.random.key(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"key is a seed or made by jax.random.key, got an array of {key.dtype}")
    if jnp.ndim(key) == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    if jnp.shape(key) != (batch,):
        raise ShapeError(f"key is one key, or one for each of {batch} prompts, got shape {jnp.shape(key)}")
    return key
