"""What a user who tried to break the library found: each test is a fault that was there."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import telic
from telic.errors import ContractError, DataError, RejectedWarning, ShapeWarning

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True).astype(np.float32)
GOOD = [(X, Y)] * 4
PAIR = (lambda key, x: {"w": jax.random.normal(key, (4, 1)) * 0.1}, lambda params, x: x @ params["w"])
MSE = "mean_squared_error"


def epochs_with_a_bad_one(epoch: int) -> Any:
    return GOOD if epoch != 1 else [(X, Y * np.nan)] * 2


def test_an_epoch_without_accepted_batches_has_no_loss_and_is_never_best() -> None:
    """An epoch in which every batch was rejected had loss 0.0, which stopped a run that was improving."""
    loop = telic.trainer(PAIR, MSE, "sgd", log=0).metric("mean_absolute_error").early_stop("loss", patience=3)
    final = loop.run(epochs_with_a_bad_one, epochs=6)
    assert final.status == "completed"
    assert np.isnan(final.history[1]["loss"])
    assert np.isnan(final.history[1]["mean_absolute_error"])
    assert final.history[1]["rejected"] == 2


def test_a_batch_of_zero_weights_has_no_loss() -> None:
    """Weights of zero only gave loss 0.0: the best score there is, for no data."""
    batch = {"inputs": X, "targets": Y, "weights": np.zeros(32, np.float32)}
    final = telic.trainer(PAIR, MSE, "sgd", log=0).run([batch] * 2)
    assert np.isnan(final.history[0]["loss"])
    assert int(final.step_state.updates) == 0


def test_a_run_that_accepted_nothing_says_so() -> None:
    """Fewer bad batches than max_rejected ended as completed, without a word."""
    classes = (lambda key, x: {"w": jnp.zeros((4, 3))}, lambda params, x: x @ params["w"])
    batch = (X, np.full(32, 7, np.int32))
    with pytest.warns(RejectedWarning, match="all 4 attempts of this run were rejected"):
        telic.trainer(classes, "softmax_cross_entropy", "sgd", log=0).run([batch] * 4)


def test_training_needs_a_loss() -> None:
    """loss=None trained nothing and said nothing."""
    with pytest.raises(TypeError, match="a trainer needs a loss"):
        telic.trainer(PAIR, None, "sgd")
    with pytest.raises(TypeError, match="a trainer needs a loss"):
        telic.Trainer(telic.supervised(PAIR, None), "sgd", key=0)


def test_a_target_that_is_dropped_may_be_nan() -> None:
    """The value of a row of weight 0 was dropped, its gradient was not: the whole batch was rejected."""
    targets, weights = Y.copy(), np.ones(32, np.float32)
    targets[3], weights[3] = np.nan, 0
    batch = {"inputs": X, "targets": targets, "weights": weights}
    final = telic.trainer(PAIR, MSE, optax.sgd(0.1), log=0).run([batch])
    keep = np.arange(32) != 3
    clean = telic.trainer(PAIR, MSE, optax.sgd(0.1), log=0).run([(X[keep], Y[keep])])
    assert int(final.step_state.updates) == 1
    np.testing.assert_allclose(
        final.step_state.variables["params"]["w"], clean.step_state.variables["params"]["w"], rtol=1e-5
    )


@pytest.mark.parametrize("value", [np.array([2**40 + 5]), np.array([2**33], np.uint64), 2**40])
def test_integers_that_do_not_fit_are_refused(value: Any) -> None:
    """64-bit integers were cut to 32 bits: a sum of 2**40 was 0."""
    with pytest.raises(DataError, match="do not fit 32 bits"):
        telic.Loop(lambda s, b: s + jnp.sum(b), lambda b: 0).run([value])


def test_a_scalar_loss_over_shapes_that_broadcast_warns() -> None:
    """Targets (n,) against predictions (n, 1) under a mean trained on n by n pairs, unnoticed."""
    with pytest.warns(ShapeWarning, match=r"differ by a last axis of 1"):
        telic.trainer(PAIR, lambda t, p: jnp.mean((t - p) ** 2), "sgd", log=0).run([(X, Y[:, 0])])


def test_stop_iteration_in_a_handler_names_the_handler() -> None:
    """It surfaced as "generator raised StopIteration", without a handler's name."""

    def reads_on(state: Any) -> None:
        next(iter(()))

    loop = telic.trainer(PAIR, MSE, "sgd", log=0).handle_event("epoch_completed", reads_on)
    with pytest.raises(RuntimeError, match=r"reads_on at event 'epoch_completed' raised StopIteration"):
        loop.run(GOOD)


def test_targets_of_none_and_an_average_that_is_a_number_are_named() -> None:
    """Both ended in an error of another library that named neither."""
    with pytest.raises(DataError, match="None in place of the targets"):
        telic.trainer(PAIR, MSE, "sgd", log=0).run([(X, None)])
    objective = telic.supervised(PAIR, MSE)
    objective.ema = 0.9  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"must be a telic.EMASpec, got 0.9"):
        telic.Trainer(objective, "sgd", key=0).loop(log=0).run(GOOD)


def test_an_answer_that_is_nonsense_is_shown_short() -> None:
    """The message printed a whole state."""
    loop = telic.trainer(PAIR, MSE, "sgd", log=0).handle_event("started", lambda s: [s.step_state] * 50)
    with pytest.raises(telic.errors.ContractError) as error:
        loop.run(GOOD)
    assert len(str(error.value)) < 600


def test_a_batch_norm_without_a_flag_says_which_flag() -> None:
    """Flax asks for a constructor argument, which would freeze the statistics."""

    class NoFlag(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(1)(nn.BatchNorm()(x))

    with pytest.raises(ValueError, match="use_running_average") as error:
        telic.trainer(NoFlag(), MSE, "sgd", log=0).run(GOOD)
    assert any("train: bool" in note for note in error.value.__notes__)


def test_what_a_handler_cannot_do_is_said_when_it_is_attached(tmp_path: Path) -> None:
    """Each was found out after a whole epoch, in another library's words, or never."""
    loop = telic.trainer(PAIR, MSE, "sgd", log=0)
    with pytest.raises(ValueError, match=r"saved as one of \.png.* got 'c\.xyz'"):
        loop.curves("c.xyz")
    with pytest.raises(ValueError, match="saved as one of"):
        loop.confusion("c")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: give another path"):
        loop.record(tmp_path / "file")
    with pytest.raises(TypeError, match=r"by its name, such as 'loss'.* got 3"):
        loop.early_stop(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="the name of a handler is text, got 3"):
        loop.handle_event("started", print, name=3)  # pyright: ignore[reportArgumentType]
    for batches in (-1, 0, "x", True):
        with pytest.raises(ValueError, match="number of batches of an epoch"):
            loop.progress(batches=batches)  # pyright: ignore[reportArgumentType]


def test_a_rate_that_cannot_be_lowered_is_refused_at_the_start() -> None:
    """A plateau hours later ended the run."""
    iterations: list[int] = []
    loop = telic.trainer(PAIR, MSE, optax.adam(1e-3), log=0).reduce_lr_on_plateau("loss", min_lr=1e-5)
    loop.handle_event("iteration_completed", lambda state: iterations.append(state.iteration))
    with pytest.raises(ContractError, match="min_lr needs an optimizer whose learning rate has a name"):
        loop.run(GOOD)
    assert not iterations


def test_a_step_that_cannot_be_traced_runs_without_a_compiler() -> None:
    """``run(jit=False)`` traced it all the same."""
    final = telic.Loop(lambda s, b: s + float(b.sum()), lambda b: 0.0).run([np.ones(3)] * 2, jit=False)
    assert final.step_state == 6.0


def test_a_state_that_holds_nan_is_no_surprise_for_jax() -> None:
    """With jax_debug_nans every run ended in a text about JAX's own programs."""
    with jax.debug_nans(True), pytest.raises(ContractError, match=r"jax_debug_nans is on.*nonfinite='raise'"):
        telic.trainer(PAIR, MSE, "sgd", log=0).run(GOOD)


def test_no_tracer_outlives_its_program() -> None:
    """A key that stays was looked up by its tracer, which JAX's search for leaks does not forgive."""
    with jax.checking_leaks():
        telic.trainer(PAIR, MSE, "sgd", log=0).run(GOOD)
