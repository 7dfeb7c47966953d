"""`microbatch="auto"` and what a run says when its memory is used up."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic import tree
from telic.compose import fitting
from telic.compose.fitting import advice, largest_fit
from telic.placement import SingleDevice
from telic.profiling import Memory
from telic.train.step import TrainStep

ROWS, WIDTH = 24, 64


def init(key: Any, x: Any) -> Any:
    return {"params": {"w": 0.1 * jax.random.normal(key, (8, WIDTH)), "v": 0.1 * jnp.ones((WIDTH, 2))}}


def apply(variables: Any, x: Any, *, train: bool = False) -> Any:
    p = variables["params"]
    hidden = jnp.tanh(x @ p["w"])
    # 16 KiB a row that is needed backwards, and 4 KiB of parameters: what a step needs is its rows.
    return jnp.sin(hidden[:, :, None] * hidden[:, None, :]).sum(1) @ p["v"]


def trainer(**options: Any) -> telic.Trainer:
    return telic.Trainer(telic.supervised((init, apply), "mean_squared_error"), "adam", key=0, **options)


def data(count: int = 3, rows: int = ROWS) -> list[Any]:
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(rows, 8)).astype(np.float32), random.normal(size=(rows, 2)).astype(np.float32))
        for _ in range(count)
    ]


@functools.cache
def needed(size: int) -> int:
    step = trainer(microbatch=None if size == ROWS else size).train_step().bind(data()[0])
    state = jax.eval_shape(step.initial_state, step.objective.initializer, step.key)
    return fitting.step_bytes(step, state, tree.shape_structs(data()[0]), SingleDevice())


def same_bits(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_the_largest_that_fits_is_taken() -> None:
    """Catches a microbatch that is too large for the budget, one that is needlessly small, too many compilations."""
    asked: list[int] = []

    def need(size: int) -> int:
        asked.append(size)
        return 100 + 10 * size

    assert largest_fit(24, need, 100 + 10 * 24) == (24, 340)
    assert asked == [24]
    for limit in range(110, 340):
        asked.clear()
        size, _ = largest_fit(24, need, limit)
        assert need(size) <= limit
        assert all(need(d) > limit for d in (2, 3, 4, 6, 8, 12, 24) if d > size)
        assert len(set(asked)) <= 10
    with pytest.raises(ValueError, match=r"one row at a time needs 110 B on a device, and there are 109 B: raise"):
        largest_fit(24, need, 109)
    assert largest_fit(24, need, 100 + 10 * 23, multiple=8) == (8, 180)
    assert largest_fit(25, need, 100 + 10 * 23, multiple=8) == (5, 150)
    with pytest.raises(ValueError, match=r"a step on 8 rows at a time needs 180 B"):
        largest_fit(24, need, 179, multiple=8)


def test_a_step_of_fewer_rows_needs_less() -> None:
    """Catches a choice made from something that does not grow with the rows."""
    assert needed(ROWS // 4) < needed(ROWS // 2)


@pytest.mark.slow
def test_the_update_is_that_of_the_whole_batch() -> None:
    """Catches a global batch that changes with the memory of the machine: the split law, for the slices chosen."""
    limit = needed(6)
    chosen = trainer(microbatch="auto", memory_limit_bytes=limit)
    step = chosen.train_step(data()[0])
    assert step.microbatch == 6
    auto = chosen.fit(data(), log_every=0)
    assert same_bits(auto.variables, trainer(microbatch=6).fit(data(), log_every=0).variables)
    whole = trainer().fit(data(), log_every=0)
    assert int(auto.updates) == int(whole.updates) == 3
    assert int(auto.attempts) == 12
    for a, b in zip(jax.tree.leaves(auto.variables), jax.tree.leaves(whole.variables), strict=True):
        assert float(jnp.abs(a - b).max()) <= 2e-6 * float(jnp.abs(b).max())


def test_the_gradient_of_one_batch_splits_exactly() -> None:
    """Catches slices that are averaged instead of summed by mass."""
    batch = data(1)[0]
    for size in (1, 4, ROWS):
        step = trainer(microbatch=None if size == ROWS else size).train_step()
        state = step.init(batch)
        after = jax.jit(step.step)(state, batch).state
        if size == 1:
            first = after
        for a, b in zip(jax.tree.leaves(after.opt_state), jax.tree.leaves(first.opt_state), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * max(1e-12, float(jnp.abs(b).max())))


def test_plenty_of_memory_slices_nothing() -> None:
    """Catches a default budget that slices a step which fits many times over."""
    assert trainer(microbatch="auto").train_step(data()[0]).microbatch is None
    report = trainer(microbatch="auto").check(data())
    assert report.ok
    assert f"{ROWS} of {ROWS} rows at once fit" in report


@pytest.mark.slow
def test_a_continued_run_keeps_its_slices(tmp_path: Path) -> None:
    """Catches a run that is continued on a larger machine with other slices, so with other keys and other bits."""
    limit = needed(6)

    def run(epochs: int, where: str, limit: int) -> telic.TrainState:
        saved = telic.Checkpoints(tmp_path / where)
        return trainer(microbatch="auto", memory_limit_bytes=limit, checkpoints=saved).fit(
            data(), epochs=epochs, log_every=0
        )

    through = run(2, "through", limit)
    run(1, "apart", limit)
    # More memory now: the rows chosen at the start are still the run's.
    apart = run(2, "apart", 2**40)
    assert int(apart.attempts) == int(through.attempts) == 24
    assert same_bits(apart.variables, through.variables)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"microbatch": "all"}, ValueError, "microbatch is a number of rows or 'auto', got 'all'"),
        ({"microbatch": "auto", "accumulate": 2}, ValueError, "joins batches and microbatch=auto slices them"),
        ({"memory_limit_bytes": 5}, ValueError, "give that too"),
        ({"microbatch": "auto", "memory_limit_bytes": 0}, ValueError, "at least 1, got 0"),
        ({"microbatch": "auto", "memory_limit_bytes": 1e9}, TypeError, "whole number of bytes, got 1000000000.0"),
    ],
)
def test_wrong_options_say_what_to_give(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """Catches a choice that is silently ignored."""
    with pytest.raises(error, match=message):
        trainer(**options)


def test_auto_needs_a_batch() -> None:
    """Catches a pure step that slices nothing although it was asked to."""
    with pytest.raises(ValueError, match=r"train_step\(example=batch\)"):
        trainer(microbatch="auto").train_step()


def test_leaves_of_several_lengths_are_refused() -> None:
    """Catches slices of a leaf that is no batch of rows."""
    batch = (np.ones((4, 8), np.float32), np.ones((5, 2), np.float32))
    with pytest.raises(telic.errors.ShapeError, match=r"'0': \(4, 8\), '1': \(5, 2\)"):
        trainer(microbatch="auto").train_step(batch)


# -- when memory is used up ---------------------------------------------------------------------------------------

OUT = "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes."


def step_of(**options: Any) -> TrainStep:
    return trainer(**options).train_step().bind(data()[0])


def test_a_real_allocation_that_fails_is_explained() -> None:
    """Catches an out-of-memory error of which the user learns only the number of bytes."""

    def step(state: Any, batch: Any) -> Any:
        # Two to the fiftieth of float32: no machine has it.
        return state + jnp.broadcast_to(batch.sum(), (2**25, 2**25)).at[0, 0].set(state).cumsum(0)[-1, -1]

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        telic.Loop(step, lambda b: jnp.zeros(())).run([np.ones(3, np.float32)] * 2)
    (note,) = [n for n in caught.value.__notes__ if "memory is used up" in n]
    assert "A step needs" in note


def test_advice_names_the_microbatch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches advice without a number, and a number that does not divide the batch or would not fit either."""
    monkeypatch.setattr(fitting, "_device_bytes", lambda: 1_000_000)
    batch = tree.shape_structs(data()[0])
    memory = Memory(argument_bytes=100_000, result_bytes=0, scratch_bytes=1_600_000)
    text = advice(OUT, step_of(), batch, memory)
    assert "16.0 GiB more were asked for, of 976.6 KiB that it has" in text
    assert "1.5 MiB of scratch" in text
    assert "Trainer(microbatch=8) instead of 24 rows at once" in text


def test_advice_when_the_state_alone_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches advice to slice batches where slicing cannot help."""
    monkeypatch.setattr(fitting, "_device_bytes", lambda: 1_000_000)
    memory = Memory(argument_bytes=950_000, result_bytes=0, scratch_bytes=400_000)
    text = advice(OUT, step_of(), tree.shape_structs(data()[0]), memory)
    assert "smaller microbatches do not help" in text
    assert "trainable=" in text


def test_advice_for_a_window_keeps_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches advice that contradicts accumulate=, which excludes microbatch=."""
    text = advice(OUT, step_of(accumulate=3), tree.shape_structs(data()[0]), None)
    assert "batches of 12 rows instead of 24, and accumulate=6 instead of 3" in text


def test_before_anything_is_known_the_advice_still_says_something() -> None:
    """Catches a second error inside the first, when memory is used up before the first step."""
    assert "memory is used up" in advice("RESOURCE_EXHAUSTED", None, None, None)
    assert "Trainer(microbatch=12)" in advice(OUT, step_of(), tree.shape_structs(data()[0]), None)


def test_other_errors_get_no_advice() -> None:
    """Catches advice about memory on an error that has another cause."""
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    fitting.explain(error, None, None, None)
    assert not hasattr(error, "__notes__")
