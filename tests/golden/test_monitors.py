"""Patience, cooldown and best values against Keras, torch, Optax, Flax, Ignite and the seed.

Telic acts on the p-th event without improvement, as Keras does; torch, Flax and the seed act one later for the same
number, so they are compared with patience p + 1. Where Telic differs on purpose, a test below says so: a NaN never
becomes the best value, the best value survives the action, and a cooldown of c leaves out exactly c events.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from telic.handlers import Monitor
from telic.loop.state import LoopState
from tests.golden import cases

CASES = cases("monitors")
AXON = cases("axon_monitors")


def starts_finite(case: Any) -> bool:
    return bool(np.isfinite(case.values[0]["in"]["values"][0]))


FINITE_FIRST = [case for case in CASES if starts_finite(case)]
AXON_FINITE_FIRST = [case for case in AXON if starts_finite(case)]


@dataclass
class Trace:
    """What a monitor did over a series of one value an event."""

    acted: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    bests: list[float | None] = field(default_factory=list)
    best_epoch: int | None = None


def watch(series: Any, **options: Any) -> Trace:
    """Run a monitor over a series."""
    trace, state = Trace(), LoopState()
    monitor = Monitor("value", lambda state: trace.acted.append(state.epoch), "watch", **options)
    for epoch, value in enumerate(series):
        state.epoch = epoch
        state.metrics.add({"value": float(value)})
        monitor(state)
        record = state.handler_state["watch"]
        trace.waits.append(record["since_last_improvement"])
        trace.bests.append(record["best"])
    trace.best_epoch = state.handler_state["watch"]["best_epoch"]
    return trace


def series(case: dict[str, Any], entry: dict[str, Any]) -> Any:
    values = case["in"]["values"]
    return -values if entry["series"] == "negated values" else values


def rates(acted: list[int], number: int, lower: Callable[[float], float]) -> list[float]:
    """Give the rate after each event, lowered where a monitor acted."""
    rate, after = 0.1, list[float]()
    for epoch in range(number):
        rate = lower(rate) if epoch in acted else rate
        after.append(rate)
    return after


STOPPING = [
    "keras_early_stopping_patience0",
    "keras_early_stopping_patience1",
    "keras_early_stopping_patience3",
    "keras_early_stopping_max",
    "keras_early_stopping_min_delta",
    "keras_early_stopping_restore",
]


@pytest.mark.parametrize("name", STOPPING)
@pytest.mark.parametrize("case", FINITE_FIRST)
def test_stops_where_keras_stops(case: dict[str, Any], name: str) -> None:
    """Patience counted one too far, an improvement that is not strict, or a best value that a NaN replaced."""
    entry = case["out"][name]
    given, expected = entry["arguments"], entry["result"]
    trace = watch(
        series(case, entry), mode=given["mode"], patience=given["patience"], min_delta=given.get("min_delta", 0.0)
    )
    assert (trace.acted or [None])[0] == expected["stop_epoch"]
    ran = len(expected["stopped"])
    np.testing.assert_allclose(np.array(trace.bests[:ran], float), expected["best_after"], rtol=1e-9)
    # Telic begins to count again when it acts, so the counter is compared before that.
    until = ran - 1 if expected["stop_epoch"] is not None else ran
    assert trace.waits[:until] == expected["wait_after"][:until]


@pytest.mark.parametrize("name", ["keras_reduce_lr", "keras_reduce_lr_max"])
@pytest.mark.parametrize("case", FINITE_FIRST)
def test_lowers_where_keras_lowers(case: dict[str, Any], name: str) -> None:
    """A plateau that counts otherwise than early stopping, or does not begin again after it acted."""
    entry = case["out"][name]
    given = entry["arguments"]
    values = series(case, entry)
    trace = watch(values, mode=given["mode"], patience=given["patience"], min_delta=given["min_delta"])
    lr = rates(trace.acted, len(values), lambda rate: rate * given["factor"])
    np.testing.assert_allclose(lr, entry["result"]["lr_after"], rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_cooldown_and_floor_are_those_of_torch(case: dict[str, Any]) -> None:
    """A cooldown that is one event short or long, or a rate that falls through its floor; a NaN first is no best."""
    entry = case["out"]["torch_reduce_lr_abs_cooldown"]
    given = entry["arguments"]
    values = series(case, entry)
    trace = watch(
        values,
        mode=given["mode"],
        patience=given["patience"] + 1,
        min_delta=given["threshold"],
        cooldown=given["cooldown"],
    )
    lr = rates(trace.acted, len(values), lambda rate: max(rate * given["factor"], given["min_lr"]))
    np.testing.assert_allclose(lr, entry["result"]["lr_after"], rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_an_improvement_of_ones_own_is_torchs_relative_threshold(case: dict[str, Any]) -> None:
    """`improved` that is asked for NaN, or whose answer is taken the wrong way round."""
    entry = case["out"]["torch_reduce_lr"]
    given = entry["arguments"]
    values = series(case, entry)
    trace = watch(values, improved=lambda now, best: now < best * (1 - 1e-4), patience=given["patience"] + 1)
    lr = rates(trace.acted, len(values), lambda rate: rate * given["factor"])
    np.testing.assert_allclose(lr, entry["result"]["lr_after"], rtol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_scales_are_those_of_optax(case: dict[str, Any]) -> None:
    """A floor of the factor that is passed, or a cooldown event that is counted as one without improvement."""
    entry = case["out"]["optax_reduce_on_plateau"]
    given = entry["arguments"]
    values = series(case, entry)
    trace = watch(
        values,
        improved=lambda now, best: now < best * (1 - given["rtol"]),
        patience=given["patience"],
        cooldown=given["cooldown"],
    )
    scale = [
        rate / 0.1
        for rate in rates(trace.acted, len(values), lambda r: max(r * given["factor"], given["min_scale"] * 0.1))
    ]
    np.testing.assert_allclose(scale, entry["result"]["scale"], rtol=2e-5)


@pytest.mark.parametrize("case", FINITE_FIRST)
def test_stops_one_event_before_flax(case: dict[str, Any]) -> None:
    """As Flax with one more, which says stop only at the event after the counter reached patience."""
    entry = case["out"]["flax_early_stopping"]
    given, expected = entry["arguments"], entry["result"]
    trace = watch(series(case, entry), mode="min", patience=given["patience"] + 1, min_delta=given["min_delta"])
    stops = [i for i, stop in enumerate(expected["should_stop"]) if stop]
    assert trace.acted[:1] == stops[:1]


@pytest.mark.parametrize("case", [c for c in FINITE_FIRST if np.isfinite(c.values[0]["in"]["values"]).all()])
def test_stops_where_ignite_stops(case: dict[str, Any]) -> None:
    """As Ignite, which takes a NaN for an improvement: compared on series without one."""
    entry = case["out"]["ignite_early_stopping"]
    values = series(case, entry)
    trace = watch(values, mode="min", patience=entry["arguments"]["patience"])
    stops = [i for i, stop in enumerate(entry["result"]["terminate"]) if stop]
    assert trace.acted[:1] == stops[:1]


@pytest.mark.parametrize("patience", [0, 1, 2, 3])
@pytest.mark.parametrize("case", AXON_FINITE_FIRST)
def test_acts_first_where_the_seed_acts_first(case: dict[str, Any], patience: int) -> None:
    """The seed acts at the (patience + 1)-th event; afterwards it takes the worse value for its best (see below)."""
    out = case["out"]
    trace = watch(case["in"]["values"], mode="min", patience=patience + 1)
    assert (trace.acted or [None])[0] == out[f"early_stop_min_patience{patience}"]["stop_epoch"]
    lr = out[f"reduce_lr_min_patience{patience}"]["lr_after"]
    lowered = [i for i in range(1, len(lr)) if lr[i] != lr[i - 1]]
    assert trace.acted[:1] == lowered[:1]


def test_the_best_value_survives_the_action() -> None:
    """B20: the seed takes the value it acted on for its best, so what is worse than the true best improves."""
    trace = watch([5, 9, 9, 8, 7, 6, 5.5], mode="min", patience=2)
    assert trace.acted == [2, 4, 6]
    assert set(trace.bests) == {5.0}


def test_nan_is_never_best_whenever_it_comes() -> None:
    """Keras and Flax take a NaN seen first for their best, which nothing beats; here it counts as no improvement."""
    trace = watch([math.nan, math.nan, 0.7, 0.6, math.inf, 0.65], mode="min", patience=4)
    assert trace.bests == [None, None, 0.7, 0.6, 0.6, 0.6]
    assert trace.waits == [1, 2, 0, 0, 1, 2]
    assert watch([1.0, math.inf, 2.0], mode="max", patience=9).bests == [1.0, 1.0, 2.0]


def test_a_cooldown_of_c_leaves_out_exactly_c_events() -> None:
    """XS031: in Keras a cooldown of 1 does nothing, since the event that ends it is counted already."""
    constant = [1.0] * 10
    assert watch(constant, mode="min", patience=2).acted == [2, 4, 6, 8]
    assert watch(constant, mode="min", patience=2, cooldown=1).acted == [2, 5, 8]
    assert watch(constant, mode="min", patience=2, cooldown=2).acted == [2, 6]
