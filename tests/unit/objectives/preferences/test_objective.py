"""`DPOObjective` on a model of plain functions: the reference, masks, windows, and what is refused."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic.contract import Step, scalar_loss
from telic.errors import ContractError, DataError, ShapeError
from telic.interop.lora import add_lora
from telic.objectives import DPOObjective
from telic.testing import check_objective
from tests.unit.objectives.language.tiny import VOCAB, Fixed, Tiny
from tests.unit.train.tiny import split, step_of


def pairs(count: int = 4, time: int = 6, seed: int = 0) -> dict[str, Any]:
    """Pairs of completions of two to four tokens after a prompt of two."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(1, VOCAB, (count, 2, time)).astype(np.int32)
    tokens[:, 1, :2] = tokens[:, 0, :2]
    lengths = draw.integers(2, 5, (count, 2, 1))
    place = np.arange(time)
    return {"tokens": tokens, "completion_mask": ((place >= 2) & (place < 2 + lengths)).astype(np.int32)}


def start_of(objective: Any, batch: Any, seed: int = 0) -> tuple[Any, Any]:
    bound = objective.bind(batch)
    return bound, bound.init(jax.random.key(seed))


def loss_of(objective: Any, variables: Any, batch: Any, reference: Any = None) -> tuple[float, dict[str, float]]:
    value, aux = scalar_loss(objective, variables, batch, Step(averaged=reference, train=False))
    return float(value), {name: float(mean.value()) for name, mean in aux.metrics.items()}


@pytest.mark.slow
def test_policy_that_is_its_reference() -> None:
    """Row 63, XS155: ln 2, rewards 0, ties that count as wrong, and a gradient that is not 0."""
    batch = pairs()
    objective, variables = start_of(DPOObjective(Tiny()), batch)
    value, metrics = loss_of(objective, variables, batch, variables)
    assert value == pytest.approx(math.log(2), rel=1e-6)
    assert {n: metrics[n] for n in ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")} == {
        "reward_chosen": 0,
        "reward_rejected": 0,
        "reward_margin": 0,
        "reward_accuracy": 0,
    }
    gradient = jax.grad(lambda v: scalar_loss(objective, v, batch, Step(averaged=variables, train=False))[0])(variables)
    margin = jax.grad(lambda v: loss_margin(objective, v, batch, variables))(variables)
    for name in gradient["params"]:
        # -β/2 of the gradient of the difference of log-probs.
        np.testing.assert_allclose(gradient["params"][name], -0.5 * margin["params"][name], rtol=1e-4, atol=1e-6)


def loss_margin(objective: Any, variables: Any, batch: Any, reference: Any) -> Any:
    del reference
    rows = {"tokens": batch["tokens"].reshape(-1, batch["tokens"].shape[-1])}
    found = objective.score(variables, rows, Step(train=False)).log_prob.reshape(len(batch["tokens"]), 2, -1)
    sums = jnp.where(batch["completion_mask"][..., 1:] != 0, found, 0).sum(-1)
    return 0.1 * jnp.mean(sums[:, 0] - sums[:, 1])


def test_the_formula_with_another_reference() -> None:
    """XS158: the reference's term forgotten, and chosen taken for rejected."""
    batch = pairs()
    objective, policy = start_of(DPOObjective(Tiny(), beta=0.3), batch)
    _, reference = start_of(DPOObjective(Tiny()), batch, seed=1)

    def sums(variables: Any) -> Any:
        tokens, mask = batch["tokens"].reshape(-1, 6), batch["completion_mask"].reshape(-1, 6)[:, 1:]
        states = Tiny().hidden_states(variables, tokens[:, :-1])
        log_probs = jax.nn.log_softmax(Tiny().head(variables).logits(states.hidden))
        picked = np.take_along_axis(np.asarray(log_probs), tokens[:, 1:, None], -1)[..., 0]
        return (picked * mask).sum(-1).reshape(-1, 2)

    ratio = sums(policy) - sums(reference)
    expected = -np.log(1 / (1 + np.exp(-0.3 * (ratio[:, 0] - ratio[:, 1]))))
    value, metrics = loss_of(objective, policy, batch, reference)
    assert value == pytest.approx(expected.mean(), rel=1e-5)
    assert metrics["reward_accuracy"] == pytest.approx((ratio[:, 0] > ratio[:, 1]).mean())
    swapped = {**batch, **{n: batch[n][:, ::-1] for n in ("tokens", "completion_mask")}}
    assert loss_of(objective, policy, swapped, reference)[0] != pytest.approx(value, rel=1e-3)
    # The same from given log-probs, and without a reference at all.
    given = {**batch, "reference_log_probs": sums(reference).astype(np.float32)}
    by_batch = DPOObjective(Tiny(), beta=0.3, reference="batch").bind(given)
    assert by_batch.ema is None
    assert loss_of(by_batch, policy, given)[0] == pytest.approx(value, rel=1e-5)
    free = DPOObjective(Tiny(), beta=0.3, reference_free=True).bind(batch)
    assert free.ema is None
    bare = sums(policy)
    expected = -np.log(1 / (1 + np.exp(-0.3 * (bare[:, 0] - bare[:, 1]))))
    value, metrics = loss_of(free, policy, batch)
    assert value == pytest.approx(expected.mean(), rel=1e-5)
    assert metrics["reward_chosen"] == pytest.approx(0.3 * bare[:, 0].mean(), rel=1e-5)


def test_the_reference_stays_while_the_policy_learns() -> None:
    """S43: a reference that is the live model keeps the loss at ln 2 for ever; ours keeps its bits."""
    batch = pairs()
    trainer = telic.Trainer(DPOObjective(Tiny()), telic.optimizers.adam(3e-2), key=0)
    loop = trainer.loop(log=0)
    losses: list[float] = []
    loop.handle_event("iteration_completed", lambda s: losses.append(float(s.metrics["loss"])))
    start = trainer.place(example=batch)
    before = jax.device_get(start.ema["params"])
    state = loop.run([batch] * 10, epochs=2).step_state
    for name, leaf in before.items():
        np.testing.assert_array_equal(state.ema["params"][name], leaf)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[9] < 0.6


def test_only_trained_leaves_are_kept_as_the_reference() -> None:
    """XS157: with adapters the reference is a copy of the adapters, and what else is trained is in it too."""
    batch = pairs()
    trainer = telic.Trainer(DPOObjective(Tiny()), telic.optimizers.adam(1e-2), key=0, trainable=("params/head",))
    state = trainer.place(example=batch)
    kept = [name for name, leaf in telic.tree.named_leaves(state.ema).items() if leaf is not None]
    assert kept == ["params/head"]
    state = trainer.loop(log=0).run([batch] * 5).step_state
    assert np.abs(np.asarray(state.variables["params"]["head"] - state.ema["params"]["head"])).max() > 1e-3
    _, metrics = loss_of(DPOObjective(Tiny()).bind(batch), state.variables, batch, state.averaged)
    assert metrics["reward_margin"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_type",
    ["sigmoid", {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}, "aot", {"aot_unpaired": 1.0, "sft": 0.5}],
    ids=["pairs", "mixture", "ranks", "ranks and tokens"],
)
def test_windows_are_exact(loss_type: Any) -> None:
    """Catches a mean of means where pairs have no mass or terms have denominators of their own, and ranks of a part."""
    batch = pairs(6)
    batch["completion_mask"][[1, 4]] = 0
    batch["completion_mask"][5, 1] = 0
    objective = DPOObjective(Tiny(), loss_type=loss_type)
    whole = step_of(objective)
    parts = step_of(objective, accumulate=3)
    state = whole.init(batch)
    reference = {"params": jax.tree.map(lambda x: 0.9 * x, state.variables["params"])}
    state = state.replace(variables=reference)
    expected = whole.step(state, batch).state
    window = parts.init(split(batch, [2, 2, 2])[0]).replace(variables=reference)
    for part in split(batch, [2, 2, 2]):
        window = parts.step(window, part).state
    for name, leaf in expected.variables["params"].items():
        np.testing.assert_allclose(window.variables["params"][name], leaf, rtol=2e-5, atol=1e-6)


def test_pairs_without_a_completion_have_no_mass() -> None:
    """Catches padding rows in the mean, and NaN in them that reaches a gradient."""
    batch = pairs(4)
    batch["completion_mask"][3, 1] = 0
    objective, variables = start_of(DPOObjective(Tiny()), batch)
    _, reference = start_of(DPOObjective(Tiny()), batch, seed=1)
    loss, aux = objective.loss(variables, batch, Step(averaged=reference, train=False))
    alone, _ = objective.loss(variables, jax.tree.map(lambda x: x[:3], batch), Step(averaged=reference, train=False))
    assert float(loss.mass) == 3
    np.testing.assert_allclose(loss.total, alone.total, rtol=1e-6)
    assert all(float(mean.mass) == 3 for mean in aux.metrics.values())
    weighted, _ = objective.loss(
        variables, {**batch, "weights": np.asarray([2.0, 0, 1, 9])}, Step(averaged=reference, train=False)
    )
    assert float(weighted.mass) == 3


def test_only_completions_count() -> None:
    """Catches prompts that are scored, and a mask that is shifted the other way."""
    batch = pairs(3)
    draw = np.random.default_rng(1).normal(size=(6, 5, VOCAB)).astype(np.float32)
    model = Fixed(draw)
    objective = DPOObjective(model, reference_free=True).bind(batch)
    variables = {"params": {"logits": jnp.asarray(draw)}}
    gradient = jax.grad(lambda v: scalar_loss(objective, v, batch, Step(train=False))[0])(variables)
    touched = np.abs(np.asarray(gradient["params"]["logits"])).sum(-1) > 0
    np.testing.assert_array_equal(touched, batch["completion_mask"].reshape(6, 6)[:, 1:] != 0)


@pytest.mark.slow
def test_keeps_the_contract() -> None:
    """Catches averages for sums, captured arrays and masses that read parameters, in each kind of loss."""
    batch = pairs(8)
    for objective in (
        DPOObjective(Tiny()),
        DPOObjective(Tiny(), loss_type={"ipo": 1.0, "sft": 0.1}),
        DPOObjective(Tiny(), loss_type="aot"),
    ):
        assert check_objective(objective, batch).ok


@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*")
def test_adapters_are_the_policy() -> None:
    """Catches an objective that reaches the layers past the adapters: the policy would never move."""
    pytest.importorskip("qwix")
    decoder = telic.models.Decoder(telic.models.DecoderConfig(vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=2))
    batch = pairs()
    weights = decoder.init_variables(jax.random.key(0), batch["tokens"][:, 0])
    lora = add_lora(decoder, rank=2)
    variables = lora.init(jax.random.key(1), batch["tokens"][:, 0, :-1], weights)
    trainer = telic.Trainer(
        DPOObjective(lora.model, variables=variables), telic.optimizers.adam(3e-2), key=0, trainable=lora.trainable
    )
    start = trainer.place(example=batch)
    kept = [name for name, leaf in telic.tree.named_leaves(start.ema).items() if leaf is not None]
    assert kept
    assert all(name.endswith(("_lora_a", "_lora_b")) for name in kept)
    final = trainer.loop(log=0).run([batch] * 40)
    # A policy that is its reference has the loss log 2.
    assert float(trainer.evaluate([batch], state=final)["loss"]) < np.log(2) - 0.02
    base = telic.tree.named_leaves(weights["params"])
    for name, leaf in telic.tree.named_leaves(final.step_state.variables["params"]).items():
        if name in base:
            np.testing.assert_array_equal(leaf, base[name])


def test_options_that_are_refused() -> None:
    """Catches options that are accepted and read by nothing."""
    for options, text in (
        ({"loss_type": "dpo"}, "unknown loss_type 'dpo'"),
        ({"loss_type": {}}, "loss_type is empty"),
        ({"beta": 0.0}, "beta must be"),
        ({"loss_type": "sft", "beta": -1.0}, "beta must be"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 has no meaning in hinge"),
        ({"loss_type": "bco_pair", "divergence": "js"}, "divergence='js' has no meaning in bco_pair"),
        ({"tail_weight": 2.0}, "tail_weight must be"),
        ({"reference": "model"}, "unknown reference"),
        ({"discopop_temperature": 0.1}, "no meaning in sigmoid"),
    ):
        with pytest.raises(ValueError, match=text):
            DPOObjective(Tiny(), **options)
    with pytest.raises(TypeError, match="loss_type takes a name"):
        DPOObjective(Tiny(), loss_type=["sigmoid"])  # pyright: ignore
    with pytest.raises(TypeError, match="needs a model with the methods"):
        DPOObjective(lambda x: x)  # pyright: ignore
    with pytest.raises(TypeError, match="ema_decay"):
        DPOObjective(Tiny(), ema_decay=0.9)  # pyright: ignore
    mixed = DPOObjective(Tiny(), loss_type={"sigmoid": 1.0, "hinge": 1.0}, label_smoothing=0.1)
    assert type(mixed) is DPOObjective


def changed(**fields: Any) -> dict[str, Any]:
    return {**pairs(), **fields}


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (np.zeros((4, 6)), DataError, r"reads a mapping with tokens .*got an array of shape \(4, 6\)"),
        ({"tokens": pairs()["tokens"]}, DataError, "the batch lacks completion_mask"),
        (
            changed(tokens=np.zeros((4, 6), int)),
            ShapeError,
            r"tokens must be token ids, int \[pairs, 2, time\].*\(4, 6\)",
        ),
        (changed(tokens=pairs()["tokens"] * 1.0), TypeError, "tokens must be integers"),
        (changed(completion_mask=np.ones((4, 2, 5))), ShapeError, r"completion_mask must have the shape of tokens"),
        (changed(weights=np.ones((4, 2))), ShapeError, r"weights must have shape \(4,\), got \(4, 2\)"),
        (changed(completion_masks=1), DataError, "has no field 'completion_masks'"),
        (changed(reference_log_probs=np.zeros((4, 2))), DataError, "keeps a reference of its own"),
        (changed(tokens=pairs()["tokens"] + VOCAB), DataError, r"token ids must be in \[0, 11\)"),
        (
            changed(tokens=np.ones((4, 2, 6), int), completion_mask=np.ones((4, 2, 6), int)),
            DataError,
            r"completion of pair 0 of the first batch are the same, \[1, 1, 1, 1, 1\] \(4 such pairs",
        ),
    ],
)
def test_batches_that_are_refused(batch: Any, error: type[Exception], text: str) -> None:
    """Catches data that would broadcast, train on nothing, or be read as something else."""
    with pytest.raises(error, match=text):
        DPOObjective(Tiny()).bind(batch)


def test_no_reference() -> None:
    """Catches a policy compared with nothing, which is not DPO."""
    batch = pairs()
    objective, variables = start_of(DPOObjective(Tiny()), batch)
    with pytest.raises(ContractError, match="there is none: train and evaluate a TrainState"):
        objective.loss(variables, batch, Step(train=False))
    with pytest.raises(DataError, match="reads the field reference_log_probs, which the batch lacks"):
        DPOObjective(Tiny(), reference="batch").bind(batch)
    given = {**batch, "reference_log_probs": np.zeros((4, 2, 5), np.float32)}
    with pytest.raises(ShapeError, match=r"reference_log_probs must have shape \(4, 2\)"):
        DPOObjective(Tiny(), reference="batch").bind(given)


def test_the_reference_does_not_drop_out() -> None:
    """XS156: dropout in the reference's pass makes the margin noise, and the first loss not ln 2."""
    config = telic.models.DecoderConfig(vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=2, embedding_dropout=0.5)
    batch = pairs()
    objective = DPOObjective(telic.models.Decoder(config)).bind(batch)
    variables = objective.init(jax.random.key(0))
    step = Step(averaged=variables, train=True, key=jax.random.key(1))
    assert float(scalar_loss(objective, variables, batch, step)[0]) == pytest.approx(math.log(2), rel=1e-5)
    noisy = DPOObjective(telic.models.Decoder(config), dropout=True).bind(batch)
    assert abs(float(scalar_loss(noisy, variables, batch, step)[0]) - math.log(2)) > 1e-4


def test_one_trainer_runs_it_like_any_objective() -> None:
    """Catches metrics that a loop or a validation does not see."""
    batch = pairs()
    trainer = telic.Trainer(DPOObjective(Tiny()), optax.sgd(0.5), key=0)
    final = trainer.loop(log=0).validate([batch]).run([batch] * 6)
    assert final.metrics["reward_accuracy"] > 0
    assert final.metrics["validation_reward_accuracy"] == 1
    assert final.metrics["validation_loss"] < math.log(2)
