"""Metrics of clu, metrax and flax.nnx in a loop: their values, over any batches, and no object is written."""

import itertools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import telic
from telic.errors import ContractError
from telic.metrics import as_metric

ROWS = 30


def scores() -> tuple[np.ndarray, np.ndarray]:
    """Logits [30, 4] and class ids [30]; not of the batch's size, so that a broadcast cannot pass."""
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 4)).astype(np.float32), random.integers(0, 4, ROWS).astype(np.int32)


def batches(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    logits, labels = scores()
    edges = np.cumsum([0, *sizes])
    return [(logits[a:b], labels[a:b]) for a, b in itertools.pairwise(edges)]


def showing() -> telic.Loop:
    """A loop whose prediction is its input: what metrics read is known."""

    def step(state: Any, batch: Any) -> Any:
        inputs, targets = batch
        loss = jnp.square(inputs).mean(-1)
        return telic.Result(state, {"prediction": inputs, "targets": targets, "loss": loss})

    return telic.Loop(step, lambda batch: 0.0)


def measured(metric: Any, sizes: list[int], name: str = "m", **options: Any) -> Any:
    final = showing().metric(metric, name, **options).run(batches(sizes), strict=False)
    return final.metrics[name]


@flax.struct.dataclass
class Hits:
    """A metric in clu's form that is nobody's subclass."""

    hits: Any
    rows: Any

    @classmethod
    def empty(cls) -> "Hits":
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    @classmethod
    def from_model_output(cls, *, logits: Any, labels: Any) -> "Hits":
        return cls((logits.argmax(-1) == labels).sum(), jnp.asarray(labels.shape[0], jnp.int32))

    def merge(self, other: "Hits") -> "Hits":
        return Hits(self.hits + other.hits, self.rows + other.rows)

    def compute(self) -> Any:
        return self.hits / self.rows


def hit_rate() -> float:
    logits, labels = scores()
    return float((logits.argmax(-1) == labels).mean())


# -- clu's form ----------------------------------------------------------------------------------------------------


def test_a_class_in_clus_form_needs_no_library() -> None:
    """Catches a mean of batch means: ragged batches give what all rows give together."""
    assert measured(Hits, [7, 7, 7, 7, 2]) == pytest.approx(hit_rate(), abs=1e-7)
    assert as_metric(Hits).name == "hits"


def test_it_trains_with_one_and_validates() -> None:
    """Catches an accumulator that the compiled loop cannot carry, or that validation cannot begin anew."""
    model = (lambda key, x: {"w": jnp.zeros((4, 4))}, lambda params, x: x @ params["w"])
    loop = telic.trainer(model, "softmax_cross_entropy", "adam", log=0).metric(Hits).validate(batches([9, 9]))
    history = loop.run(batches([10, 10, 10]), epochs=4).history
    assert history[3]["hits"] > history[0]["hits"]
    assert 0 <= history[3]["validation_hits"] <= 1


def test_clu_metrics() -> None:
    """Catches arguments given under the wrong names, where all are by name only."""
    clu = pytest.importorskip("clu.metrics")
    assert measured(clu.Accuracy, [7, 7, 7, 7, 2]) == pytest.approx(hit_rate(), abs=1e-6)
    expected = float(jnp.square(scores()[0]).mean())
    assert measured(clu.Average.from_output("loss"), [16, 14], reads="loss") == pytest.approx(expected, rel=1e-5)
    assert measured(clu.Average, [16, 14], reads={"values": "loss"}) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match="must provide name"):
        as_metric(clu.Average.from_output("loss"), reads="loss")


def test_metrax_metrics() -> None:
    """Catches a class whose method gives values of another class, and arguments that go to the wrong parameters."""
    metrax = pytest.importorskip("metrax")
    logits, labels = scores()

    def classes(outputs: Any) -> tuple[Any, ...]:
        return outputs["prediction"].argmax(-1), outputs["targets"]

    assert measured(metrax.Accuracy, [7, 7, 7, 7, 2], reads=classes) == pytest.approx(hit_rate(), abs=1e-6)

    def values(outputs: Any) -> tuple[Any, ...]:
        return outputs["prediction"][:, 0], outputs["targets"].astype(jnp.float32)

    expected = float(np.sqrt(np.mean((logits[:, 0] - labels) ** 2)))
    assert measured(metrax.RMSE, [20, 10], reads=values) == pytest.approx(expected, rel=1e-5)

    def score(outputs: Any) -> tuple[Any, ...]:
        return jax.nn.sigmoid(outputs["prediction"][:, 0]), (outputs["targets"] > 1).astype(jnp.int32)

    together = measured(metrax.AUCROC, [ROWS], reads=score)
    assert measured(metrax.AUCROC, [7, 7, 7, 7, 2], reads=score) == pytest.approx(together, abs=1e-6)
    assert 0 < together < 1


def test_weights_reach_a_class_that_takes_them() -> None:
    """Catches a padded row that counts."""
    metrax = pytest.importorskip("metrax")

    def step(state: Any, batch: Any) -> Any:
        return telic.Result(state, {"prediction": batch, "targets": jnp.zeros(4), "weights": jnp.array([1, 1, 0, 0.0])})

    data = [np.array([1, 3, 100, 100], np.float32)]
    final = telic.Loop(step, lambda b: 0.0).metric(metrax.MSE).run(data)
    assert final.metrics["mse"] == pytest.approx(5.0)


# -- nnx -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[ROWS], [7, 7, 7, 7, 2], [1] * 5 + [25]])
def test_nnx_accuracy_over_any_batches(sizes: list[int]) -> None:
    """Catches an object that is updated once, while tracing, and then never."""
    assert measured(nnx.metrics.Accuracy(), sizes) == pytest.approx(hit_rate(), abs=1e-6)


def test_an_nnx_metric_is_never_written() -> None:
    """Catches two loops, or an epoch and its validation, that add into one object."""
    accuracy = nnx.metrics.Accuracy()
    accuracy.update(logits=jnp.eye(2), labels=jnp.array([0, 0]))
    loop = showing().metric(accuracy)
    values = [loop.run(batches([10, 10, 10])).metrics["accuracy"] for _ in range(2)]
    assert values == [pytest.approx(hit_rate(), abs=1e-6)] * 2
    assert float(accuracy.compute()) == 0.5


def test_nnx_average_and_welford_read_what_they_are_named_after() -> None:
    """Catches an argument name that is ignored, and an accumulator whose dtype changes at the first update."""
    losses = np.square(scores()[0]).mean(-1)
    assert measured(nnx.metrics.Average("loss"), [16, 14]) == pytest.approx(losses.mean(), rel=1e-5)
    found = measured(nnx.metrics.Welford("loss"), [16, 14])
    assert float(found.standard_deviation) == pytest.approx(losses.std(), rel=1e-4)


def test_nnx_multi_metric_gives_all_its_values() -> None:
    """Catches a metric whose value is no scalar breaking the run."""
    both = nnx.metrics.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    found = measured(both, [16, 14], reads=("targets", "prediction", "loss"))
    assert float(found["accuracy"]) == pytest.approx(hit_rate(), abs=1e-6)
    assert float(found["loss"]) == pytest.approx(np.square(scores()[0]).mean(), rel=1e-5)


@pytest.mark.parametrize("metric", [nnx.metrics.Average("x"), nnx.metrics.Welford("x")])
def test_nnx_metrics_merge(metric: Any) -> None:
    """Catches a merge that forgets how far two means are apart."""
    made = as_metric(metric, "m")
    x = jnp.arange(10.0) ** 2
    whole = made.update(made.init(x), x)
    halves = [made.update(made.init(part), part) for part in (x[:3], x[3:])]
    for a, b in zip(
        jax.tree.leaves(made.compute(made.merge(*halves))), jax.tree.leaves(made.compute(whole)), strict=True
    ):
        assert float(a) == pytest.approx(float(b), rel=1e-6)
    both = as_metric(nnx.metrics.MultiMetric(x=metric), "m", reads="x")
    with pytest.raises(TypeError, match="has no merge"):
        both.merge(None, None)


# -- refusals ------------------------------------------------------------------------------------------------------


@flax.struct.dataclass
class Collecting(Hits):
    """Keeps everything it saw."""

    def merge(self, other: Hits) -> Hits:
        return Collecting(jnp.append(self.hits, other.hits), self.rows)


@pytest.mark.parametrize(
    ("metric", "options", "match"),
    [
        (Hits, {"reads": {"logits": "prediction"}}, "missing a required.*labels"),
        (Hits, {"reads": ("prediction", "loss")}, "cannot be given logits, loss"),
        (nnx.metrics.Average(), {}, "takes values; say which output"),
        (nnx.metrics.MultiMetric(a=nnx.metrics.Accuracy()), {}, "does not say what it takes"),
        (Collecting, {}, "change their shapes as they merge"),
    ],
)
def test_what_cannot_be_read_is_refused(metric: Any, options: dict[str, Any], match: str) -> None:
    """Catches a guess, or an error of the other library that names no remedy."""
    with pytest.raises(ContractError, match=match):
        measured(metric, [10, 10], **options)


def test_weights_are_not_lost_silently() -> None:
    """Catches padding rows that count, in a metric that knows no weights."""

    def step(state: Any, batch: Any) -> Any:
        outputs = {"prediction": jnp.eye(2), "targets": jnp.array([0, 0]), "weights": jnp.array([1.0, 0.0])}
        return telic.Result(state, outputs)

    for metric in (Hits, nnx.metrics.Accuracy()):
        with pytest.raises(ContractError, match=r"has weights and .* takes none"):
            telic.Loop(step, lambda b: 0.0).metric(metric, "m").run([np.float32(1)])
    reads = {"labels": "targets", "logits": "prediction", "mask": "weights"}
    final = telic.Loop(step, lambda b: 0.0).metric(nnx.metrics.Accuracy(), "m", reads=reads).run([np.float32(1)])
    assert final.metrics["m"] == 1.0


def test_running_average_of_a_foreign_metric() -> None:
    """Catches reduce= that is accepted and not obeyed."""
    found = measured(nnx.metrics.Accuracy(), [16, 14], reduce="running_average")
    logits, labels = scores()
    hits = logits.argmax(-1) == labels
    assert found == pytest.approx((hits[:16].mean() + hits[16:].mean()) / 2, abs=1e-6)
