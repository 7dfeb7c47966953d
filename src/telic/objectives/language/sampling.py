"""Sampling with nothing but the protocol of a language model: for previews, and where a model has no cache."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from telic.models import generate
from telic.types import Array, Key, Variables


class Generate(Protocol):
    """How prompts are continued; `telic.models.generate` is one."""

    def __call__(
        self,
        model: Any,
        variables: Variables,
        prompts: Any,
        /,
        *,
        max_new_tokens: int,
        temperature: float,
        key: Key,
    ) -> Any:
        """Give a value whose ``tokens``, int32 [n, max_new_tokens], follow each prompt."""
        ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What `sample` gives.

    Attributes:
      tokens: Ids that follow each prompt, int32 [n, max_new_tokens].
    """

    tokens: Any


def sampler_for(model: Any) -> Generate:
    """Give the sampler with a cache where a model has what it needs, and `sample` elsewhere."""
    has_cache = all(hasattr(model, name) for name in ("prefill", "decode", "config"))
    return generate if has_cache else sample


def sample(
    model: Any, variables: Variables, prompts: Any, /, *, max_new_tokens: int, temperature: float, key: Key
) -> Sampled:
    """Continue prompts token by token, running the whole model for each.

    Simple and right for any `LanguageModel`, and slow: `telic.models.generate` keeps the keys and values of a
    `telic.models.Decoder`.

    Args:
      model: The language model.
      variables: Its variables.
      prompts: Ids without padding, int [n, time].
      max_new_tokens: Tokens to sample.
      temperature: Divides the logits; 0 takes the likeliest token.
      key: PRNG key.
    """
    prompts = jnp.asarray(prompts, jnp.int32)
    n, start = prompts.shape
    tokens = jnp.concatenate([prompts, jnp.zeros((n, max_new_tokens), jnp.int32)], axis=1)
    head = model.head(variables)

    def extend(i: Array, tokens: Array) -> Array:
        # Causal: what stands after a place does not reach it.
        hidden = model.hidden_states(variables, tokens, train=False).hidden
        logits = head.logits(jax.lax.dynamic_index_in_dim(hidden, start + i - 1, axis=1, keepdims=False))
        if temperature == 0:
            new = jnp.argmax(logits, axis=-1)
        else:
            new = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature, axis=-1)
        return jax.lax.dynamic_update_index_in_dim(tokens, new.astype(jnp.int32), start + i, axis=1)

    return Sampled(jax.lax.fori_loop(0, max_new_tokens, extend, tokens)[:, start:])
