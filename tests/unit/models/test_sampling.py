"""Continuations: cached equals uncached, padding changes nothing, and each way to draw draws what it says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import DataError, ShapeError
from telic.interop import load_huggingface
from telic.models import Decoder, Experts, generate, sampling
from tests.decoders import random_decoder
from tests.golden import DATA, load

SMALL: dict[str, Any] = {"vocab_size": 17, "d_model": 16, "num_layers": 2, "num_heads": 4, "max_length": 24, "d_ff": 24}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "qk_norm": True, "tied": True},
    "window": {"num_kv_heads": 1, "sliding_window": 3},
    "mixed windows, scanned": {"sliding_window": 3, "window_layers": (True, False), "scan": True},
    "experts": {"experts": Experts(num_experts=4, top_k=2, bias=True)},
    "experts, scanned": {
        "experts": Experts(num_experts=4, top_k=2, dispatch="dense"),
        "scan": True,
        "final_soft_cap": 3.0,
    },
    "learned": {"positions": "learned", "norm": "layer", "gated": False, "qkv_bias": True, "attention_soft_cap": 5.0},
}


def made(**options: Any) -> tuple[Decoder, Any]:
    return random_decoder(**{**SMALL, **options})


@pytest.fixture(scope="module")
def plain() -> tuple[Decoder, Any]:
    return made()


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]


@pytest.mark.parametrize("kind", KINDS)
def test_cached_logits_equal_uncached_ones(kind: str) -> None:
    """Catches a slot written in the wrong place, a window or positions counted in slots, padding that is seen."""
    decoder, variables = made(**KINDS[kind])
    rows = np.random.default_rng(0).integers(0, 17, (2, 9)).astype(np.int32)
    full = jax.jit(lambda v, t: decoder.head(v).logits(decoder.hidden_states(v, t).hidden))
    # The second row's prompt is shorter by three, and so is padded on the left.
    tokens = np.stack([rows[0, :5], np.r_[[0, 0, 0], rows[1, :2]]])
    valid = np.array([[1] * 5, [0, 0, 0, 1, 1]], bool)
    hidden, cache = jax.jit(lambda v: decoder.prefill(v, tokens, jnp.asarray(valid), slots=9))(variables)
    decode = jax.jit(decoder.decode)
    head = decoder.head(variables)
    expected = np.asarray(full(variables, rows))
    for i in range(4):
        for row, start in ((0, 5), (1, 2)):
            place = start - 1 + i
            np.testing.assert_allclose(head.logits(hidden)[row], expected[row, place], rtol=1e-5, atol=1e-5)
        hidden, cache = decode(variables, np.array([rows[0, 5 + i], rows[1, 2 + i]], np.int32), cache)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "gpt2"])
def test_greedy_continuations_of_checkpoints(family: str) -> None:
    """Catches a continuation that differs from transformers' own."""
    (case,) = load(f"hf_{family}")["cases"]
    decoder, variables = load_huggingface(DATA / f"hf_{family}")
    found = generate(decoder, variables, case["in"]["prompts"], max_new_tokens=8, temperature=0)
    np.testing.assert_array_equal(found.tokens, case["out"]["greedy"])
    assert not found.is_stopped.any()


def test_log_probs_are_those_of_the_model(plain: tuple[Decoder, Any]) -> None:
    """Catches log-probabilities after the temperature where they are asked before it, or of the token before."""
    decoder, variables = plain
    found = generate(decoder, variables, PROMPTS, max_new_tokens=4, key=0, temperature=0.7, top_k=5)
    for prompt, tokens, raw, drawn in zip(
        PROMPTS, found.texts(), found.log_probs, found.sampling_log_probs, strict=True
    ):
        row = np.array([prompt + tokens], np.int32)
        logits = np.asarray(decoder.apply(variables, row))[0, len(prompt) - 1 : -1].astype(np.float64)
        everything = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        np.testing.assert_allclose(raw, everything[np.arange(4), tokens], rtol=1e-4, atol=1e-5)
        warm = logits / 0.7
        warm = np.where(warm >= np.sort(warm, -1)[:, -5:][:, :1], warm, -np.inf)
        warm = warm - np.log(np.exp(warm).sum(-1, keepdims=True))
        np.testing.assert_allclose(drawn, warm[np.arange(4), tokens], rtol=1e-4, atol=1e-5)


def test_draws_depend_on_the_row_and_its_key_alone(plain: tuple[Decoder, Any]) -> None:
    """Catches one stream for all rows, and draws that move with padding or with the other rows."""
    decoder, variables = plain
    together = generate(decoder, variables, PROMPTS, max_new_tokens=6, key=3)
    padded = generate(decoder, variables, PROMPTS, max_new_tokens=6, key=3, pad_to=8)
    np.testing.assert_array_equal(together.tokens, padded.tokens)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(3))
    alone = generate(decoder, variables, PROMPTS[1:2], max_new_tokens=6, key=keys[1:2])
    np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])
    same = generate(decoder, variables, [[7, 7]] * 4, max_new_tokens=6, key=3)
    assert len({tuple(row) for row in same.texts()}) > 1
    other = generate(decoder, variables, PROMPTS, max_new_tokens=6, key=4)
    assert not np.array_equal(together.tokens, other.tokens)
    tokens, mask = np.array([[0, 0, 0, 9, 2]]), np.array([[0, 0, 0, 1, 1]], bool)
    given = generate(decoder, variables, tokens, mask=mask, max_new_tokens=6, key=keys[1:2])
    np.testing.assert_array_equal(given.tokens, alone.tokens)


def test_stop_tokens_end_a_text_and_the_loop(plain: tuple[Decoder, Any]) -> None:
    """Catches a stop token that is left out, tokens after it, and other rows that stop with it."""
    decoder, variables = plain
    free = generate(decoder, variables, PROMPTS, max_new_tokens=8, key=0)
    stop = int(free.tokens[0, 2])
    found = generate(decoder, variables, PROMPTS, max_new_tokens=8, key=0, stop_tokens=[stop], pad_token=16)
    for row, (before, after) in enumerate(zip(np.asarray(free.tokens), found.texts(), strict=True)):
        expected = before.tolist()
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        assert after == expected
        assert bool(found.is_stopped[row]) == (stop in before)
        assert (np.asarray(found.tokens)[row, len(after) :] == 16).all()
        assert (np.asarray(found.log_probs)[row, len(after) :] == 0).all()
    all_stop = generate(decoder, variables, PROMPTS, max_new_tokens=8, key=0, stop_tokens=range(17))
    assert all_stop.lengths.tolist() == [1, 1, 1]


def filtered(logits: Any, **options: Any) -> np.ndarray:
    options = {"temperature": 1.0, "top_p": None, "min_p": None, **options}
    return np.asarray(sampling._Filter(**options).filtered(jnp.asarray(logits, jnp.float32)))


def test_filters_keep_what_they_say() -> None:
    """Catches a nucleus without the token that reaches the share, and min_p of the whole instead of the likeliest."""
    logits = np.log([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    kept = np.isfinite(filtered(logits, top_k=2))
    np.testing.assert_array_equal(kept, [[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(np.isfinite(filtered(logits, top_p=0.69)), [[1, 1, 0, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(np.isfinite(filtered(logits, top_p=0.71)), [[1, 1, 1, 0], [0, 1, 1, 1]])
    np.testing.assert_array_equal(np.isfinite(filtered(logits, top_p=0.01)), [[1, 0, 0, 0], [0, 0, 0, 1]])
    np.testing.assert_array_equal(np.isfinite(filtered(logits, min_p=0.6)), [[1, 1, 0, 0], [0, 0, 1, 1]])
    # Among the two likeliest, the first alone has 4 / 7.
    np.testing.assert_array_equal(np.isfinite(filtered(logits, top_k=2, top_p=0.5)), [[1, 0, 0, 0], [0, 0, 0, 1]])
    np.testing.assert_allclose(filtered(logits, temperature=2.0), (logits - np.log(0.4)) / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(filtered(logits, temperature=1e-30)[0] > -1e20, [1, 0, 0, 0])


def test_frequencies_are_those_of_the_model(plain: tuple[Decoder, Any]) -> None:
    """Catches draws from another distribution than the log-probabilities say."""
    decoder, variables = plain
    found = generate(decoder, variables, [[1, 2, 3]] * 2000, max_new_tokens=1, key=0)
    logits = np.asarray(decoder.apply(variables, np.array([[1, 2, 3]])))[0, -1].astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum()
    counts = np.bincount(np.asarray(found.tokens)[:, 0], minlength=17)
    spread = np.sqrt(2000 * shares * (1 - shares)) + 1
    assert (np.abs(counts - 2000 * shares) < 5 * spread).all()


def test_compiles_once_for_all_numbers_of_a_shape(plain: tuple[Decoder, Any]) -> None:
    """Catches a program per temperature, per key or per length of the prompt."""
    decoder, variables = plain
    generate(decoder, variables, PROMPTS, max_new_tokens=3, key=0, top_p=0.9, pad_to=7)
    before = sampling._compiled._cache_size()
    generate(decoder, variables, PROMPTS, max_new_tokens=3, key=1, top_p=0.5, temperature=2.0, pad_to=7)
    generate(decoder, variables, [[1], [2], [3]], max_new_tokens=3, key=1, top_p=0.5, pad_to=7)
    assert sampling._compiled._cache_size() == before


def test_continues_inside_another_program(plain: tuple[Decoder, Any]) -> None:
    """Catches checks on the host that a preview under jit trips over."""
    decoder, variables = plain
    prompts = np.array([[3, 1, 4], [1, 5, 9]], np.int32)
    run = jax.jit(lambda v, p: generate(decoder, v, p, max_new_tokens=3, key=0).tokens)
    expected = generate(decoder, variables, prompts, max_new_tokens=3, key=0).tokens
    np.testing.assert_array_equal(run(variables, prompts), expected)


def test_what_cannot_be_continued_is_named(plain: tuple[Decoder, Any]) -> None:
    """Catches a prompt cut in silence, an id that wraps around, and numbers that mean nothing."""
    decoder, variables = plain

    def run(prompts: Any, **options: Any) -> Any:
        return generate(decoder, variables, prompts, **{"max_new_tokens": 2, "key": 0, **options})

    with pytest.raises(DataError, match=r"a prompt of 23 tokens and 2 new ones are longer than .*max_length=24"):
        run([[1], [1] * 23])
    with pytest.raises(DataError, match="prompt 0 holds the token 17 at 1"):
        run([[1, 17]])
    with pytest.raises(DataError, match="prompt 1 is empty"):
        run([[1], []])
    with pytest.raises(DataError, match="no prompt"):
        run([])
    with pytest.raises(ShapeError, match="row 1 has padding after a token"):
        run(np.ones((2, 3), int), mask=[[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ShapeError, match=r"pad_to=1 is less than the longest prompt, 2"):
        run([[1, 2]], pad_to=1)
    with pytest.raises(ShapeError, match="one for each of 2 prompts"):
        run([[1], [2]], key=jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ShapeError, match="prompt 0 must be a sequence of token ids, got float64"):
        run([[0.5]])
    with pytest.raises(ValueError, match="drawing needs a key"):
        run([[1]], key=None)
    for name, value in (("temperature", -1.0), ("top_k", 0), ("top_p", 0.0), ("min_p", 1.5), ("max_new_tokens", 0)):
        with pytest.raises(ValueError, match=name):
            run([[1]], **{name: value})
