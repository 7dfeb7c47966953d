"""Training in float16 with a dynamic loss scale learns what float32 learns."""

from typing import Any

import flax.linen as nn
import numpy as np
import pytest

import telic
from telic.data import columns, digits_split
from telic.precision import Dynamic


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def accuracy(seed: int, **options: Any) -> tuple[float, Any]:
    """Train on the digits and give the accuracy in percent on those held out, and the final state."""
    objective = telic.supervised(Dense(), "softmax_cross_entropy")
    trainer = telic.Trainer(objective, telic.optimizers.adam(3e-3), key=seed, **options)
    state = trainer.fit(columns(digits_split("train", flat=True), batch=100, seed=seed), epochs=8, log_every=0)
    values = trainer.evaluate([digits_split("test", flat=True)], state=state, metrics=["accuracy"])
    return 100 * float(values["accuracy"]), state


@pytest.mark.slow
def test_float16_reaches_the_accuracy_of_float32() -> None:
    """Gradients that underflow or overflow in float16, or a scale that is never taken out of them.

    On 2,000 digits one run lies about 0.4 points from the next of the same precision, so means of several are compared.
    """
    exact, half = [], []
    for seed in range(6):
        exact.append(accuracy(seed)[0])
        found, state = accuracy(seed, precision="float16", loss_scale=Dynamic(2.0**24, period=100))
        half.append(found)
        # The scale began too high on purpose: it was lowered by rejected attempts, and grew again.
        assert int(state.rejections.total) > 0
        assert int(state.updates) + int(state.rejections.total) == int(state.attempts)
        assert float(state.loss_scale.value) < 2.0**24
    assert min(exact) > 92
    assert abs(np.mean(exact) - np.mean(half)) <= 0.5, (exact, half)
