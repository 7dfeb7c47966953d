"""check_objective: good objectives pass, each wrong one fails the check that is for it."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.contract import Aux, Step
from telic.mean import Mean
from telic.testing import ObjectiveFault, check_objective
from tests.unit.train.tiny import Contrast, Own, Tiny, batch_of

BATCH = batch_of(0, 8, masses=np.arange(8) % 3 + 1)


def verdicts(objective: Any, batch: Any = BATCH) -> dict[str, str]:
    return {c.name: c.verdict for c in check_objective(objective, batch).checks}


@pytest.mark.parametrize(
    "objective",
    [Tiny("mean"), Own("own"), *(pytest.param(o, marks=pytest.mark.slow) for o in (Tiny("terms"), Contrast("rows")))],
    ids=lambda o: o.kind,
)
def test_good_objectives_pass(objective: Any) -> None:
    report = check_objective(objective, BATCH)
    assert report.check() is report
    assert (report.ok, report.exit_code) == (True, 0)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x)).sum(-1)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        return nn.Dropout(0.5, deterministic=not train)(nn.Dense(3)(x)).sum(-1)


def test_batch_statistics_are_a_note() -> None:
    """BatchNorm is no fault: the statistics double when the batch is doubled, and no split leaves them equal."""
    report = check_objective(telic.supervised(Normed(), "mean_squared_error"), (BATCH["x"], BATCH["y"]))
    assert report.ok, str(report)
    found = {c.name: c for c in report.checks}["splits"]
    assert found.verdict == "note"
    assert "BatchNorm" in found.detail


def test_dropout_is_compared_in_inference() -> None:
    report = check_objective(telic.supervised(Dropped(), "mean_squared_error"), (BATCH["x"], BATCH["y"]))
    assert report.ok, str(report)
    assert "in inference" in {c.name: c.detail for c in report.checks}["splits"]


class InBatch(Tiny):
    """InfoNCE within a batch, as a Mean over its rows."""

    def statistics(self, params: Any, batch: Any, out: Any, error: Any) -> Any:
        logits = out[:, None] * batch["y"][None]
        losses = -jax.nn.log_softmax(logits)[jnp.arange(len(out)), jnp.arange(len(out))]
        return Mean.of(losses)


def test_in_batch_losses_are_a_note() -> None:
    report = check_objective(InBatch(""), BATCH)
    assert report.ok, str(report)
    assert "in-batch" in {c.name: c.detail for c in report.checks}["splits"]


class Wrong(Tiny):
    """An objective that is wrong in the way its kind says."""

    def __init__(self, kind: str):
        super().__init__(kind)
        self.weights = jnp.arange(4.0)
        self.calls = 0.0
        self.last: Any = None

    def init(self, key: Any, variables: Any = None) -> Any:
        return {**super().init(key, variables), "c": {"n": jnp.zeros(())}}

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        params, m = variables["params"], batch["m"]
        out = batch["x"] @ params["w"] + params["b"][0]
        error = (out - batch["y"]) ** 2
        fit = Mean((error * m).sum(), m.sum())
        match self.kind:
            case "own statistics without reduce_loss":
                return {"total": fit.total, "mass": fit.mass}
            case "parameters in Aux":
                return fit, Aux(variables={"params": params})
            case "average for a total":
                return Mean(error.mean(), error.size)
            case "masked average":
                return Mean((error * m).sum() / m.sum(), 1.0)
            case "mass of predictions":
                keep = (error < 1).astype(jnp.float32)
                return Mean((error * keep).sum(), keep.sum())
            case "negative mass":
                return Mean(-fit.total, -fit.mass)
            case "counts its calls":
                self.calls += 1
                return fit + self.calls
            case "keeps a traced value":
                self.last = error
                return fit
            case "global randomness":
                return fit + np.random.default_rng().normal()
            case "reads its own array":
                return fit + (self.weights * params["b"]).sum()
            case "divides by the mass":
                return Mean((error * m / m.sum()).sum() * m.sum(), m.sum())
            case "hides NaN":
                clean = jax.tree.map(jnp.nan_to_num, params)
                return Mean.of((batch["x"] @ clean["w"] + clean["b"][0] - batch["y"]) ** 2)
            case "moves in evaluation":
                return fit, Aux(variables={"c": {"n": variables["c"]["n"] + 1}})
            case _:
                raise AssertionError(self.kind)


def second(*values: str) -> Any:
    """Give a second fault of a check: one of each is enough for a quick run."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("own statistics without reduce_loss", "contract"),
        second("parameters in Aux", "contract"),
        ("average for a total", "splits"),
        second("masked average", "splits"),
        ("mass of predictions", "masses"),
        second("negative mass", "masses"),
        ("counts its calls", "purity"),
        second("keeps a traced value", "purity"),
        second("global randomness", "purity"),
        ("reads its own array", "captures"),
        ("divides by the mass", "zero mass"),
        ("hides NaN", "rejection"),
        ("moves in evaluation", "evaluation"),
    ],
)
def test_wrong_objectives_fail_their_check(kind: str, check: str) -> None:
    report = check_objective(Wrong(kind), BATCH)
    assert check in report.failed, str(report)
    # A fault that drowned the report in others would be hard to find.
    assert len(report.failed) <= (1 if check in ("contract", "splits", "captures", "evaluation", "rejection") else 3)
    assert not report.ok
    assert report.exit_code == 1
    with pytest.raises(ObjectiveFault, match=f"Wrong breaks its contract: .*{check}"):
        report.check()
