"""`LMObjective` on a model of plain functions: what is learned, reported, refused, and exact over windows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic.artifacts import TextSamples, TokenScores
from telic.contract import Step, scalar_loss
from telic.errors import ContractError, DataError
from telic.models import Decoder, DecoderConfig
from telic.objectives.language import LMObjective
from telic.objectives.language.sampling import sample
from telic.testing import check_objective
from tests.unit.objectives.language.tiny import VOCAB, Fixed, Tiny, rows
from tests.unit.train.tiny import split, step_of

TEST = Step(train=False)


def bound(objective: LMObjective, batch: Any) -> tuple[LMObjective, Any]:
    made = objective.bind(batch)
    return made, jax.jit(made.init)(jax.random.key(0))


def compiled(objective: LMObjective) -> Any:
    """Give ``(variables, batch) -> (statistics, aux)`` in evaluation, compiled: op by op it takes minutes."""
    return jax.jit(lambda variables, batch: objective.loss(variables, batch, TEST))


def loss_of(objective: LMObjective, batch: Any, variables: Any = None, step: Step = TEST) -> Any:
    made, start = bound(objective, batch)
    return jax.jit(functools.partial(scalar_loss, made))(start if variables is None else variables, batch, step)


def trained(objective: LMObjective, batches: Any, *, accumulate: int, **options: Any) -> Any:
    """Train on batches, and give the state and what each attempt gave."""
    step = step_of(
        objective, optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)), accumulate=accumulate, **options
    )
    step = step.bind(batches[0])
    state, run, outputs = step.init(batches[0]), jax.jit(step.step), []
    for batch in batches:
        result = run(state, batch)
        state = result.state
        outputs.append(result.outputs)
    return state, outputs


def test_a_model_that_knows_the_next_token_has_no_loss() -> None:
    """S42: shifted twice, a model that is right about t + 1 is scored on t + 2."""
    tokens = np.asarray([[0, 1, 2, 3], [4, 5, 6, 7]], np.int32)
    logits = 50 * np.eye(8, dtype=np.float32)[tokens[:, 1:]]
    value, aux = loss_of(LMObjective(Fixed(logits)), {"tokens": tokens})
    assert float(value) < 1e-6
    assert float(aux.metrics["token_accuracy"].value()) == 1
    wrong, _ = loss_of(LMObjective(Fixed(logits)), {"tokens": np.roll(tokens, 1, axis=1)})
    assert float(wrong) > 10


def test_the_mean_is_over_tokens() -> None:
    """XS149: documents of 7 and 2 tokens with 1 and 2 nats each are 11/9, and 3/2 by weights per document."""
    tokens = np.zeros((1, 11), np.int32)
    tokens[0, 8:] = 1
    segments = np.asarray([[1] * 8 + [2] * 3])
    nll = np.asarray([1.0] * 7 + [0] + [2.0] * 2)
    # Of two tokens the target has logit x and the other 0: -log sigmoid(x) = nll.
    x = -np.log(np.expm1(np.maximum(nll, 0.1)))
    logits = np.where(tokens[0, 1:, None] == np.arange(2), x[:, None], 0)[None].astype(np.float32)
    batch = {"tokens": tokens, "segment_ids": segments}
    value, aux = loss_of(LMObjective(Fixed(logits)), batch)
    np.testing.assert_allclose(value, 11 / 9, rtol=1e-6)
    # XS151: what is reported is what is optimised.
    np.testing.assert_allclose(aux.metrics["cross_entropy"].value(), value, rtol=1e-6)
    by_document = {**batch, "weights": np.asarray([[1 / 7] * 8 + [1 / 2] * 3], np.float32)}
    np.testing.assert_allclose(loss_of(LMObjective(Fixed(logits)), by_document)[0], 1.5, rtol=1e-6)


def test_packed_documents_lose_what_they_lose_alone() -> None:
    """S41: attention or a target across the documents of a row."""
    a, b = [1, 2, 3], [4, 5, 6, 7, 8]
    objective = LMObjective(Tiny())
    packed = {"tokens": np.asarray([a + b], np.int32), "segment_ids": np.asarray([[1] * 3 + [2] * 5])}
    made, variables = bound(objective, packed)
    loss = compiled(made)
    together = loss(variables, packed)[0]
    alone = [loss(variables, {"tokens": np.asarray([d], np.int32)})[0] for d in (a, b)]
    assert float(together.mass) == sum(float(m.mass) for m in alone) == 6
    np.testing.assert_allclose(together.total, sum(float(m.total) for m in alone), rtol=1e-6)


def test_padding_changes_nothing() -> None:
    """Catches padding that is read, predicted, or sent to an expert."""
    objective = LMObjective(Tiny(experts=4), pad_id=0, balance_loss=0.5, router_z_loss=0.1)
    short = rows(2, 5)
    wide = np.concatenate([short, np.zeros((2, 3), np.int32)], axis=1)
    made, variables = bound(objective, {"tokens": wide})
    loss = compiled(made)
    full = loss(variables, {"tokens": wide})[0].terms
    only = loss(variables, {"tokens": short})[0].terms
    # Longer rows of the same texts: the last token of a text is then read too, to predict nothing.
    longer = loss(variables, {"tokens": np.pad(wide, ((0, 0), (0, 4)))})[0].terms
    for name in ("next_token", "balance", "router_z"):
        np.testing.assert_allclose(longer[name][1].total, full[name][1].total, rtol=1e-6)
        assert float(longer[name][1].mass) == float(full[name][1].mass)
    np.testing.assert_allclose(full["next_token"][1].total, only["next_token"][1].total, rtol=1e-6)
    assert float(full["next_token"][1].mass) == float(only["next_token"][1].mass) == 8


def test_rows_without_targets_have_no_mass() -> None:
    """Catches an empty row that pulls the mean towards 0, and a window of them that commits."""
    batch = {"tokens": rows(), "weights": np.asarray([1, 0, 0, 0], np.float32)}
    objective = LMObjective(Tiny())
    np.testing.assert_allclose(loss_of(objective, batch)[0], loss_of(objective, {"tokens": rows()[:1]})[0], rtol=1e-6)
    empty = {"tokens": rows(), "weights": np.zeros(4, np.float32)}
    state, outputs = trained(objective, [empty], accumulate=1)
    assert int(state.updates) == 0
    assert float(outputs[0]["statistics"].mass) == 0


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_window_is_one_batch(scope: Any) -> None:
    """Row 11: roles (1 against 9 targets), router losses, smoothing, clipping, bias moves and qk maxima over K = 2."""
    tokens, roles = rows(4, 8), np.zeros((4, 8), np.int32)
    roles[0, 3] = roles[2:, 1:] = 1
    batch = {"tokens": tokens, "roles": roles}
    objective = LMObjective(
        Tiny(experts=4, soft_cap=5.0),
        loss_roles=(1,),
        label_smoothing=0.1,
        z_loss=1e-3,
        balance_loss=0.3,
        balance_scope=scope,
        router_z_loss=0.01,
        balance_rate=0.01,
        qk_stats=True,
    )
    whole, given = trained(objective, [batch], accumulate=1)
    window, pieces = trained(objective, split(batch, [2, 2]), accumulate=2)
    assert int(whole.updates) == int(window.updates) == 1
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(window.variables["params"]),
        jax.tree.leaves(whole.variables["params"]),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7, err_msg=str(path))
    np.testing.assert_array_equal(window.variables["balance"]["bias"], whole.variables["balance"]["bias"])
    assert np.abs(np.asarray(whole.variables["balance"]["bias"])).max() > 0
    mass = sum(float(p["metrics"]["cross_entropy"].mass) for p in pieces)
    assert mass == float(given[0]["metrics"]["cross_entropy"].mass) == 15


def test_the_two_scopes_differ() -> None:
    """Catches a scope that is read and not used: rows that each use other experts are unbalanced one by one alone."""
    batch = {"tokens": rows(4, 8)}
    values = [
        float(loss_of(LMObjective(Tiny(experts=4), balance_loss=1.0, balance_scope=scope), batch)[0])
        for scope in ("sequence", "batch")
    ]
    assert abs(values[0] - values[1]) > 1e-3
    one = {"tokens": rows(1, 8)}
    same = [
        float(loss_of(LMObjective(Tiny(experts=4), balance_loss=1.0, balance_scope=scope), one)[0])
        for scope in ("sequence", "batch")
    ]
    np.testing.assert_allclose(*same, rtol=1e-6)


def test_blocks_of_the_vocabulary_and_the_whole_train_alike() -> None:
    """Catches a head whose blocks see other weights, or metrics that change with the number of blocks."""
    batch = {"tokens": rows()}
    ends = [trained(LMObjective(Tiny(), head_chunks=n), [batch] * 3, accumulate=1) for n in (1, 3)]
    for a, b in zip(*(jax.tree.leaves(state.variables) for state, _ in ends), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert "prediction" in ends[0][1][0]
    assert "prediction" not in ends[1][1][0]


def test_what_is_reported() -> None:
    """Catches bits per byte in nats or per token, and metrics of tokens that do not count."""
    batch = {"tokens": rows(), "weights": np.ones((4, 7), np.float32)}
    batch["weights"][:, :4] = 0
    table = np.arange(VOCAB) % 3
    objective = LMObjective(Tiny(), token_bytes=table, z_loss=1e-3)
    value, aux = loss_of(objective, batch)
    nats = float(aux.metrics["cross_entropy"].total)
    in_bytes = table[batch["tokens"][:, 4:]].sum()
    np.testing.assert_allclose(aux.metrics["bits_per_byte"].value(), nats / np.log(2) / in_bytes, rtol=1e-5)
    parts = aux.metrics["cross_entropy"].value() + 1e-3 * aux.metrics["z_loss"].value()
    np.testing.assert_allclose(value, parts, rtol=1e-6)
    assert float(aux.metrics["token_accuracy"].mass) == 12


def test_scores_are_those_of_the_loss() -> None:
    """Catches an evaluation that shifts, masks or weighs otherwise than training."""
    batch = {"tokens": rows(), "segment_ids": np.asarray([[1, 1, 1, 2, 2, 0, 0]] * 4)}
    made, variables = bound(LMObjective(Tiny(), token_bytes=np.ones(VOCAB, int)), batch)
    scores = jax.jit(lambda v, b: made.evaluate(v, b, TEST))(variables, batch)
    assert isinstance(scores, TokenScores)
    loss, aux = compiled(made)(variables, batch)
    np.testing.assert_allclose(-(scores.log_probs * scores.mask).sum(), loss.total, rtol=1e-6)
    assert float(scores.mask.sum()) == float(loss.mass) == 12
    hits = (scores.correct * scores.mask).sum()
    np.testing.assert_allclose(hits, aux.metrics["token_accuracy"].total)
    assert ((scores.confidence > 0) & (scores.confidence <= 1)).all()
    right = np.asarray(scores.correct)
    np.testing.assert_allclose(scores.confidence[right], np.exp(scores.log_probs)[right], rtol=1e-5)


def test_samples_follow_the_model() -> None:
    """Catches a sample drawn from the place before or after the last token."""
    batch = {"tokens": rows()}
    objective = LMObjective(Tiny(), prompts=[[1, 2], [3, 4]], sample_tokens=3, temperature=0, decode=str)
    made, variables = bound(objective, batch)
    shown = made.preview(variables, batch, TEST)
    assert isinstance(shown, TextSamples)
    text = np.asarray([[1, 2], [3, 4]])
    for i in range(3):
        hidden = Tiny().hidden_states(variables, text).hidden
        text = np.append(text, np.asarray(Tiny().head(variables).logits(hidden)[:, -1].argmax(-1))[:, None], axis=1)
        np.testing.assert_array_equal(shown.completions[:, i], text[:, -1])
    # Without prompts, the rows' own beginnings.
    without, _ = bound(LMObjective(Tiny(), sample_tokens=2), batch)
    own = without.preview(variables, batch, Step(train=False, key=jax.random.key(3)))
    np.testing.assert_array_equal(own.prompts, batch["tokens"][:, :3])
    assert own.completions.shape == (4, 2)


def test_samples_of_a_decoder_use_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preview that runs the whole model for each token although the model keeps keys and values."""
    decoder = Decoder(DecoderConfig(vocab_size=12, d_model=16, num_layers=2, num_heads=2, max_length=10))
    batch = {"tokens": rows()}
    objective = LMObjective(decoder, prompts=[[1, 2, 5], [3, 4, 6]], sample_tokens=4, temperature=0)
    made, variables = bound(objective, batch)
    slow = sample(decoder, variables, [[1, 2, 5], [3, 4, 6]], max_new_tokens=4, temperature=0, key=jax.random.key(0))
    monkeypatch.setattr("telic.objectives.language.sampling.sample", None)
    np.testing.assert_array_equal(made.preview(variables, batch, TEST).completions, slow.tokens)


def test_samples_end_where_the_model_does() -> None:
    """A preview that ends the run because rows and samples together are longer than the decoder's max_length."""
    decoder = Decoder(DecoderConfig(vocab_size=12, d_model=16, num_layers=1, num_heads=2, max_length=8))
    batch = {"tokens": rows()}
    made, variables = bound(LMObjective(decoder, sample_tokens=64), batch)
    shown = made.preview(variables, batch, TEST)
    assert shown.prompts.shape[1] + shown.completions.shape[1] == 8


def test_precision_average_and_frozen_parameters() -> None:
    """Catches a loss in bfloat16, an average that does not move, and frozen leaves that do."""
    batch = {"tokens": rows()}
    trainer = telic.Trainer(
        LMObjective(Tiny(), ema=telic.EMASpec(0.5)), "sgd", key=0, precision="bfloat16", trainable="params/head"
    )
    step = trainer.train_step().bind(batch)
    state = step.init(batch)
    result = jax.jit(step.step)(state, batch)
    assert result.outputs["loss"].dtype == result.outputs["nll"].dtype == jnp.float32
    before, after = state.variables["params"], result.state.variables["params"]
    np.testing.assert_array_equal(before["table"], after["table"])
    moved = np.asarray(after["head"]) - np.asarray(before["head"])
    assert np.abs(moved).max() > 0
    average = result.state.averaged["params"]["head"]
    np.testing.assert_allclose(average, np.asarray(before["head"]) + moved / 2, rtol=1e-6)


@pytest.mark.slow
def test_the_contract_is_kept() -> None:
    """Catches a mass that reads parameters, an impure loss, a split that changes the loss."""
    check_objective(
        LMObjective(Tiny(experts=4), balance_loss=0.1, router_z_loss=0.01, balance_rate=0.01),
        {"tokens": rows(), "weights": np.ones((4, 7), np.float32)},
    ).check()


def test_ids_outside_the_vocabulary() -> None:
    """Catches an id that an embedding clips without a word: at first, and in a later batch."""
    bad = rows()
    bad[2, 3] = VOCAB
    with pytest.raises(DataError, match=r"the first batch: .* got 11 in row 2 at place 3"):
        LMObjective(Tiny()).bind({"tokens": bad})
    for place in (0, 3):
        later = rows()
        later[1, place] = -1
        state, outputs = trained(LMObjective(Tiny()), [{"tokens": rows()}, {"tokens": later}], accumulate=1)
        assert np.isnan(outputs[1]["loss"])
        assert (int(state.updates), int(state.rejections.total)) == (1, 1)
    # Padding may hold anything.
    padded = {"tokens": later, "segment_ids": np.ones((4, 7), np.int32)}
    padded["segment_ids"][1, 3:] = 0
    assert np.isfinite(loss_of(LMObjective(Tiny(), variables=None), {**padded, "tokens": np.abs(later)})[0])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"label_smoothing": 1.0}, ValueError, "in \\[0, 1\\), got 1.0"),
        ({"z_loss": -1.0}, ValueError, "z_loss must be a number ≥ 0"),
        ({"balance_scope": "rows"}, ValueError, "'sequence' or 'batch', got 'rows'"),
        ({"loss_roles": ()}, ValueError, "nothing would be learned"),
        ({"token_bytes": [0.5]}, ValueError, "number of bytes"),
        ({"prompts": [1, 2]}, ValueError, "prompts must be token ids"),
    ],
)
def test_options_that_are_refused(options: Any, error: type[Exception], text: str) -> None:
    """Catches an option that is out of range and only shows in the loss."""
    with pytest.raises(error, match=text):
        LMObjective(Tiny(), **options)


def test_models_and_options_that_do_not_fit() -> None:
    """Catches an attribute error deep in a trace, where a line could have said what is missing."""
    with pytest.raises(TypeError, match=r"init_variables, hidden_states and head .*got function"):
        LMObjective(lambda tokens: tokens)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Fixed\.add_router_bias"):
        LMObjective(Fixed(np.zeros((1, 1, 2))), balance_rate=0.1)
    batch = {"tokens": rows()}
    with pytest.raises(ContractError, match="report no router"):
        loss_of(LMObjective(Tiny(), balance_loss=0.1), batch)
    with pytest.raises(ValueError, match=r"pad_id must be an id of the vocabulary, in \[0, 11\), got 50"):
        LMObjective(Tiny(), pad_id=50).bind(batch)
    with pytest.raises(ValueError, match="one number for each of 11 ids"):
        LMObjective(Tiny(), token_bytes=[1, 1]).bind(batch)
