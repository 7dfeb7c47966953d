"""Peak memory of the compiled step: arguments, results and scratch as the compiler plans them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import telic
from benchmarks import models, sides
from benchmarks.timing import Ratio, exact
from telic.profiling import Memory, Report, byte_text, memory_of


def memory(rounds: int = 1) -> list[Ratio]:
    """Compare the memory of Telic's step with that of the hand-written donated one; nothing is timed."""
    del rounds
    gpt, heavy, mlp = models.GPT(), models.Heavy(), models.MLP()
    sentences = models.sentences(1)
    wide = [(x, x) for x, _ in models.rows(1, width=models.HEAVY_WIDTH, batch=models.HEAVY_BATCH)]
    rows = models.rows(1)
    hand = {
        "gpt": _by_hand(sides.next_token(gpt), gpt.init(jax.random.key(0))["params"], sentences[0]),
        "heavy": _by_hand(sides.squared_error(heavy), sides.params_of(heavy, wide[0][0]), wide[0]),
        "mlp": _by_hand(sides.cross_entropy(mlp), sides.params_of(mlp, rows[0][0]), rows[0]),
    }
    wide_objective = telic.supervised(heavy, "mean_squared_error")
    small = telic.supervised(mlp, "softmax_cross_entropy")
    return [
        _row("memory of the GPT step, nonfinite='allow'", gpt, sentences, hand["gpt"], aim=1.02, nonfinite="allow"),
        _row("memory of the GPT step, guard", gpt, sentences, hand["gpt"], aim=1.06),
        _row("memory of the 24 MB step, guard", wide_objective, wide, hand["heavy"], aim=1.25),
        _row("memory of the 24 MB step, allow", wide_objective, wide, hand["heavy"], aim=1.02, nonfinite="allow"),
        _row("memory of the MLP step, guard", small, rows, hand["mlp"]),
    ]


def _row(name: str, objective: Any, data: Any, hand: Memory, *, aim: float | None = None, **options: Any) -> Ratio:
    reports: list[Report] = []
    sides.trainer(objective, **options).loop(log=0, profile=reports.append).run(data)
    ours = reports[0].memory
    if ours is None:
        raise RuntimeError("this backend does not say what memory a program needs")
    note = f"{byte_text(ours.peak_bytes)}, {byte_text(hand.peak_bytes)}"
    return exact(name, ours.peak_bytes / hand.peak_bytes, aim=aim, note=note)


def _by_hand(loss: sides.Loss, params: Any, batch: Any) -> Memory:
    optimizer = optax.adam(models.LEARNING_RATE)

    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(loss)(params, batch, None)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    placed = jax.tree.map(jnp.asarray, batch)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), placed).compile()
    found = memory_of(compiled)
    if found is None:
        raise RuntimeError("this backend does not say what memory a program needs")
    return found
