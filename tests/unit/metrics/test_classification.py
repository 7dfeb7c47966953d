import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as reference

from telic import metrics
from telic.errors import ShapeError
from tests.unit.metrics.running import Weighted, in_pieces, measure

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def draw(rows=200, classes=5, seed=0):
    """Targets, scores and weights; class 4 is never a target, so its ratios divide by zero."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, classes - 1, rows)
    scores = rng.normal(size=(rows, classes)).astype(np.float32)
    scores[np.arange(rows), targets] += 1
    return targets, scores, rng.uniform(0, 2, rows).astype(np.float32)


# ---- accuracy


def test_accuracy_is_sklearns():
    """Catches averages of batches instead of examples, and weights that do not reach the mass."""
    targets, scores, weights = draw()
    predicted = scores.argmax(-1)
    value = measure(metrics.accuracy(), *in_pieces(targets, scores))
    np.testing.assert_allclose(value, reference.accuracy_score(targets, predicted), **CLOSE)
    value = measure(metrics.accuracy(), *in_pieces(targets, scores, weights))
    np.testing.assert_allclose(value, reference.accuracy_score(targets, predicted, sample_weight=weights), **CLOSE)


def test_accuracy_of_every_form_of_targets():
    """Catches one form decided by another's rule: ids, one-hot, ids against ids, tokens."""
    targets, scores, _ = draw()
    expected = (scores.argmax(-1) == targets).mean()
    forms = [
        (targets, scores),
        (np.eye(5)[targets], scores),
        (targets, scores.argmax(-1)),
        (targets.reshape(20, 10), scores.reshape(20, 10, 5)),
        (targets.astype(np.uint8), jnp.asarray(scores)),
    ]
    for form in forms:
        np.testing.assert_allclose(measure(metrics.accuracy(), form), expected, **CLOSE)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2, 1), ()])
def test_binary_accuracy_of_any_rank(shape):
    """Catches predictions of rank 1 or 3 crashing as in the seed."""
    size = int(np.prod(shape))
    scores = np.array([0.9, 0.2, 0.6, 0.5])[:size].reshape(shape)
    targets = np.array([1, 0, 0, 1])[:size].reshape(shape)
    expected = ((scores > 0.5) == targets).mean()
    assert float(measure(metrics.accuracy(), (targets, scores))) == expected
    logits = scores - 0.5
    assert float(measure(metrics.accuracy(from_logits=True), (targets, logits))) == expected


def test_threshold_decides_each_of_several_labels():
    """Catches several labels per example being compared by their argmax."""
    targets, scores = np.array([[1, 1, 0], [0, 0, 0]]), np.array([[0.9, 0.6, 0.1], [0.4, 0.2, 0.6]])
    assert float(measure(metrics.accuracy(threshold=0.5), (targets, scores))) == pytest.approx(5 / 6)
    assert float(measure(metrics.accuracy(), (targets, scores))) == 0.5


@pytest.mark.parametrize(
    ("targets", "prediction", "todo"),
    [
        ((4,), (4, 1), r"prediction\[..., 0\] or targets\[..., None\]"),
        ((4, 1), (4,), r"targets\[..., 0\] or prediction\[..., None\]"),
        ((4, 1), (4, 3), r"targets\[..., 0\]"),
        ((4, 3), (4,), "class ids of shape"),
        ((3,), (4,), "class ids of shape"),
        ((4, 2), (4, 3), "one-hot"),
    ],
)
def test_accuracy_does_not_broadcast(targets, prediction, todo):
    """Catches B45: (n,) against (n, 1) compared n by n, 0.5 instead of 1.0."""
    with pytest.raises(ShapeError, match=todo):
        metrics.accuracy().init(jnp.ones(targets, jnp.int32), jnp.ones(prediction))


def test_ids_must_be_integers():
    """Catches regression targets counted as class ids."""
    with pytest.raises(TypeError, match="class ids must be integers, got float32"):
        measure(metrics.accuracy(), (jnp.ones(3), jnp.ones((3, 2))))


def test_token_accuracy_leaves_out_ignored_tokens():
    """Catches padding counted as wrong."""
    targets, logits = np.array([[0, 1, -100], [2, -100, -100]]), np.zeros((2, 3, 3))
    assert float(measure(metrics.token_accuracy(ignore=-100), (targets, logits))) == pytest.approx(1 / 3)
    mask = (targets >= 0).astype(np.float32)
    assert float(measure(metrics.token_accuracy(), Weighted((targets, logits), mask))) == pytest.approx(1 / 3)
    assert float(measure(metrics.token_accuracy(), (targets, logits))) == pytest.approx(1 / 6)
    with pytest.raises(ShapeError, match=r"token ids of shape \(2, 3\)"):
        measure(metrics.token_accuracy(), (np.zeros((2, 3, 3), int), logits))


# ---- top k


@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_is_sklearns(k):
    """Catches ranks counted from the wrong end or off by one."""
    targets, scores, weights = draw()
    expected = reference.top_k_accuracy_score(targets, scores, k=k, labels=range(5), sample_weight=weights)
    for given in (targets, np.eye(5)[targets]):
        value = measure(metrics.top_k_accuracy(k=k), *in_pieces(given, scores, weights))
        np.testing.assert_allclose(value, expected, **CLOSE)


def test_top_k_of_equal_scores():
    """Catches a constant prediction that is right for every class, and ties that depend on a sort."""
    targets, scores = np.arange(4), np.zeros((4, 4))
    hits = [float(measure(metrics.top_k_accuracy(k=2), (targets[i : i + 1], scores[i : i + 1]))) for i in range(4)]
    assert hits == [1, 1, 0, 0]


def test_top_k_1_is_accuracy_with_ties_and_nan():
    """Catches two rules for ties, and a NaN score that ranks first for its own class only."""
    scores = np.array([[1, 1, 0], [0, np.nan, 1], [np.nan, 0, 1], [2, 2, 2]], np.float32)
    row, targets = np.nonzero(~np.isnan(scores))
    # A power of two each, so that the sum says which were right.
    batch = Weighted((targets, scores[row]), 2.0 ** np.arange(len(row)))
    assert float(measure(metrics.top_k_accuracy(k=1), batch)) == float(measure(metrics.accuracy(), batch))
    assert float(measure(metrics.top_k_accuracy(k=1), (np.array([1]), scores[1:2]))) == 0


def test_top_k_of_ids_that_are_no_class():
    """Catches -1 read as the last class."""
    assert float(measure(metrics.top_k_accuracy(k=2), (np.array([-1, 3]), np.eye(2, 3)[:, ::-1]))) == 0


def test_top_k_needs_enough_classes():
    """Catches top-5 of three classes, which is always 1."""
    with pytest.raises(ValueError, match=r"k=5 is more than the 3 classes .* k < 3"):
        measure(metrics.as_metric("top_k_accuracy"), (np.zeros(2, int), np.zeros((2, 3))))
    with pytest.raises(ValueError, match="k must be at least 1"):
        metrics.top_k_accuracy(k=0)


# ---- counts and ratios


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("average", ["macro", "micro", "weighted", None])
@pytest.mark.parametrize("name", ["precision", "recall", "f1"])
def test_ratios_of_classes_are_sklearns(name, average, weighted):
    """Catches means of batches' ratios, supports without weights, and 0/0 that is not 0."""
    targets, scores, weights = draw()
    weights = weights if weighted else None
    score = getattr(reference, f"{name}_score")
    options = {"labels": range(5), "average": average, "sample_weight": weights, "zero_division": 0}
    expected = score(targets, scores.argmax(-1), **options)
    metric = getattr(metrics, name)(num_classes=5, average=average)
    for prediction in (scores, scores.argmax(-1)):
        np.testing.assert_allclose(measure(metric, *in_pieces(targets, prediction, weights)), expected, **CLOSE)


@pytest.mark.parametrize("weighted", [False, True])
def test_binary_ratios_are_sklearns(weighted):
    """Catches a class mistaken for the other, and weights that are forgotten."""
    rng = np.random.default_rng(1)
    targets, scores = rng.integers(0, 2, 100), rng.uniform(size=100).astype(np.float32)
    weights = rng.uniform(0, 2, 100).astype(np.float32) if weighted else None
    predicted = scores > 0.5
    options = {"sample_weight": weights, "zero_division": 0}
    expected = {
        "precision": reference.precision_score(targets, predicted, **options),
        "recall": reference.recall_score(targets, predicted, **options),
        "sensitivity": reference.recall_score(targets, predicted, **options),
        "specificity": reference.recall_score(targets, predicted, pos_label=0, **options),
        "f1": reference.f1_score(targets, predicted, **options),
    }
    (tn, fp), (fn, tp) = reference.confusion_matrix(targets, predicted, sample_weight=weights)
    expected |= {"true_positives": tp, "true_negatives": tn, "false_positives": fp, "false_negatives": fn}
    value = {name: float(measure(metrics.as_metric(name), *in_pieces(targets, scores, weights))) for name in expected}
    np.testing.assert_allclose([value[n] for n in expected], list(expected.values()), rtol=1e-6)


def test_specificity_of_classes_is_recall_of_the_rest():
    """Catches true negatives that leave out a class."""
    targets, scores, weights = draw()
    predicted = scores.argmax(-1)
    expected = [
        reference.recall_score(targets != c, predicted != c, sample_weight=weights, zero_division=0) for c in range(5)
    ]
    value = measure(metrics.specificity(num_classes=5, average=None), *in_pieces(targets, scores, weights))
    np.testing.assert_allclose(value, expected, **CLOSE)


def test_docs_values_of_the_seed():
    """Catches another threshold (strictly above 0.5) or sides exchanged."""
    y, p = jnp.array([1, 0, 1, 1, 0, 1, 0]), jnp.array([0.8, 0.6, 0.4, 0.2, 0.8, 0.2, 0.2])
    names = ("true_positives", "false_negatives", "true_negatives", "false_positives")
    assert [float(measure(metrics.as_metric(n), (y, p))) for n in names] == [1, 3, 1, 2]
    y, p = jnp.array([0, 1, 1, 1]), jnp.array([1, 0, 1, 1])
    for name, expected in [("precision", 2 / 3), ("recall", 2 / 3), ("sensitivity", 2 / 3), ("specificity", 0)]:
        assert float(measure(metrics.as_metric(name), (y, p))) == pytest.approx(expected)
    assert float(measure(metrics.as_metric("recall"), (jnp.ones(1), jnp.full(1, 0.5)))) == 0


def test_ratios_come_from_summed_counts():
    """Catches axon #139: precision 1 of 1 and 0 of 3 is 1/4, not 1/2."""
    a, b = (jnp.ones(1), jnp.ones(1)), (jnp.zeros(3), jnp.ones(3))
    assert float(measure(metrics.precision(), a, b)) == 0.25
    counts = [2, 3, 1]
    batches = [(jnp.zeros(n), jnp.ones(n)) for n in counts]
    assert float(measure(metrics.false_positives(), *batches)) == 6


def test_nothing_named_and_nothing_positive_is_zero():
    """Catches NaN where the docs promise 0."""
    batch = (jnp.zeros(3), jnp.zeros(3))
    assert [float(measure(metrics.as_metric(n), batch)) for n in ("precision", "recall", "f1")] == [0, 0, 0]


def test_counts_refuse_shapes_that_do_not_fit():
    """Catches a broadcast, and scores of classes thresholded one by one."""
    with pytest.raises(ShapeError, match=r"prediction\[..., 0\]"):
        metrics.recall().init(jnp.ones(4), jnp.ones((4, 1)))
    with pytest.raises(ShapeError, match="make the metric with num_classes=3"):
        metrics.recall().init(jnp.ones(4), jnp.ones((4, 3)))
    with pytest.raises(ShapeError, match=r"num_classes=3 scores in its last dimension.*got \(4, 2\)"):
        metrics.recall(num_classes=3).init(jnp.ones(4, jnp.int32), jnp.ones((4, 2)))
    with pytest.raises(ValueError, match="num_classes must be at least 2, got 1"):
        metrics.recall(num_classes=1)
    with pytest.raises(ValueError, match="threshold is for binary decisions"):
        metrics.recall(num_classes=3, threshold=0.2)


def test_confusion_matrix_is_sklearns():
    """Catches rows and columns exchanged."""
    targets, scores, weights = draw()
    for w in (None, weights):
        expected = reference.confusion_matrix(targets, scores.argmax(-1), labels=range(5), sample_weight=w)
        value = measure(metrics.confusion_matrix(num_classes=5), *in_pieces(targets, scores, w))
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_an_id_that_is_no_class_is_not_counted():
    """Catches -1 counted in the last class and 5 in the one before it."""
    ids = jnp.array([-1, 3, 1])
    value = measure(metrics.confusion_matrix(num_classes=3), (ids, jnp.array([2, 2, 2])))
    np.testing.assert_array_equal(value, [[0, 0, 0], [0, 0, 1], [0, 0, 0]])


def test_second_batch_does_not_compile():
    """Catches weak types or dtypes of the accumulator that change with the first update."""
    targets, scores, weights = map(jnp.asarray, draw())
    for metric in (metrics.accuracy(), metrics.f1(num_classes=5), metrics.confusion_matrix(num_classes=5)):
        compiled = []

        @jax.jit
        def update(acc, targets, scores, weights, metric=metric, compiled=compiled):
            compiled.append(metric.name)
            return metric.update(acc, targets, scores, weights=weights)

        acc = update(metric.init(targets, scores), targets, scores, weights)
        update(acc, targets, scores, weights)
        assert compiled == [metric.name]
