"""Rung 3, a loss that changes with time: a variational autoencoder whose KL weight grows with ``Step.updates``.

`Step.updates` counts committed optimizer updates, so the schedule neither moves within an accumulation window nor with
a rejected batch.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import telic
from telic.data import columns, digits_split

WARM_UP = 250
"""Updates until the KL term has its full weight."""


class VAE(nn.Module):
    """An encoder and a decoder around 8 latent numbers."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        hidden = nn.relu(nn.Dense(200)(x))
        mean, log_var = nn.Dense(8)(hidden), nn.Dense(8)(hidden)
        z = mean
        if train:
            z = mean + jnp.exp(log_var / 2) * jax.random.normal(self.make_rng("latent"), mean.shape)
        hidden = nn.relu(nn.Dense(200)(z))
        return {"pixels": nn.Dense(784)(hidden), "mean": mean, "log_var": log_var}


def kl_weight(updates):
    """Give the weight of the KL term, from 0 to 1."""
    return jnp.minimum(updates / WARM_UP, 1.0)


def parts(prediction, inputs):
    """Give reconstruction loss and KL divergence of each digit, in nats."""
    reconstruction = jnp.sum(optax.sigmoid_binary_cross_entropy(prediction["pixels"], inputs), axis=-1)
    mean, log_var = prediction["mean"], prediction["log_var"]
    kl = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, axis=-1)
    return reconstruction, kl


def annealed(forward, variables, inputs, targets):
    """Give the negative evidence bound, its KL term weighted by the clock."""
    output = forward(variables, inputs)
    reconstruction, kl = parts(output.prediction, inputs)
    return reconstruction + kl_weight(forward.step.updates) * kl, output


def main() -> dict[int, dict[str, float]]:
    """Train for four epochs and give the metrics of each."""
    data = columns({"inputs": digits_split("all", flat=True)["inputs"]}, batch=64, held_out=2000)
    loop = telic.trainer(VAE(), annealed, telic.optimizers.adam(2e-3), log=0)
    loop.metric(lambda p, x: parts(p, x)[0], "reconstruction", reads=("prediction", "batch.inputs"))
    loop.metric(lambda p, x: parts(p, x)[1], "kl", reads=("prediction", "batch.inputs"))
    history = loop.validate(data).progress().run(data, epochs=4).history
    for epoch, metrics in history.items():
        pixels, code = metrics["validation_reconstruction"], metrics["validation_kl"]
        print(f"epoch {epoch}: {pixels:.1f} nats of pixels, {code:.1f} of code")
    return history


if __name__ == "__main__":
    main()
