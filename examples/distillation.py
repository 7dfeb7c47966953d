"""Rung 3 with a frozen tree: a small student learns from a teacher's outputs alone, without a label.

``frozen={"teacher": weights}`` puts the teacher's weights beside the student's. They are an argument of the compiled
program, are stored once, and no step changes a bit of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import telic
from telic.data import columns, digits_split

TEMPERATURE = 3.0


def network(width: int) -> nn.Module:
    """Give a dense network with one hidden layer."""
    return nn.Sequential([nn.Dense(width), nn.relu, nn.Dense(10)])


TEACHER, STUDENT = network(256), network(16)


def imitate(forward, variables, inputs, targets):
    """Give the cross-entropy between the softened outputs of teacher and student."""
    output = forward(variables, inputs)
    wanted = jax.nn.softmax(TEACHER.apply(variables["teacher"], inputs) / TEMPERATURE)
    losses = -jnp.sum(wanted * jax.nn.log_softmax(output.prediction / TEMPERATURE), axis=-1)
    return losses, output


def main() -> dict[str, float]:
    """Train a teacher with labels and a student without; give both accuracies and the teacher's change."""
    data = columns(digits_split("all", flat=True), batch=64, held_out=2000)
    teacher = telic.trainer(TEACHER, "softmax_cross_entropy", "adam", log=0).metric("accuracy").validate(data)
    taught = teacher.run(data, epochs=3)
    weights = taught.step_state.variables

    unlabelled = columns({"inputs": digits_split("train", flat=True)["inputs"]}, batch=64)
    objective = telic.supervised(STUDENT, imitate, frozen={"teacher": weights})
    student = telic.Trainer(objective, telic.optimizers.adam(3e-3), key=1)
    state = student.fit(unlabelled, epochs=3)

    inputs, labels = digits_split("test", flat=True).values()
    logits = STUDENT.apply({"params": state.variables["params"]}, inputs)
    before, after = jax.tree.leaves(weights), jax.tree.leaves(state.variables["teacher"])
    result = {
        "teacher": taught.history[2]["validation_accuracy"],
        "student": float(np.mean(np.argmax(logits, axis=-1) == labels)),
        "teacher_change": max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(before, after, strict=True)),
    }
    print({name: round(value, 4) for name, value in result.items()})
    return result


if __name__ == "__main__":
    main()
