"""Monitors and early stopping: what counts, when they act, whose record is whose."""

import math

import flax.linen as nn
import numpy as np
import pytest

import telic
from telic.errors import ContractError
from tests.unit.handlers.scripted import run, scripted


def test_acts_on_the_second_event_without_improvement() -> None:
    """S08, XS132: a counter that is compared before it is raised runs one epoch more."""
    final = run(scripted(loss=[1, 1, 1, 1]).early_stop("loss", patience=2), 4)
    assert (final.status, final.epoch, list(final.history)) == ("halted", 2, [0, 1, 2])


@pytest.mark.parametrize("patience", [0, 1])
def test_patience_zero_never_acts_on_the_first_value(patience: int) -> None:
    """XS028, XS036: patience 0 that stops at the very first epoch, whose value is an improvement by definition."""
    final = run(scripted(acc=[0.1, 0.2, 0.3, 0.25, 0.9]).early_stop("acc", mode="max", patience=patience), 5)
    assert list(final.history) == [0, 1, 2, 3]


def test_a_run_that_improves_is_not_stopped() -> None:
    """XS038, XS029: a comparison that is reversed stops at the first step."""
    assert run(scripted(loss=[5, 4, 3, 2]).early_stop("loss", patience=1), 4).status == "completed"


def test_a_constant_metric_stops_at_patience_plus_one_values() -> None:
    """XS034: one epoch more than patience."""
    final = run(scripted(loss=[1] * 9).early_stop("loss", patience=5), 9)
    assert len(final.history) == 6


def test_stopping_and_plateau_act_at_the_same_epoch() -> None:
    """XS030: two handlers with one patience and two meanings of it."""
    acted: list[int] = []
    loop = scripted(loss=[1] * 4).monitor("loss", lambda state: acted.append(state.epoch), patience=2)
    assert len(run(loop.early_stop("loss", patience=2), 4).history) - 1 == acted[0]


def test_counts_begin_again_after_the_action() -> None:
    """S09: with cooldown 0 the plateau acts at each following epoch."""
    acted: list[int] = []
    run(scripted(loss=[1] * 13).monitor("loss", lambda state: acted.append(state.epoch + 1), patience=4), 13)
    assert acted == [5, 9, 13]


@pytest.mark.parametrize("metric", ["val_recall", "mape", "auc", "validation_accuracy", "training_loss"])
def test_no_direction_is_guessed_from_a_name(metric: str) -> None:
    """S11: 'mape' maximised because it begins like 'map', recall minimised."""
    with pytest.raises(ValueError, match="mode='min' or mode='max'"):
        scripted().early_stop(metric)


def test_a_metric_says_which_direction_is_better() -> None:
    """A mode asked for although the metric carries it, or taken from the wrong metric."""
    loop = telic.trainer(_model(), "mean_squared_error", "sgd", log=0).metric("accuracy").metric("mean_absolute_error")
    loop.early_stop("accuracy").early_stop("validation_mean_absolute_error").early_stop("validation_test_accuracy")
    modes = [a.handler.mode for a in loop._attachments if isinstance(a.handler, telic.handlers.Monitor)]
    assert modes == ["max", "min", "max"]


def test_the_mode_given_wins() -> None:
    """A mode that is read and not used: a rising loss in mode max is an improvement."""
    assert run(scripted(loss=[1, 2, 3, 4]).early_stop("loss", mode="max", patience=1), 4).status == "completed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "minimum"}, "'min' or 'max', got 'minimum'"),
        ({"patience": -1}, "patience must be 0 or more, got -1"),
        ({"min_delta": -0.1}, "min_delta must be 0 or more"),
        ({"min_delta": math.nan}, "min_delta must be 0 or more"),
        ({"cooldown": -2}, "cooldown must be 0 or more"),
        ({"improved": min, "trigger": bool}, "exactly one of mode, improved and trigger"),
        ({"mode": "min", "improved": min}, "exactly one of mode, improved and trigger"),
        ({"improved": min, "min_delta": 0.1}, "min_delta belongs to mode"),
        ({"name": ""}, "name must be text"),
    ],
)
def test_contradictions_are_refused_when_attached(options: dict, message: str) -> None:
    """XS037: an option that is accepted and has no effect."""
    with pytest.raises(ValueError, match=message):
        scripted().monitor("loss", lambda state: None, **options)


@pytest.mark.parametrize("options", [{"patience": 1.5}, {"patience": True}, {"improved": 3}, {"cooldown": "2"}])
def test_wrong_kinds_are_refused_when_attached(options: dict) -> None:
    """A float patience that is never equal to a count."""
    with pytest.raises(TypeError):
        scripted().monitor("loss", lambda state: None, **options)
    with pytest.raises(TypeError, match="unexpected keyword"):
        scripted().early_stop("loss", patiense=3)


def test_an_action_is_a_handler() -> None:
    """An answer that is thrown away, or a state that is not taken in."""
    loop = scripted(loss=[1] * 5).monitor("loss", lambda s: (telic.HALT_LOOP, s.replace(max_epoch=99)), patience=1)
    final = run(loop, 5)
    assert (final.status, final.max_epoch) == ("halted", 99)


def test_a_trigger_acts_where_it_holds() -> None:
    """B19: a predicate that acts where it is false."""
    acted: list[int] = []
    run(scripted(x=[1, 5, 2, 6, 7]).monitor("x", lambda s: acted.append(s.epoch), trigger=lambda now: now > 3), 5)
    assert acted == [1, 3, 4]


def test_a_trigger_with_patience_asks_for_a_row() -> None:
    """Events where it does not hold that are left in the count."""
    acted: list[int] = []
    loop = scripted(x=[5, 1, 5, 5, 5, 5])
    run(loop.monitor("x", lambda s: acted.append(s.epoch), trigger=lambda now: now > 3, patience=2), 6)
    assert acted == [3, 5]


def test_a_trigger_sees_nan() -> None:
    """A stop on NaN that never sees one."""
    loop = scripted(x=[1, math.nan, 2]).monitor("x", lambda s: telic.HALT_LOOP, trigger=math.isnan)
    assert list(run(loop, 3).history) == [0, 1]


def test_monitors_do_not_share_a_record() -> None:
    """B21: two early stops under one name: `a` never improves, `b` always, and nothing ever stops."""
    loop = (
        scripted(a=[1] * 8, b=range(8))
        .early_stop("a", mode="min")
        .early_stop("b", mode="max")
        .early_stop("a", mode="max")
    )
    final = run(loop, 8)
    assert len(final.history) == 4
    assert list(final.handler_state) == ["early_stop/a", "early_stop/b", "early_stop/a#2"]
    assert final.handler_state["early_stop/b"]["best"] == 3.0


def test_a_name_is_given_once() -> None:
    """Two monitors of one name, whose records would be one."""
    loop = scripted().monitor("loss", lambda s: None, "watch")
    with pytest.raises(ValueError, match="has a handler named 'watch' already"):
        loop.monitor("loss", lambda s: None, "watch")


def test_an_absent_metric_is_named_with_those_there_are() -> None:
    """A misspelt metric that is never looked at."""
    loop = scripted(loss=[1, 1], accuracy=[1, 1]).early_stop("acuracy", mode="max")
    with pytest.raises(ContractError, match=r"Did you mean 'accuracy'.*loss, accuracy") as caught:
        run(loop, 2)
    assert "early_stop/acuracy at event 'epoch_completed'" in caught.value.__notes__[0]


def test_a_vector_is_refused() -> None:
    """A metric per class whose comparison has no truth value."""
    loop = scripted().handle_event("epoch_completed", lambda s: s.metrics.add({"v": np.ones(3)}))
    with pytest.raises(ValueError, match=r"watches 'v', which is not a scalar \(shape \(3,\)\)"):
        run(loop.monitor("v", lambda s: None, mode="min"), 1)


def _model():
    return nn.Dense(1)


def _batches():
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(4, 2)).astype(np.float32), np.ones((4, 1), np.float32)) for _ in range(2)]


def _validated(order: str, event: str = "epoch_completed") -> telic.Loop:
    loop = telic.trainer(_model(), "mean_squared_error", "sgd", log=0)
    for word in order.split():
        if word == "validate":
            loop.validate(_batches(), filter=telic.every(2))
        else:
            loop.monitor("validation_loss", lambda s: None, event=event)
    return loop


def test_a_metric_of_validation_is_waited_for() -> None:
    """XS033: a reader of a validation metric that fails where validation has not run yet."""
    final = _validated("validate monitor").run(_batches(), epochs=5)
    record = final.handler_state["monitor/validation_loss"]
    assert record["best_epoch"] in (1, 3)
    assert _validated("monitor validate", "iteration_completed").run(_batches(), epochs=1).status == "completed"


def test_a_validation_that_runs_after_its_reader_is_refused() -> None:
    """A reader that waits for ever, because what it reads is recorded after it looks."""
    with pytest.raises(ContractError, match="attach validate before what reads its results"):
        _validated("monitor validate").run(_batches(), epochs=1)


def test_counts_one_observation_per_event() -> None:
    """XS035: a validation of many batches that counts as many events."""
    loop = telic.trainer(_model(), "mean_squared_error", telic.optimizers.sgd(0.0), log=0)
    loop.validate(_batches() * 5).early_stop("validation_loss", patience=2)
    assert len(loop.run(_batches(), epochs=6).history) == 3


def test_records_are_replaced_and_not_changed() -> None:
    """A state that was kept whose record moves on with the run."""
    kept: list[telic.LoopState] = []
    loop = scripted(loss=[3, 2, 1]).early_stop("loss")
    run(loop.handle_event("epoch_completed", lambda s: kept.append(s.keep())), 3)
    assert [s.handler_state["early_stop/loss"]["best"] for s in kept] == [3.0, 2.0, 1.0]


# -- restore_best ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["planned", "another handler"])
def test_the_best_state_comes_back_whoever_ended_the_run(ends: str) -> None:
    """S10: best weights that come back only where early stopping itself acted."""
    loop = scripted(loss=[3, 1, 2]).early_stop("loss", patience=5, restore_best=True)
    if ends == "another handler":
        loop.handle_event("epoch_completed", lambda s: telic.HALT_LOOP, telic.once(3))
    final = run(loop, 3)
    assert len(final.history) == 3
    # The scripted state counts batches: two were done at the best epoch.
    assert float(final.step_state) == 2.0


def test_without_restore_best_the_last_state_is_given() -> None:
    """A restore that nobody asked for."""
    assert float(run(scripted(loss=[3, 1, 2]).early_stop("loss", patience=5), 3).step_state) == 3.0


def test_the_best_state_survives_a_saved_state() -> None:
    """A best state that is lost with the process, so that a resumed run returns another one."""
    blobs: list[bytes] = []
    loop = scripted(loss=[3, 1, 2, 2, 2]).early_stop("loss", patience=5, restore_best=True)
    twin = loop.copy()
    loop.handle_event("epoch_completed", lambda s: blobs.append(telic.serialize_state(s)))
    assert float(run(loop, 5).step_state) == 2.0
    for blob in blobs[1:]:
        assert float(run(twin.copy().from_state(telic.deserialize_state(blob)), 5).step_state) == 2.0


def test_a_stopped_run_that_is_resumed_ends_at_once() -> None:
    """A run killed between its last checkpoint and its end, which trains on when it is started again."""
    blobs: list[bytes] = []
    series = [1] * 9
    loop = scripted(loss=series).early_stop("loss", patience=2)
    loop.handle_event("epoch_completed", lambda s: blobs.append(telic.serialize_state(s)))
    final = run(loop, 9)
    resumed = run(
        scripted(loss=series).early_stop("loss", patience=2).from_state(telic.deserialize_state(blobs[-1])), 9
    )
    assert (resumed.status, resumed.history) == ("halted", final.history)
    assert float(resumed.step_state) == float(final.step_state) == 3.0


def test_a_stopped_run_can_be_continued_on_purpose() -> None:
    """The state that a stopped run returned halting every run that goes on from it."""
    loop = scripted(loss=[1] * 9).early_stop("loss", patience=2)
    final = run(loop, 9)
    assert len(run(loop.from_state(final), 9).history) == 5
