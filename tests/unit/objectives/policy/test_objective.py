"""`GRPOObjective` on a model of plain functions: masks, windows, references, packing, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.contract import Step, scalar_loss
from telic.errors import ContractError, DataError, ShapeError
from telic.objectives import GRPOObjective
from telic.testing import check_objective
from tests.unit.objectives.language.tiny import VOCAB, Fixed, Tiny
from tests.unit.train.tiny import split, step_of


def rows(count: int = 6, time: int = 7, seed: int = 0) -> dict[str, Any]:
    """Completions of one to four tokens after a prompt of two or three, with log-probs near the policy's."""
    draw = np.random.default_rng(seed)
    lengths, start = draw.integers(1, 5, (count, 1)), draw.integers(2, 4, (count, 1))
    place = np.arange(time)
    return {
        "tokens": draw.integers(1, VOCAB, (count, time)).astype(np.int32),
        "completion_mask": ((place >= start) & (place < start + lengths)).astype(np.int32),
        "advantages": draw.normal(size=count).astype(np.float32),
        "old_log_probs": (draw.normal(size=(count, time)) / 2 - 2).astype(np.float32),
        "rewards": draw.normal(size=count).astype(np.float32),
    }


def started(objective: Any, batch: Any, seed: int = 0) -> tuple[Any, Any]:
    bound = objective.bind(batch)
    return bound, bound.init(jax.random.key(seed))


def loss_of(objective: Any, variables: Any, batch: Any, reference: Any = None) -> tuple[float, dict[str, float]]:
    value, aux = scalar_loss(objective, variables, batch, Step(averaged=reference, train=False))
    return float(value), {name: float(mean.value()) for name, mean in aux.metrics.items()}


def gradient_of(objective: Any, variables: Any, batch: Any, reference: Any = None) -> Any:
    step = Step(averaged=reference, train=False)
    return jax.grad(lambda v: scalar_loss(objective, v, batch, step)[0])(variables)["params"]


def log_probs_of(variables: Any, tokens: Any) -> Any:
    """Log-probs of all tokens but the first, computed apart."""
    states = Tiny().hidden_states(variables, tokens[:, :-1])
    found = jax.nn.log_softmax(Tiny().head(variables).logits(states.hidden))
    return np.take_along_axis(np.asarray(found), tokens[:, 1:, None], -1)[..., 0]


def test_by_hand() -> None:
    """Catches a ratio the wrong way round, a sign, and log-probs that are a place off."""
    batch = rows()
    objective, variables = started(GRPOObjective(Tiny(), epsilon_low=0.2, epsilon_high=0.3), batch)
    mask = batch["completion_mask"][:, 1:]
    ratio = np.exp(log_probs_of(variables, batch["tokens"]) - batch["old_log_probs"][:, 1:])
    advantages = batch["advantages"][:, None]
    losses = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.3) * advantages)
    expected = ((losses * mask).sum(1) / mask.sum(1)).mean()
    value, metrics = loss_of(objective, variables, batch)
    assert value == pytest.approx(expected, rel=1e-5)
    assert metrics["ratio"] == pytest.approx((ratio * mask).sum() / mask.sum(), rel=1e-5)
    assert metrics["clip_high"] == pytest.approx(((ratio > 1.3) & (advantages > 0) & (mask != 0)).sum() / mask.sum())
    assert metrics["reward"] == pytest.approx(batch["rewards"].mean(), rel=1e-5)
    assert metrics["completion_tokens"] == pytest.approx(mask.sum(1).mean())


def test_without_old_log_probs_the_ratio_is_one() -> None:
    """XS166: on policy the gradient is that of -A log π, and nothing is clipped."""
    batch = {n: x for n, x in rows().items() if n != "old_log_probs"}
    objective, variables = started(GRPOObjective(Tiny()), batch)
    _, metrics = loss_of(objective, variables, batch)
    assert metrics["ratio"] == 1
    assert metrics["clip_low"] == metrics["clip_high"] == metrics["old_kl"] == 0
    mask = batch["completion_mask"][:, 1:]

    def reinforce(v: Any) -> Any:
        states = Tiny().hidden_states(v, batch["tokens"][:, :-1])
        found = jax.nn.log_softmax(Tiny().head(v).logits(states.hidden))
        picked = jnp.take_along_axis(found, jnp.asarray(batch["tokens"])[:, 1:, None], -1)[..., 0]
        return -((picked * mask).sum(1) / mask.sum(1) * batch["advantages"]).mean()

    expected = jax.grad(reinforce)(variables)["params"]
    for name, leaf in gradient_of(objective, variables, batch).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-4, atol=1e-6)


def test_zero_advantages_move_nothing_but_the_kl_does() -> None:
    """S46: groups without spread: with beta 0 the gradient is exactly 0, with beta > 0 the KL acts."""
    batch = {**rows(), "advantages": np.zeros(6, np.float32)}
    objective, variables = started(GRPOObjective(Tiny()), batch)
    for leaf in gradient_of(objective, variables, batch).values():
        np.testing.assert_array_equal(leaf, 0)
    assert loss_of(objective, variables, batch)[1]["zero_advantage"] == 1
    pulled, variables = started(GRPOObjective(Tiny(), beta=0.1), batch)
    _, reference = started(GRPOObjective(Tiny()), batch, seed=1)
    value, metrics = loss_of(pulled, variables, batch, reference)
    assert metrics["kl"] > 0.01
    assert value > 0
    assert max(np.abs(leaf).max() for leaf in gradient_of(pulled, variables, batch, reference).values()) > 1e-3


OPTIONS: dict[str, dict[str, Any]] = {
    "sequence_mean": {},
    "token_mean": {"aggregate": "token_mean"},
    "constant": {"aggregate": "constant", "max_tokens": 4},
    "gspo": {"importance": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2},
    "cispo": {"surrogate": "cispo", "aggregate": "token_mean"},
    "kl": {"beta": 0.1, "kl_importance": True},
}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_windows_are_exact(name: str) -> None:
    """S45: microbatches whose lengths differ, one of them without a token, against one batch."""
    batch = rows()
    batch["completion_mask"][2:4] = 0
    objective = GRPOObjective(Tiny(), **OPTIONS[name])
    whole, parts = step_of(objective), step_of(objective, accumulate=3)
    state = whole.init(batch)
    moved = {"params": jax.tree.map(lambda x: 0.9 * x, state.variables["params"])}
    expected = whole.step(state.replace(variables=moved), batch).state
    pieces = split(batch, [2, 2, 2])
    window = parts.init(pieces[0]).replace(variables=moved)
    for piece in pieces:
        window = parts.step(window, piece).state
    assert int(window.updates) == 1
    for leaf, wanted in zip(*(jax.tree.leaves(x.variables["params"]) for x in (window, expected)), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, OPTIONS["gspo"], OPTIONS["token_mean"], OPTIONS["constant"]])
def test_packed_rows_are_their_completions(options: dict[str, Any]) -> None:
    """Row 69: two completions packed into one row give the loss and the gradient of two rows, in float64."""
    with jax.enable_x64(True):
        apart = rows(4)
        packed = {n: apart[n].reshape(2, -1) for n in ("tokens", "completion_mask", "old_log_probs")}
        packed["segment_ids"] = np.repeat([[1, 2]], 7, axis=1).repeat(2, axis=0)
        packed["advantages"] = np.repeat(apart["advantages"].reshape(2, 2), 7, axis=1)
        objective, variables = started(GRPOObjective(Tiny(), **options), apart)
        variables = jax.tree.map(lambda x: x.astype(jnp.float64), variables)
        value, _ = loss_of(objective, variables, apart)
        assert loss_of(objective, variables, packed)[0] == pytest.approx(value, rel=1e-9)
        expected = gradient_of(objective, variables, apart)
        for name, leaf in gradient_of(objective, variables, packed).items():
            np.testing.assert_allclose(leaf, expected[name], rtol=1e-8, atol=1e-10)


def test_all_masked_completions_commit_nothing() -> None:
    """Catches weight decay, or a step of Adam's moments, on a batch without a token."""
    batch = {**rows(), "completion_mask": np.zeros((6, 7), np.int32)}
    step = step_of(GRPOObjective(Tiny()))
    state = step.init(batch)
    after = step.step(state, batch).state
    assert int(after.updates) == 0
    for a, b in zip(*(jax.tree.leaves(x.variables) for x in (state, after)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_stands_behind_the_mask_does_not_matter() -> None:
    """XS164, XS169: prompts' and padding's log-probs, NaN and infinities included."""
    batch = rows()
    objective, variables = started(GRPOObjective(Tiny()), batch)
    value, _ = loss_of(objective, variables, batch)
    hidden = batch["completion_mask"] == 0
    for poison in (np.nan, np.inf, -np.inf):
        other = {**batch, "old_log_probs": np.where(hidden, poison, batch["old_log_probs"]).astype(np.float32)}
        assert loss_of(objective, variables, other)[0] == value
        assert all(np.isfinite(leaf).all() for leaf in gradient_of(objective, variables, other).values())


def test_tokens_after_the_end_and_padding_before_do_not_matter() -> None:
    """XS164: log-probs of a completion that depend on junk after its end, or on the ids of the padding."""
    batch = {**rows(), "segment_ids": np.tile([0, 1, 1, 1, 1, 0, 0], (6, 1))}
    batch["completion_mask"] = np.tile([0, 0, 0, 1, 1, 0, 0], (6, 1))
    objective, variables = started(GRPOObjective(Tiny()), batch)
    value, _ = loss_of(objective, variables, batch)
    junk = batch["tokens"].copy()
    junk[:, [0, 5, 6]] = 7
    assert loss_of(objective, variables, {**batch, "tokens": junk})[0] == value
    other = batch["tokens"].copy()
    other[:, 1] = 7
    assert loss_of(objective, variables, {**batch, "tokens": other})[0] != value


def test_samples_of_another_program() -> None:
    """Catches weights that are not applied, and tokens without a log-prob that are passed over in silence."""
    batch = rows()
    given = batch["old_log_probs"] - 0.5
    objective, variables = started(GRPOObjective(Tiny(), sampling_highest=1.25), batch)
    value, _ = loss_of(objective, variables, batch)
    weighed, metrics = loss_of(objective, variables, {**batch, "sampling_log_probs": given})
    assert weighed == pytest.approx(1.25 * value, rel=1e-5)
    assert metrics["sampling_weight"] == pytest.approx(1.25)
    nothing, metrics = loss_of(objective, variables, {**batch, "sampling_log_probs": np.full_like(given, np.nan)})
    assert nothing == value
    assert metrics["missing_log_probs"] == 1


def test_temperature_divides_the_logits() -> None:
    """Catches log-probs of another distribution than the samples were drawn from."""
    batch = {n: x for n, x in rows(2, 4).items() if n != "old_log_probs"}
    logits = np.random.default_rng(0).normal(size=(2, 3, VOCAB)).astype(np.float32)
    variables = {"params": {"logits": jnp.asarray(logits)}}
    objective = GRPOObjective(Fixed(logits), temperature=0.5).bind(batch)
    _, aux = objective.loss(variables, batch, Step(train=False))
    expected = np.take_along_axis(jax.nn.log_softmax(2 * logits), batch["tokens"][:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(aux.outputs["log_probs"], expected, rtol=1e-5)


def test_a_reference_of_the_batch() -> None:
    """Catches a copy of the weights that is kept although the batch brings the reference."""
    batch = rows()
    kept, variables = started(GRPOObjective(Tiny(), beta=0.1), batch)
    assert kept.ema is not None
    _, reference = started(GRPOObjective(Tiny()), batch, seed=1)
    given = np.pad(log_probs_of(reference, batch["tokens"]), ((0, 0), (1, 0)))
    brought = {**batch, "reference_log_probs": given}
    objective = GRPOObjective(Tiny(), beta=0.1, reference="batch").bind(brought)
    assert objective.ema is None
    assert loss_of(objective, variables, brought)[0] == pytest.approx(
        loss_of(kept, variables, batch, reference)[0], rel=1e-5
    )
    assert GRPOObjective(Tiny()).ema is None
    with pytest.raises(ContractError, match="there is none: train and evaluate a TrainState"):
        kept.loss(variables, batch, Step(train=False))


@pytest.mark.slow
def test_keeps_the_contract() -> None:
    """Catches averages for sums, captured arrays and masses that read parameters."""
    for name in ("sequence_mean", "gspo", "kl"):
        assert check_objective(GRPOObjective(Tiny(), **OPTIONS[name]), rows(8)).ok


def test_options_that_are_refused() -> None:
    """Catches options that are accepted and read by nothing."""
    for options, text in (
        ({"surrogate": "ppo"}, "unknown surrogate 'ppo'"),
        ({"surrogate": "cispo", "epsilon_low": 0.1}, "CISPO cuts weights from above only"),
        ({"aggregate": "constant"}, "divides by max_tokens"),
        ({"max_tokens": 5}, "divides by max_tokens"),
        ({"aggregate": "constant", "max_tokens": 0}, "at least 1"),
        ({"importance": "row"}, "unknown importance"),
        ({"beta": -1.0}, "beta must be"),
        ({"kl": "k4"}, "unknown kl"),
        ({"epsilon_high": 0.0}, "epsilon_high must be above 0"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"sampling_lowest": 3.0}, "sampling_lowest < sampling_highest"),
    ):
        with pytest.raises(ValueError, match=text):
            GRPOObjective(Tiny(), **options)
    with pytest.raises(TypeError, match="needs a model with the methods"):
        GRPOObjective(None)  # pyright: ignore


def changed(**fields: Any) -> dict[str, Any]:
    return {**rows(), **fields}


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"tokens": rows()["tokens"]}, DataError, "lacks completion_mask, advantages"),
        (changed(advantages=np.zeros((6, 1))), ShapeError, r"advantages must be .*got \(6, 1\)"),
        (changed(advantages=np.asarray([0, 0, np.nan, 0, 0, 0])), DataError, "advantage of row 2"),
        (changed(old_log_probs=np.zeros((6, 6))), ShapeError, r"old_log_probs must have the shape of tokens, \(6, 7\)"),
        (changed(old_log_prob=np.zeros((6, 7))), DataError, "no field 'old_log_prob'. Did you mean 'old_log_probs'"),
        (changed(rewards=np.zeros((6, 2))), ShapeError, "rewards must be reward of each completion"),
        (changed(tokens=rows()["tokens"] - 5), DataError, r"token ids must be in \[0, 11\)"),
        (changed(tokens=rows()["tokens"][0]), ShapeError, "tokens must be"),
    ],
)
def test_batches_that_are_refused(batch: Any, error: type[Exception], text: str) -> None:
    """Catches data that would broadcast, or a field that is read by nothing."""
    with pytest.raises(error, match=text):
        GRPOObjective(Tiny()).bind(batch)


def test_a_reference_that_is_missing_or_not_asked_for() -> None:
    """Catches a KL to nothing."""
    with pytest.raises(DataError, match="which the batch lacks"):
        GRPOObjective(Tiny(), beta=0.1, reference="batch").bind(rows())
    with pytest.raises(DataError, match="keeps a reference of its own"):
        GRPOObjective(Tiny(), beta=0.1).bind(changed(reference_log_probs=np.zeros((6, 7))))


def test_it_learns_what_is_rewarded() -> None:
    """Catches a sign: completions with a positive advantage become likelier."""
    batch = {n: x for n, x in rows().items() if n != "old_log_probs"}
    trainer = telic.Trainer(GRPOObjective(Tiny()), telic.optimizers.adam(1e-2), key=0)
    start = trainer.place(example=batch)
    state = trainer.loop(log=0).run([batch] * 10).step_state
    mask = batch["completion_mask"][:, 1:]
    before, after = ((log_probs_of(s.variables, batch["tokens"]) * mask).sum(1) / mask.sum(1) for s in (start, state))
    assert ((after - before) * batch["advantages"]).mean() > 0.01
