"""Evaluation with artifacts: pooled once, keyed alike, shown once per event, refused before training where possible."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic import metrics
from telic.artifacts import ImageGrid, Representations, Scalars, TextSamples, TokenScores
from telic.data import Dataset
from telic.errors import ContractError, DataError


class Line(telic.Objective):
    """w moves towards 1; the loss of a row is (w - x)², and evaluation shows what the rows are."""

    def __init__(self, evaluate: Callable[..., Any] | None = None):
        if evaluate is not None:
            self.evaluate = evaluate  # type: ignore[method-assign]

    def init(self, key: Any, variables: Any = None) -> Any:
        del key, variables
        return {"params": {"w": jnp.zeros(())}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        del step
        return telic.Mean.of((variables["params"]["w"] - batch["x"]) ** 2)


def rows(values: Any, batch: int = 16) -> list[Any]:
    x = np.asarray(values, np.float32)
    return [{"x": x[i : i + batch]} for i in range(0, len(x), batch)]


ONES = rows(np.ones(8), 4)


def trainer(objective: Any, **options: Any) -> telic.Trainer:
    return telic.Trainer(objective, optax.sgd(0.1), key=0, **options)


def at(w: float) -> Any:
    return {"params": {"w": jnp.float32(w)}}


def represent(variables: Any, batch: Any, step: Any) -> Any:
    del step
    x = batch["x"]
    return Representations(jnp.stack([x, x * variables["params"]["w"]], 1), (x > 2).astype(jnp.int32))


# -- pooled once ------------------------------------------------------------------------------------------------------


class Scalar(Line):
    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        del step
        return (variables["params"]["w"] - batch["x"]).mean()


def test_two_validation_losses_that_are_easily_wrong() -> None:
    """The two of reference/objectives.md 2.10: a scalar loss summed over the batches, 7.0, and a last batch padded with
    its last row, 2.60.
    """
    four = rows(np.repeat([1.0, 1.0, 2.0, 3.0], 4), 4)
    assert trainer(Scalar()).evaluate(four, state=at(0.0))["loss"] == pytest.approx(-1.75)
    losses = np.array([1.0] * 49 + [3.0] * 20 + [9.0])
    assert trainer(Line()).evaluate(rows(np.sqrt(losses)), state=at(0.0))["loss"] == pytest.approx(1.686, abs=5e-4)
    whole = trainer(Line()).evaluate(rows(np.sqrt(losses), 70), state=at(0.0))["loss"]
    assert whole == pytest.approx(118 / 70, rel=1e-6)


def score(variables: Any, batch: Any, step: Any) -> Any:
    del step
    x = batch["x"]
    big = jnp.where(x > 59, 1.0, 0.0)
    return Scalars({"x": telic.Mean.of(x), "big": telic.Mean.of(big), "rows": jnp.float32(x.shape[0])})


def test_every_record_counts_once() -> None:
    """objectives.md 46: a smaller last batch, 6 of 70 records, that counts as one batch of five."""
    values = trainer(Line(score)).evaluate(rows(np.arange(70)), state=at(0.0))
    assert values["x"] == pytest.approx(34.5)
    assert values["big"] == pytest.approx(10 / 70)
    assert values["rows"] == pytest.approx((4 * 16 * 16 + 6 * 6) / 70)
    assert trainer(Line(score)).evaluate(rows(np.arange(5)), state=at(0.0))["x"] == pytest.approx(2.0)


def test_a_metric_of_an_artifact_is_that_of_all_examples() -> None:
    """Catches perplexity as a mean of batches' perplexities, and a mask that is not read."""
    log_probs = -np.linspace(0.1, 4.0, 24).astype(np.float32).reshape(6, 4)
    log_probs[5, 3] = np.nan
    mask = np.ones((6, 4), np.float32)
    mask[0, 1:], mask[5, 3] = 0.5, 0.0
    correct, sizes = log_probs > -2, np.arange(24).reshape(6, 4) % 3

    def tokens(variables: Any, batch: Any, step: Any) -> Any:
        del variables, step
        b = {k: v for k, v in batch.items() if k != "x"}
        return TokenScores(b["l"], b["m"], b["c"], b["n"], jnp.exp(b["l"]))

    whole = {"x": np.zeros(6, np.float32), "l": log_probs, "m": mask, "c": correct, "n": sizes}
    split = [{k: v[i:j] for k, v in whole.items()} for i, j in ((0, 1), (1, 4), (4, 6))]
    asked = [
        metrics.perplexity(reads=TokenScores),
        metrics.token_accuracy(reads=TokenScores),
        metrics.expected_calibration_error("ece", reads=TokenScores),
        "bits_per_byte",
    ]
    values = trainer(Line(tokens)).evaluate(split, state=at(0.0), metrics=asked)
    nll = -np.where(mask > 0, log_probs, 0).astype(np.float64) * mask
    assert values["perplexity"] == pytest.approx(np.exp(nll.sum() / mask.sum()), rel=1e-5)
    assert values["token_accuracy"] == pytest.approx((correct * mask).sum() / mask.sum(), rel=1e-6)
    assert values["bits_per_byte"] == pytest.approx(nll.sum() / (sizes * mask).sum() / np.log(2), rel=1e-5)
    assert values == pytest.approx(trainer(Line(tokens)).evaluate([whole], state=at(0.0), metrics=asked), rel=1e-5)
    assert 0 < values["ece"] < 1


def test_an_absent_field_is_named() -> None:
    """Catches a token accuracy of None, told as a failure of jnp.asarray."""
    bare = trainer(Line(lambda v, b, s: TokenScores(b["x"])))
    with pytest.raises(ContractError, match=r"'token_accuracy' reads TokenScores.correct, which evaluate left out"):
        bare.evaluate(ONES, state=at(0.0), metrics=[metrics.token_accuracy(reads=TokenScores)])


def test_host_metrics_and_compiled_ones_together() -> None:
    """Catches a metric of all rows that is computed within each batch, or not at all beside one that is compiled."""
    data = rows(np.arange(1, 9), 3)
    found = trainer(Line(represent)).evaluate(
        data,
        state=at(2.0),
        metrics=["knn_accuracy", metrics.as_metric(lambda r: r.features[:, 0], "mean", reads=Representations)],
    )
    assert found["mean"] == pytest.approx(4.5)
    x = np.arange(1.0, 9.0)
    named = metrics.knn_labels(np.stack([x, 2 * x], 1), (x > 2).astype(int), None)
    assert found["knn_accuracy"] == pytest.approx(np.mean(named == (x > 2)))
    assert found["loss"] == pytest.approx(np.mean((2 - x) ** 2), rel=1e-6)


def test_a_metric_of_outputs_may_work_on_the_host() -> None:
    """Catches a host metric that is given nothing but artifacts, or tracers."""

    class Spread:
        name, mode, host, reads = "spread", None, True, ("batch.x",)

        def init(self, *args: Any) -> Any:
            return ()

        def update(self, acc: Any, *args: Any, weights: Any = None) -> Any:
            assert isinstance(args[0], np.ndarray)
            return (*acc, *args[0].tolist())

        def merge(self, a: Any, b: Any) -> Any:
            return (*a, *b)

        def compute(self, acc: Any) -> Any:
            return max(acc) - min(acc)

    assert trainer(Line()).evaluate(rows([3, 1, 7], 2), state=at(0.0), metrics=[Spread()])["spread"] == 6.0


# -- an evaluation that works on the host -----------------------------------------------------------------------------


def test_an_evaluation_on_the_host_gives_the_same() -> None:
    """Catches an evaluation in plain Python, as seed 004 has it, refused because it cannot be traced."""

    def plain(variables: Any, batch: Any, step: Any) -> Any:
        found = score(variables, batch, step), represent(variables, batch, step)
        assert float(np.asarray(batch["x"]).sum()) >= 0
        return (*found, TextSamples(None, [f"{x:.0f}" for x in np.asarray(batch["x"])]))

    def traced(variables: Any, batch: Any, step: Any) -> Any:
        return score(variables, batch, step), represent(variables, batch, step)

    asked = ["knn_accuracy", metrics.as_metric(lambda r: r.features[:, 1], "mean", reads=Representations)]
    values = [
        trainer(Line(evaluate)).evaluate(rows(np.arange(20), 8), state=at(2.0), metrics=asked)
        for evaluate in (plain, traced)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert set(values[0]) == {"loss", "x", "big", "rows", "knn_accuracy", "mean"}


def test_an_evaluator_does_without_an_evaluation_on_the_host() -> None:
    """Catches a loop of metrics that fails for an evaluation nobody asked it for."""
    plain = Line(lambda v, b, s: TextSamples(None, [f"{x:.0f}" for x in np.asarray(b["x"])]))
    assert telic.evaluator(plain, log=0).run(ONES, state=at(0.0)).metrics["loss"] == pytest.approx(1.0)


def test_a_scoring_on_the_host_is_reused() -> None:
    """Catches text that is made twice for the batch that is shown."""
    calls: list[int] = []

    def speak(variables: Any, batch: Any, step: Any) -> Any:
        made = TextSamples(None, [f"{x:.0f}" for x in np.asarray(batch["x"])])
        calls.append(1)
        return made

    sink = _Sink()
    trainer(Line(speak)).evaluate(rows([1, 2, 3], 2), state=at(0.0), preview=sink)
    assert len(calls) == 2
    assert sink.taken[0][1].completions == ("1", "2")


def test_a_loader_that_writes_its_memory_again() -> None:
    """Catches a preview of the last batch under the name of the first."""
    memory = {"x": np.zeros(2, np.float32)}

    def val() -> Any:
        for value in (1.0, 2.0, 3.0):
            memory["x"][:] = value
            yield memory

    shown = _Sink()
    objective = Line(lambda v, b, s: Representations(b["x"][:, None]))
    trainer(objective).loop(log=0).validate(val, preview=shown).run(ONES)
    assert shown.taken[0][1].features.tolist() == [[1.0], [1.0]]
    assert trainer(Line(score)).evaluate(val, state=at(0.0))["x"] == pytest.approx(2.0)


def test_an_error_of_an_evaluation_is_its_own() -> None:
    """objectives.md 50, XS140: an evaluation that fails on one host and is passed over."""

    def failing(variables: Any, batch: Any, step: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        trainer(Line(failing)).loop(log=0).validate(ONES).run(ONES)
    assert any("raised in the validation, batch 0" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError, match="mine"):
        trainer(Line(lambda v, b, s: (_ for _ in ()).throw(TypeError("mine")))).evaluate(ONES, state=at(0.0))


# -- weights, keys, cadence -------------------------------------------------------------------------------------------


def test_averaged_or_live_weights() -> None:
    """objectives.md 45, 48: evaluation of the live weights where the averaged ones were asked for."""
    objective = Line(lambda v, b, s: Scalars({"w": v["params"]["w"]}))
    objective.ema = telic.EMASpec(decay=0.5)
    run = trainer(objective)
    loop = run.loop(log=0).validate(ONES, name="live").validate(ONES, name="ema", averaged=True)
    final = loop.run(ONES, steps=2)
    values, state = final.metrics, final.step_state
    assert values["validation_live_w"] == pytest.approx(float(state.params["params"]["w"]), rel=1e-6)
    assert values["validation_ema_w"] == pytest.approx(float(state.averaged["params"]["w"]), rel=1e-6)
    assert values["validation_live_w"] > values["validation_ema_w"] > 0
    assert run.evaluate(ONES, state=final, averaged=True)["w"] == values["validation_ema_w"]


def test_keys_are_own_and_repeatable() -> None:
    """Catches draws that differ between two passes, are alike in all batches, or take a key from training."""
    draws: list[Any] = []

    class Drawing(Line):
        def evaluate(self, variables: Any, batch: Any, step: Any) -> Any:
            del variables
            assert not step.train
            return Representations(jax.random.normal(step.key, (batch["x"].shape[0], 2)))

        def preview(self, variables: Any, batch: Any, step: Any, *, scored: Any = None) -> Any:
            draws.append(jax.random.key_data(step.key).tolist())

    class Rows:
        name, mode, host, reads = "rows", None, True, Representations

        def init(self, *args: Any) -> Any:
            return ()

        def update(self, acc: Any, *args: Any, weights: Any = None) -> Any:
            return (*acc, args[0].features)

        def merge(self, a: Any, b: Any) -> Any:
            return (*a, *b)

        def compute(self, acc: Any) -> Any:
            return np.concatenate(acc)

    def run(*, validates: bool) -> tuple[Any, list[Any]]:
        loop, seen = trainer(Drawing()).loop(log=0), list[Any]()
        if validates:
            loop.validate(ONES, metrics=[Rows()], preview=_Sink())
            loop.handle_event("epoch_completed", lambda s: seen.append(s.metrics["validation_rows"]))
        return loop.run(ONES, epochs=2).step_state, seen

    (state, (first, second)), (plain, _) = run(validates=True), run(validates=False)
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first)) == first.size
    assert draws[0] == draws[1]
    assert all(draws[0] != jax.random.key_data(_key(i)).tolist() for i in range(3))
    np.testing.assert_array_equal(state.params["params"]["w"], plain.params["params"]["w"])


def _key(index: int) -> Any:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0x45_56_41_4C), index)


class _Sink:
    def __init__(self) -> None:
        self.taken: list[tuple[str, Any, int]] = []

    def artifact(self, name: str, value: Any, step: int) -> None:
        self.taken.append((name, value, step))


class _Calls(metrics.RowsMetric):
    def update(self, acc: Any, *args: Any, weights: Any = None) -> Any:
        CALLS.append(len(args[0].features))
        return super().update(acc, *args, weights=weights)


CALLS: list[int] = []


def test_cadence_of_fit() -> None:
    """objectives.md 48: eval_every=2, steps=4: two passes of three batches, the last on the averaged weights."""
    CALLS.clear()
    objective = Line(represent)
    objective.ema = telic.EMASpec(decay=0.5)
    data = Dataset(train=lambda p: itertools.repeat(ONES[0]), val=rows([1, 2, 3, 4, 5], 2))
    sink = _Sink()
    metric = _Calls(name="last_feature", finish=lambda r: float(r.features[-1, 1]))
    state = trainer(objective).fit(
        data, steps=4, eval_every=2, metrics=[metric], log_every=0, averaged=True, preview=sink
    )
    assert CALLS == [2, 2, 1, 2, 2, 1]
    assert [step for _, _, step in sink.taken] == [2, 4]
    last = sink.taken[-1][1]
    assert last.features[0, 1] == pytest.approx(float(state.averaged["params"]["w"]), rel=1e-6)


def test_several_suites() -> None:
    """objectives.md 44: sets with names, metrics and a cadence of their own."""
    loop = trainer(Line(represent)).loop(log=0)
    biggest = metrics.RowsMetric(name="biggest", finish=lambda r: float(r.features[:, 0].max()))
    loop.validate(rows([1, 9], 2), name="first", metrics=[biggest])
    loop.validate(rows([1, 2, 3, 4], 2), name="second", event="step_completed", filter=telic.every(3))
    history = loop.run(ONES, epochs=3).history
    assert [h.get("validation_first_biggest") for h in history.values()] == [9.0] * 3
    assert all("validation_second_biggest" not in h for h in history.values())
    assert ["validation_second_loss" in h for h in history.values()] == [False, True, True]
    values = trainer(Line()).loop(log=0).run(ONES)
    assert values.status == "completed"
    both = trainer(Line())
    both.fit(ONES, epochs=1, eval_every="epoch", validation={"a": rows([1]), "b": rows([2])}, log_every=0)


def test_data_are_read_once_for_each_pass() -> None:
    """Catches a look at the first batch, before training, that reads it once more than it is used."""
    read: list[int] = []

    def val() -> Any:
        for i, batch in enumerate(rows(np.arange(6), 2)):
            read.append(i)
            yield batch

    trainer(Line(score)).loop(log=0).validate(val).run(ONES, epochs=2)
    assert read == [0, 1, 2, 0, 1, 2]
    read.clear()
    trainer(Line(score)).loop(log=0).validate(val, limit=2).run(ONES, epochs=2)
    assert read == [0, 1, 0, 1]


# -- previews ---------------------------------------------------------------------------------------------------------


def test_preview_runs_once_and_reuses_the_first_scoring(tmp_path: Path) -> None:
    """Catches a preview for each batch, and one that scores its batch again."""
    shown: list[Any] = []

    class Showing(Line):
        def evaluate(self, variables: Any, batch: Any, step: Any) -> Any:
            return represent(variables, batch, step)

        def preview(self, variables: Any, batch: Any, step: Any, *, scored: Any = None) -> Any:
            shown.append((scored, batch))
            return super().preview(variables, batch, step, scored=scored)

    sink = _Sink()
    trainer(Showing()).loop(log=0).validate(rows([1, 2, 3], 2), preview=sink).run(ONES, epochs=2)
    assert len(shown) == 2
    assert [(name, step) for name, _, step in sink.taken] == [
        ("validation_representations", 2),
        ("validation_representations", 4),
    ]
    for (scored, batch), (_, value, _) in zip(shown, sink.taken, strict=True):
        assert scored.features.shape == (2, 2)
        np.testing.assert_array_equal(batch["x"], [1, 2])
        assert isinstance(value.features, np.ndarray)
        np.testing.assert_array_equal(value.features, scored.features)


def test_previews_as_files(tmp_path: Path) -> None:
    """Catches ids that are decoded before they are gathered, pictures of one name, and a file for each batch."""
    decoded: list[type] = []

    def decode(ids: Any) -> str:
        decoded.append(type(ids))
        return "".join(chr(97 + i) for i in ids.tolist())

    def show(variables: Any, batch: Any, step: Any) -> Any:
        n = batch["x"].shape[0]
        ids = jnp.arange(n * 3).reshape(n, 3) % 26
        return (
            ImageGrid(jnp.linspace(0, 1, n * 12).reshape(n, 2, 2, 3), captions=batch["x"]),
            TextSamples(ids, ids + 1, completion_mask=jnp.array([[1, 1, 0]] * n), decode=decode),
            TextSamples(("<b>",) * n, ids),
            Scalars({"nan": jnp.float32(jnp.nan)}),
        )

    directory = tmp_path / "run"
    checkpoints = telic.Checkpoints(directory)
    run = trainer(Line(show), checkpoints=checkpoints)
    run.fit(ONES, steps=2, eval_every=2, validation=rows([1, 2]), preview=True, log_every=0)
    folder = directory / "previews"
    assert sorted(p.name for p in folder.iterdir()) == [
        "validation_image_grid_000002.png",
        "validation_scalars_000002.json",
        "validation_text_samples_1_000002.json",
        "validation_text_samples_1_000002.txt",
        "validation_text_samples_2_000002.json",
        "validation_text_samples_2_000002.txt",
    ]
    first = json.loads((folder / "validation_text_samples_1_000002.json").read_text())
    assert first == [{"prompt": "abc", "completion": "bc"}, {"prompt": "def", "completion": "ef"}]
    second = json.loads((folder / "validation_text_samples_2_000002.json").read_text())
    assert second[0] == {"prompt": "<b>", "completion": [0, 1, 2]}
    assert json.loads((folder / "validation_scalars_000002.json").read_text()) == {"nan": "NaN"}
    assert set(decoded) == {np.ndarray}
    assert (folder / "validation_image_grid_000002.png").read_bytes()[:4] == b"\x89PNG"


def test_preview_of_one_evaluation(tmp_path: Path) -> None:
    """Catches a preview that only a training run can show."""
    run = trainer(Line(represent))
    run.evaluate(ONES, state=at(1.0), preview=tmp_path / "now")
    assert [p.name for p in (tmp_path / "now").iterdir()] == ["representations_000000.png"]
    sink = _Sink()
    run.evaluate(ONES, state=run.fit(ONES, steps=3, log_every=0), preview=sink)
    assert [(name, step) for name, _, step in sink.taken] == [("representations", 3)]


# -- refused before training ------------------------------------------------------------------------------------------

READS = metrics.as_metric(lambda t: t.log_probs, "nll", reads=TokenScores)
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "an artifact that nobody makes": (
        lambda run: run(Line()).loop(log=0).metric(READS).validate(ONES).run(ONES),
        ContractError,
        "'nll' reads TokenScores, which nobody makes: Line has no evaluation",
    ),
    "an artifact of another type": (
        lambda run: run(Line(represent)).loop(log=0).metric(READS).validate(ONES).run(ONES),
        ContractError,
        "'nll' reads TokenScores, which no evaluation makes; the objective's evaluate gave: Representations",
    ),
    "two artifacts of one type": (
        lambda run: (
            run(Line(lambda v, b, s: (TokenScores(b["x"]), TokenScores(b["x"]))))
            .loop(log=0)
            .metric(READS)
            .validate(ONES)
            .run(ONES)
        ),
        ContractError,
        "evaluate gave 2 of them",
    ),
    "a metric without an evaluation": (
        lambda run: run(Line(represent)).fit(ONES, steps=1, metrics=["knn_accuracy"], log_every=0),
        ContractError,
        "'knn_accuracy' reads Representations, .* nothing in this run evaluates for it: attach",
    ),
    "a host metric of an evaluator": (
        lambda run: telic.evaluator(Line(represent), log=0).metric("knn_accuracy").run(ONES, state=at(0.0)),
        ContractError,
        "compute it with trainer.evaluate",
    ),
    "a cadence without data": (
        lambda run: run(Line()).fit(ONES, steps=1, eval_every=1),
        ValueError,
        "evaluates the val of a Dataset, and fit was given list",
    ),
    "a cadence without a val": (
        lambda run: run(Line()).fit(Dataset(train=lambda p: iter(ONES)), steps=1, eval_every=1),
        DataError,
        "has no val",
    ),
    "data without a cadence": (
        lambda run: run(Line()).fit(ONES, steps=1, validation=ONES),
        ValueError,
        "validation= and no eval_every=",
    ),
    "a preview without a cadence": (
        lambda run: run(Line(represent)).fit(ONES, steps=1, preview=True),
        ValueError,
        "preview= and no eval_every=",
    ),
    "a preview without a place": (
        lambda run: run(Line(represent)).fit(ONES, steps=1, eval_every=1, validation=ONES, preview=True),
        ValueError,
        "this run has none",
    ),
    "a preview of nothing": (
        lambda run: run(Line()).loop(log=0).validate(ONES, preview="nowhere").run(ONES),
        ContractError,
        "Line has nothing to show",
    ),
    "a sink that is none": (
        lambda run: run(Line(represent)).loop(log=0).validate(ONES, preview=print),
        TypeError,
        "preview is a directory, True",
    ),
    "one name for two sets": (
        lambda run: run(Line()).loop(log=0).validate(ONES).validate(ONES),
        ValueError,
        "a validation without a name already",
    ),
    "one name for two metrics": (
        lambda run: (
            run(Line(represent)).loop(log=0).metric("knn_accuracy").validate(ONES, metrics=["knn_accuracy"]).run(ONES)
        ),
        ValueError,
        "'knn_accuracy' of its own, and the loop has one",
    ),
    "names that meet": (
        lambda run: (
            run(Line(lambda v, b, s: Scalars({"b_loss": jnp.float32(1)})))
            .loop(log=0)
            .validate(ONES)
            .validate(ONES, name="b")
            .run(ONES)
        ),
        ValueError,
        "records 'validation_b_loss', and so does the validation",
    ),
    "a scalar with the loss's name": (
        lambda run: run(Line(lambda v, b, s: Scalars({"loss": jnp.float32(1)}))).evaluate(ONES, state=at(0.0)),
        ContractError,
        "gives a scalar 'loss'",
    ),
    "an array as an artifact": (
        lambda run: run(Line(lambda v, b, s: b["x"])).evaluate(ONES, state=at(0.0)),
        ContractError,
        r"Line.evaluate must return an artifact .* got an array of shape \(4,\)",
    ),
    "a mean as an artifact": (
        lambda run: run(Line(lambda v, b, s: telic.Mean(1.0, 1.0))).evaluate(ONES, state=at(0.0)),
        ContractError,
        "must return an artifact",
    ),
    "infinite data": (
        lambda run: run(Line()).loop(log=0).validate(itertools.cycle(ONES)),
        DataError,
        "is infinite",
    ),
    "a metric that a handler misspells": (
        lambda run: run(Line()).loop(log=0).validate(ONES).early_stop("validation_los", mode="min").run(ONES),
        ContractError,
        "Did you mean 'validation_loss'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_first_step(case: str) -> None:
    """objectives.md 49, 50, XS101: found after an epoch, or never: a val that is silently the training data."""
    act, kind, message = REFUSED[case]
    steps: list[int] = []

    def run(objective: Any) -> telic.Trainer:
        seen = objective.loss
        objective.loss = lambda v, b, s: (steps.append(isinstance(b["x"], np.ndarray)), seen(v, b, s))[1]
        return trainer(objective)

    with pytest.raises(kind, match=message):
        act(run)
    assert not any(steps)


def test_a_metric_a_handler_adds_is_waited_for() -> None:
    """Catches a refusal of what a user's own handler would have recorded."""
    loop = trainer(Line()).loop(log=0)
    loop.handle_event("epoch_completed", lambda s: s.metrics.add({"mine": 1.0}))
    loop.early_stop("mine", mode="min", patience=2)
    assert loop.run(ONES, epochs=5).epoch < 5


def test_a_run_that_is_over_opens_no_validation_data() -> None:
    """objectives.md 8: data opened for a run that has nothing left to do."""
    opened: list[int] = []

    def val() -> Any:
        opened.append(1)
        return ONES

    assert trainer(Line()).loop(log=0).validate(val).run(ONES, epochs=0).status == "completed"
    assert not opened
