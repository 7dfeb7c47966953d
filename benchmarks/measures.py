"""What is measured: each function gives rows of the table."""

import contextlib
import io
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

import telic
from benchmarks import models, sides
from benchmarks.timing import Ratio, ratio, take_turns
from telic.profiling import Report

WINDOW = 8


def mlp(rounds: int, steps: int = 1000) -> list[Ratio]:
    """Measure the small step, where what the library adds shows: accuracy, running loss, progress, guard."""
    data = models.rows(steps)
    params = sides.params_of(models.MLP(), data[0][0])
    seconds = _quietly(
        {
            "hand": sides.by_hand(sides.cross_entropy(models.MLP()), params, data),
            "guard": sides.of_loop(sides.mlp_loop(), data),
            "allow": sides.of_loop(sides.mlp_loop(nonfinite="allow"), data),
            "apart": sides.of_loop(sides.mlp_loop().drive(fuse=False), data),
        },
        rounds,
    )
    hand = seconds["hand"]
    return [
        ratio("MLP step, guard", seconds["guard"], hand, aim=0.85, units=steps),
        ratio("MLP step, nonfinite='allow'", seconds["allow"], hand, aim=0.78, units=steps),
        ratio("MLP step, guard, one dispatch each (fuse=False)", seconds["apart"], hand, units=steps),
    ]


def feeding(rounds: int, steps: int = 1000) -> list[Ratio]:
    """Measure the small step fed by `telic.data.columns`, and how long it waits for data."""
    batches = models.rows(steps)
    columns = {
        "inputs": jnp.concatenate([x for x, _ in batches]).__array__(),
        "targets": jnp.concatenate([y for _, y in batches]).__array__(),
    }
    reports: list[Report] = []
    seconds = _quietly(
        {
            "list": sides.of_loop(sides.mlp_loop(), batches),
            "columns": sides.of_loop(sides.mlp_loop(), telic.data.columns(columns, batch=64)),
        },
        rounds,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        loop = sides.mlp_loop().drive(profile=reports.append)
        loop.run(telic.data.columns(columns, batch=64), epochs=5)
    waiting = reports[0].seconds["data"] / reports[0].step_seconds
    return [
        ratio("MLP step from columns, to the same from a list", seconds["columns"], seconds["list"], units=steps),
        Ratio("share of its time spent waiting for columns", waiting, waiting, waiting, None, "profile of 5 epochs"),
    ]


def gpt(rounds: int, steps: int = 4) -> list[Ratio]:
    """Measure the small decoder: guard, and five metrics."""
    data, objective = models.sentences(steps), models.GPT()
    params = objective.init(jax.random.key(0))["params"]
    metered = sides.trainer(objective).loop(log=0)
    for metric in ("accuracy", telic.metrics.top_k_accuracy(k=5), "perplexity"):
        metered.metric(metric)
    metered.metric(lambda targets, prediction: prediction.max(-1), "largest")
    metered.metric(lambda targets, prediction: jax.nn.logsumexp(prediction, -1), "normaliser")
    seconds = _quietly(
        {
            "hand": sides.by_hand(sides.next_token(objective), params, data),
            "guard": sides.of_loop(sides.trainer(objective).loop(log=0), data),
            "allow": sides.of_loop(sides.trainer(objective, nonfinite="allow").loop(log=0), data),
            "metrics": sides.of_loop(metered, data),
        },
        rounds,
    )
    hand = seconds["hand"]
    return [
        ratio("GPT step, guard", seconds["guard"], hand, aim=1.01, units=steps),
        ratio("GPT step, nonfinite='allow'", seconds["allow"], hand, units=steps),
        ratio("GPT step, guard to allow", seconds["guard"], seconds["allow"], aim=1.03, units=steps),
        ratio("GPT step, five metrics to none", seconds["metrics"], seconds["guard"], aim=1.02, units=steps),
    ]


def windows(rounds: int, count: int = WINDOW) -> list[Ratio]:
    """Measure windows of `count` microbatches of the decoder: one Mean, two terms planned and replayed."""
    data = models.sentences(count)
    seconds = _quietly(
        {
            "hand": sides.scanned_by_hand(models.GPT(), data, count),
            "mean": sides.of_loop(sides.trainer(models.GPT(), accumulate=count).loop(log=0), data),
            "terms": sides.of_loop(sides.trainer(models.TwoTerms(), accumulate=count).loop(log=0), data),
            "replay": sides.of_loop(sides.trainer(models.Statistics(), accumulate=count).loop(log=0), data),
            "plain": sides.of_loop(sides.trainer(models.GPT()).loop(log=0), data),
        },
        rounds,
    )
    mean = seconds["mean"]
    return [
        ratio(f"Mean window of {count}, to a hand-written scan", mean, seconds["hand"], aim=1.02, units=count),
        ratio(f"Mean window of {count}, to {count} plain steps", mean, seconds["plain"], units=count),
        ratio(f"two planned terms in {count}, to Mean", seconds["terms"], mean, aim=1.05, units=count),
        ratio(f"replayed window of {count}, to Mean", seconds["replay"], mean, aim=1.45, units=count),
    ]


def heavy(rounds: int, steps: int = 20) -> list[Ratio]:
    """Measure a step that moves 24 MB of parameters for 8 rows: what forms of a guard cost there."""
    data = [(x, x) for x, _ in models.rows(steps, width=models.HEAVY_WIDTH, batch=models.HEAVY_BATCH)]
    model = models.Heavy()
    params = sides.params_of(model, data[0][0])
    loss = sides.squared_error(model)
    objective = telic.supervised(model, "mean_squared_error")
    option = {"xla_cpu_copy_insertion_use_region_analysis": True} if jax.default_backend() == "cpu" else {}
    forms: dict[str, sides.Side] = {
        "hand": sides.by_hand(loss, _copy(params), data),
        "select": sides.by_hand(loss, _copy(params), data, guard="select"),
        "option": sides.by_hand(loss, _copy(params), data, guard="select", compiler_options=option),
        "cond": sides.by_hand(loss, _copy(params), data, guard="cond"),
        "guard": sides.of_loop(sides.trainer(objective).loop(log=0), data),
        "keep": sides.of_loop(sides.trainer(objective, keep_previous=True).loop(log=0), data),
        "allow": sides.of_loop(sides.trainer(objective, nonfinite="allow").loop(log=0), data),
    }
    seconds = _quietly(forms, rounds)
    hand = seconds["hand"]
    named = {
        "select": "24 MB step by hand with selects",
        "option": "24 MB step by hand with selects and the option",
        "cond": "24 MB step by hand with lax.cond",
        "guard": "24 MB step, guard",
        "keep": "24 MB step, guard, keep_previous=True",
        "allow": "24 MB step, nonfinite='allow'",
    }
    return [ratio(text, seconds[name], hand, units=steps) for name, text in named.items()]


def convolution(rounds: int, steps: int = 20) -> list[Ratio]:
    """Measure the step of the demonstration: convolutions, dropout, digits moved a little."""
    data, model = models.pictures(steps), models.DigitReader()
    params = sides.params_of(model, data[0][0])
    loop = telic.trainer(model, models.read_digits, optax.adam(models.LEARNING_RATE), log=0)
    seconds = _quietly(
        {
            "hand": sides.by_hand(sides.moved_digits(model), params, data),
            "telic": sides.of_loop(loop.metric("accuracy").progress(plain=True), data),
        },
        rounds,
    )
    return [ratio("convolutional step of the demo", seconds["telic"], seconds["hand"], aim=1.05, units=steps)]


def evaluation(rounds: int, count: int = 500) -> list[Ratio]:
    """Measure a pass over validation data: loss and accuracy against a hand-written sum of losses."""
    data, model = models.rows(count), models.MLP()
    params = sides.params_of(model, data[0][0])
    loop = telic.evaluator(model, "softmax_cross_entropy", log=0).metric("accuracy")
    seconds = _quietly(
        {
            "hand": sides.evaluated_by_hand(sides.cross_entropy(model), params, data),
            "telic": sides.of_loop(loop, data, state={"params": params}),
        },
        rounds,
    )
    return [ratio("validation pass of the MLP", seconds["telic"], seconds["hand"], units=count)]


def _copy(params: object) -> object:
    return jax.tree.map(jnp.copy, params)


def _quietly(forms: dict[str, sides.Side], rounds: int) -> dict[str, list[float]]:
    """Let sides take turns while what they show goes nowhere."""
    with contextlib.redirect_stdout(io.StringIO()):
        return take_turns(forms, rounds)


MEASURES: dict[str, Callable[[int], list[Ratio]]] = {
    "mlp": mlp,
    "gpt": gpt,
    "windows": windows,
    "heavy": heavy,
    "convolution": convolution,
    "evaluation": evaluation,
    "feeding": feeding,
}
"""Measures of time, by the name `--only` takes."""
