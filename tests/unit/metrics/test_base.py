import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic import metrics
from telic.mean import Mean
from telic.metrics.base import Renamed, as_reads
from telic.metrics.sums import Sum
from tests.unit.metrics.running import measure


def test_import_loads_no_jax():
    """Catches an eager import in the package: `import telic.metrics` would take a second and pick a device."""
    code = "import sys, telic.metrics as m; dir(m); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_table_of_contents_is_complete():
    """Catches a name that is exported but cannot be loaded, or loaded but not exported."""
    from telic.metrics import _WHERE

    assert set(_WHERE) == set(metrics.__all__)
    assert [n for n in metrics.__all__ if getattr(metrics, n) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'acuracy'"):
        _ = metrics.acuracy


def test_sum_counts_past_2_to_24_under_jit_and_scan():
    """Catches float32 counters that stop at 16,777,216, and compilers that simplify the correction away."""
    start = Sum.zero(jnp.float32(0)).add(2.0**24)

    @jax.jit
    def count(acc):
        return jax.lax.scan(lambda c, x: (c.add(x), None), acc, jnp.ones(101))[0]

    out = count(start)
    assert float(out.high) + float(out.low) == 2**24 + 101
    merged = jax.jit(Sum.merge)(out, out)
    assert float(merged.high) + float(merged.low) == 2 * (2**24 + 101)


@pytest.mark.parametrize(("bad", "expected"), [(np.inf, np.inf), (-np.inf, -np.inf), (np.nan, np.nan)])
def test_sum_of_something_not_finite(bad, expected):
    """Catches the correction turning an infinite sum into NaN."""
    out = Sum.zero(jnp.float32(0)).add(1.0).add(bad).add(1.0)
    np.testing.assert_array_equal(out.value(), np.float32(expected))


def test_every_name_makes_a_metric_of_that_name():
    """Catches a table entry that points at the wrong function."""
    for name in metrics.NAMES:
        if name == "confusion_matrix":
            continue
        metric = metrics.as_metric(name, reads="prediction")
        assert isinstance(metric, metrics.Metric)
        assert (metric.name, metric.reads) == (name, ("prediction",))
    assert metrics.as_metric("recall").reads == ("targets", "prediction")
    assert metrics.as_metric("recall", "r").name == "r"


def test_directions():
    """Catches a monitor that would keep the worst epoch."""
    modes = {n: metrics.as_metric(n, reads="x").mode for n in metrics.NAMES if n != "confusion_matrix"}
    expected = dict.fromkeys(modes, "max")
    expected |= dict.fromkeys(("mean", "sum", "last"))
    for name in modes:
        if "error" in name or name in ("perplexity", "bits_per_byte", "false_positives", "false_negatives"):
            expected[name] = "min"
    assert modes == expected


def test_unknown_names_are_refused_with_the_nearest():
    """Catches the seed's behaviour: a misspelt metric fails only at the first batch."""
    with pytest.raises(ValueError, match=r"unknown metric 'acuracy'. Did you mean 'accuracy'\?"):
        metrics.as_metric("acuracy")
    with pytest.raises(ValueError, match=r"metrics.confusion_matrix\(num_classes=...\)"):
        metrics.as_metric("confusion_matrix")
    with pytest.raises(ValueError, match="reads='prediction'"):
        metrics.as_metric("mean")
    with pytest.raises(ValueError, match=r"unknown reduce 'avg'"):
        metrics.as_metric("accuracy", reduce="avg")
    with pytest.raises(ValueError, match=r"unknown average 'macroo'. Did you mean 'macro'"):
        metrics.precision(num_classes=3, average="macroo")


def test_functions_without_a_name_must_be_named():
    """Catches two lambdas that would both be reported as '<lambda>'."""
    with pytest.raises(ValueError, match="must provide name"):
        metrics.as_metric(lambda t, p: p)
    assert metrics.as_metric(lambda t, p: p, "p").name == "p"

    def error(targets, prediction):
        return prediction - targets

    assert metrics.as_metric(error).name == "error"
    assert metrics.as_metric(jax.jit(error)).name == "error"
    with pytest.raises(TypeError, match="name must be a string, got 3"):
        metrics.as_metric(error, 3)
    with pytest.raises(ValueError, match="must not be empty"):
        metrics.as_metric(error, "")


def test_what_is_no_metric_is_refused():
    """Catches a class or a number that would be called per batch and fail far from its cause."""
    with pytest.raises(TypeError, match=r"give an instance of a metric, not the class: R2\(...\)"):
        metrics.as_metric(metrics.R2)
    with pytest.raises(TypeError, match="a metric is a name such as 'accuracy', a function, or a Metric"):
        metrics.as_metric(3)
    with pytest.raises(TypeError, match="reads must be names"):
        metrics.as_metric("accuracy", reads=3)
    with pytest.raises(TypeError, match="reads must be names"):
        as_reads(())


def test_a_metric_can_be_renamed():
    """Catches two metrics of one class that could not be attached side by side (composer #1382)."""
    base = metrics.accuracy()
    assert metrics.as_metric(base) is base
    twice = metrics.as_metric(metrics.as_metric(base, "a"), "b", reads=["y", "z"])
    assert twice == Renamed(base, "b", ("y", "z"))
    assert twice.mode == "max"
    t, p = jnp.array([1, 0]), jnp.array([0.9, 0.9])
    assert float(measure(twice, (t, p))) == 0.5
    acc = twice.update(twice.init(t, p), t, p)
    assert float(twice.compute(twice.merge(acc, acc))) == 0.5


def test_one_metric_serves_two_uses():
    """Catches state on the metric object: one accumulator must not move another (ignite #2158, keras #22617)."""
    metric = metrics.mean(reads="loss")
    first = metric.update(metric.init(jnp.float32(0)), jnp.float32(4))
    second = metric.update(metric.init(jnp.float32(0)), jnp.float32(2))
    assert (float(metric.compute(first)), float(metric.compute(second))) == (4.0, 2.0)


def test_reads_forms():
    """Catches a function or type of artifacts being taken for names."""

    def pick(outputs):
        return (outputs["x"],)

    assert [as_reads(r) for r in ("a", ["a", "b"], pick, Mean)] == [("a",), ("a", "b"), pick, Mean]
