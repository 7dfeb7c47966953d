"""How a step runs: shapes, compilations, dtypes, donation, constants, transfers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import telic
from telic.driver import DriverOptions, StepDriver
from telic.errors import CaptureError, CaptureWarning, ContractError, ShapeError
from telic.placement import SingleDevice

ONE = np.float32(1)


class Log:
    """Listener that notes what was compiled."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def compiling(self, what: str) -> None:
        self.told.append(what)

    def compiled(self, what: str, seconds: float) -> None:
        assert seconds > 0
        self.told.append(f"{what} done")


@contextmanager
def compilations(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Collect the names of the programs XLA compiles."""
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="jax"), jax.log_compiles(True):
        yield found
    found += [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]


def rows(*sizes: int) -> list[Any]:
    return [np.ones(n, np.float32) for n in sizes]


def counting(log: Log | None = None) -> telic.Loop:
    """A raw loop over rows that counts how often its step is traced."""
    loop = telic.Loop(lambda s, b: telic.Result(s + b.sum(), {"x": b}), lambda b: 0.0)
    loop._listener = log  # pyright: ignore[reportPrivateUsage] the trainer's port for progress
    return loop.metric(lambda x: x, "x", reads="x")


def read(state: telic.LoopState) -> None:
    """Fetch every metric, as a handler that looks does."""
    dict(state.metrics)


# -- shapes ------------------------------------------------------------------------------------------------------


def test_a_smaller_last_batch_is_a_second_program_and_told_once() -> None:
    """S25: compiling again at the end of each epoch; a refusal of the ordinary remainder."""
    log = Log()
    final = counting(log).run(rows(4, 4, 4, 2), epochs=3)
    assert log.told == ["the step", "the step done", "the smaller last batch", "the smaller last batch done"]
    assert float(final.step_state) == 42.0
    assert final.history[2] == {"x": 1.0}


def test_the_step_is_traced_once_for_a_shape() -> None:
    """Catches going through the user's Python, and its gradient, once to check a step and again to compile it, or
    once for each step of a dispatch (XS090).

    The forward pass is gone through once more, to see what the masses read.
    """
    traced = 0

    class Counted(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            nonlocal traced
            traced += not self.is_initializing()
            return nn.Dense(3)(x)

    rows = [(np.ones((4, 2), np.float32), np.ones((4, 3), np.float32))] * 3
    telic.trainer(Counted(), "mse", "sgd", log=0).run(rows, epochs=2)
    assert traced == 2


def test_a_third_shape_is_refused_with_everything_one_needs() -> None:
    """Axon #480, #662: a template mismatch that names neither batch nor remedy."""
    with pytest.raises(ShapeError) as caught:
        counting().run(rows(4, 4, 2, 3), epochs=2)
    text = str(caught.value)
    for part in ("batch 3 of epoch 0", "leaf 'batch'", "(3,)", "(4,)", "one smaller last batch", "strict=False"):
        assert part in text
    with pytest.raises(ShapeError, match=r"batch 1 of epoch 0.*\(5,\)"):
        counting().run(rows(4, 5))
    loop = telic.Loop(lambda s, b: s + b["x"].sum(), lambda b: 0.0)
    with pytest.raises(ShapeError, match=r"leaf 'x' has shape \(4,\) and dtype int32"):
        loop.run([{"x": np.ones(4, np.float32)}, {"x": np.ones(4, np.int32)}])
    with pytest.raises(ShapeError, match="another structure"):
        loop.run([{"x": ONE}, {"x": ONE, "y": ONE}])


def test_strict_false_allows_any_shape() -> None:
    """A shape that is refused though the user said that compiling is fine."""
    assert float(counting().run(rows(4, 3, 2, 5), strict=False).step_state) == 14.0


# -- compilations ------------------------------------------------------------------------------------------------


def test_the_second_epoch_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Objectives.md section 4 row 31: a program per epoch, per log line or per read of the metrics."""
    model = (lambda key, x: {"w": jnp.zeros(3)}, lambda params, x: x @ params["w"])
    data = [(np.ones((4, 3), np.float32), np.ones(4, np.float32))] * 5
    loop = telic.trainer(model, "mean_squared_error", "adam", log=0).metric("mean_absolute_error")
    loop.handle_event("iteration_completed", read, telic.every(2))
    stream = loop.stream(data, epochs=3)
    next(stream)
    with compilations(caplog) as found:
        for _ in stream:
            pass
    assert found == []


def test_a_python_number_as_state_does_not_compile_twice() -> None:
    """A weakly typed first state: the second call sees another type and compiles again."""
    traces: list[Any] = []

    def step(state: Any, batch: Any) -> Any:
        if not isinstance(batch, jax.ShapeDtypeStruct):
            traces.append(state.aval)
        return state + batch

    log = Log()
    loop = telic.Loop(step, lambda b: 0)
    loop._listener = log  # pyright: ignore[reportPrivateUsage]
    # The step's own dtype is the state's from the start.
    assert loop.run([ONE] * 4).step_state.dtype == jnp.float32
    assert log.told == ["the step", "the step done"]
    before = len(traces)
    loop.run([ONE] * 9)
    assert len(traces) <= 2 * before


def test_handlers_that_read_do_not_change_the_bits() -> None:
    """Reading each iteration splits the run into other dispatches: the numbers must not know."""
    model = (lambda key, x: {"w": jax.random.normal(key, (3, 2))}, lambda params, x: jnp.tanh(x @ params["w"]).sum(-1))
    random = np.random.default_rng(0)
    data = [(random.normal(size=(4, 3)).astype(np.float32), np.ones(4, np.float32)) for _ in range(12)]

    def final(every: int | None) -> Any:
        loop = telic.trainer(model, "mean_squared_error", "adam", log=0)
        if every is not None:
            loop.handle_event("iteration_completed", read, telic.every(every))
        state = loop.run(data, epochs=2)
        return np.asarray(state.step_state.params["params"]["w"]).tobytes(), state.history

    assert final(None) == final(1) == final(5)


# -- dtypes ------------------------------------------------------------------------------------------------------


def test_a_step_that_changes_its_state_is_refused_before_it_compiles() -> None:
    """B33, XS095: float64 or another shape on the second batch; donation that silently does not take place."""
    with pytest.raises(ContractError, match=r"changes leaf 'state' from float32\[\] to int32\[\]"):
        telic.Loop(lambda s, b: (s + b).astype(jnp.int32), lambda b: jnp.float32(0)).run([ONE])
    with pytest.raises(ContractError, match=r"changes leaf 'x' from float32\[2\] to float32\[3\]"):
        telic.Loop(lambda s, b: {"x": jnp.ones(3)}, lambda b: {"x": jnp.ones(2)}).run([ONE])
    with pytest.raises(ContractError, match=r"missing: \['b'\], new: \['c'\]"):
        telic.Loop(lambda s, b: {"a": s["a"], "c": b}, lambda b: {"a": 0.0, "b": 0.0}).run([ONE])


def test_bfloat16_state_stays_bfloat16() -> None:
    """A dtype that is not a fixed point of the step: widened after one batch."""
    loop = telic.Loop(lambda s, b: s + b.astype(jnp.bfloat16), lambda b: jnp.zeros((), jnp.bfloat16))
    assert loop.run([ONE] * 3).step_state.dtype == jnp.bfloat16


def test_jit_and_no_jit_agree() -> None:
    """A run without jit that is another program: metrics, windows or rejections that differ."""
    model = (lambda key, x: {"w": jnp.ones(3)}, lambda params, x: x @ params["w"])
    data = [(np.full((n, 3), 0.1, np.float32), np.ones(n, np.float32)) for n in (4, 2)]

    def final(jit: bool) -> Any:
        loop = telic.trainer(model, "mean_squared_error", "sgd", log=0).metric("mean_absolute_error")
        return loop.run(data, jit=jit)

    a, b = final(True), final(False)
    for x, y in zip(jax.tree.leaves(a.step_state), jax.tree.leaves(b.step_state), strict=True):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
    assert a.event_counts == b.event_counts
    for epoch, values in a.history.items():
        assert values == pytest.approx(b.history[epoch], rel=1e-6)


# -- donation ----------------------------------------------------------------------------------------------------


def test_the_state_is_donated_and_no_two_leaves_share_a_buffer() -> None:
    """S27, objectives.md section 4 row 25: a state that costs its memory twice, or buffers given away twice."""
    step = telic.train_step((lambda key, x: {"w": jnp.ones(3)}, lambda p, x: x @ p["w"]), "mean_squared_error", "adam")
    batch = (np.ones((2, 3), np.float32), np.ones(2, np.float32))
    pointers: list[int] = []
    olds: list[Any] = []

    def look(state: telic.LoopState) -> None:
        leaves = [x for x in jax.tree.leaves(state.step_state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
        pointers[:] = [x.unsafe_buffer_pointer() for x in leaves]
        olds.append(state.step_state.params["params"]["w"])

    telic.Loop(step).handle_event("iteration_completed", look).run([batch] * 3)
    assert len(set(pointers)) == len(pointers)
    assert [old.is_deleted() for old in olds] == [True, True, False]


# -- constants ---------------------------------------------------------------------------------------------------


def test_a_large_captured_array_warns() -> None:
    """S26: 24,032 elements, or 2.2 GiB, in the program as constants."""
    big = jnp.ones((513, 512))

    def captures(state: Any, batch: Any) -> Any:
        return jax.lax.cond(batch > 0, lambda s: s + big.sum(), lambda s: s, state)

    with pytest.warns(CaptureWarning, match=r"1\.0 MiB.*held_variables"):
        telic.Loop(captures, lambda b: 0.0).run([ONE])


def test_captured_model_weights_are_an_error() -> None:
    """S26: weights that are compiled in and never trained."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    @telic.objective
    def wrong(forward: Any, variables: Any, inputs: Any, targets: Any) -> Any:
        output = forward(variables, inputs)
        return (output.prediction - targets) ** 2 + (model.kernel[...] ** 2).sum(), output

    data = [(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))]
    with pytest.raises(CaptureError, match="model's own weights"):
        telic.trainer(model, wrong, "sgd", log=0).run(data)


# -- transfers ---------------------------------------------------------------------------------------------------


def test_the_hot_path_moves_nothing_implicitly() -> None:
    """Row 31, XS108: a Python number or a host array that reaches the device unasked in each step."""
    step = telic.train_step((lambda key, x: {"w": jnp.ones(3)}, lambda p, x: x @ p["w"]), "mean_squared_error", "adam")
    batch = (np.ones((2, 3), np.float32), np.ones(2, np.float32))
    program = step.bind(batch)
    driver = StepDriver(telic.Loop(step)._program, {}, SingleDevice(), DriverOptions())  # pyright: ignore
    driver.start(program.init(batch), batch)
    driver.advance([batch], epoch=0, iteration=0)
    with jax.transfer_guard("disallow"):
        for i in range(1, 6):
            driver.advance([batch], epoch=0, iteration=i)
            driver.check(wait=False)
    assert int(driver.step_state.updates) == 6


def test_a_buffer_that_the_loader_refills_is_copied() -> None:
    """A numpy buffer refilled after dispatch corrupts the batch silently."""
    buffer = np.zeros(1000, np.float32)

    def refilled(epoch: int) -> Iterator[Any]:
        for i in range(20):
            buffer[:] = i
            yield buffer

    loop = telic.Loop(lambda s, b: s + b.mean(), lambda b: 0.0)
    assert float(loop.run(refilled).step_state) == pytest.approx(190.0)
