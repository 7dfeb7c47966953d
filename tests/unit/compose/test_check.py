"""`Trainer.check`: what it finds before a run is left alone, and that it leaves nothing behind."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.compose.check import CheckReport

MODEL = (
    lambda key, x: {"w": jax.random.normal(key, (x.shape[-1], 3))},
    lambda params, x: x @ params["w"],
)


def columns(**options: Any) -> telic.data.Dataset:
    random = np.random.default_rng(0)
    inputs = random.normal(size=(40, 4)).astype(np.float32)
    data = {"inputs": inputs, "targets": inputs[:, :3].argmax(-1).astype(np.int32)}
    return telic.data.columns(data, batch=8, **options)


def trainer(objective: Any = None, **options: Any) -> telic.Trainer:
    made = telic.supervised(MODEL, "softmax_cross_entropy") if objective is None else objective
    return telic.Trainer(made, "adam", **{"key": 0, **options})


def test_a_good_run_is_told_part_by_part() -> None:
    """Catches a part that is not tried, or a report that cannot be printed."""
    report = trainer().check(columns(held_out=8), metrics=["accuracy"])
    assert isinstance(report, str)
    assert report.ok
    assert report.failures == ()
    for part in (
        "inputs float32[8, 4]",
        "loss, accuracy",
        "12 trainable parameters",
        "an update committed",
        "of one batch of val: accuracy",
        "arrays are equal",
        "parameters",
        "compiled step, scratch",
        "all is well",
    ):
        assert part in report
    # Four bytes for each of 12 weights, twice that and a count and two scalars for Adam.
    rows = {line.rsplit(maxsplit=2)[0].strip(): line.rsplit(maxsplit=2)[1:] for line in report.splitlines()}
    assert rows["parameters"] == ["48", "B"]
    assert rows["batch"] == ["160", "B"]


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"microbatch": 4}, {"loss_scale": "dynamic"}])
def test_windows_slices_and_scales_are_tried_too(options: dict[str, Any]) -> None:
    """Catches a check that only knows the plain step."""
    assert trainer(**options).check(columns()).failures == ()


def test_without_validation_data_it_says_what_it_evaluated() -> None:
    """Catches a report that claims a validation nobody has data for."""
    batches = [(np.ones((4, 4), np.float32), np.zeros(4, np.int32))]
    assert "as there is no val" in trainer().check(batches)


def test_it_leaves_no_trace(tmp_path: Any) -> None:
    """Catches a key that is used up, an objective that is bound, a checkpoint that a later run goes on from."""
    data = columns()
    folder = tmp_path / "run"
    checked = trainer(checkpoints=telic.Checkpoints(folder))
    before = dict(vars(checked))
    held = dict(vars(checked.objective))
    assert checked.check(data).ok
    # Where its batches live is found out once.
    assert {name: value for name, value in vars(checked).items() if name != "_placement"} == before
    assert vars(checked.objective) == held
    assert not folder.exists()
    plain = trainer().fit(data, steps=3, log_every=0)
    after = trainer()
    after.check(data)
    for a, b in zip(
        jax.tree.leaves(after.fit(data, steps=3, log_every=0).variables), jax.tree.leaves(plain.variables), strict=True
    ):
        np.testing.assert_array_equal(a, b)


class Broken(telic.Objective):
    """An objective whose validation fails where its training does not."""

    def init(self, key: Any, variables: Any = None) -> Any:
        return {"params": {"w": jnp.ones(3)}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        if not step.train:
            raise RuntimeError("no such table")
        return telic.Mean.of((batch @ variables["params"]["w"]) ** 2), telic.Aux()


@pytest.mark.parametrize(
    ("make", "data", "options", "match"),
    [
        (trainer, [(np.full((4, 4), np.nan, np.float32), np.zeros(4, np.int32))], {}, "rejected; not finite: loss"),
        (trainer, [(np.ones((4, 4), np.float32), np.zeros(4, np.int32))], {"metrics": ["acc"]}, "unknown metric 'acc'"),
        (trainer, [], {}, "data .*FAILED"),
        (trainer, iter([np.float32(1)]), {}, "an iterator would lose its first batch"),
        (trainer, [{"inputs": np.ones((4, 4), np.float32)}], {}, "step .*FAILED"),
        (
            trainer,
            [(np.ones((2, 4), np.float32), np.zeros(2, np.int32), np.zeros(2, np.float32))],
            {},
            "has no mass",
        ),
        (lambda: trainer(Broken()), [np.ones((2, 3), np.float32)], {}, "validation .*no such table"),
        (
            trainer,
            [(np.ones((4, 4), np.float32), np.zeros(4, np.int32))],
            {"metrics": [telic.metrics.FunctionMetric(lambda t, p: jnp.nan * p.sum(-1), "broken")]},
            "not finite: broken",
        ),
    ],
)
def test_what_fails_is_in_the_report_and_raises_nothing(make: Any, data: Any, options: Any, match: str) -> None:
    """Catches a failure that ends the check, or one that is called well."""
    report = make().check(data, **options)
    assert isinstance(report, CheckReport)
    assert not report.ok
    assert re.search(match, report.failures[0])
    assert report.endswith("failed")


def test_an_iterator_keeps_its_first_batch() -> None:
    """Catches a check that reads from a stream which the run is given next."""
    stream = iter([1, 2])
    trainer().check(stream)
    assert next(stream) == 1
