"""Numbers that are told: whose they are, of which moment, and how often they were divided."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic.contract import Aux, Objective
from telic.errors import ContractError
from tests.faults.small import MODEL, batches, trainer
from tests.unit.train.tiny import Own, Tiny, batch_of, step_of


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


class Fixed(Objective):
    """A loss of 8 whatever the weights, and a gradient of 10; it reports what it is asked to."""

    def __init__(self, **metrics: Any):
        self.metrics = metrics

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.zeros(())}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        w = variables["params"]["w"]
        return telic.Mean(8.0 + 10 * (w - jax.lax.stop_gradient(w)), 1.0), Aux(metrics=dict(self.metrics))


@pytest.mark.parametrize("k", [1, 4])
def test_a_loss_is_not_divided_by_the_windows_size(k: int, tmp_path: Path) -> None:
    """XS128: a loss that is divided by k once more when it is logged."""
    rate = telic.optimizers.sgd(0.0)
    loop = telic.Trainer(Fixed(), rate, key=0, accumulate=k).loop(log=0).record(tmp_path, interval=2)
    final = loop.run(batches(8), epochs=1)
    assert final.history == {0: {"loss": 8.0}}
    assert {line["metrics"]["loss"] for line in lines(tmp_path)} == {8.0}


def test_the_gradient_s_norm_is_that_before_clipping(tmp_path: Path) -> None:
    """XS127: a norm of which nobody knows whether it was clipped; XS179: a clip that does nothing where k is 1."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    loop = telic.Trainer(Fixed(), optimizer, key=0).loop(log=0).record(tmp_path, interval=1, gradient_norm=True)
    final = loop.run(batches(2), epochs=1)
    assert [line["training"]["gradient_norm"] for line in lines(tmp_path)[:2]] == [10.0, 10.0]
    assert float(final.step_state.variables["params"]["w"]) == pytest.approx(-2.0)


def test_one_by_one_and_all_at_once_are_logged_alike(tmp_path: Path) -> None:
    """XS122: a loss and a norm of the gradient that are k times too large where a batch comes in k microbatches."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 1, 1)).astype(np.float32)
    singles = [(one, 3 * one) for one in x]
    wholes = [(x[i : i + 8, 0], 3 * x[i : i + 8, 0]) for i in (0, 8)]
    said: list[Any] = []
    for k, data in ((8, singles), (1, wholes)):
        place = tmp_path / str(k)
        loop = trainer(optimizer="sgd", accumulate=k).loop(log=0).record(place, interval=k, gradient_norm=True)
        loop.run(data, epochs=1)
        said.append([(line["metrics"]["loss"], line["training"].get("gradient_norm", 0)) for line in lines(place)])
    np.testing.assert_allclose(said[0], said[1], rtol=1e-5)


def test_slices_have_the_norm_of_their_batch_and_replays_have_none() -> None:
    """XS122: the mean of the slices' norms given for the batch's, and 0 where a replay is yet to give the gradient."""
    batch = batch_of(0, 8, masses=1.0)
    whole, sliced = (step_of(Tiny("mean"), microbatch=size) for size in (None, 4))
    start = whole.init(batch)
    norms = [
        jax.jit(lambda s, step=step: step.step(s, batch).outputs["gradient_norm"])(start) for step in (whole, sliced)
    ]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
    replayed = step_of(Own("own"), accumulate=2)
    outputs = jax.eval_shape(lambda: replayed.step(replayed.init(batch), batch).outputs)
    assert "gradient_norm" not in outputs


def test_compiling_is_not_the_first_line_s_speed(tmp_path: Path) -> None:
    """XS126: a first tick whose throughput has the compilation in it."""
    trainer().loop(log=0).record(tmp_path, interval=1).run(batches(3), epochs=1)
    first = lines(tmp_path)[0]["speed"]
    assert first["seconds"]["compile"] > 0
    spent = sum(first["seconds"].get(part, 0.0) for part in telic_parts())
    assert first["batches_per_second"] == pytest.approx(1 / spent, rel=0.01)


def telic_parts() -> tuple[str, ...]:
    from telic.profiling import STEP_PARTS

    assert "compile" not in STEP_PARTS
    return STEP_PARTS


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "learning_rate", "rejected", "updates"])
def test_names_of_the_trainer_s_own_are_refused(name: str) -> None:
    """XS073: a metric of an objective that takes the place of the trainer's own value."""
    with pytest.raises(ContractError, match="a name the trainer reports itself"):
        telic.Trainer(Fixed(**{name: 1.0}), "sgd", key=0).loop(log=0).run(batches(1))


def test_each_call_of_a_step_gives_its_own_loss() -> None:
    """XS070: a call on one batch that gives the running average over the calls before."""
    rows = np.ones((4, 1), np.float32)
    step = telic.eval_step(MODEL, "mean_squared_error")
    variables = {"params": {"w": np.zeros((1, 1), np.float32)}}
    state = jax.tree.map(jnp.asarray, variables)
    for size in (2.0, 1.0):
        result = step.step(state, (rows, size * rows))
        assert float(result.outputs["loss"]) == size**2
        state = result.state


def test_an_objective_is_told_the_moment_by_its_step() -> None:
    """XS092: a counter of the objective's own that stands still once the step is compiled."""

    class Told(Fixed):
        def loss(self, variables: Any, batch: Any, step: Any) -> Any:
            mean, _ = super().loss(variables, batch, step)
            return mean, Aux(metrics={"step_of": step.step, "updates_of": step.updates})

    seen: list[tuple[float, float]] = []
    loop = telic.Trainer(Told(), "sgd", key=0, accumulate=2).loop(log=0)
    loop.metric(lambda m: m["step_of"], "now", reads="metrics", reduce="last")
    loop.metric(lambda m: m["updates_of"], "closed", reads="metrics", reduce="last")
    loop.handle_event("iteration_completed", lambda s: seen.append((s.metrics["now"], s.metrics["closed"])))
    loop.run(batches(5), epochs=1)
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
