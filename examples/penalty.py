"""Rung 3, a penalty on the parameters: the objective function reads a kernel from ``variables["params"]``."""

import jax.numpy as jnp
import optax
from flax import linen as nn

import telic
from telic.data import columns, digits_split

PENALTY = 1e-3


class Reader(nn.Module):
    """One hidden layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, name="hidden")(x))
        return nn.Dense(10, name="logits")(x)


def penalised(forward, variables, inputs, targets):
    """Give the cross-entropy and, added to each example's, the size of the first layer's weights."""
    output = forward(variables, inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(output.prediction, targets)
    size = jnp.sum(jnp.abs(variables["params"]["hidden"]["kernel"]))
    return losses + PENALTY * size, output


def main() -> tuple[dict, dict]:
    """Train without and with the penalty; give accuracy and share of nearly unused weights of each."""
    data = columns(digits_split("all", flat=True), batch=64, held_out=2000)
    results = []
    for name, loss in (("without", "softmax_cross_entropy"), ("with", penalised)):
        loop = telic.trainer(Reader(), loss, "adam", log=0).metric("accuracy").validate(data)
        final = loop.run(data, epochs=2)
        kernel = final.step_state.variables["params"]["hidden"]["kernel"]
        small = float(jnp.mean(jnp.abs(kernel) < 1e-2))
        accuracy = final.history[1]["validation_accuracy"]
        print(f"{name} the penalty: accuracy {accuracy:.3f}, {small:.0%} of the weights are below 0.01")
        results.append({"accuracy": accuracy, "small": small})
    return results[0], results[1]


if __name__ == "__main__":
    main()
