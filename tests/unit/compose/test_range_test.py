"""The learning-rate range test: the ramp, the suggestion, the end at divergence, and that it trains real digits."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic import optimizers
from telic.compose.range_test import suggested
from telic.errors import ContractError

# One weight on a quadratic: gradient descent is stable up to the rate 2 / curvature.
CURVATURE = 8.0
MODEL = (lambda key, x: {"w": jnp.zeros(())}, lambda params, x: params["w"] * x)
BATCH = (np.full(4, math.sqrt(CURVATURE / 2), np.float32), np.full(4, 3.0, np.float32))


def found(optimizer: Any = "sgd", **options: Any) -> Any:
    return telic.find_learning_rate(
        MODEL, "mean_squared_error", optimizer, **{"data": [BATCH], "low": 1e-4, "high": 10.0, "steps": 60, **options}
    )


def test_the_rate_grows_by_one_factor_and_each_loss_belongs_to_its_rate() -> None:
    """Catches a linear ramp, and losses moved by a step: the curve of gradient descent is known by hand."""
    # Below the rate 2 / curvature, where rounding shrinks as the error does.
    result = found(high=0.05)
    assert result.rates[0] == pytest.approx(1e-4)
    ratios = np.diff(np.log(result.rates))
    np.testing.assert_allclose(ratios, math.log(500) / 59, rtol=1e-6)
    w, expected = 0.0, []
    x, y = float(BATCH[0][0]), 3.0
    for rate in result.rates:
        expected.append((w * x - y) ** 2)
        w -= rate * 2 * (w * x - y) * x
    np.testing.assert_allclose(result.losses, expected, rtol=1e-4, atol=1e-6)


def test_it_stops_where_the_loss_runs_away_and_suggests_less() -> None:
    """Catches a test that goes on to the highest rate, and a suggestion beyond the stable rates."""
    result = found()
    assert result.diverged
    assert len(result.rates) < 60
    assert 1e-3 < result.suggestion < 2 / CURVATURE
    assert "ran away" in str(result)
    assert f"{result.suggestion:.3g}" in str(result)
    calm = found(high=1e-2)
    assert not calm.diverged
    assert len(calm.rates) == 60
    assert calm.rates[-1] == pytest.approx(1e-2)


def test_a_loss_that_is_not_finite_ends_it() -> None:
    """Catches a NaN that becomes the smallest loss, or an error instead of a result."""

    def fails(targets: Any, prediction: Any) -> Any:
        # Where the weight has moved by much, the loss is NaN.
        return jnp.square(targets - prediction) + jnp.log(1.5 - prediction)

    result = telic.find_learning_rate(MODEL, fails, "sgd", data=[BATCH], low=1e-4, high=10.0, steps=60)
    assert result.diverged
    assert all(map(math.isfinite, result.losses))
    assert len(result.rates) < 60


def test_a_loss_that_never_falls_gives_no_suggestion() -> None:
    """Catches the argmin of a flat curve sold as a rate."""
    assert suggested([0.1, 0.2, 0.4, 0.8], [1.0, 1.1, 1.5, 2.0]) is None
    assert suggested([], []) is None
    result = found(data=[(BATCH[0], np.zeros(4, np.float32))])
    assert result.suggestion is None
    assert "no suggestion" in str(result)


def test_the_steepest_descent_is_suggested() -> None:
    """Catches a slope taken against the step of a curve that was cut, or searched beyond the minimum."""
    rates = [10.0**i for i in range(-5, 2)]
    assert suggested(rates, [5.0, 5.0, 4.5, 2.0, 1.0, 0.9, 50.0]) == pytest.approx(1e-2)


@pytest.mark.slow
def test_it_trains_real_digits() -> None:
    """Catches a suggestion that is one in name only: a hundredth of it learns less in the same time."""
    data = telic.data.columns(telic.data.digits_split("train", flat=True), batch=64)
    test = telic.data.digits_split("test", flat=True)

    def init(key: Any, x: Any) -> Any:
        return {"w": 0.01 * jax.random.normal(key, (x.shape[-1], 10)), "b": jnp.zeros(10)}

    model = (init, lambda params, x: x @ params["w"] + params["b"])
    result = telic.find_learning_rate(model, "softmax_cross_entropy", "sgd", data=data, steps=100)
    assert 0.01 < result.suggestion < 5

    def accuracy(rate: float) -> float:
        loop = telic.trainer(model, "softmax_cross_entropy", optimizers.sgd(learning_rate=rate), log=0)
        loop.metric("accuracy").validate([(test["inputs"], test["targets"])])
        return loop.run(data).history[0]["validation_accuracy"]

    good = accuracy(result.suggestion)
    assert good > 0.8
    assert good > accuracy(result.suggestion / 100) + 0.05


def test_an_objective_and_the_options_of_a_trainer() -> None:
    """Catches options that are swallowed, and windows whose ramp goes by batches instead of updates."""
    objective = telic.supervised(MODEL, "mean_squared_error")
    result = telic.find_learning_rate(objective, data=[BATCH], optimizer="sgd", steps=10, high=0.01, accumulate=2)
    assert len(result.rates) == 10
    assert result.rates[-1] == pytest.approx(0.01)
    with pytest.raises(TypeError, match="leave loss out"):
        telic.find_learning_rate(objective, "mean_squared_error", data=[BATCH])
    with pytest.raises(TypeError, match="Did you mean 'accumulate'"):
        found(acumulate=2)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"low": 1.0, "high": 0.1}, ValueError, "0 < low < high"),
        ({"low": 0.0}, ValueError, "0 < low < high"),
        ({"steps": 3}, ValueError, "at least 10"),
        ({"smoothing": 1.0}, ValueError, "smoothing"),
        ({"divergence": 1.0}, ValueError, "divergence"),
        ({"optimizer": optax.sgd(0.1)}, ContractError, "names no learning_rate"),
        ({"optimizer": optimizers.sgd(optax.constant_schedule(0.1))}, ContractError, "follows a schedule"),
    ],
)
def test_what_makes_no_ramp_is_refused(options: dict[str, Any], error: Any, match: str) -> None:
    """Catches a ramp that sets nothing, so that every rate looks alike."""
    with pytest.raises(error, match=match):
        found(**options)


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    """Catches a picture that is not written, or a half-written one."""
    found(steps=20).plot(tmp_path / "new" / "rates.png")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["rates.png"]
    assert (tmp_path / "new" / "rates.png").read_bytes().startswith(b"\x89PNG")
