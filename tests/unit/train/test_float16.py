"""Training in float16 with a dynamic loss scale learns what float32 learns."""

from typing import Any

import flax.linen as nn
import pytest

import telic
from telic.data import columns, digits_split
from telic.precision import Dynamic


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def accuracy(**options: Any) -> tuple[float, Any]:
    """Train on the digits and give the accuracy in percent on those held out, and the final state."""
    objective = telic.supervised(Dense(), "softmax_cross_entropy")
    trainer = telic.Trainer(objective, telic.optimizers.adam(3e-3), key=0, **options)
    state = trainer.fit(columns(digits_split("train", flat=True), batch=100), epochs=8, log_every=0)
    values = trainer.evaluate([digits_split("test", flat=True)], state=state, metrics=["accuracy"])
    return 100 * float(values["accuracy"]), state


@pytest.mark.slow
def test_float16_reaches_the_accuracy_of_float32() -> None:
    """Gradients that underflow or overflow in float16, or a scale that is never taken out of them."""
    exact, _ = accuracy()
    scale = Dynamic(2.0**24, period=100)
    half, state = accuracy(precision="float16", loss_scale=scale)
    assert exact > 92
    assert abs(exact - half) <= 0.5
    # The scale began too high on purpose: it was lowered by rejected attempts, and grew again.
    assert int(state.rejections.total) > 0
    assert int(state.updates) + int(state.rejections.total) == int(state.attempts)
    assert float(state.loss_scale.value) < 2.0**24
