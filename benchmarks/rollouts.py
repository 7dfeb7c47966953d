"""Measure rollouts per second against a bare jitted generation loop: what the source adds to drawing.

Run: python -m benchmarks.rollouts
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from telic.data import ByteTokenizer, Rollouts
from telic.loop.ports import View
from telic.models import Decoder, DecoderConfig, generate

TOKENIZER = ByteTokenizer()
PROMPTS, GROUP, PROMPT, NEW = 8, 8, 16, 32


def bare(decoder):
    """Give the loop one writes by hand: prefill, then one token at a time in one compiled scan."""

    @jax.jit
    def draw(variables, prompts, key):
        head = decoder.head(variables)
        hidden, cache = decoder.prefill(variables, prompts, jnp.ones_like(prompts, bool), slots=PROMPT + NEW - 1)

        def drawn(logits, key):
            token = jax.random.categorical(key, logits).astype(jnp.int32)
            return token, jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]

        def step(carry, key):
            token, cache = carry
            hidden, cache = decoder.decode(variables, token, cache)
            token, log_prob = drawn(head.logits(hidden), key)
            return (token, cache), (token, log_prob)

        keys = jax.random.split(key, NEW)
        token, log_prob = drawn(head.logits(hidden), keys[0])
        _, (tokens, log_probs) = jax.lax.scan(step, (token, cache), keys[1:])
        return jnp.concatenate([token[None], tokens]), jnp.concatenate([log_prob[None], log_probs])

    return draw


def ratio(rounds: int = 15, width: int = 64) -> float:
    """Give the median of the time of a rollout over that of the bare loop, interleaved pairs in one process."""
    config = DecoderConfig(vocab_size=TOKENIZER.vocab_size, d_model=width, num_layers=2, num_heads=4, max_length=64)
    decoder = Decoder(config)
    variables = decoder.init_variables(jax.random.key(0), jnp.zeros((1, PROMPT), jnp.int32))
    texts = [f"{i:0{PROMPT}d}" for i in range(PROMPTS)]
    source = Rollouts(
        texts,
        TOKENIZER,
        # Nothing stops early: both sides draw the same number of tokens.
        generate=functools.partial(generate, decoder),
        reward=lambda prompts, completions: [float(len(text)) for text in completions],
        group=GROUP,
        batch=PROMPTS,
        max_new_tokens=NEW,
    )
    source.begin(0, continuous=True)
    draw = bare(decoder)
    prompts = np.repeat(np.stack([TOKENIZER.encode(text) for text in texts]), GROUP, axis=0)
    view = View(variables, 0, 0)
    ratios: list[float] = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        jax.device_get(draw(variables, prompts, jax.random.key(number)))
        between = time.perf_counter()
        source.next(view)
        ended = time.perf_counter()
        if number:
            ratios.append((ended - between) / (between - began))
    return statistics.median(ratios)


def main() -> None:
    """Print the ratio."""
    rows = PROMPTS * GROUP
    print(f"{rows} completions of {NEW} tokens: a rollout takes {ratio():.3f} of the bare loop's time (aim 1.10)")


if __name__ == "__main__":
    main()
