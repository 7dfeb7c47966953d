"""Metrics of a loop: what they read, and how batches are joined."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.contract import Result
from telic.errors import ContractError, ShapeError
from telic.loop.reducers import reported
from telic.mean import Mean

RAGGED = [np.zeros(3, np.float32), np.full(1, 4.0, np.float32)]
"""B34, S18: the mean of the batches is 2, that of the examples is 1."""


def reading(batches: list[Any], metric: Any, **options: Any) -> Any:
    """Give a metric over batches that are the outputs too."""
    options = {"name": "m", "reads": "x", **options}
    loop = telic.Loop(lambda s, b: Result(s + 1, {"x": b, "pair": (b, {"inner": b + 1})}), lambda b: 0)
    return loop.metric(metric, **options).run(batches).metrics["m"]


def test_mean_is_that_of_the_examples() -> None:
    """B34, S18, XS061: an epoch's mean of the batches' means over-weighs a short batch."""
    assert reading(RAGGED, lambda x: x) == 1.0
    assert reading(RAGGED, lambda x: x.mean()) == 1.0
    assert reading([np.float32([1, 1, 1, 1]), np.float32([5])], lambda x: x) == pytest.approx(1.8)


def test_the_other_reductions() -> None:
    """XS060: a count that is averaged; a "last" that is the first; a fold that forgets."""
    assert reading(RAGGED, lambda x: x, reduce="running_average") == 2.0
    assert reading(RAGGED, lambda x: x, reduce="running_sum") == 4.0
    assert np.array_equal(reading(RAGGED, lambda x: x.max(), reduce="last"), 4.0)
    assert reading(RAGGED, lambda x: x.max(), reduce=(lambda acc, value, i: jnp.maximum(acc, value), -1.0)) == 4.0
    assert reading(RAGGED, lambda x: Mean(x.sum(), 2.0)) == 1.0


def test_a_fold_starts_from_its_initial_value_in_any_structure() -> None:
    """B33: an accumulator that is always one float32 zero: vectors, integers and trees fail."""
    initial = {"low": np.full(2, 9, np.int32), "count": 0}

    def fold(acc: Any, value: Any, i: Any) -> Any:
        return {"low": jnp.minimum(acc["low"], value), "count": acc["count"] + i}

    found = reading([np.int32([5, 7]), np.int32([6, 1]), np.int32([8, 8])], lambda x: x, reduce=(fold, initial))
    assert found["low"].tolist() == [5, 1]
    assert found["low"].dtype == np.int32
    assert int(found["count"]) == 3


@pytest.mark.parametrize(
    ("reads", "expected"),
    [("x", 1.0), (("x",), 1.0), ("pair.0", 1.0), ("pair.1.inner", 2.0), ("batch", 1.0), (lambda o: (o["x"] * 3,), 3.0)],
)
def test_what_a_metric_may_read(reads: Any, expected: float) -> None:
    """B32: a single name that is taken apart, tuples that cannot be reached."""
    assert reading([np.ones(2, np.float32)], lambda x: x, reads=reads) == expected


def test_batch_fields_and_the_state_of_a_raw_loop() -> None:
    """A metric that can see outputs only: no mask, no state."""
    loop = telic.Loop(lambda s, b: {"sum": s["sum"] + b["x"].sum()}, lambda b: {"sum": 0.0})
    loop.metric(lambda m: m, "masked", reads="batch.mask").metric(lambda s: s, "sum", reads="sum", reduce="last")
    final = loop.run([{"x": np.float32([1, 2]), "mask": np.float32([1, 0])}] * 2)
    assert (final.metrics["masked"], final.metrics["sum"]) == (0.5, 6.0)


def test_a_name_that_is_not_there_is_refused_before_anything_compiles() -> None:
    """An error deep in the first batch, without the names there are."""
    with pytest.raises(ContractError, match=r"metric 'm' reads 'y', which the step's outputs lack.*pair, x"):
        reading([np.ones(2)], lambda x: x, reads="y")
    with pytest.raises(ContractError, match="as a tuple"):
        reading([np.ones(2)], lambda x: x, reads=lambda o: o["x"])


def test_a_metric_named_like_a_field_of_the_state_is_computed() -> None:
    """B31: a metric whose name equals a key of the state is replaced by the state's previous value."""
    loop = telic.Loop(lambda s, b: {"total": s["total"] + b}, lambda b: {"total": 0.0})
    loop.metric(lambda s: s * 100, "total", reads="total", reduce="last")
    assert loop.run([np.float32(1)] * 2).metrics["total"] == 200.0


def test_metrics_begin_anew_with_each_epoch() -> None:
    """B6, B57, XS067, XS109: accumulators kept over epochs."""
    loop = telic.Loop(lambda s, b: Result(s, {"x": b}), lambda b: 0).metric(
        lambda x: x, "sum", reads="x", reduce="running_sum"
    )
    final = loop.run(lambda epoch: [np.float32(4 - 2 * epoch)] * 2, epochs=2)
    assert final.history == {0: {"sum": 8.0}, 1: {"sum": 4.0}}


def test_names_are_unique_and_free() -> None:
    """S19, B21, XS065, XS066, XS072: a second metric of one name silently replaces the first."""
    loop = telic.Loop(lambda s, b: s)
    loop.metric("accuracy")
    with pytest.raises(ValueError, match="'accuracy' already"):
        loop.metric("accuracy")
    loop.metric("accuracy", "again")
    with pytest.raises(ValueError, match="log lines use"):
        loop.metric(lambda x: x, "epoch")
    with pytest.raises(ValueError, match=r"acuracy.*Did you mean 'accuracy'"):
        loop.metric("acuracy")
    with pytest.raises((TypeError, ValueError), match="name"):
        loop.metric(lambda x: x)


def test_three_metrics_attached_in_a_python_loop_differ() -> None:
    """XS065: closures that all see the last name."""
    loop = telic.Loop(lambda s, b: Result(s, {"a": b, "b": b * 2, "c": b * 3}), lambda b: 0)
    for name in "abc":
        loop.metric(lambda x: x, name, reads=name)
    assert dict(loop.run([np.float32(1)]).metrics) == {"a": 1.0, "b": 2.0, "c": 3.0}


def test_shapes_that_would_broadcast_are_refused() -> None:
    """B45: (n,) against (n, 1) gives an n by n comparison and a wrong accuracy."""
    loop = telic.Loop(lambda s, b: Result(s, {"targets": b[0], "prediction": b[1]}), lambda b: 0)
    loop.metric("mean_squared_error")
    with pytest.raises(ShapeError, match="shape"):
        loop.run([(np.ones(4, np.float32), np.ones((4, 1), np.float32))])


def test_weights_are_mass() -> None:
    """XS062, XS063: a weighted metric divided by the batch's size."""
    loop = telic.Loop(lambda s, b: Result(s, {"x": b[0], "weights": b[1]}), lambda b: 0).metric(
        lambda x: x, "m", reads="x"
    )
    a = (np.float32([1, 1]), np.float32([1, 0]))
    b = (np.float32([3, 3]), np.float32([1, 1]))
    assert loop.run([a, b]).metrics["m"] == pytest.approx(7 / 3)


def test_a_rejected_batch_is_in_no_metric() -> None:
    """A metric that is NaN for the epoch since one batch was."""
    loop = telic.Loop(lambda s, b: Result(s, {"x": b}, accepted=jnp.isfinite(b).all()), lambda b: 0)
    loop.metric(lambda x: x, "m", reads="x")
    assert loop.run([np.float32([1]), np.float32([np.nan]), np.float32([3])]).metrics["m"] == 2.0


def test_what_a_step_reports_needs_no_attaching() -> None:
    """Metrics of an objective that nobody sees; a Mean that loses its mass."""
    result = Result(None, {"metrics": {"a": Mean(jnp.ones(()), jnp.ones(())), "b": jnp.ones(())}})
    assert list(reported(result, {"b": None})) == ["a"]
    assert reported(Result(None, {"x": 1}), {}) == {}
    loop = telic.Loop(
        lambda s, b: Result(s, {"metrics": {"kl": Mean(b.sum(), jnp.float32(b.size)), "rate": b[0]}}), lambda b: 0
    )
    # XS069: one token of 1 and nine of 0 is 0.1; a scalar weighs its rows.
    final = loop.run([np.float32([0] * 9), np.float32([1])])
    assert final.metrics["kl"] == pytest.approx(0.1)
    assert final.metrics["rate"] == pytest.approx(0.1)
