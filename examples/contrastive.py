"""Rung 3, an objective function with two forward passes: digits and their moved copies are taught to find each other.

No label is used. Each digit and a moved, noisy copy of it go through one encoder; the loss asks each digit to be most
similar to its own copy among all copies of the batch. The similarities are returned as the prediction, so that a
metric of the loop can read them. What counts is retrieval among all held-out digits, not among those of a batch: the
evaluation gives the features, and `recall_at_k` compares every row with every other.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import telic
from telic.artifacts import Representations
from telic.data import columns, digits_split


class Encoder(nn.Module):
    """Gives unit vectors of 32 numbers."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        x = nn.Dense(32)(x)
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


def augmented(key, images):
    """Give copies, each moved by up to three pixels and with noise."""
    move_key, noise_key = jax.random.split(key)
    by = jax.random.randint(move_key, (images.shape[0], 2), 0, 7)
    padded = jnp.pad(images, ((0, 0), (3, 3), (3, 3), (0, 0)))
    moved = jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, (at[0], at[1], 0), (28, 28, 1)))(padded, by)
    return moved + 0.1 * jax.random.normal(noise_key, images.shape)


def find_the_copy(forward, variables, inputs, targets):
    """Give the loss of each digit, and the similarities [batch, batch] as the prediction."""
    output = forward(variables, inputs)
    copies = forward(variables, augmented(forward.step.key, inputs)).prediction
    logits = output.prediction @ copies.T / 0.1
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(logits.shape[0]))
    return losses, output.replace(prediction=logits)


def found(logits):
    """Say for each digit whether its own copy is the most similar one."""
    return jnp.argmax(logits, axis=-1) == jnp.arange(logits.shape[0])


def represent(variables, batch, step):
    """Give the features of each digit of a batch, and those of the copy it should find."""
    digits, weights = batch["inputs"], {"params": variables["params"]}
    encode = Encoder().apply
    return Representations(encode(weights, digits), partners=encode(weights, augmented(step.key, digits)))


def training(learning_rate: float = 2e-3):
    """Give the trainer, the digits to learn from, and batches of digits that are held out."""
    data = columns({"inputs": digits_split("train")["inputs"]}, batch=128)
    digits = digits_split("test")["inputs"][:500]
    held_out = [{"inputs": digits[i : i + 100]} for i in range(0, 500, 100)]
    objective = telic.supervised(Encoder(), find_the_copy)
    objective.evaluate = represent
    return telic.Trainer(objective, telic.optimizers.adam(learning_rate), key=0), data, held_out


def main() -> tuple[float, float]:
    """Train, and give the retrieval accuracy of the untrained and of the trained encoder."""
    trainer, data, held_out = training()
    loop = trainer.loop(log=0).metric(found, reads=("prediction",)).metric("recall_at_k").validate(held_out).progress()

    start = trainer.place(example=held_out[0])
    untrained = trainer.evaluate(held_out, state=start, metrics=["recall_at_k"])["recall_at_k"]
    trained = loop.run(data, epochs=5).metrics["validation_recall_at_k"]
    print(f"retrieval accuracy: untrained {untrained:.3f}, trained {trained:.3f}")
    return untrained, trained


if __name__ == "__main__":
    main()
