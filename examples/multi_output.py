"""Rung 2, several outputs with weighted losses: one network reads the digit and measures its ink."""

from flax import linen as nn

import telic
from telic.data import digits_split


class Reader(nn.Module):
    """A shared layer and two heads."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(128)(x))
        return {"digit": nn.Dense(10)(x), "ink": nn.Dense(1)(x)[:, 0]}


def batches(split: str, size: int = 64) -> list:
    """Give the digits with two targets each: the class, and ten times the mean brightness."""
    inputs, labels = digits_split(split, flat=True).values()
    ink = 10 * inputs.mean(axis=1)
    return [
        {"inputs": inputs[i : i + size], "targets": {"digit": labels[i : i + size], "ink": ink[i : i + size]}}
        for i in range(0, len(inputs), size)
    ]


LOSSES = {"digit": ("softmax_cross_entropy", 1.0), "ink": ("mean_squared_error", 0.5)}


def main() -> dict[str, float]:
    """Train for three epochs and give the last epoch's metrics."""
    loop = telic.trainer(Reader(), LOSSES, "adam", log=0)
    loop.metric("accuracy", "digit_accuracy", reads=("targets.digit", "prediction.digit"))
    loop.metric("mean_absolute_error", "ink_error", reads=("targets.ink", "prediction.ink"))
    loop.validate(batches("test")).progress()
    metrics = loop.run(batches("train"), epochs=3).history[2]
    print({name: round(value, 4) for name, value in metrics.items()})
    return metrics


if __name__ == "__main__":
    main()
