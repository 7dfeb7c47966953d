"""The state of a run and its lazily read metrics."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import TelicError
from telic.loop.state import LoopState, Metrics, scalars


class Counting:
    """Computes metrics, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Any]:
        self.calls += 1
        return {"loss": 1.0, "accuracy": 0.5}

    def later(self) -> Callable[[], dict[str, Any]]:
        return self


def test_metrics_are_computed_when_read_and_once() -> None:
    """A fetch per name, or one nobody asked for."""
    compute = Counting()
    metrics = Metrics(compute, ("loss", "accuracy"))
    assert list(metrics) == ["loss", "accuracy"]
    assert "loss" in metrics
    assert len(metrics) == 2
    assert repr(metrics) == "Metrics(loss, accuracy)"
    assert compute.calls == 0
    assert dict(metrics) == {"loss": 1.0, "accuracy": 0.5}
    assert metrics["loss"] == 1.0
    assert compute.calls == 1


def test_a_newer_value_wins() -> None:
    """B27: a second validation whose values are discarded since the names exist."""
    metrics = Metrics(Counting(), ("loss", "accuracy"))
    metrics.add({"validation_loss": 5.0})
    metrics.add({"validation_loss": 50.0})
    assert dict(metrics) == {"loss": 1.0, "accuracy": 0.5, "validation_loss": 50.0}
    assert metrics.later()() == dict(metrics)
    assert len(metrics) == 3


def test_a_missing_metric_is_named_with_what_there_is() -> None:
    """A bare KeyError."""
    metrics = Metrics(Counting(), ("loss", "accuracy"))
    with pytest.raises(KeyError, match=r"no metric 'los'.*Did you mean 'loss'.*loss, accuracy"):
        metrics["los"]
    with pytest.raises(KeyError, match="none"):
        Metrics()["x"]


def test_history_keeps_numbers_only() -> None:
    """XS110: a history that keeps predictions, and grows with the epochs."""
    found = scalars(
        {"a": 1, "b": np.float32(0.5), "c": jnp.ones(()), "d": np.ones(3), "e": {"x": 1}, "f": "text", "g": True}
    )
    assert found == {"a": 1.0, "b": 0.5, "c": 1.0, "g": 1.0}
    assert {type(v) for v in found.values()} == {float}


def test_a_loop_without_a_model_says_so() -> None:
    """None where a model was expected, and an AttributeError later."""
    with pytest.raises(TelicError, match="not built from a model"):
        LoopState().model  # noqa: B018


def test_replace_changes_a_copy() -> None:
    """A handler's `replace` that changes the state it was given."""
    state = LoopState(epoch=1)
    assert state.replace(epoch=2).epoch == 2
    assert state.epoch == 1


def test_rejected_attempts_are_listed_where_there_are_some() -> None:
    """A count of 0 in every line and history, a count that is lost, or one that a kept state no longer has."""
    none, some = (Metrics(lambda n=n: {"loss": 1.0, "rejected": n}, ("loss", "rejected")) for n in (0.0, 2.0))
    assert dict(none) == none.later()() == {"loss": 1.0}
    assert len(none) == 1
    assert none["rejected"] == 0
    assert "rejected" in none
    assert dict(some) == some.later()() == {"loss": 1.0, "rejected": 2.0}
    for metrics, count in ((none, 0), (some, 2)):
        kept = LoopState(metrics=metrics).keep()
        assert kept.metrics["rejected"] == count
        assert dict(kept.metrics) == dict(metrics)
