"""End to end on real digits: a convolutional network, trained, evaluated and used, in one page."""

import numpy as np
from flax import linen as nn

import telic
from telic.data import columns, digits_split


class Reader(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(x)


def main() -> float:
    """Train for four epochs and give the accuracy on the test digits."""
    data = columns(digits_split("train"), batch=64, seed=0)
    inputs, targets = digits_split("test").values()
    batches = [(inputs[i : i + 500], targets[i : i + 500]) for i in range(0, len(inputs), 500)]

    trainer = telic.Trainer(telic.supervised(Reader(), "softmax_cross_entropy"), telic.optimizers.adam(2e-3), key=0)
    state = trainer.fit(data, epochs=4)
    scores = trainer.evaluate(batches, state=state, metrics=["accuracy"])
    print(f"test accuracy {scores['accuracy']:.4f}, test loss {scores['loss']:.4f}")

    logits = Reader().apply({"params": state.variables["params"]}, inputs[:10])
    print("read as", np.argmax(logits, axis=-1), "are", targets[:10])
    return scores["accuracy"]


if __name__ == "__main__":
    main()
