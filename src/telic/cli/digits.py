"""The demonstration: a small convolutional network learns to read handwritten digits, and leaves a run directory."""

import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from telic.compose import trainer
from telic.data import columns, digits_split
from telic.loop.state import LoopState
from telic.optimizers import adam, cosine

BATCH = 64
HELD_OUT = 2000
"""The rows from 8,000 on: the test split of `telic.data.digits_split`."""
LEARNING_RATE = 3e-3
SHIFT = 2
"""Training digits move by at most so many pixels each way."""


class DigitReader(nn.Module):
    """Two convolutions and two dense layers: 105,866 parameters."""

    @nn.compact
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        """Give the logits of images [batch, 28, 28, 1]."""
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(10)(x)


def shifted(key: Any, images: Any) -> Any:
    """Give images moved by a few pixels, each by its own amount."""
    offsets = jax.random.randint(key, (images.shape[0], 2), 0, 2 * SHIFT + 1)
    padded = jnp.pad(images, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)))
    return jax.vmap(lambda image, by: jax.lax.dynamic_slice(image, (by[0], by[1], 0), images.shape[1:]))(
        padded, offsets
    )


def read_digits(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
    """Give the objective: cross-entropy, in training of digits that were moved a little."""
    if forward.step.train:
        inputs = shifted(forward.step.key, inputs)
    output = forward(variables, inputs)
    return optax.softmax_cross_entropy_with_integer_labels(output.prediction, targets), output


def run(folder: Path, *, seed: int = 0, epochs: int = 8, plain: bool = False) -> LoopState:
    """Train, test, and write the run directory.

    Args:
      folder: Where the record of the run and curves.png go; it exists.
      seed: Seed of everything random.
      epochs: Passes over the training digits.
      plain: Write lines even on a terminal.
    Returns:
      LoopState: the finished run.
    """
    data = columns(digits_split("all"), batch=BATCH, seed=seed, held_out=HELD_OUT)
    batches = data.batches_per_epoch or 1
    settings = {
        "command": "demo",
        "seed": seed,
        "epochs": epochs,
        "batch": BATCH,
        "batches_per_epoch": batches,
        "training_digits": batches * BATCH,
        "test_digits": HELD_OUT,
        "model": DigitReader.__name__,
        "optimizer": "adam",
        "learning_rate": f"cosine from {LEARNING_RATE}",
        "augmentation": f"shift by up to {SHIFT} pixels",
    }
    print(f"A small network learns to read {batches * BATCH:,} handwritten digits; {HELD_OUT:,} others test it.")
    passes = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    print(f"Seed {seed}, {passes} of {batches} batches, on {jax.default_backend()}, into {folder}", flush=True)
    loop = (
        trainer(DigitReader(), read_digits, adam(cosine(LEARNING_RATE, steps=epochs * batches)), key=seed, log=0)
        .metric("accuracy")
        .validate(data)
        .progress(plain=True if plain else None, batches=batches)
        .record(folder, config=settings)
        .curves(folder / "curves.png", title="telic demo: handwritten digits")
    )
    began = time.monotonic()
    try:
        final = loop.run(data, epochs=epochs)
    except KeyboardInterrupt:
        print(f"Stopped. What was measured so far is in {folder / 'metrics.jsonl'}", file=sys.stderr, flush=True)
        raise
    seconds = time.monotonic() - began
    accuracy = final.history[epochs - 1]["validation_accuracy"]
    again = f"telic demo --seed {seed + 1} --epochs {epochs + 4}"
    print(
        f"\nRead {accuracy:.2%} of the {HELD_OUT:,} test digits, after {passes} in {seconds:.0f} s.\n"
        f"In {folder}:\n"
        "  curves.png      loss and accuracy by epoch: look at it\n"
        "  metrics.jsonl   every number, one line per interval and epoch\n"
        "  run.json        settings, versions, seed, result\n"
        "  profile.json    where the time went\n\n"
        "Next:\n"
        f"  {f'telic report {folder}':<32}  all of it as one page for a browser\n"
        f"  {again:<32}  another start, a longer run\n"
        "  README.md                         the same in ten lines of your own\n"
        "  examples/                         a program for each rung of the ladder"
    )
    return final
