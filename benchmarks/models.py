"""The models, data and objectives that all benchmarks share."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import telic
from telic.cli.digits import DigitReader, read_digits

LEARNING_RATE = 1e-3

LAYERS, WIDTH, HEADS, TIME, GPT_BATCH, VOCAB = 4, 128, 4, 128, 8, 256
HEAVY_WIDTH, HEAVY_LAYERS, HEAVY_BATCH = 1448, 3, 8
"""Three square matrices: 24 MB of float32."""

Batches = list[Any]


class MLP(nn.Module):
    """64 → 128 → 10 with a ReLU between."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Give logits, [batch, classes]."""
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


class Heavy(nn.Module):
    """Three wide dense layers on few rows: a step that moves parameters and computes little."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Give logits, [batch, width]."""
        for _ in range(HEAVY_LAYERS):
            x = nn.tanh(nn.Dense(HEAVY_WIDTH, use_bias=False)(x))
        return x


class Leaves(nn.Module):
    """A chain of many small parameters, for what a leaf costs."""

    count: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Give predictions, [batch, 8]."""
        scale = sum(self.param(f"scale_{i}", nn.initializers.normal(), (8,)) for i in range(self.count))
        return x * scale


class GPT(telic.Objective):
    """A small decoder of 4 layers, width 128, 128 tokens. Its outputs feed metrics; a Mean is its loss."""

    def init(self, key: Any, variables: Any = None) -> Any:
        """Give the parameters: 0.9 M of them."""
        del variables
        keys = iter(jax.random.split(key, 3 + 4 * LAYERS))

        def dense(rows: int, columns: int) -> Any:
            return jax.random.normal(next(keys), (rows, columns)) / rows**0.5

        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        params = {f"block_{i}": {name: dense(*size) for name, size in sizes.items()} for i in range(LAYERS)}
        tables = {"tokens": dense(VOCAB, WIDTH), "positions": dense(TIME, WIDTH), "head": dense(WIDTH, VOCAB)}
        return {"params": {**params, **tables}}

    def logits(self, params: Any, tokens: Any) -> Any:
        """Give the logits of each next token, [batch, time, vocab]."""
        x = params["tokens"][tokens[:, :-1]] + params["positions"]
        seen = jnp.tril(jnp.ones((TIME, TIME), bool))
        for i in range(LAYERS):
            p = params[f"block_{i}"]
            q, k, v = jnp.split(_norm(x) @ p["qkv"], 3, -1)
            q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in (q, k, v))
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
            x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(_norm(x) @ p["up"]) @ p["down"]
        return _norm(x) @ params["head"]

    def nll(self, params: Any, tokens: Any) -> Any:
        """Give the loss of each next token, [batch, time], the logits' log normaliser, and the logits."""
        logits = self.logits(params, tokens)
        total = jax.nn.logsumexp(logits, -1)
        return total - jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0], total, logits

    def loss(self, variables: Any, batch: Any, step: telic.Step) -> Any:
        """Give the mean loss of the tokens that count."""
        del step
        losses, _, logits = self.nll(variables["params"], batch["tokens"])
        outputs = {"prediction": logits, "targets": batch["tokens"][:, 1:], "weights": batch["mask"]}
        return telic.Mean.of(losses, batch["mask"]), telic.Aux(outputs=outputs)


class TwoTerms(GPT):
    """The same model with a z-loss that has a denominator of its own."""

    def loss(self, variables: Any, batch: Any, step: telic.Step) -> Any:
        """Give both terms."""
        del step
        losses, normaliser, _ = self.nll(variables["params"], batch["tokens"])
        z = telic.Mean.of(normaliser**2, 1 - batch["mask"])
        return telic.Terms({"fit": (1.0, telic.Mean.of(losses, batch["mask"])), "z": (1e-4, z)})


class Statistics(GPT):
    """The same loss as statistics of the objective's own, which are exact only by running each microbatch twice."""

    def loss(self, variables: Any, batch: Any, step: telic.Step) -> Any:
        """Give total and mass."""
        del step
        losses, _, _ = self.nll(variables["params"], batch["tokens"])
        return {"total": (losses * batch["mask"]).sum(), "mass": batch["mask"].sum()}

    def reduce_loss(self, statistics: Any) -> Any:
        """Give the loss of the summed statistics."""
        return statistics["total"] / statistics["mass"], statistics["mass"] > 0


def _norm(x: Any) -> Any:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def rows(count: int, *, width: int = 64, batch: int = 64, classes: int = 10) -> Batches:
    """Give batches of normal rows and class ids, as arrays on the host."""
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(batch, width)).astype(np.float32), random.integers(0, classes, batch).astype(np.int32))
        for _ in range(count)
    ]


def pictures(count: int) -> Batches:
    """Give batches of 64 pictures [28, 28, 1] and class ids."""
    return [(x.reshape(64, 28, 28, 1), y) for x, y in rows(count, width=784)]


def sentences(count: int) -> Batches:
    """Give batches of token ids with a mask that keeps four of five."""
    random = np.random.default_rng(0)
    return [
        {
            "tokens": random.integers(0, VOCAB, (GPT_BATCH, TIME + 1)).astype(np.int32),
            "mask": (random.random((GPT_BATCH, TIME)) < 0.8).astype(np.float32),
        }
        for _ in range(count)
    ]


__all__ = [
    "GPT",
    "GPT_BATCH",
    "HEAVY_BATCH",
    "HEAVY_WIDTH",
    "LEARNING_RATE",
    "MLP",
    "TIME",
    "Batches",
    "DigitReader",
    "Heavy",
    "Leaves",
    "Statistics",
    "TwoTerms",
    "pictures",
    "read_digits",
    "rows",
    "sentences",
]
