"""Supervised training of one dense layer against the seed's trainer, Axon.Loop v0.5.0.

Batch losses, the running metric, and the parameters after each epoch are the seed's. Three things differ by design:

- The seed's metric "loss" reads the state one step late and is never reset between epochs (B5, B6). Telic's is the
  exact mean of its epoch; the running mean over the whole run, which the seed keeps in its state, is compared.
- The seed's accumulation commits the last microbatch's gradient divided by k (B2; the golden file's note speaks of a
  mean, its numbers do not show one: `test_the_seed_s_accumulation_drops_gradients`). Telic commits the window's mean.
- The seed carries a short window over to the next epoch. Telic does so in a run of steps, and commits it at the end of
  each epoch in a run of epochs (B60).
"""

from typing import Any

import numpy as np
import optax
import pytest

import telic
from tests.golden import cases, load

RTOL, ATOL = 1e-5, 1e-6
"""The golden file's own tolerance, for float32."""

CASES = cases("axon_trainer")
ACCUMULATED = [
    pytest.param(case, k, id=f"{case['name']}-{k}")
    for case in load("axon_trainer")["cases"]
    for k in case["config"]["accumulation"]
    if k > 1
]


def dense(key: Any, inputs: Any) -> Any:
    return {"kernel": np.zeros((inputs.shape[-1], 1), np.float32), "bias": np.zeros(1, np.float32)}


MODEL = (dense, lambda params, inputs: inputs @ params["kernel"] + params["bias"])


def start(case: dict[str, Any]) -> dict[str, Any]:
    return {"params": {name: case["in"][name].astype(np.float32) for name in ("kernel", "bias")}}


def batches(case: dict[str, Any]) -> list[Any]:
    x, y = (case["in"][name].astype(np.float32) for name in ("x", "y"))
    return list(zip(x, y, strict=True))


def loop_of(case: dict[str, Any], **options: Any) -> telic.Loop:
    optimizer = optax.sgd(case["config"]["lr"])
    loop = telic.trainer(MODEL, "mean_squared_error", optimizer, log=0, **options)
    return loop.metric("mean_absolute_error", "mae")


def by_hand(case: dict[str, Any], k: int, *, rule: str, flush: bool) -> list[dict[str, np.ndarray]]:
    """Give the parameters after each epoch, in float64: windows of k batches under the seed's rule or the mean."""
    kernel, bias = case["in"]["kernel"].copy(), case["in"]["bias"].copy()
    window: list[tuple[np.ndarray, np.ndarray]] = []
    epochs = []

    def commit() -> None:
        nonlocal kernel, bias
        lr = case["config"]["lr"]
        grads = (
            [np.mean(g, axis=0) for g in zip(*window, strict=True)] if rule == "mean" else [g / k for g in window[-1]]
        )
        kernel, bias = kernel - lr * grads[0], bias - lr * grads[1]
        window.clear()

    for _ in range(case["config"]["epochs"]):
        for x, y in zip(case["in"]["x"], case["in"]["y"], strict=True):
            error = x @ kernel + bias - y
            window.append((2 * x.T @ error / error.size, 2 * error.sum(0) / error.size))
            if len(window) == k:
                commit()
        if flush and window:
            commit()
        epochs.append({"kernel": kernel, "bias": bias})
    return epochs


@pytest.mark.parametrize("scale", [None, "static"])
@pytest.mark.parametrize("case", CASES)
def test_training_follows_the_seed(case: dict[str, Any], scale: str | None) -> None:
    """B4, B5, B6: a wrong gradient, a loss read late or kept over epochs, a loss scale that changes the numbers."""
    expected = case["out"]["accumulation_1" if scale is None else "static_scale_default"]
    params: list[Any] = []
    losses: list[float] = []
    maes: list[float] = []
    loop = loop_of(case, loss_scale=scale).metric(lambda loss: loss, "batch_loss", reads="loss", reduce="last")
    loop.handle_event("iteration_completed", lambda s: losses.append(s.metrics["batch_loss"]))
    loop.handle_event("iteration_completed", lambda s: maes.append(s.metrics["mae"]))
    loop.handle_event("epoch_completed", lambda s: params.append(s.keep().step_state.params["params"]))
    final = loop.run(batches(case), epochs=case["config"]["epochs"], state=start(case))
    for epoch, found in enumerate(params):
        np.testing.assert_allclose(found["kernel"], expected["kernel"][epoch], RTOL, ATOL)
        np.testing.assert_allclose(found["bias"], expected["bias"][epoch], RTOL, ATOL)
    np.testing.assert_allclose(maes, expected["mae"].ravel(), RTOL, ATOL)
    running = np.cumsum(losses) / np.arange(1, len(losses) + 1)
    np.testing.assert_allclose(running, expected["step_state_loss"].ravel(), RTOL, ATOL)
    # The batches are of one size, so an epoch's mean is the mean of its batches.
    count = len(case["in"]["x"])
    for epoch, values in final.history.items():
        np.testing.assert_allclose(values["loss"], np.mean(losses[epoch * count : (epoch + 1) * count]), RTOL, ATOL)
        np.testing.assert_allclose(values["mae"], expected["final_metrics"][str(epoch)]["mae"], RTOL, ATOL)


@pytest.mark.parametrize(("case", "k"), ACCUMULATED)
def test_the_seed_s_accumulation_drops_gradients(case: dict[str, Any], k: int) -> None:
    """B2: shows which rule the golden numbers follow, with the code that the next tests compare Telic with."""
    expected = case["out"][f"accumulation_{k}"]
    for epoch, found in enumerate(by_hand(case, k, rule="last over k", flush=False)):
        np.testing.assert_allclose(found["kernel"], expected["kernel"][epoch], RTOL, ATOL)
        np.testing.assert_allclose(found["bias"], expected["bias"][epoch], RTOL, ATOL)


@pytest.mark.parametrize(("case", "k"), ACCUMULATED)
def test_steps_carry_a_short_window_over_as_the_seed_does(case: dict[str, Any], k: int) -> None:
    """B2: the window's mean gradient, over one stream in which windows cross the ends of the data."""
    data = batches(case)
    expected = by_hand(case, k, rule="mean", flush=False)[-1]
    steps = case["config"]["epochs"] * len(data) // k
    final = loop_of(case, accumulate=k).run(data, steps=steps, state=start(case))
    found = final.step_state.params["params"]
    np.testing.assert_allclose(found["kernel"], expected["kernel"], RTOL, ATOL)
    np.testing.assert_allclose(found["bias"], expected["bias"], RTOL, ATOL)
    assert int(final.step_state.updates) == steps


@pytest.mark.parametrize(("case", "k"), ACCUMULATED)
def test_epochs_commit_a_short_window_with_its_own_mass(case: dict[str, Any], k: int) -> None:
    """B60: a window that is dropped at the end, carried over, or divided by k instead of what it holds."""
    expected = by_hand(case, k, rule="mean", flush=True)[-1]
    final = loop_of(case, accumulate=k).run(batches(case), epochs=case["config"]["epochs"], state=start(case))
    found = final.step_state.params["params"]
    np.testing.assert_allclose(found["kernel"], expected["kernel"], RTOL, ATOL)
    np.testing.assert_allclose(found["bias"], expected["bias"], RTOL, ATOL)
    per_epoch = -(-len(case["in"]["x"]) // k)
    assert final.steps == int(final.step_state.updates) == per_epoch * case["config"]["epochs"]
