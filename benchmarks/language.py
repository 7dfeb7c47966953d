"""Language modelling against a step one would write by hand: tokens per second, and the memory of a large head.

A byte-level decoder of 4 layers, width 128, 128 tokens, batch 8, Adam, on the standard library's source. Both sides
run the same model on the same batches in one process and take turns. Telic's side has the masks of packed rows, its
guard against what is not finite, and the metrics that `LMObjective` reports; the hand-written side is one jitted
function with donated state.

The head's memory is that of the compiled loss with its gradients: nothing of it is run.

    python -m benchmarks.language
    python -m benchmarks.language --rounds 15 --steps 20
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import sides, timing
from telic.data import ByteTokenizer, DataPartition, pack, standard_library, tokenize
from telic.models import Decoder, DecoderConfig
from telic.objectives.language import LMObjective, token_statistics

TIME, BATCH = 128, 8
TOKENS, VOCAB, WIDTH = 4096, 128 * 1024, 512


def batches_of(steps: int) -> list[dict[str, np.ndarray]]:
    documents = tokenize(standard_library("train", max_bytes=400_000).values(), ByteTokenizer())
    stream = iter(pack(documents, length=TIME, batch=BATCH).train(DataPartition()))
    return [next(stream) for _ in range(steps)]


def by_hand(decoder: Decoder, batches: list[dict[str, np.ndarray]]) -> timing.Side:
    """Give the hand-written side: the mean over targets within a document."""

    def loss(params: Any, batch: Any, key: Any) -> Any:
        del key
        tokens, segments = batch["tokens"], batch["segment_ids"]
        given = (tokens[:, :-1], batch["positions"][:, :-1], segments[:, :-1])
        logits = decoder.apply({"params": params}, *given)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        kept = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        return jnp.where(kept, nll, 0).sum() / kept.sum()

    params = decoder.init_variables(jax.random.key(0), jnp.zeros((1, TIME), jnp.int32))["params"]
    return sides.by_hand(loss, params, batches)


def temporary_bytes(chunks: int | None) -> int:
    """Give the temporary memory of a head's loss with its gradients."""

    def loss(hidden: Any, kernel: Any, targets: Any) -> Any:
        head = _Head(kernel)
        return -token_statistics(hidden, head, targets, chunks=chunks).log_prob.mean()

    shapes = (((TOKENS, WIDTH), jnp.float32), ((WIDTH, VOCAB), jnp.float32), ((TOKENS,), jnp.int32))
    given = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    memory = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*given).compile().memory_analysis()
    return int(memory.temp_size_in_bytes)  # pyright: ignore[reportOptionalMemberAccess]


class _Head:
    bias, soft_cap, scale = None, None, 1.0

    def __init__(self, kernel: Any):
        self.kernel = kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps of one round")
    options = parser.parse_args()
    config = DecoderConfig(vocab_size=262, d_model=128, num_layers=4, num_heads=4, d_ff=384, max_length=TIME)
    decoder, batches = Decoder(config), batches_of(options.steps)
    loop = sides.trainer(LMObjective(decoder)).loop(log=0)
    seconds = timing.take_turns(
        {"telic": sides.of_loop(loop, batches), "hand": by_hand(decoder, batches)}, options.rounds
    )
    print(timing.machine())
    print(timing.heading())
    print(timing.ratio("decoder step", seconds["telic"], seconds["hand"], aim=1.02, units=options.steps))
    for name, side in seconds.items():
        rate = BATCH * TIME * options.steps / sorted(side)[len(side) // 2]
        print(f"  {name}: {rate:,.0f} tokens per second")
    cut, whole = temporary_bytes(None), temporary_bytes(1)
    note = f"{cut / 2**20:,.0f} MiB, {whole / 2**20:,.0f} MiB"
    print(timing.exact("temporary memory of the head, in blocks", cut / whole, aim=1 / 6, note=note))


if __name__ == "__main__":
    main()
