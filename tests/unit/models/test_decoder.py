"""The decoder: what one token may see, what both forms of its layers give, dtypes, kernels, statistics, bad input."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import ContractError, ShapeError
from telic.models import (
    Decoder,
    DecoderConfig,
    Experts,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    YarnScaling,
    adapt,
    attention_kernels,
    stack_layers,
    unstack_layers,
)
from telic.models.decoder.kernels import Visible, largest_logits
from telic.models.decoder.mixture import MixtureOfExperts
from telic.models.decoder.rotary import frequencies, rotation
from tests.decoders import random_decoder

SMALL: dict[str, Any] = {
    "vocab_size": 13,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "d_ff": 24,
    "max_length": 16,
}
TOKENS = np.random.default_rng(0).integers(0, 13, (2, 9)).astype(np.int32)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2], [1, 1, 1, 2, 2, 3, 3, 0, 0]], np.int32)
MIXTURE = Experts(num_experts=4, top_k=2, bias=True)


def made(**options: Any) -> tuple[Decoder, Any]:
    return random_decoder(**{**SMALL, **options})


def logits_of(decoder: Decoder, variables: Any, tokens: Any = TOKENS, **given: Any) -> np.ndarray:
    def run(v: Any, t: Any, g: Any) -> Any:
        return decoder.head(v).logits(decoder.hidden_states(v, t, **g).hidden)

    return np.asarray(jax.jit(run)(variables, tokens, given))


@pytest.fixture(scope="module")
def plain() -> tuple[Decoder, Any]:
    return made()


def test_logits_are_those_of_the_adapted_model(plain: tuple[Decoder, Any]) -> None:
    """Catches a head laid over hidden states that is not the model's own, and inputs by name that are dropped."""
    decoder, variables = plain
    model = adapt(decoder)
    found = jax.jit(lambda v, x: model.forward(v, x, train=False).prediction)
    by_name = found(variables, {"tokens": TOKENS, "segment_ids": SEGMENTS})
    np.testing.assert_allclose(by_name, logits_of(decoder, variables, segment_ids=SEGMENTS), rtol=1e-5, atol=1e-6)
    assert not np.allclose(by_name, found(variables, TOKENS))


def seen_by(decoder: Decoder, variables: Any, **given: Any) -> np.ndarray:
    """Say which token's embedding each place of the first row depends on, bool [time, time]."""

    def last(table_rows: Any) -> Any:
        tokens = jnp.arange(9, dtype=jnp.int32)[None]
        table = variables["params"]["embedding"]["embedding"].at[:9].add(table_rows)
        params = {**variables["params"], "embedding": {"embedding": table}}
        return decoder.hidden_states({**variables, "params": params}, tokens, **given).hidden[0]

    slopes = jax.jit(jax.jacrev(lambda x: last(x).sum(-1)))(jnp.zeros((9, 16)))
    return np.asarray(jnp.abs(slopes).sum(-1) > 0)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_a_token_sees_its_own_document_within_its_window(scan: bool) -> None:
    """Catches a future token that is seen, attention across documents, and a window one token too wide."""
    causal = np.tril(np.ones((9, 9), bool))
    distance = np.subtract.outer(np.arange(9), np.arange(9))
    same = SEGMENTS[:1].T == SEGMENTS[:1]
    one = {"num_layers": 1, "scan": scan}
    np.testing.assert_array_equal(seen_by(*made(**one)), causal)
    np.testing.assert_array_equal(seen_by(*made(**one), segment_ids=SEGMENTS[:1]), causal & same)
    windowed = made(**one, sliding_window=3)
    np.testing.assert_array_equal(seen_by(*windowed), causal & (distance < 3))
    np.testing.assert_array_equal(seen_by(*windowed, segment_ids=SEGMENTS[:1]), causal & same & (distance < 3))
    mixed = made(scan=scan, sliding_window=3, window_layers=(True, False))
    np.testing.assert_array_equal(seen_by(*mixed), causal)


def test_documents_of_a_row_are_as_if_alone(plain: tuple[Decoder, Any]) -> None:
    """Catches positions that do not restart, leakage, and padding that turns into NaN."""
    for decoder, variables in (plain, made(positions="learned", experts=MIXTURE)):
        packed = logits_of(decoder, variables, segment_ids=SEGMENTS)
        assert np.isfinite(packed).all()
        for row, ids in enumerate(SEGMENTS):
            for document in set(ids) - {0}:
                place = ids == document
                alone = logits_of(decoder, variables, TOKENS[row][place][None])
                np.testing.assert_allclose(packed[row][place], alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"experts": MIXTURE, "tied": True}, {"sliding_window": 2, "window_layers": (False, True)}],
    ids=["plain", "experts", "windows"],
)
def test_scanned_equals_unrolled_both_ways(options: dict[str, Any]) -> None:
    """Catches layers in another order, and statistics or maxima that belong to another layer."""
    decoder, variables = made(**options)
    scanned = Decoder(decoder.config.replace(scan=True))
    stacked = stack_layers(variables)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), variables)
    fresh = jax.eval_shape(lambda key: scanned.init_variables(key, TOKENS), jax.random.key(0))
    assert jax.tree.map(jnp.shape, stacked) == jax.tree.map(jnp.shape, fresh)
    runs = [
        jax.jit(lambda v, d=d: d.hidden_states(v, TOKENS, segment_ids=SEGMENTS, qk_stats=True))(v)
        for d, v in ((decoder, variables), (scanned, stacked))
    ]
    np.testing.assert_allclose(runs[0].hidden, runs[1].hidden, rtol=1e-5, atol=1e-5)
    largest = [runs[0].qk_max[f"layers_{i}"]["attention"]["max_logits"] for i in range(2)]
    np.testing.assert_allclose(np.stack(largest), runs[1].qk_max["layers"]["attention"]["max_logits"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), runs[0].router, runs[1].router)


def test_layers_that_cannot_be_converted_are_named(plain: tuple[Decoder, Any]) -> None:
    """Catches a conversion that gives variables back as they were."""
    _, variables = plain
    with pytest.raises(ValueError, match="no stacked layers"):
        unstack_layers(variables)
    with pytest.raises(ValueError, match="have no layers_0"):
        stack_layers(stack_layers(variables))
    params = {name: tree for name, tree in variables["params"].items() if name != "layers_0"}
    with pytest.raises(ValueError, match=r"without a gap, got \[1\]"):
        stack_layers({"params": params})


@pytest.mark.parametrize("kernel", ["dot_product", "einsum"])
@pytest.mark.parametrize("given", ["causal", "window", "documents", "both"])
def test_kernels_agree_with_attention_written_out(kernel: str, given: str) -> None:
    """Catches a kernel that scales twice, mixes up the heads of a group, or reads the window as one more or less."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 9, n, 4)).astype(np.float32) for n in (4, 2, 2))
    window = 3 if given in ("window", "both") else None
    segments = SEGMENTS if given in ("documents", "both") else None
    visible = Visible(segment_ids=segments, window=window)
    found = attention_kernels[kernel](query, key, value, visible=visible, scale=0.3)
    for row in range(2):
        for t in range(9):
            keys = [s for s in range(t + 1) if window is None or s > t - window]
            keys = [s for s in keys if segments is None or segments[row, s] == segments[row, t]]
            for head in range(4):
                scores = query[row, t, head].astype(np.float64) @ key[row, keys, head // 2].T * 0.3
                shares = np.exp(scores - scores.max())
                expected = shares @ value[row, keys, head // 2] / shares.sum()
                np.testing.assert_allclose(found[row, t, head], expected, rtol=1e-5, atol=1e-6)


def test_largest_logits_are_over_pairs_that_see_each_other() -> None:
    """Catches a maximum over the future or over padding, which a clip would then act on."""
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(2, 9, 4, 4)), rng.normal(size=(2, 9, 2, 4))
    logits = np.einsum("btgjh,bsgh->bgjts", query.reshape(2, 9, 2, 2, 4), key).reshape(2, 4, 9, 9) * 0.5
    seen = np.tril(np.ones((9, 9), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, :, None] != 0)
    expected = np.where(seen[:, None], logits, -np.inf).max((0, 2, 3))
    found = largest_logits(jnp.asarray(query), jnp.asarray(key), visible=Visible(segment_ids=SEGMENTS), scale=0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_kernel_of_ones_own_is_called() -> None:
    """Catches a kernel that is passed over for the default one."""
    shapes: list[Any] = []

    def kernel(query: Any, key: Any, value: Any, **options: Any) -> Any:
        shapes.append((query.shape, key.shape, sorted(options)))
        return attention_kernels["einsum"](query, key, value, **options)

    decoder, variables = made()
    own = Decoder(decoder.config.replace(attention=kernel))
    np.testing.assert_allclose(logits_of(own, variables), logits_of(decoder, variables), rtol=1e-4, atol=1e-5)
    names = ["dropout", "dropout_key", "scale", "soft_cap", "visible"]
    assert shapes[0] == ((2, 9, 4, 4), (2, 9, 2, 4), names)
    with pytest.raises(ValueError, match="unknown attention kernel 'flash'"):
        made(attention="flash")


def test_computes_in_the_dtype_of_the_parameters(plain: tuple[Decoder, Any]) -> None:
    """Catches hidden states that widen on the way, and logits that stay narrow."""
    decoder, variables = plain
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables)
    states = decoder.hidden_states(narrow, TOKENS)
    assert states.hidden.dtype == jnp.bfloat16
    logits = decoder.head(narrow).logits(states.hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, logits_of(decoder, variables), rtol=0.1, atol=0.3)


def test_soft_caps_bound_and_biases_add() -> None:
    """Catches a cap that is configured and never applied, and a head's bias left out of the pure function."""
    decoder, variables = made(final_soft_cap=0.5, head_bias=True, logit_scale=2.0, attention_soft_cap=1.0)
    capped = logits_of(decoder, variables)
    assert np.abs(capped).max() <= 1.0
    head = decoder.head(variables)
    raw = dataclasses.replace(head, soft_cap=None, scale=1.0)
    hidden = decoder.hidden_states(variables, TOKENS).hidden
    np.testing.assert_allclose(capped, 2 * 0.5 * np.tanh(raw.logits(hidden) / 0.5), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        raw.logits(hidden) - raw.logits(0 * hidden),
        hidden @ variables["params"]["head"]["kernel"],
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(raw.logits(0 * hidden)[0, 0], variables["params"]["head"]["bias"], rtol=1e-6)


def test_dropout_draws_in_training_only_and_by_key() -> None:
    """Catches dropout in evaluation, and a key that changes nothing."""
    decoder, variables = made(embedding_dropout=0.2, attention_dropout=0.2, residual_dropout=0.2)
    run = jax.jit(lambda v, key: decoder.hidden_states(v, TOKENS, train=True, key=key).hidden)
    one, same, other = (run(variables, jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
    assert not np.allclose(one, decoder.hidden_states(variables, TOKENS).hidden)


@pytest.mark.parametrize("dispatch", ["dense", "sorted"])
@pytest.mark.parametrize("gated", [True, False])
def test_experts_are_what_they_say(dispatch: Any, gated: bool) -> None:
    """Catches weights laid on the wrong expert, and a token sent to one expert more or less."""
    decoder, variables = made(num_layers=1, experts=dataclasses.replace(MIXTURE, dispatch=dispatch), gated=gated)
    block = variables["params"]["layers_0"]["experts"]
    x = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)
    bias = np.array([0.0, 0.3, 0.0, -0.3], np.float32)
    given = {"params": block, "router_bias": {"bias": bias}}
    found, sums = MixtureOfExperts(decoder.config).apply(given, x, None)
    scores = np.exp(x @ np.asarray(block["router"]["kernel"]))
    scores = scores / scores.sum(-1, keepdims=True)
    for b in range(2):
        for t in range(5):
            best = np.argsort(-(scores[b, t] + bias))[:2]
            expected = np.zeros(16)
            for e in best:
                up = x[b, t] @ np.asarray(block["up"]["kernel"][e])
                act = up * jax.nn.sigmoid(up)
                if gated:
                    gate = x[b, t] @ np.asarray(block["gate"]["kernel"][e])
                    act = gate * jax.nn.sigmoid(gate) * up
                expected = expected + scores[b, t, e] / scores[b, t, best].sum() * (
                    act @ np.asarray(block["down"]["kernel"][e])
                )
            np.testing.assert_allclose(found[b, t], expected, rtol=1e-4, atol=1e-5)
    assert sums["counts"].sum() == 2 * 5 * 2
    np.testing.assert_allclose(sums["probabilities"], scores.sum(1), rtol=1e-5)


def test_router_statistics_add_up_and_leave_padding_out() -> None:
    """Catches statistics that are means, and padding that is balanced."""
    decoder, variables = made(experts=MIXTURE)
    run = jax.jit(lambda v, t, s: decoder.hidden_states(v, t, segment_ids=s).router)
    whole = run(variables, TOKENS, SEGMENTS)
    parts = [run(variables, TOKENS[i : i + 1], SEGMENTS[i : i + 1]) for i in range(2)]
    np.testing.assert_array_equal(whole.tokens, [9, 7])
    np.testing.assert_array_equal(whole.counts.sum(-1), [[18, 14]] * 2)
    np.testing.assert_allclose(whole.probabilities.sum(-1), [[9, 7]] * 2, rtol=1e-5)
    for name in ("counts", "probabilities", "z"):
        joined = np.concatenate([getattr(part, name) for part in parts], axis=1)
        np.testing.assert_allclose(getattr(whole, name), joined, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_router_bias_is_moved_layer_by_layer(scan: bool) -> None:
    """Catches a bias moved in another layer, and one that leaves the tree's structure or dtype."""
    decoder, variables = made(experts=MIXTURE, scan=scan)
    change = np.arange(8, dtype=np.float32).reshape(2, 4)
    moved = decoder.add_router_bias(variables, jnp.asarray(change))
    old = {"router_bias": variables["router_bias"]}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), moved) == jax.tree.map(lambda x: (x.shape, x.dtype), old)
    before, after = (unstack_layers(x) if scan else x for x in (old, moved))
    for i in range(2):
        biases = [x["router_bias"][f"layers_{i}"]["experts"]["bias"] for x in (before, after)]
        np.testing.assert_allclose(biases[1], biases[0] + change[i], rtol=1e-6)
    with pytest.raises(ContractError, match="has no router bias"):
        made()[0].add_router_bias(variables, jnp.asarray(change))


def test_remat_changes_no_gradient(plain: tuple[Decoder, Any]) -> None:
    """Catches a policy that is not known until it is used."""
    decoder, variables = plain

    def grads(remat: Any, scan: bool) -> Any:
        model = Decoder(decoder.config.replace(remat=remat, scan=scan))
        start = stack_layers(variables) if scan else variables
        return jax.jit(jax.grad(lambda v: (model.hidden_states(v, TOKENS, train=True).hidden ** 2).sum()))(start)

    expected = grads("none", False)
    for remat in ("full", "dots"):
        for scan in (False, True):
            found = unstack_layers(grads(remat, scan)) if scan else grads(remat, scan)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)


def test_bad_rows_are_named(plain: tuple[Decoder, Any]) -> None:
    """Catches rows that run past the positions, and ids of another kind or shape."""
    decoder, variables = plain
    with pytest.raises(ShapeError, match="rows of 17 tokens are longer than the decoder's max_length=16"):
        decoder.hidden_states(variables, np.zeros((1, 17), np.int32))
    with pytest.raises(ShapeError, match=r"tokens must be \[batch, time\], got shape \(3,\)"):
        decoder.hidden_states(variables, np.zeros(3, np.int32))
    with pytest.raises(ShapeError, match="tokens must be integers, got float32"):
        decoder.hidden_states(variables, np.zeros((1, 3), np.float32))
    with pytest.raises(ShapeError, match=r"segment_ids must have the shape of tokens, \(1, 3\), got \(1, 2\)"):
        decoder.hidden_states(variables, np.zeros((1, 3), np.int32), segment_ids=np.ones((1, 2), np.int32))


@pytest.mark.parametrize("wrong", [-1, 13])
def test_ids_outside_of_the_vocabulary_give_nan(wrong: int, plain: tuple[Decoder, Any]) -> None:
    """Catches an id that wraps around or is clipped, so that training goes on with another token."""
    decoder, variables = plain
    logits = logits_of(decoder, variables, np.array([[1, wrong, 2], [1, 3, 2]], np.int32))
    assert np.isnan(logits[0, 1:]).all()
    assert np.isfinite(logits[1]).all()


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": 3, "num_kv_heads": None}, "num_heads=3 must divide d_model=16"),
    ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
    ({"head_dim": 3}, "even head_dim, got 3"),
    ({"vocab_size": 0}, "vocab_size must be a whole number of at least 1, got 0"),
    ({"norm": "batch"}, "unknown norm 'batch'"),
    ({"activation": "slu"}, "Did you mean 'silu'"),
    ({"residual_dropout": 1.0}, r"residual_dropout must be in \[0, 1\)"),
    ({"final_soft_cap": 0.0}, "final_soft_cap must be a number > 0"),
    ({"window_layers": (True, False)}, "needs sliding_window"),
    ({"sliding_window": 2, "window_layers": (True,)}, r"one flag per layer \(2\)"),
    ({"experts": MIXTURE, "mlp_bias": True}, "experts have no biases"),
]


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE, ids=str)
def test_impossible_architectures_are_named(options: dict[str, Any], message: str) -> None:
    """Catches an architecture that fails somewhere inside, after a compilation."""
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**SMALL, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_experts": 4, "top_k": 5}, "top_k must be at most num_experts=4"),
        ({"num_experts": 4, "top_k": 1, "num_groups": 3}, "num_groups=3 must divide"),
        ({"num_experts": 4, "top_k": 3, "num_groups": 2}, "do not fit in 1 of 2 groups"),
        ({"num_experts": 4, "top_k": 1, "top_groups": 2}, "at most num_groups=1"),
        ({"num_experts": 4, "top_k": 1, "scoring": "tanh"}, "unknown scoring 'tanh'"),
    ],
    ids=str,
)
def test_impossible_mixtures_are_named(options: dict[str, Any], message: str) -> None:
    """Catches more experts asked for than a token may reach."""
    with pytest.raises(ValueError, match=message):
        Experts(**options)


LLAMA3 = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_length=64)
YARN = YarnScaling(factor=4.0, original_length=64)
ROUGH_YARN = YarnScaling(factor=4.0, original_length=64, truncate=False, fast_turns=8.0, slow_turns=2.0)


# What the functions of transformers 5.24's modeling_rope_utils give in float64, to ten digits.
@pytest.mark.parametrize(
    ("scaling", "amplitude", "expected"),
    [
        (LinearScaling(factor=4.0), 1.0, [0.25, 0.025, 0.0025, 0.00025]),
        (
            LLAMA3,
            1.0,
            [1.0, 0.2443845994, 0.01304225604, 0.003952847075, 0.00125, 3.952847075e-4, 1.25e-4, 3.952847075e-5],
        ),
        (YARN, 1.138629436111989, [1, 0.2371708245, 0.05, 7.90569415e-3, 2.5e-3, 7.90569415e-4, 2.5e-4, 7.90569415e-5]),
        (
            ROUGH_YARN,
            1.138629436111989,
            [1, 0.1605891349, 0.025, 7.90569415e-3, 2.5e-3, 7.90569415e-4, 2.5e-4, 7.90569415e-5],
        ),
    ],
    ids=["linear", "llama3", "yarn", "yarn without rounding"],
)
def test_scaled_frequencies_are_those_of_transformers(scaling: Any, amplitude: float, expected: list[float]) -> None:
    """Catches a ramp turned round, a wavelength taken for a frequency, and a factor on attention that is left out."""
    rotary = Rotary(scaling=scaling)
    np.testing.assert_allclose(frequencies(rotary, 2 * len(expected)), expected, rtol=1e-9)
    cos, sin = rotation(rotary, 2 * len(expected), jnp.arange(3)[None], jnp.float32)
    np.testing.assert_allclose(jnp.sqrt(cos**2 + sin**2), amplitude, rtol=1e-5)


def test_rotation_is_relative() -> None:
    """Catches angles that depend on more than the distance."""
    decoder, variables = made(num_layers=1)
    moved = logits_of(decoder, variables, positions=np.broadcast_to(np.arange(9) + 5, (2, 9)))
    np.testing.assert_allclose(moved, logits_of(decoder, variables), rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="the factor of a scaling must be a number ≥ 1"):
        LinearScaling(factor=0.5)
    with pytest.raises(ValueError, match="low_frequency_factor < high_frequency_factor"):
        Llama3Scaling(factor=2.0, low_frequency_factor=4.0, high_frequency_factor=1.0, original_length=8)


def test_fresh_weights_are_spread_and_branches_end_small() -> None:
    """Catches an initialisation that scales every weight alike, and a biased router from the start."""
    config = DecoderConfig(vocab_size=64, d_model=64, num_layers=8, num_heads=4, scan=True, experts=MIXTURE)
    variables = jax.jit(lambda key: Decoder(config).init_variables(key, TOKENS))(jax.random.key(0))
    layers = variables["params"]["layers"]
    np.testing.assert_allclose(layers["attention"]["query"]["kernel"].std(), 0.02, rtol=0.05)
    np.testing.assert_allclose(layers["attention"]["output"]["kernel"].std(), 0.02 / 4, rtol=0.05)
    np.testing.assert_allclose(layers["experts"]["down"]["kernel"].std(), 0.02 / 4, rtol=0.05)
    assert not np.allclose(layers["experts"]["up"]["kernel"][0], layers["experts"]["up"]["kernel"][1])
    assert not jax.tree.leaves(variables["router_bias"])[0].any()
