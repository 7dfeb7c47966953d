"""Rung 1, a loss by name: a dense network learns digits, with the loss, the optimizer and the metric named."""

from flax import linen as nn

import telic
from telic.data import columns, digits_split


def main() -> telic.LoopState:
    """Train for three epochs with validation and give the final state."""
    model = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(10)])
    data = columns(digits_split("all", flat=True), batch=64, held_out=2000)

    loop = telic.trainer(model, "softmax_cross_entropy", "adam", log=0)
    loop.metric("accuracy").validate(data).progress()
    final = loop.run(data, epochs=3)

    print(f"validation accuracy by epoch: {[round(m['validation_accuracy'], 3) for m in final.history.values()]}")
    return final


if __name__ == "__main__":
    main()
