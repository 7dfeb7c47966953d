"""telic.losses: values, shapes, what is refused, and sums of losses over several outputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic import losses
from telic.errors import ShapeError
from telic.mean import Mean, Terms

ELEMENTWISE = (
    "binary_cross_entropy",
    "hinge",
    "huber",
    "log_cosh",
    "mean_absolute_error",
    "mean_squared_error",
    "poisson",
    "sigmoid_cross_entropy",
    "soft_margin",
)
OVER_CLASSES = (
    "categorical_cross_entropy",
    "categorical_hinge",
    "cosine_similarity",
    "kl_divergence",
    "softmax_cross_entropy",
)


def f32(x: Any) -> Any:
    return jnp.asarray(x, jnp.float32)


def near(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


DOCUMENTED = [
    (
        losses.binary_cross_entropy,
        [[0, 1], [1, 0], [1, 0]],
        [[0.6811, 0.5565], [0.6551, 0.4551], [0.5422, 0.2648]],
        [0.86448264, 0.51506001, 0.45986634],
    ),
    (
        losses.categorical_cross_entropy,
        [[0, 1, 0], [0, 0, 1]],
        [[0.05, 0.95, 0], [0.1, 0.8, 0.1]],
        [0.05129331, 2.30258512],
    ),
    (losses.kl_divergence, [[0, 1], [0, 0]], [[0.6, 0.4], [0.4, 0.6]], [0.91628921, -3.08e-6]),
    (losses.log_cosh, [[0, 1], [0, 0]], [[1, 1], [0, 0]], [0.21689039, 0]),
    (losses.poisson, [[0, 1], [0, 0]], [[1, 1], [0, 0]], [0.99999994, 0]),
    (losses.mean_absolute_error, [[0, 1], [0, 0]], [[1, 1], [1, 0]], [0.5, 0.5]),
    (losses.mean_squared_error, [[0, 1], [0, 0]], [[1, 1], [1, 0]], [0.5, 0.5]),
    (losses.huber, [1, 1.5, 2], [0.8, 1.8, 2.1], [0.02, 0.045, 0.005]),
]


@pytest.mark.parametrize(
    ("loss", "targets", "prediction", "expected"), DOCUMENTED, ids=[row[0].__name__ for row in DOCUMENTED]
)
def test_documented_values_of_the_seed(loss: losses.Loss, targets: Any, prediction: Any, expected: Any) -> None:
    """A formula, a clip or an axis that is not the seed's."""
    near(loss(f32(targets), f32(prediction)), expected)


def test_hinge_soft_margin_categorical_hinge_and_margin_ranking_by_hand() -> None:
    """A sign, or a maximum over the wrong entries."""
    y, p = f32([[1, -1]]), f32([[0.25, 0.5]])
    near(losses.hinge(y, p), [(0.75 + 1.5) / 2])
    near(losses.soft_margin(y, p), [(np.log1p(np.exp(-0.25)) + np.log1p(np.exp(0.5))) / 2])
    near(losses.categorical_hinge(f32([[0, 1, 0]]), f32([[0.3, 0.5, 0.2]])), [0.8])
    ranks = losses.margin_ranking(f32([1, 1, -1]), (f32([3.0, 1.0, 1.0]), f32([1.0, 2.0, 3.0])), margin=0.5)
    near(ranks, [0, 1.5, 0])


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses_give_one_value_a_row(name: str) -> None:
    """A sum over the batch axis (B44, soft_margin), a huber without its mean (B44), a mean of a flat batch."""
    loss = losses.NAMES[name]
    y, p = jax.random.uniform(jax.random.key(0), (2, 5, 3, 4))
    whole = loss(y, p)
    assert whole.shape == (5, 3)
    near(whole, loss(y.reshape(-1), p.reshape(-1)).reshape(5, 3, 4).mean(-1))
    near(whole[2], loss(y[2], p[2]))


@pytest.mark.parametrize("name", OVER_CLASSES)
def test_losses_over_classes_give_one_value_a_row(name: str) -> None:
    """A loss that mixes rows: each row alone gives what it gives in the batch."""
    loss = losses.NAMES[name]
    y, p = jax.random.uniform(jax.random.key(0), (2, 5, 3, 4), minval=0.1)
    whole = loss(y, p)
    assert whole.shape == (5, 3)
    near(whole[2, 1:2], loss(y[2, 1:2], p[2, 1:2]))


@pytest.mark.parametrize(
    "name", sorted(set(losses.NAMES) - {"margin_ranking", "connectionist_temporal_classification"})
)
def test_a_column_against_a_flat_batch_is_refused(name: str) -> None:
    """(n,) against (n, 1) broadcasts to n x n and trains on a meaningless loss (B45, B46)."""
    with pytest.raises(ShapeError, match=r"\(4,\).*\(4, 1\)"):
        losses.NAMES[name](jnp.ones(4), jnp.ones((4, 1)))
    with pytest.raises(ShapeError):
        losses.NAMES[name](jnp.ones((4, 1)), jnp.ones(4))


def test_margin_ranking_checks_both_scores() -> None:
    """A second score of another shape broadcasts; one array is read as a pair of its rows."""
    y = jnp.ones(4)
    with pytest.raises(ShapeError, match="one shape"):
        losses.margin_ranking(y, (jnp.ones(4), jnp.ones((4, 1))))
    with pytest.raises(ShapeError, match="pair"):
        losses.margin_ranking(y, jnp.ones((2, 4)))


@pytest.mark.parametrize("name", OVER_CLASSES)
def test_losses_over_classes_refuse_a_flat_batch(name: str) -> None:
    """The batch axis read as the classes gives one finite, meaningless loss."""
    with pytest.raises(ShapeError, match=r"classes.*\(4,\)"):
        losses.NAMES[name](jnp.ones(4), jnp.ones(4))


LOGITS = [[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]


@pytest.mark.parametrize("form", ["ids", "one-hot", "integer one-hot", "sparse column"])
def test_every_form_of_a_class_gives_the_same_cross_entropy(form: str) -> None:
    """Integer labels broadcast against a softmax head gave 4.2228 where 0.4076060 is right (B43, B46)."""
    targets, sparse = {
        "ids": (jnp.asarray([0, 2]), None),
        "one-hot": (f32([[1, 0, 0], [0, 0, 1]]), None),
        "integer one-hot": (jnp.asarray([[1, 0, 0], [0, 0, 1]]), None),
        "sparse column": (jnp.asarray([[0], [2]]), True),
    }[form]
    logits = f32(LOGITS)
    near(losses.categorical_cross_entropy(targets, logits, from_logits=True, sparse=sparse), [0.4076060] * 2)
    near(losses.categorical_cross_entropy(targets, jax.nn.softmax(logits), sparse=sparse), [0.4076060] * 2)
    if sparse is None:
        near(losses.softmax_cross_entropy(targets, logits), [0.4076060] * 2)


def test_sparse_and_one_hot_losses_of_the_seeds_documentation_agree() -> None:
    """A gather along the wrong axis."""
    p = f32([[0.05, 0.95, 0], [0.1, 0.8, 0.1]])
    near(losses.categorical_cross_entropy(jnp.asarray([1, 2]), p).sum(), 2.35387850)


REFUSED = [
    (jnp.zeros((2, 1), jnp.int32), None, r"drop the last axis"),
    (jnp.zeros(2, jnp.float32), None, r"must be integers"),
    (jnp.zeros(2, jnp.int32), False, r"leave sparse out"),
    (jnp.zeros((2, 3), jnp.float32), True, r"sparse=True needs integer"),
    (jnp.zeros(2, jnp.float32), True, r"sparse=True needs integer"),
    (jnp.zeros((3, 2), jnp.float32), None, r"one-hot rows"),
]


@pytest.mark.parametrize(("targets", "sparse", "message"), REFUSED)
def test_targets_that_are_neither_ids_nor_distributions(targets: Any, sparse: bool | None, message: str) -> None:
    """Labels of another shape train silently; the error must say what to give (B46)."""
    with pytest.raises(ShapeError, match=message):
        losses.categorical_cross_entropy(targets, f32(LOGITS), from_logits=True, sparse=sparse)


@pytest.mark.parametrize("name", ["mean_squared_error", "binary_cross_entropy", "kl_divergence"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_class_ids_given_to_another_loss_name_the_right_one(name: str, shape: tuple[int, ...]) -> None:
    """A message about shapes alone, where the user chose the wrong loss."""
    with pytest.raises(ShapeError, match="softmax_cross_entropy"):
        losses.NAMES[name](jnp.zeros(shape, jnp.int32), f32(LOGITS))


@pytest.mark.parametrize("bad", [-1, -100, 3])
def test_an_id_outside_the_classes_is_nan_and_harmless_under_weight_zero(bad: int) -> None:
    """A padding id that wraps to the last class trains it; a NaN gradient would spoil a masked row."""
    ids, weights = jnp.asarray([0, bad]), jnp.asarray([1.0, 0.0])

    def masked(logits: Any) -> Any:
        return Mean.of(losses.softmax_cross_entropy(ids, logits), weights).value()

    assert np.isnan(losses.softmax_cross_entropy(ids, f32(LOGITS))).tolist() == [False, True]
    value, grads = jax.value_and_grad(masked)(f32(LOGITS))
    near(value, 0.4076060)
    assert np.asarray(grads[1]).tolist() == [0.0, 0.0, 0.0]
    assert np.isfinite(grads).all()


@pytest.mark.parametrize("one_hot", [False, True])
def test_class_weights_give_the_weighted_mean_over_any_split(one_hot: bool) -> None:
    """A mean of weighted losses over the count, or a mean of microbatch means, in place of Σ(w·l) / Σw."""
    logits = jax.random.normal(jax.random.key(1), (6, 3))
    ids, weights = jnp.asarray([0, 0, 0, 1, 2, 2]), np.asarray([1.0, 2.0, 5.0])
    targets = jax.nn.one_hot(ids, 3) if one_hot else ids
    loss = functools.partial(losses.softmax_cross_entropy, class_weights=weights)
    plain, w = losses.softmax_cross_entropy(ids, logits), weights[np.asarray(ids)]
    expected = float((plain * w).sum() / w.sum())
    near(loss(targets, logits).value(), expected)
    near(loss(targets[:4], logits[:4]).merge(loss(targets[4:], logits[4:])).value(), expected)
    with pytest.raises(ShapeError, match="3 classes"):
        losses.softmax_cross_entropy(ids, logits, class_weights=[1.0, 2.0])


def test_positive_and_negative_weights_keep_one_value_a_row() -> None:
    """Weights made the seed return a scalar whatever was asked for (B44)."""
    y, x = f32([[1, 0], [0, 0.25]]), f32([[0.3, -2.0], [1.0, 0.5]])
    p = jax.nn.sigmoid(x)
    by_hand = -(3 * y * jnp.log(p) + 0.5 * (1 - y) * jnp.log(1 - p)).mean(-1)
    near(losses.binary_cross_entropy(y, p, positive_weight=3.0, negative_weight=0.5), by_hand)
    near(losses.sigmoid_cross_entropy(y, x, positive_weight=3.0, negative_weight=0.5), by_hand)
    near(losses.sigmoid_cross_entropy(y, x), optax.sigmoid_binary_cross_entropy(x, y).mean(-1))


@pytest.mark.parametrize("targets", [jnp.asarray([0, 2]), f32([[1, 0, 0], [0, 0, 1]])], ids=["ids", "one-hot"])
def test_label_smoothing_is_optaxs(targets: Any) -> None:
    """Smoothing that adds e to the target, or spreads it over the other classes only."""
    smooth = optax.smooth_labels(f32([[1, 0, 0], [0, 0, 1]]), 0.2)
    expected = optax.softmax_cross_entropy(f32(LOGITS), smooth)
    near(losses.softmax_cross_entropy(targets, f32(LOGITS), label_smoothing=0.2), expected)
    near(losses.label_smoothing("softmax_cross_entropy", 0.2)(targets, f32(LOGITS)), expected)
    near(
        losses.label_smoothing(losses.softmax_cross_entropy)(targets, f32(LOGITS)),
        losses.softmax_cross_entropy(targets, f32(LOGITS), label_smoothing=0.1),
    )


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2)])
def test_label_smoothing_of_a_binary_loss_has_two_classes(shape: tuple[int, ...]) -> None:
    """A single column has one "class": 1 would stay 1 and 0 become e."""
    y = f32([1, 0, 1, 0]).reshape(shape)
    loss = functools.partial(losses.binary_cross_entropy, from_logits=True)
    logits = f32([0.5, -1, 2, 0]).reshape(shape)
    near(losses.label_smoothing(loss, 0.1)(y, logits), loss(y * 0.9 + 0.05, logits))


@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_smoothing_outside_zero_and_one_is_refused(smoothing: float) -> None:
    """A negative smoothing sharpens targets past 1."""
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        losses.label_smoothing("mse", smoothing)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        losses.softmax_cross_entropy(jnp.asarray([0, 2]), f32(LOGITS), label_smoothing=smoothing)


@pytest.mark.parametrize("error", [-100.0, -1e4, 1e4])
def test_log_cosh_does_not_overflow(error: float) -> None:
    """exp(-2x) is infinite at x = -100 (B44)."""
    value, grad = jax.value_and_grad(lambda p: losses.log_cosh(f32([0.0]), p)[0])(f32([error]))
    near(value, abs(error) - np.log(2))
    near(grad, [np.sign(error)])


@pytest.mark.parametrize(
    ("name", "targets", "prediction"),
    [
        ("soft_margin", [[1.0, -1.0]], [[-200.0, 200.0]]),
        ("sigmoid_cross_entropy", [[1.0, 0.0]], [[-200.0, 200.0]]),
        ("softmax_cross_entropy", [[1.0, 0.0]], [[-200.0, 200.0]]),
        ("binary_cross_entropy", [[1.0, 0.0]], [[0.0, 1.0]]),
        ("categorical_cross_entropy", [[1.0, 0.0]], [[0.0, 1.0]]),
        ("kl_divergence", [[1.0, 0.0]], [[0.0, 1.0]]),
        ("cosine_similarity", [[1.0, 0.0]], [[0.0, 0.0]]),
    ],
)
def test_extreme_predictions_have_finite_losses_and_gradients(name: str, targets: Any, prediction: Any) -> None:
    """log 0, exp overflow or a division by a zero norm."""
    value, grad = jax.value_and_grad(lambda p: losses.NAMES[name](f32(targets), p).sum())(f32(prediction))
    assert np.isfinite(value)
    assert value > 0
    assert np.isfinite(grad).all()


def test_a_confidently_wrong_probability_still_has_a_gradient() -> None:
    """A clip whose gradient is zero: the example never learns (#567)."""
    grad = jax.grad(lambda p: losses.binary_cross_entropy(f32([1.0]), p)[0])(f32([1e-9]))
    assert grad[0] < -1e5


def test_masked_classes_do_not_make_cross_entropy_nan() -> None:
    """0 · log 0 at a class whose logit is -inf."""
    logits = f32([[1.0, -np.inf, 0.0]])
    value, grad = jax.value_and_grad(lambda x: losses.softmax_cross_entropy(f32([[1, 0, 0]]), x).sum())(logits)
    near(value, np.log1p(np.exp(-1)))
    assert np.isfinite(grad).all()


def test_cosine_loss_falls_as_vectors_turn_together() -> None:
    """A similarity taken for a loss is minimised by opposite vectors (B44)."""
    y = f32([[1.0, 0.0]] * 3)
    near(losses.cosine_similarity(y, f32([[2, 0], [0, 3], [-1, 0]])), [0, 1, 2])


@pytest.mark.parametrize("name", sorted(set(losses.NAMES) - {"connectionist_temporal_classification"}))
@pytest.mark.usefixtures("strict_rank")
def test_half_precision_is_computed_in_float32(name: str) -> None:
    """A bfloat16 loss has three digits: sums over a batch stall."""
    y, p = jnp.full((2, 3), 1, jnp.bfloat16), jnp.full((2, 3), 0.3, jnp.bfloat16)
    half = (p, p) if name == "margin_ranking" else p
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    values = losses.NAMES[name](y, half)
    assert values.dtype == jnp.float32
    near(values, losses.NAMES[name](y.astype(jnp.float32), wide))


def test_the_loss_has_the_predictions_dtype_not_the_targets() -> None:
    """float64 targets make a float32 loss float64, which then breaks a strict step (#494)."""
    with jax.enable_x64(True):
        targets = jnp.ones((2, 3), jnp.float64)
        assert losses.mean_squared_error(targets, jnp.ones((2, 3), jnp.float32)).dtype == jnp.float32
        assert losses.mean_squared_error(targets.astype(jnp.float32), targets).dtype == jnp.float64


def test_a_tuple_of_outputs_is_not_stacked_into_one_array() -> None:
    """jnp.asarray of a tuple of outputs stacks them and trains on the stack."""
    pair = (jnp.ones((2, 3)), jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="one loss each"):
        losses.mean_squared_error(pair, pair)
    with pytest.raises(TypeError, match="mapping"):
        losses.mean_squared_error({"a": pair[0]}, {"a": pair[0]})


def test_complex_predictions_are_refused() -> None:
    """The square of a complex error is not its size."""
    with pytest.raises(TypeError, match="complex64"):
        losses.mean_squared_error(jnp.ones(2), jnp.ones(2, jnp.complex64))


# Connectionist temporal classification.


def test_ctc_of_two_frames_by_hand() -> None:
    """A wrong blank, or paddings taken for lengths: one label in two frames has three alignments."""
    p = f32([[[0.6, 0.3, 0.1], [0.5, 0.2, 0.3]]])  # blank, 1, 2
    expected = -np.log(0.3 * 0.2 + 0.3 * 0.5 + 0.6 * 0.2)
    near(losses.ctc(jnp.asarray([[1]]), jnp.log(p)), [expected])
    near(losses.ctc(jnp.asarray([[1, -1]]), jnp.log(p)), [expected])
    near(losses.ctc(jnp.asarray([[1, 0]]), jnp.log(p)), [expected])
    near(losses.ctc((jnp.asarray([1]), jnp.asarray([[1, 2]])), jnp.log(p)), [expected])
    longer = jnp.concatenate([jnp.log(p), jnp.zeros((1, 3, 3))], 1)
    near(losses.ctc(jnp.asarray([[1]]), (jnp.asarray([2]), longer)), [expected])
    near(losses.ctc(jnp.asarray([[0]]), jnp.log(p[..., ::-1]), blank=2), [-np.log(0.1 * 0.3 + 0.1 * 0.5 + 0.6 * 0.3)])


def test_ctc_checks_its_arguments() -> None:
    """Targets of another batch size broadcast; float labels index nothing."""
    logits = jnp.zeros((2, 5, 3))
    with pytest.raises(ShapeError, match="batch, frames, classes"):
        losses.ctc(jnp.ones((3, 2), jnp.int32), logits)
    with pytest.raises(TypeError, match="integer labels"):
        losses.ctc(jnp.ones((2, 2)), logits)
    with pytest.raises(ShapeError, match="lengths of labels"):
        losses.ctc((jnp.ones(3, jnp.int32), jnp.ones((2, 2), jnp.int32)), logits)


# Losses by name.


def test_get_knows_names_aliases_and_functions() -> None:
    """An alias of the wrong loss; a function that comes back wrapped."""
    assert losses.get("mse") is losses.mean_squared_error
    assert losses.get("mae") is losses.mean_absolute_error
    assert losses.get("bce") is losses.binary_cross_entropy
    assert losses.get("ctc") is losses.connectionist_temporal_classification
    assert all(losses.get(name) is fn for name, fn in losses.NAMES.items())
    own = lambda y, p: (y - p) ** 2
    assert losses.get(own) is own


def test_an_unknown_loss_names_the_nearest() -> None:
    """A misspelt loss found out only in the first step."""
    with pytest.raises(ValueError, match="Did you mean 'mean_squared_error'"):
        losses.get("mean_square_error")
    with pytest.raises(TypeError, match="a loss is a name"):
        losses.get(3.0)


# Weighted losses of several outputs.

ONE, TWO = f32([[1.0]]), f32([[2.0]])


def test_losses_by_position_give_the_seeds_value() -> None:
    """The seed's own test: mse and mae, half each, of two identity outputs is 1.0."""
    loss = losses.get([("mean_squared_error", 0.5), (losses.mean_absolute_error, 0.5)])
    assert np.asarray(loss((TWO, TWO), (ONE, ONE))).tolist() == [1.0]


def test_losses_by_name_are_not_matched_by_order() -> None:
    """A mapping zipped with outputs in another order."""
    loss = losses.weighted({"b": ("mse", 10.0), "a": "mae"})
    outputs = {"a": f32([[1.0], [2.0]]), "b": f32([[1.0], [1.0]])}
    targets = {"a": f32([[4.0], [2.0]]), "b": f32([[3.0], [0.0]])}
    near(loss(targets, outputs), [3 + 40, 0 + 10])


def test_each_output_counts_once_whatever_its_trailing_shape() -> None:
    """Per-token losses [batch, time] broadcast against [batch] losses."""
    loss = losses.weighted([("mse", 1.0), ("mse", 1.0)])
    outputs = (jnp.zeros((2, 3, 4)), jnp.zeros((2, 4)))
    targets = (jnp.ones((2, 3, 4)) * f32([1.0, 2.0, 3.0])[:, None], jnp.ones((2, 4)))
    near(loss(targets, outputs), [14 / 3 + 1] * 2)


@pytest.mark.parametrize("parts", [1, 3])
def test_too_few_or_too_many_losses_are_refused(parts: int) -> None:
    """The seed silently drops outputs without a loss."""
    loss = losses.weighted([("mse", 1.0), ("mae", 1.0)])
    with pytest.raises(ValueError, match=rf"2 losses but prediction has {parts}"):
        loss((ONE,) * parts, (ONE,) * parts)
    with pytest.raises(ValueError, match=rf"2 losses but targets has {parts}"):
        loss((ONE,) * parts, (ONE, ONE))


def test_losses_must_fit_the_structure_of_the_outputs() -> None:
    """Losses matched with the wrong outputs, or with the rows of one array."""
    by_name, by_position = losses.weighted({"a": "mse", "b": "mae"}), losses.weighted(["mse", "mae"])
    both = {"a": ONE, "b": ONE}
    with pytest.raises(ValueError, match=r"\['a', 'b'\] but prediction has \['a', 'c'\]"):
        by_name(both, {"a": ONE, "c": ONE})
    with pytest.raises(ValueError, match=r"\['a', 'b'\] but targets has \['a'\]"):
        by_name({"a": ONE}, both)
    with pytest.raises(ValueError, match="need a mapping as prediction"):
        by_name((ONE, ONE), (ONE, ONE))
    with pytest.raises(ValueError, match="give losses by name"):
        by_position(both, both)
    with pytest.raises(ValueError, match="tuple of 2 as prediction, got an array"):
        by_position(jnp.ones((2, 1)), jnp.ones((2, 1)))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "at least one"),
        ([("mse", "heavy")], "finite number"),
        ([("mse", float("nan"))], "finite number"),
        ([("mse", True)], "finite number"),
        ([(0.5, "mse")], r"losses\[0\] must be"),
        ([("msee", 1.0)], "unknown loss 'msee'"),
    ],
)
def test_malformed_weighted_losses_are_refused_when_built(pairs: Any, message: str) -> None:
    """A pair the wrong way round found out in the first step, or a weight that makes every loss NaN."""
    with pytest.raises(ValueError, match=message):
        losses.weighted(pairs)


def test_a_loss_with_its_own_denominator_makes_terms() -> None:
    """Class-weighted and plain losses added by row lose the weighted mean's denominator."""
    weighted_ce = functools.partial(losses.softmax_cross_entropy, class_weights=[1.0, 2.0, 4.0])
    loss = losses.weighted({"class": (weighted_ce, 1.0), "box": ("mse", 0.5)})
    targets = {"class": jnp.asarray([0, 2]), "box": jnp.ones((2, 4))}
    outputs = {"class": f32([[2, 1, 0], [0, 2, 1]]), "box": jnp.zeros((2, 4))}
    result = loss(targets, outputs)
    assert isinstance(result, Terms)
    near(result.terms["class"][1].mass, 5.0)
    near(result.value(), weighted_ce(targets["class"], outputs["class"]).value() + 0.5)


def test_scalar_losses_add_to_a_scalar_and_beside_rows_to_terms() -> None:
    """A user's scalar broadcast over the rows is divided by the batch's mass, not by its own."""
    total = lambda y, p: jnp.abs(y - p).sum()
    assert losses.weighted([(total, 2.0), (total, 1.0)])((TWO, TWO), (ONE, ONE)).shape == ()
    mixed = losses.weighted([(total, 2.0), ("mse", 1.0)])((TWO, TWO), (ONE, ONE))
    assert isinstance(mixed, Terms)
    near(mixed.value(), 3.0)


def test_losses_of_different_batch_sizes_are_refused() -> None:
    """A broadcast of one row against many."""
    with pytest.raises(ShapeError, match="leading dimension"):
        losses.weighted(["mse", "mse"])((jnp.ones((1, 2)), jnp.ones((3, 2))), (jnp.ones((1, 2)), jnp.ones((3, 2))))
