import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic import metrics
from telic.errors import ContractError, ShapeError
from telic.mean import Mean
from tests.unit.metrics.running import Weighted, measure


def error(targets, prediction):
    return jnp.abs(targets - prediction)


def zeros_and(values):
    values = jnp.asarray(values, jnp.float32)
    return jnp.zeros_like(values), values


def test_mean_is_over_examples_and_not_over_batches():
    """Catches the mean of batch means (axon #139, tensorflow #38596, keras #19363): 3.0 instead of 1.8."""
    metric = metrics.as_metric(error)
    assert float(measure(metric, zeros_and([1, 1, 1, 1]), zeros_and([5]))) == pytest.approx(9 / 5, abs=1e-6)
    assert float(measure(metric, zeros_and([10, 10]), zeros_and([9]))) == pytest.approx(29 / 3, abs=1e-6)
    ragged = measure(metric, zeros_and([0, 0, 0]), zeros_and([4]))
    assert float(ragged) == 1.0


def test_mean_is_by_sum_of_weights():
    """Catches weighing a batch by its size (keras #10305: 2.0) or dividing by the count (keras #19740: 0.5)."""
    metric = metrics.as_metric(error)
    a = Weighted(zeros_and([1, 1]), jnp.array([1.0, 0.0]))
    b = Weighted(zeros_and([3, 3]), jnp.array([1.0, 1.0]))
    assert float(measure(metric, a, b)) == pytest.approx(7 / 3, abs=1e-6)
    c = Weighted(zeros_and([1, 1]), jnp.array([0.0, 1.0]))
    assert float(measure(metric, c)) == 1.0


def test_by_name_and_by_function_agree_under_weights():
    """Catches tensorflow #29965: 'mse' gives 0.5 where the same function gives 1.0."""

    def squared(targets, prediction):
        return (targets - prediction) ** 2

    batch = Weighted(zeros_and(np.ones(10)), jnp.repeat(jnp.array([1.0, 0.0]), 5))
    by_name = measure(metrics.as_metric("mean_squared_error"), batch)
    assert (float(by_name), float(measure(metrics.as_metric(squared), batch))) == (1.0, 1.0)


def test_a_number_weighs_as_many_examples_as_the_batch_has():
    """Catches a function that averages its batch being averaged over batches: 2.0 instead of 1.0."""
    metric = metrics.as_metric(lambda t, p: jnp.abs(t - p).mean(), "error")
    assert float(measure(metric, zeros_and([0, 0, 0]), zeros_and([4]))) == 1.0
    weighted = measure(
        metric, Weighted(zeros_and([1, 1]), jnp.array([1.0, 0.0])), Weighted(zeros_and([3, 3]), jnp.ones(2))
    )
    assert float(weighted) == pytest.approx(7 / 3, abs=1e-6)


def test_a_number_of_numbers_weighs_one():
    """Catches a scalar argument without a leading dimension, as a loss read from the outputs."""
    metric = metrics.mean(reads="loss")
    assert float(measure(metric, (jnp.float32(4),), Weighted((jnp.float32(2),), jnp.ones(8)))) == 3.0


def test_a_mean_merges_by_its_own_mass():
    """Catches trl #6380: 0.5, the mean of means, where one token of 1 and nine of 0 give 0.1."""
    metric = metrics.mean(reads="kl")
    value = measure(metric, (Mean(jnp.float32(1), jnp.float32(1)),), (Mean(jnp.float32(0), jnp.float32(9)),))
    assert float(value) == pytest.approx(0.1, abs=1e-7)
    vector = metrics.as_metric(lambda x: Mean(x.sum(0), x.shape[0]), "columns", reads="x")
    np.testing.assert_allclose(measure(vector, (jnp.ones((1, 2)),), (jnp.zeros((3, 2)),)), [0.25, 0.25])


def test_zero_weight_drops_even_nan():
    """Catches 0 * NaN from a padded row reaching the mean."""
    batch = Weighted(zeros_and([1, np.nan]), jnp.array([1.0, 0.0]))
    assert float(measure(metrics.as_metric(error), batch)) == 1.0


def test_nothing_is_not_a_number():
    """Catches an epoch without data that reads as 0, the best of errors."""
    metric = metrics.as_metric(error)
    assert np.isnan(float(metric.compute(metric.init(*zeros_and([1])))))


def test_values_that_are_not_per_example_are_refused():
    """Catches per-class values averaged as if they were examples, and trees that have no mean."""
    with pytest.raises(ShapeError, match=r"returned values of shape \(2,\) for 4 examples"):
        measure(metrics.as_metric(lambda t, p: p[:2], "head"), zeros_and(np.ones(4)))
    with pytest.raises(TypeError, match="got dict; reduce='last' keeps any tree"):
        measure(metrics.as_metric(lambda t, p: {"p": p}, "tree"), zeros_and(np.ones(4)))
    with pytest.raises(ShapeError, match="weights must have the shape of the values"):
        measure(metrics.as_metric(error), Weighted(zeros_and(np.ones(4)), jnp.ones(3)))


def test_running_average_counts_batches_alike():
    """Catches the seed's reduction turned into a mean by mass: 1.0 instead of 2.0."""
    metric = metrics.as_metric(error, reduce="running_average")
    assert float(measure(metric, zeros_and([0, 0, 0]), zeros_and([4]))) == 2.0
    without = Weighted(zeros_and([9]), jnp.zeros(1))
    assert float(measure(metric, zeros_and([0, 0, 0]), without, zeros_and([4]))) == 2.0


def test_running_average_of_the_seed():
    """Catches another recurrence than the seed's: current 0.5, second batch all right, gives 0.75."""
    metric = metrics.as_metric(lambda x: x, "x", reads="x", reduce="running_average")
    assert float(measure(metric, (jnp.float32(0.5),), (jnp.float32(1.0),))) == 0.75


def test_running_sum_adds():
    """Catches counts being averaged (axon #139): false positives 2, 3, 1 are 6."""
    metric = metrics.sum(reads="count")
    assert float(measure(metric, (jnp.int32(2),), (jnp.int32(3),), (jnp.int32(1),))) == 6.0
    values = Weighted((jnp.array([1.0, 2.0]),), jnp.array([1.0, 10.0]))
    assert float(measure(metric, values)) == 21.0
    mean = metrics.sum(reads="loss")
    assert float(measure(mean, (Mean(jnp.float32(3), jnp.float32(2)),))) == 3.0


def test_named_metrics_take_the_reductions_of_the_seed():
    """Catches `reduce` being ignored for names: 2 batches of precision 1 and 0 average to 0.5, pooled 0.75."""
    a = (jnp.ones(3), jnp.ones(3))
    b = (jnp.zeros(1), jnp.ones(1))
    assert float(measure(metrics.as_metric("precision"), a, b)) == 0.75
    assert float(measure(metrics.as_metric("precision", reduce="running_average"), a, b)) == 0.5
    summed = metrics.as_metric("true_positives", "hits", reduce="running_sum")
    assert (summed.name, summed.mode, float(measure(summed, a, b))) == ("hits", "max", 3.0)
    per_class = metrics.as_metric(metrics.recall(num_classes=2, average=None), reduce="running_average")
    ids = jnp.array([0, 1])
    np.testing.assert_allclose(measure(per_class, (ids, ids), (ids, 1 - ids)), [0.5, 0.5])


def test_last_keeps_trees_of_any_shape_and_dtype():
    """Catches handlers that would see the first batch's predictions, or widened or summed ones."""
    metric = metrics.last(reads=("targets", "prediction"))
    first = (jnp.zeros(2, jnp.int32), {"a": jnp.zeros((2, 3), jnp.bfloat16)})
    second = (jnp.ones(2, jnp.int32), {"a": jnp.ones((2, 3), jnp.bfloat16)})
    targets, prediction = measure(metric, first, second)
    assert (targets.dtype, prediction["a"].dtype) == (jnp.int32, jnp.bfloat16)
    np.testing.assert_array_equal(targets, [1, 1])
    np.testing.assert_array_equal(prediction["a"], np.ones((2, 3)))


def test_last_merges_in_order_and_empty_is_neutral():
    """Catches an empty accumulator's zeros replacing the last value."""
    metric = metrics.last(reads="x")
    x, y = jnp.array([1.0]), jnp.array([2.0])
    empty = metric.init(x)
    a, b = metric.update(empty, x), metric.update(empty, y)
    assert [float(metric.compute(metric.merge(*p))[0]) for p in ((a, b), (b, a), (a, empty), (empty, a))] == [
        2,
        1,
        1,
        1,
    ]


def test_fold_with_an_initial_value_of_any_tree():
    """Catches the seed's fixed float32 zero as accumulator: axon #494, #668, B33."""

    def fold(acc, value, count):
        return {
            "max": jnp.maximum(acc["max"], value.max()),
            "at": jnp.where(value.max() > acc["max"], count, acc["at"]),
        }

    metric = metrics.as_metric(error, reduce=(fold, {"max": -jnp.inf, "at": -1}))
    out = measure(metric, zeros_and([1, 2]), zeros_and([7, 3]), zeros_and([5, 4]))
    assert (float(out["max"]), int(out["at"])) == (7.0, 1)


def test_fold_settles_on_a_dtype_before_the_first_batch():
    """Catches a carry that changes from int32 to float32 and compiles twice, or fails under scan."""
    metric = metrics.as_metric(lambda x: x.sum(), "total", reads="x", reduce=(lambda acc, value, count: acc + value, 0))
    empty = metric.init(jnp.ones(2))
    assert empty.value.dtype == jnp.float32
    out = jax.lax.scan(lambda c, x: (metric.update(c, x), None), empty, jnp.ones((5, 2)))[0]
    assert (float(metric.compute(out)), int(out.count)) == (10.0, 5)


def test_fold_that_changes_shape_is_refused():
    """Catches an error deep inside scan that names no metric."""
    metric = metrics.as_metric(error, reduce=(lambda acc, value, count: acc + value, 0.0))
    with pytest.raises(ContractError, match=r"metric 'error': fold.*float32\[\], got float32\[3\]"):
        metric.init(*zeros_and(np.ones(3)))


def test_fold_of_two_arguments_is_told_the_three():
    """Catches Python's own word about arguments, at the first batch, that names neither metric nor fold."""
    with pytest.raises(
        TypeError, match=r"metric 'error': a fold is called with \(acc, value, count\).*got <lambda>\(acc, value\)"
    ):
        metrics.as_metric(error, reduce=(lambda acc, value: acc + value, 0.0))


def test_fold_does_not_merge():
    """Catches a fold silently merged by addition."""
    metric = metrics.as_metric(error, reduce=(lambda acc, value, count: acc + value.sum(), 0.0))
    acc = metric.init(*zeros_and([1]))
    with pytest.raises(TypeError, match=r"metric 'error' is a fold .* cannot be merged"):
        metric.merge(acc, acc)
    with pytest.raises(TypeError, match=r"pair \(fold, initial\)"):
        metrics.as_metric(error, reduce=(0.0, error))


def test_accumulators_are_wide():
    """Catches bfloat16 sums, which stop at 256, and float64 ones cut to float32."""
    metric = metrics.as_metric(lambda x: x, "x", reads="x")
    assert metric.init(jnp.ones(2, jnp.bfloat16)).total.high.dtype == jnp.float32
    assert float(measure(metric, *[(jnp.ones(1, jnp.bfloat16),)] * 300)) == 1.0
    with jax.enable_x64(True):
        x = jnp.ones(2, jnp.float64)
        acc = metric.update(metric.init(x), x, weights=jnp.ones(2, jnp.float32))
        assert {leaf.dtype for leaf in jax.tree.leaves(acc)} == {jnp.dtype("float64")}
