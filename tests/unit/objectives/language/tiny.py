"""A language model of plain functions: nothing of Flax, so that objectives are seen to need the protocol alone."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

VOCAB = 11
WIDTH = 6


@dataclass(frozen=True)
class Tiny:
    """Each hidden state is the mean of the embeddings of its document so far, plus its own; experts are counted only.

    Attributes:
      experts: Experts of the one counted layer, 0 for none.
      soft_cap: Of the head.
    """

    experts: int = 0
    soft_cap: float | None = None

    def init_variables(self, key: Any, tokens: Any) -> Any:
        del tokens
        shapes = {"table": (VOCAB, WIDTH), "head": (WIDTH, VOCAB), "bias": (VOCAB,)}
        if self.experts:
            shapes["router"] = (WIDTH, self.experts)
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        params = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
        state = {"balance": {"bias": jnp.zeros((1, self.experts))}} if self.experts else {}
        return {"params": params, **state}

    def hidden_states(
        self,
        variables: Any,
        tokens: Any,
        *,
        positions: Any = None,
        segment_ids: Any = None,
        train: bool = False,
        key: Any = None,
        qk_stats: bool = False,
    ) -> Any:
        del positions, train, key
        embedded = variables["params"]["table"][tokens]
        seen = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None]
        counted = jnp.ones(tokens.shape, bool)
        if segment_ids is not None:
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
            counted = segment_ids != 0
        mixed = jnp.einsum("bqk,bkd->bqd", seen.astype(embedded.dtype), embedded) / seen.sum(-1, keepdims=True)
        hidden = (embedded + mixed).astype(embedded.dtype)
        largest = {"block": {"max_logits": jnp.abs(hidden).max((0, 1))}} if qk_stats else None
        return SimpleNamespace(
            hidden=hidden, state={}, router=self.routed(variables, embedded, counted), qk_max=largest
        )

    def routed(self, variables: Any, embedded: Any, counted: Any) -> Any:
        if not self.experts:
            return None
        logits = embedded.astype(jnp.float32) @ variables["params"]["router"].astype(jnp.float32)
        shares = jax.nn.softmax(logits, axis=-1)
        chosen = jax.lax.top_k(jax.lax.stop_gradient(shares) + variables["balance"]["bias"][0], 2)[1]
        times = jax.nn.one_hot(chosen, self.experts).sum(-2)
        kept = counted[..., None]
        return SimpleNamespace(
            counts=jnp.where(kept, times, 0).sum(1)[None],
            probabilities=jnp.where(kept, shares, 0).sum(1)[None],
            z=jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum(1)[None],
            tokens=counted.sum(1),
        )

    def head(self, variables: Any) -> Any:
        params = variables["params"]
        return Head(params["head"], params["bias"], self.soft_cap, 1.0)

    def add_router_bias(self, variables: Any, change: Any) -> Any:
        return {"balance": {"bias": variables["balance"]["bias"] + change}}


@dataclass(frozen=True)
class Head:
    """A head by its attributes."""

    kernel: Any
    bias: Any = None
    soft_cap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Any) -> Any:
        raw = hidden.astype(jnp.float32) @ self.kernel.astype(jnp.float32)
        raw = raw if self.bias is None else raw + self.bias
        return self.scale * (raw if self.soft_cap is None else self.soft_cap * jnp.tanh(raw / self.soft_cap))


@dataclass(frozen=True, eq=False)
class Fixed:
    """A model whose logits are given: hidden states are rows of a table, and the head is the identity."""

    logits: Any

    def init_variables(self, key: Any, tokens: Any) -> Any:
        del key, tokens
        return {"params": {"logits": jnp.asarray(self.logits)}}

    def hidden_states(self, variables: Any, tokens: Any, **around: Any) -> Any:
        del tokens, around
        return SimpleNamespace(hidden=variables["params"]["logits"], state={}, router=None, qk_max=None)

    def head(self, variables: Any) -> Any:
        return Head(jnp.eye(variables["params"]["logits"].shape[-1]))


def rows(batch: int = 4, time: int = 7, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, VOCAB, (batch, time)).astype(np.int32)
