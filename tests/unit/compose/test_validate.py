"""Validation and evaluation: every metric, the loss on every rung, every example once, training untouched."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import telic
from telic.errors import ContractError, DataError

MODEL = (
    lambda key, x: {"w": jax.random.normal(key, (x.shape[-1],))},
    lambda params, x: x @ params["w"],
)


def batches(*sizes: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    return [(x, x.sum(-1)) for x in (random.normal(size=(n, 3)).astype(np.float32) for n in sizes)]


TRAIN, HELD = batches(4, 4), batches(4, 4, 2, seed=1)


def trainer(loss: Any = "mean_squared_error") -> telic.Loop:
    return telic.trainer(MODEL, loss, "sgd", log=0)


def by_hand(variables: Any, data: list[Any]) -> np.ndarray:
    """Give the squared errors of all examples, in float64."""
    w = np.asarray(variables["params"]["w"], np.float64)
    return np.concatenate([(x.astype(np.float64) @ w - y) ** 2 for x, y in data])


def test_every_metric_is_carried_over_as_it_is() -> None:
    """B26, B34, XS068: validation that averages batches, drops reads and reduce, or hides its values."""
    loop = trainer().metric("mean_absolute_error", "mae")
    loop.metric(lambda p: p.shape[0] * jnp.ones(()), "rows", reads="prediction", reduce="running_sum")
    loop.metric(lambda b: b[0].sum(), "inputs", reads="batch", reduce="running_sum")
    seen: list[dict[str, Any]] = []
    loop.validate(HELD).handle_event("epoch_completed", lambda s: seen.append(dict(s.metrics)))
    final = loop.run(TRAIN)
    errors = by_hand(final.step_state.params, HELD)
    values = final.history[0]
    assert seen == [values]
    assert set(values) == {n for m in ("loss", "mae", "rows", "inputs") for n in (m, f"validation_{m}")}
    assert values["validation_loss"] == pytest.approx(errors.mean(), rel=1e-5)
    assert values["validation_mae"] == pytest.approx(np.sqrt(errors).mean(), rel=1e-5)
    assert values["validation_rows"] == 10.0
    assert values["validation_inputs"] == pytest.approx(sum(x.sum() for x, _ in HELD), rel=1e-5)


def test_named_sets_and_new_values() -> None:
    """B27: a second set, or a second validation, whose values are discarded."""
    loop = trainer().validate(HELD).validate(batches(3, seed=2), name="other")
    loop.validate(HELD, name="often", event="step_completed")
    final = loop.run(TRAIN, epochs=2)
    last = by_hand(final.step_state.params, HELD).mean()
    assert final.history[1]["validation_loss"] == pytest.approx(last, rel=1e-5)
    assert final.history[1]["validation_often_loss"] == pytest.approx(last, rel=1e-5)
    assert final.history[1]["validation_other_loss"] != pytest.approx(last, rel=1e-2)
    assert final.history[0]["validation_loss"] > final.history[1]["validation_loss"]


@pytest.mark.parametrize("loss", ["mean_squared_error", lambda t, p: (t - p) ** 2, "function"])
def test_a_model_given_to_validate_is_judged_by_the_loops_loss(loss: Any) -> None:
    """Catches the seed's `validate(loop, model, data)`, which reported no validation_loss, or refused to run."""

    def function(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
        output = forward(variables, inputs)
        return (targets - output.prediction) ** 2, output

    chosen = function if loss == "function" else loss
    plain = trainer(chosen).validate(HELD).run(TRAIN).history[0]
    doubled = (MODEL[0], lambda params, x: 2 * MODEL[1](params, x))
    assert trainer(chosen).validate(HELD, model=MODEL).run(TRAIN).history[0] == plain
    other = trainer(chosen).validate(HELD, model=doubled).run(TRAIN)
    w = np.asarray(other.step_state.params["params"]["w"], np.float64)
    errors = np.concatenate([(2 * (x.astype(np.float64) @ w) - y) ** 2 for x, y in HELD])
    assert other.history[0]["validation_loss"] == pytest.approx(errors.mean(), rel=1e-5)
    assert other.history[0]["loss"] == plain["loss"]


def test_a_mapping_of_sets_is_one_validation_for_each() -> None:
    """Catches named sets that fit takes and a loop refuses, and a mapping of columns taken for sets."""
    sets = {"held": HELD, "other": batches(3, seed=2)}
    apart = trainer().validate(HELD, name="held").validate(sets["other"], name="other")
    assert trainer().validate(sets).run(TRAIN).history == apart.run(TRAIN).history
    with pytest.raises(ValueError, match="held, other have names of their own: leave name= out"):
        trainer().validate(sets, name="both")
    for columns in ({"inputs": HELD[0][0], "targets": HELD[0][1]}, {"inputs": [1.0], "targets": [2.0]}):
        with pytest.raises(TypeError, match=r"telic\.data\.columns"):
            trainer().validate(columns)


def test_a_pass_begins_anew() -> None:
    """S31, XS071: a metric that is never reset: the mean of all validations so far."""
    loop = telic.Loop(lambda s, b: s + 1, lambda b: 0.0)
    model = (lambda key, x: {"w": jnp.zeros(())}, lambda params, x: x)
    with pytest.raises(ContractError, match=r"validate\(data, model=\.\.\.\)"):
        loop.validate([1])
    evaluation = telic.Trainer(telic.supervised(model, "mean_squared_error"), "sgd", key=0)
    data = [(np.float32([2.0]), np.float32([0.0]))]
    assert [evaluation.evaluate(data, state={"params": {"w": jnp.zeros(())}})["loss"] for _ in range(2)] == [4.0, 4.0]
    final = trainer().validate(HELD).run(TRAIN, epochs=3)
    assert final.history[2]["validation_loss"] == pytest.approx(by_hand(final.step_state.params, HELD).mean(), rel=1e-5)


class Noisy(nnx.Module):
    """Dropout and BatchNorm: what validation must neither run nor move."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.drop(self.norm(x)))[:, 0]


def test_training_does_not_know_of_validation() -> None:
    """S32, XS113, XS115: a model left in evaluation mode, keys drawn, statistics moved."""

    def run(validates: bool) -> telic.LoopState:
        loop = telic.trainer(Noisy(nnx.Rngs(0)), "mean_squared_error", "adam", log=0)
        if validates:
            loop.validate(HELD, event="iteration_completed")
        return loop.run(TRAIN, epochs=2)

    plain, validated = run(False), run(True)
    for a, b in zip(jax.tree.leaves(plain.step_state), jax.tree.leaves(validated.step_state), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert validated.history[1]["loss"] == plain.history[1]["loss"]


def test_validation_is_deterministic_and_that_of_the_evaluator() -> None:
    """XS113, XS114: dropout in validation: two passes differ, and differ from a standalone evaluation."""
    loop = telic.trainer(Noisy(nnx.Rngs(0)), "mean_squared_error", "sgd", log=0)
    final = loop.validate(HELD).validate(HELD, name="again").run(TRAIN)
    values = final.history[0]
    assert values["validation_loss"] == values["validation_again_loss"]
    evaluator = telic.evaluator(Noisy(nnx.Rngs(0)), "mean_squared_error", log=0)
    assert evaluator.run(HELD, state=final.step_state).metrics["loss"] == values["validation_loss"]


def test_validation_compiles_once() -> None:
    """B29: the validation loop compiles again every epoch."""
    traces: list[int] = []

    def apply(params: Any, x: Any, *, train: bool = False) -> Any:
        if not train:
            traces.append(1)
        return x @ params["w"]

    loop = telic.trainer((MODEL[0], apply), "mean_squared_error", "sgd", log=0).validate(HELD)
    counts: list[int] = []
    loop.handle_event("epoch_completed", lambda s: counts.append(len(traces)))
    loop.run(TRAIN, epochs=3)
    assert counts[0] > 0
    assert counts[0] == counts[1] == counts[2]


def test_a_loop_that_gains_a_metric_validates_it() -> None:
    """A validation that keeps the metrics of its first run; a copy that validates the original's."""
    loop = trainer().validate(HELD)
    loop.run(TRAIN)
    twin = loop.copy().metric("mean_absolute_error", "mae")
    assert "validation_mae" in twin.run(TRAIN).history[0]
    assert "validation_mae" not in loop.run(TRAIN).history[0]
    loop.metric("mean_absolute_error", "late")
    assert "validation_late" in loop.run(TRAIN).history[0]


def test_bad_validation_data_is_refused() -> None:
    """A pass over nothing that reports zeros; an iterator that validates once."""
    with pytest.raises(TypeError, match="only once"):
        trainer().validate(iter(HELD))
    with pytest.raises(DataError, match="no batches"):
        trainer().validate([]).run(TRAIN)


def test_an_error_in_validation_is_raised() -> None:
    """Row 50: a failing metric or loader that is swallowed around evaluation."""

    def failing() -> Any:
        yield HELD[0]
        raise OSError("no such disk")

    with pytest.raises(OSError, match="no such disk") as caught:
        trainer().validate(failing).run(TRAIN)
    assert any("handler validate at event 'epoch_completed'" in note for note in caught.value.__notes__)


# -- the evaluator -----------------------------------------------------------------------------------------------


def test_an_evaluator_takes_weights_in_any_form() -> None:
    """B65: one model that cannot serve both; a training state that is taken for the evaluation's own progress."""
    final = trainer().run(TRAIN, epochs=3)
    expected = by_hand(final.step_state.params, HELD).mean()
    for given in (final, final.step_state, final.step_state.params):
        state = telic.evaluator(MODEL, "mean_squared_error", log=0).run(HELD, state=given)
        assert state.metrics["loss"] == pytest.approx(expected, rel=1e-5)
        assert state.status == "completed"


def test_weights_in_the_model_need_no_state() -> None:
    """A trained NNX model that must be taken apart to be evaluated."""
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    evaluator = telic.evaluator(model, log=0).metric("mean_absolute_error", "mae")
    data = [(x, y[:, None]) for x, y in HELD]
    expected = np.concatenate([np.abs(np.asarray(model(x)) - y) for x, y in data]).mean()
    found = evaluator.run(data).metrics
    # Without a loss there is none to report.
    assert list(found) == ["mae"]
    assert found["mae"] == pytest.approx(expected, rel=1e-5)


def test_an_evaluator_without_weights_says_so() -> None:
    """Axon #383: an obscure error deep inside."""
    with pytest.raises(ContractError, match=r"needs weights: pass run\(data, state=variables\)"):
        telic.evaluator(MODEL, log=0).run(HELD)
    with pytest.raises(TypeError, match="params"):
        telic.evaluator(MODEL, log=0).run(HELD, state={"w": 1})
    with pytest.raises(ContractError, match="needs weights"):
        telic.Trainer(telic.supervised(MODEL, "mean_squared_error"), "sgd", key=0).evaluate(HELD)


def test_an_evaluator_may_be_silent_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    """B29: an evaluator that prints each batch and cannot be silenced."""
    weights = {"params": {"w": jnp.ones(3)}}
    telic.evaluator(MODEL, "mean_squared_error", log=0).run(HELD, state=weights)
    assert capsys.readouterr().out == ""
    out = io.StringIO()
    telic.evaluator(MODEL, "mean_squared_error", log=0).log(1, device=out).run(HELD, state=weights)
    assert out.getvalue().splitlines()[-1] == "Epoch: 0, Batch: 2, loss: 0.0000000"


@pytest.mark.parametrize("kind", [tuple, dict])
def test_a_model_of_several_outputs_is_evaluated(kind: type) -> None:
    """B30: evaluation that works for one tensor only."""

    def apply(params: Any, x: Any) -> Any:
        a, b = x @ params["w"], x.sum(-1)
        return (a, b) if kind is tuple else {"a": a, "b": b}

    where = ("prediction.0", "prediction.1") if kind is tuple else ("prediction.a", "prediction.b")
    evaluator = telic.evaluator((MODEL[0], apply), log=0)
    evaluator.metric(lambda a, b: (a - b) ** 2, "gap", reads=where)
    assert evaluator.run(HELD, state={"params": {"w": jnp.ones(3)}}).metrics["gap"] == pytest.approx(0.0, abs=1e-10)


def test_the_objective_s_loss_keeps_its_name() -> None:
    """S19: a metric named "loss" that silently replaces the objective's."""
    with pytest.raises(ValueError, match="objective's loss as 'loss'"):
        trainer().metric("mean_absolute_error", "loss")
    telic.evaluator(MODEL, log=0).metric("mean_squared_error", "loss")
    telic.Loop(lambda s, b: s).metric(lambda x: x, "loss", reads="x")


def test_a_metric_name_that_is_a_loss() -> None:
    """`metric("huber")`: losses by name are metrics too, and equal the loss of that name (XS064)."""
    final = trainer("huber").metric("huber", "same").run(TRAIN)
    assert final.history[0]["same"] == pytest.approx(final.history[0]["loss"], rel=1e-6)
