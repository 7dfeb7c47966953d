"""The public loop: options, totals, continuing, copies, raw reductions, log lines."""

import io
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.errors import ContractError, DataError, TelicError

ONE = np.float32(1)


def summing() -> telic.Loop:
    return telic.Loop(lambda total, batch: telic.Result(total + batch, {"x": batch}), lambda batch: 0.0).metric(
        lambda x: x, "x", reads="x"
    )


def linear(key: Any, inputs: Any) -> dict[str, Any]:
    return {"w": jax.random.normal(key, (inputs.shape[-1], 1))}


MODEL = (linear, lambda params, inputs: inputs @ params["w"])


def regression(batches: int, rows: int = 4, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(batches, rows, 3)).astype(np.float32)
    return [(one, one.sum(-1, keepdims=True)) for one in x]


def same_bits(a: Any, b: Any) -> bool:
    def raw(leaf: Any) -> Any:
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        raw(x).tobytes() == raw(y).tobytes() for x, y in zip(left, right, strict=True)
    )


# -- any reduction -----------------------------------------------------------------------------------------------


def test_numbers_may_be_batches() -> None:
    """B32: only tuples of tensors are taken for batches."""
    final = telic.Loop(lambda total, n: total + n, lambda n: 0).run(list(range(5)))
    assert int(final.step_state) == 10
    assert final.step_state.dtype == jnp.int32


def test_the_mean_and_variance_of_a_data_set() -> None:
    """A loop that can only train: Welford's merge over ragged batches, against NumPy."""
    data = np.random.default_rng(0).normal(3, 2, size=(103, 4)).astype(np.float32)

    def step(state: Any, batch: Any) -> Any:
        count, mean, squares = state["count"], state["mean"], state["squares"]
        n = batch.shape[0]
        delta = batch.mean(0) - mean
        total = count + n
        squares = squares + ((batch - batch.mean(0)) ** 2).sum(0) + delta**2 * count * n / total
        return {"count": total, "mean": mean + delta * n / total, "squares": squares}

    def init(batch: Any) -> Any:
        return {"count": 0.0, "mean": jnp.zeros(4), "squares": jnp.zeros(4)}

    final = telic.Loop(step, init).run([data[i : i + 10] for i in range(0, 103, 10)]).step_state
    np.testing.assert_allclose(final["mean"], data.mean(0, dtype=np.float64), rtol=1e-5)
    np.testing.assert_allclose(final["squares"] / final["count"], data.var(0, dtype=np.float64), rtol=1e-5)


def test_k_means() -> None:
    """A reduction with state of several dtypes and an outer stop: Lloyd's algorithm until nothing moves."""
    random = np.random.default_rng(1)
    true = np.float32([[0, 0], [10, 0], [0, 10]])
    points = (true[np.arange(90) % 3] + random.normal(0, 0.3, size=(90, 2))).astype(np.float32)

    def step(state: Any, batch: Any) -> Any:
        nearest = jnp.argmin(((batch[:, None] - state["centers"]) ** 2).sum(-1), -1)
        one_hot = jax.nn.one_hot(nearest, 3)
        return {**state, "sums": state["sums"] + one_hot.T @ batch, "counts": state["counts"] + one_hot.sum(0)}

    def init(batch: Any) -> Any:
        return {"centers": batch[:3], "sums": jnp.zeros((3, 2)), "counts": jnp.zeros(3), "moved": jnp.inf}

    def close(state: telic.LoopState) -> Any:
        now = state.step_state
        centers = now["sums"] / now["counts"][:, None]
        moved = jnp.abs(centers - now["centers"]).max()
        state.step_state = {"centers": centers, "sums": now["sums"] * 0, "counts": now["counts"] * 0, "moved": moved}
        return telic.HALT_LOOP if float(moved) == 0 else None

    loop = telic.Loop(step, init).handle_event("epoch_completed", close)
    final = loop.run([points[i : i + 30] for i in range(0, 90, 30)], epochs=50)
    assert final.status == "halted"
    expected = np.stack([points[np.arange(90) % 3 == i].mean(0) for i in range(3)])
    np.testing.assert_allclose(final.step_state["centers"], expected, rtol=1e-4, atol=1e-4)


def test_run_returns_everything() -> None:
    """B62: an output that throws optimizer state, metrics and status away."""
    final = telic.trainer(MODEL, "mean_squared_error", "adam", log=0).run(regression(3))
    assert isinstance(final, telic.LoopState)
    assert final.status == "completed"
    assert set(final.history[0]) == {"loss"}
    assert final.step_state.opt_state is not None
    assert final.model is not None
    transformed = telic.Loop(lambda s, b: s + b, lambda b: 0.0, output_transform=lambda s: float(s.step_state))
    assert transformed.run([ONE] * 3) == 3.0


# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"epochs": -1}, ValueError, "epochs must be 0 or more, got -1"),
        ({"steps": -2}, ValueError, "steps must be 0 or more, got -2"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1"),
        ({"iterations": -1}, ValueError, "None means no limit"),
        ({"epochs": True}, TypeError, "whole number, got True"),
        ({"epochs": 1.0}, TypeError, "whole number, got 1.0"),
        ({"epochs": 1, "steps": 1}, ValueError, "not both"),
        ({"steps": 1, "iterations": 1}, ValueError, "give one"),
        ({"epoch": 5}, TypeError, "epoch"),
    ],
)
def test_run_checks_its_options(options: Any, error: type[Exception], match: str) -> None:
    """B37, B52, XS121: `epoch: 5` runs one epoch, `iterations: 0` runs all."""
    loop = summing()
    with pytest.raises(error, match=match):
        loop.run([ONE], **options)
    loop.metric(lambda x: x, "still free", reads="x")


def test_stream_names_an_unknown_option() -> None:
    """XS121: as run, for the generator."""
    with pytest.raises(TypeError, match=r"unknown option 'epoch'.*epochs"):
        summing().stream([ONE], epoch=2)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: telic.Loop(3), "step function"),
        (lambda: telic.Loop(lambda s, b: s, 3), r"run\(state=\.\.\.\)"),  # pyright: ignore
        (lambda: telic.Loop(telic.train_step(MODEL, "mean_squared_error", "sgd"), lambda b: 0), "leave init out"),
        (lambda: telic.trainer(MODEL, "mean_squared_error", "sgd", accumlate=2), "Did you mean 'accumulate'"),
        (lambda: telic.train_step(MODEL, "mean_squared_error", "sgd", lag=2), "unknown option 'lag'"),
        (lambda: summing().handle_event("started", 3), "function of the LoopState"),  # pyright: ignore
        (lambda: summing().handle_event("started", print, lambda s: True), r"telic\.when"),  # pyright: ignore
        (lambda: summing().from_state(3), "takes a LoopState"),  # pyright: ignore
        (lambda: summing().log(2, device=3), r"write\(text\)"),  # pyright: ignore
    ],
)
def test_what_cannot_be_is_refused_when_written(make: Any, match: str) -> None:
    """B53, XS121: nonsense that is ignored, or fails at the first batch."""
    with pytest.raises(TypeError, match=match):
        make()


@pytest.mark.parametrize("log", [-1, True, 1.5, None])
def test_log_is_a_number_of_batches(log: Any) -> None:
    """B52: `log: false` means 50."""
    with pytest.raises(ValueError, match="log is the number of batches"):
        telic.trainer(MODEL, "mean_squared_error", "sgd", log=log)
    with pytest.raises(ValueError, match="log is the number of batches"):
        telic.evaluator(MODEL, log=log)


def test_nothing_to_do_is_a_valid_run() -> None:
    """B55: epochs: 0 yields metrics for the epochs 0 and -1."""
    for limits in ({"epochs": 0}, {"steps": 0}):
        final = summing().run([ONE] * 2, **limits)
        assert (final.status, final.history, final.epoch, final.total_iterations) == ("completed", {}, 0, 0)
        assert float(final.step_state) == 0.0


def test_a_loop_without_a_start_says_what_to_give() -> None:
    """An error deep in the step."""
    with pytest.raises(ContractError, match=r"Loop\(step, init\), or run\(data, state=\.\.\.\)"):
        telic.Loop(lambda s, b: s).run([ONE])
    assert float(telic.Loop(lambda s, b: s + b).run([ONE], state=2.0).step_state) == 3.0


# -- data --------------------------------------------------------------------------------------------------------


def test_the_first_batch_is_not_lost() -> None:
    """B36: the batch that shapes were learned from is thrown away."""
    assert float(summing().run(iter([np.float32(2), np.float32(3)])).step_state) == 5.0


def test_an_exhausted_iterator_raises_in_the_second_epoch() -> None:
    """B36: epochs without batches, silently, with zero metrics."""
    with pytest.raises(DataError, match="read only once"):
        summing().run(iter([ONE] * 2), epochs=2)
    with pytest.raises(DataError, match="empty"):
        summing().run([])


def test_data_that_ends_before_the_steps_are_done_raises() -> None:
    """Objectives.md section 4: a run of 10 steps that ends after 4 and says "completed"."""
    with pytest.raises(DataError, match=r"ended after 4 of 10 steps.*a list, a Dataset or a function"):
        summing().run(iter([ONE] * 4), steps=10)


def test_bad_data_leaves_the_loop_free() -> None:
    """A loop that says "running" for ever after a refused call."""
    loop = summing()
    with pytest.raises(TypeError):
        loop.run(None)
    loop.run([ONE])


def test_a_generator_of_unknown_length_ends_epochs_of_its_own() -> None:
    """XS120: the last output is gone when the epoch-end handlers look, and epochs are miscounted."""
    seen: list[tuple[int, float]] = []
    loop = summing().metric(lambda x: x, "last", reads="x", reduce="last")
    loop.handle_event("epoch_completed", lambda s: seen.append((s.epoch, s.metrics["last"])))

    def batches(epoch: int) -> Iterator[Any]:
        yield from (np.float32(10 * epoch + i) for i in range(3))

    final = loop.run(batches, epochs=2)
    assert seen == [(0, 2.0), (1, 12.0)]
    assert final.epoch == 2


def test_the_limit_of_an_epoch_is_not_learned_from_the_first() -> None:
    """XS119: max_iteration overwritten with the length of a first short epoch."""
    final = summing().run(lambda epoch: [ONE] * (3 if epoch == 0 else 9), epochs=2, iterations=5)
    assert final.event_counts["iteration_completed"] == 3 + 5


# -- continuing --------------------------------------------------------------------------------------------------


def columns() -> Any:
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    return telic.data.columns({"inputs": x, "targets": x.sum(-1, keepdims=True)}, batch=4, seed=3)


def trainer() -> telic.Loop:
    return telic.trainer(MODEL, "mean_squared_error", "adam", log=0)


@pytest.mark.parametrize("kind", ["columns", "list", "function"])
@pytest.mark.parametrize("limits", [({"epochs": 1}, {"epochs": 3}), ({"steps": 4}, {"steps": 9})])
def test_totals_are_totals(kind: str, limits: Any) -> None:
    """B15, XS023: `epochs` silently means *more* epochs; data that begins anew, so that a continued run is another."""

    def data() -> Any:
        match kind:
            case "columns":
                return columns()
            case "list":
                return regression(6)
            case _:
                return lambda epoch: regression(6, seed=epoch)

    first, total = limits
    straight = trainer().run(data(), **total)
    part = trainer().run(data(), **first)
    continued = trainer().from_state(part).run(data(), **total)
    assert same_bits(continued.step_state, straight.step_state)
    assert (continued.epoch, continued.iteration, continued.total_iterations, continued.steps) == (
        straight.epoch,
        straight.iteration,
        straight.total_iterations,
        straight.steps,
    )
    assert list(continued.history) == list(straight.history)
    assert continued.status == "completed"


def test_a_finished_run_continued_changes_nothing() -> None:
    """A last epoch that is run again, or an error where there is nothing left to do."""
    done = trainer().run(regression(2), epochs=2)
    again = trainer().run(regression(2), epochs=2, state=done)
    assert same_bits(again.step_state, done.step_state)
    assert (again.status, again.epoch, again.history) == ("completed", 2, done.history)


@pytest.mark.parametrize("event", ["iteration_completed", "epoch_completed"])
def test_a_halted_run_continues_with_the_next_epoch(event: str) -> None:
    """B16, XS117, XS118: a halted state whose stale iteration makes the next run corrupt."""
    stopped = summing().handle_event(event, lambda s: telic.HALT_LOOP, telic.once(2))
    part = stopped.run([ONE] * 3, epochs=4)
    halted = part.epoch
    final = summing().run([ONE] * 3, epochs=4, state=part)
    assert (final.status, final.epoch, final.iteration) == ("completed", 4, 0)
    assert list(final.history) == [0, 1, 2, 3]
    assert final.event_counts["iteration_completed"] == part.total_iterations + 3 * (3 - halted)


def test_an_infinite_generator_may_be_continued() -> None:
    """XS116: continuing fails when the epoch's length was never known."""

    def endless() -> Iterator[Any]:
        while True:
            yield ONE

    data = endless()
    loop = summing().handle_event("iteration_completed", lambda s: telic.HALT_LOOP, telic.once(4))
    part = loop.run(data, epochs=1)
    final = summing().run(data, epochs=3, iterations=5, state=part)
    assert (part.total_iterations, final.total_iterations) == (4, 14)


def test_two_starts_contradict() -> None:
    """B17: a start that is silently ignored."""
    part = summing().run([ONE])
    with pytest.raises(ValueError, match="use one"):
        summing().from_state(part).run([ONE], state=3.0)


def test_the_caller_s_state_is_not_consumed() -> None:
    """A deleted array in the caller's hands after a run."""
    given = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    loop = telic.Loop(lambda s, b: {"a": s["a"] + b, "b": s["b"] + s["a"]})
    loop.run([ONE] * 3, state=given)
    assert float(given["a"].sum() + given["b"].sum()) == 3.0
    step = telic.train_step(MODEL, "mean_squared_error", "adam")
    start = step.init(regression(1)[0])
    final = telic.Loop(step).run(regression(2), state=start)
    assert jnp.isfinite(start.params["params"]["w"]).all()
    telic.Loop(step).run(regression(2), state=final)
    assert jnp.isfinite(final.step_state.params["params"]["w"]).all()


def test_a_leaf_given_twice_is_two_leaves() -> None:
    """S27: one buffer in two places of a donated state."""
    shared = jnp.ones(3)
    loop = telic.Loop(lambda s, b: {"params": s["params"] + b, "ema": s["ema"] * 0.5})
    final = loop.run([ONE] * 3, state={"params": shared, "ema": shared}).step_state
    assert final["params"].tolist() == [4.0] * 3
    assert final["ema"].tolist() == [0.125] * 3


def test_stream_gives_a_readable_state_after_each_epoch() -> None:
    """A state whose arrays are gone when the caller looks; a change of the caller's that is lost."""
    seen: list[tuple[int, float]] = []
    for state in summing().stream([ONE] * 2, epochs=3):
        seen.append((state.epoch, float(state.step_state)))
        if state.epoch == 2:
            state.step_state = jnp.float32(100)
    assert seen == [(1, 2.0), (2, 4.0), (3, 102.0)]


def test_an_abandoned_stream_frees_the_loop() -> None:
    """A loop that runs for ever in the eyes of the next call."""
    loop = summing()
    stream = loop.stream([ONE] * 2, epochs=3)
    next(stream)
    with pytest.raises(TelicError, match="running"):
        loop.metric(lambda x: x, "y", reads="x")
    stream.close()  # pyright: ignore
    loop.metric(lambda x: x, "y", reads="x")


def test_a_stream_left_open_ends_quietly_with_python() -> None:
    """Catches "Exception ignored in: <generator object ...>" after a program that leaves a stream in a variable."""
    program = """
import numpy as np, telic
stream = telic.Loop(lambda total, batch: total + batch, lambda batch: 0.0).stream([np.float32(1)] * 2, epochs=3)
print(float(next(stream).step_state))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


def test_copy_forks() -> None:
    """A handler attached to a copy that runs in the original too."""
    base = summing()
    seen: list[str] = []
    twin = base.copy().handle_event("started", lambda s: seen.append("twin"))
    twin.metric(lambda x: x * 2, "double", reads="x")
    assert list(base.run([ONE]).metrics) == ["x"]
    assert seen == []
    assert list(twin.run([ONE]).metrics) == ["x", "double"]
    assert seen == ["twin"]
    assert "handlers={'started': 1}" in repr(twin)


# -- log lines ---------------------------------------------------------------------------------------------------


def test_log_lines_carry_their_own_iteration_and_are_exact_at_the_end() -> None:
    """B48, B49, XS125: lines that drift between epochs, miss the last batch, or show another moment's values."""
    out = io.StringIO()
    summing().log(2, device=out).run([np.float32(v) for v in (1, 3, 5, 7, 9)], epochs=2)
    lines = ["Batch: 1, x: 2.0000000", "Batch: 3, x: 4.0000000", "Batch: 4, x: 5.0000000"]
    assert out.getvalue().splitlines() == [f"Epoch: {epoch}, {line}" for epoch in (0, 1) for line in lines]


def test_a_line_waits_for_the_next_one() -> None:
    """A host that waits for the device at each line: the line of iteration 1 is written at iteration 3."""
    out = io.StringIO()
    written: list[int] = []
    loop = summing().log(2, device=out)
    loop.handle_event("iteration_completed", lambda s: written.append(out.getvalue().count("\n")))
    loop.run([ONE] * 5)
    assert written == [0, 0, 0, 1, 1]
    assert out.getvalue().count("\n") == 3


def test_a_metric_that_is_no_number_stays_out_of_the_line() -> None:
    """B35: one vector metric ends training with a log line."""
    out = io.StringIO()
    loop = telic.Loop(lambda s, b: telic.Result(s, {"x": b}), lambda b: 0).log(1, device=out)
    loop.metric(lambda x: x, "all", reads="x", reduce="last").metric(lambda x: x, "mean", reads="x")
    final = loop.run([np.float32([1, 2])])
    assert out.getvalue() == "Epoch: 0, Batch: 0, mean: 1.5000000\n"
    assert final.status == "completed"
    assert final.history == {0: {"mean": 1.5}}
    assert final.metrics["all"].tolist() == [1.0, 2.0]


def test_a_failing_message_is_told_once_and_training_goes_on() -> None:
    """B35: any exception in a log line halts training quietly."""
    out = io.StringIO()
    loop = summing().log(lambda s: f"{s.metrics['nope']}", device=out)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        final = loop.run([ONE] * 3)
    assert final.status == "completed"
    assert [str(w.message)[:22] for w in caught if "log message" in str(w.message)] == ["the log message failed"]
    good = io.StringIO()
    summing().log(lambda s: f"at {s.iteration}", filter=telic.every(2), device=good).run([ONE] * 4)
    assert good.getvalue() == "at 1\nat 3\n"


@pytest.mark.parametrize(("event", "at"), [("iteration_completed", 4), ("epoch_completed", 1)])
def test_a_kept_state_continues_where_it_was_kept(event: str, at: int) -> None:
    """B10, B11: a batch or an epoch that is run twice, or with a shifted index."""
    straight = trainer().run(columns(), epochs=2)
    kept: list[telic.LoopState] = []
    trainer().handle_event(event, lambda s: kept.append(s.keep()), telic.once(at)).run(columns(), epochs=2)
    final = trainer().run(columns(), epochs=2, state=kept[0])
    assert same_bits(final.step_state, straight.step_state)
    assert (final.epoch, final.total_iterations, list(final.history)) == (2, 12, [0, 1])


@pytest.mark.parametrize("with_last", [False, True])
def test_a_halted_epoch_loses_no_batch_of_a_stream(with_last: bool) -> None:
    """A batch read ahead (to know whether it is the last) that is dropped, or used in an epoch it is not of."""
    stream = telic.data.Dataset(train=lambda partition: iter([np.float32(i) for i in range(9)]), val=None)
    seen: list[tuple[int, float]] = []
    loop = summing().metric(lambda x: x, "now", reads="x", reduce="last")
    loop.handle_event("iteration_completed", lambda s: seen.append((s.epoch, s.metrics["now"])))
    loop.handle_event("iteration_completed", lambda s: telic.HALT_EPOCH, telic.once(3))
    if with_last:
        # Live: the first epoch is the last one until its end, so that the loop looks ahead in it.
        loop.handle_event("iteration_completed", lambda s: None, telic.last)
        loop.handle_event("epoch_halted", lambda s: s.replace(max_epoch=2))
    loop.run(stream, epochs=1 if with_last else 2)
    assert seen == [(0, 0.0), (0, 1.0), (0, 2.0), *((1, float(i)) for i in range(3, 9))]
