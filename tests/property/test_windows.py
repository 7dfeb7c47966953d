"""Laws of accumulation: any split of a batch gives the update of the whole batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telic.contract import Step, call_loss, owns_statistics, reduce_statistics
from telic.mean import merge_statistics
from telic.train import statistics as statistic
from tests.unit.train.tiny import Contrast, Own, RootMean, Tiny, batch_of, split, step_of

ROWS = 12
KINDS = {
    "mean": lambda **o: Tiny("mean", **o),
    "weighted": lambda **o: Tiny("weighted", **o),
    "array": lambda **o: Tiny("array", **o),
    "penalised": lambda **o: Tiny("penalised", **o),
    "terms": lambda **o: Tiny("terms", **o),
    "whole": lambda **o: Tiny("whole", **o),
    "own": lambda **o: Own("own", **o),
    "root": lambda **o: RootMean("root", **o),
    "rows": lambda **o: Contrast("rows", **o),
}


@functools.cache
def window_gradient(kind: str, sizes: tuple[int, ...], plans: bool, double: bool, scanned: bool = False) -> Any:
    """Give the compiled function from a batch to (the window's gradient, updates), cut into these sizes."""
    dtype = jnp.float64 if double else jnp.float32
    step = step_of(KINDS[kind](dtype=dtype), accumulate=len(sizes), plans=plans)

    one, plan = jax.jit(step.step), jax.jit(step.window_of)
    many = jax.jit(lambda s, bs, w: jax.lax.scan(lambda s, b: (step.step(s, b, w).state, None), s, bs)[0])
    start = step.init(batch_of(0, sizes[0], dtype=np.float64 if double else np.float32))

    def run(batch: Any) -> Any:
        pieces = split(batch, sizes)
        state = start
        window = plan(state, pieces) if plans else None
        if scanned:
            state = many(state, jax.tree.map(lambda *x: jnp.stack(x), *pieces), window)
        else:
            for piece in pieces:
                state = one(state, piece, window).state
        return state.opt_state[0].trace, state.updates

    return run


@functools.cache
def whole_gradient(kind: str, double: bool) -> Any:
    """Give the compiled gradient of the loss of the concatenated batch."""
    objective = KINDS[kind](dtype=jnp.float64 if double else jnp.float32)

    def run(batch: Any) -> Any:
        step = step_of(objective)
        params = step.initial_state(objective.initializer, step.key).variables["params"]

        def value(params: Any) -> Any:
            statistics, _ = call_loss(objective, {"params": params}, batch, Step(0, jax.random.key(0)))
            return reduce_statistics(objective, statistics)[0]

        return jax.grad(value)(params)

    return jax.jit(run)


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(float(jnp.abs(b).max()), 1e-30)
        assert float(jnp.abs(a - b).max()) <= tolerance * scale, (a, b)


HALVES, QUARTERS, RAGGED = (6, 6), (3, 3, 3, 3), (2, 4, 6)
CASES = [
    ("mean", QUARTERS, False),
    ("mean", RAGGED, False),
    ("weighted", HALVES, False),
    ("array", HALVES, False),
    ("penalised", HALVES, False),
    ("terms", HALVES, False),
    ("terms", HALVES, True),
    ("terms", RAGGED, True),
    ("whole", RAGGED, False),
    ("whole", HALVES, True),
    ("own", HALVES, False),
    ("own", RAGGED, False),
    ("root", HALVES, False),
    ("rows", HALVES, False),
    ("rows", QUARTERS, False),
]


@pytest.mark.parametrize(("kind", "sizes", "plans"), CASES)
def test_a_window_equals_the_concatenated_batch(kind: str, sizes: tuple[int, ...], plans: bool) -> None:
    """Catches means of means, a dropped ragged microbatch, cotangents taken from one microbatch's own sums."""

    @given(st.integers(0, 10_000))
    @settings(max_examples=6)
    def law(seed: int) -> None:
        batch = batch_of(seed, ROWS)
        got, updates = window_gradient(kind, sizes, plans, False)(batch)
        assert int(updates) == 1
        assert_close(got, whole_gradient(kind, False)(batch), 1e-6 if kind == "rows" else 2e-6)

    law()


@pytest.mark.parametrize(
    ("kind", "sizes", "plans"),
    [("mean", RAGGED, False), ("terms", HALVES, True), ("own", HALVES, False)],
)
def test_in_float64_the_law_holds_to_rounding(kind: str, sizes: tuple[int, ...], plans: bool) -> None:
    """Catches sums kept in float32 whatever the parameters are."""
    with jax.enable_x64(True):
        for seed in range(3):
            batch = batch_of(seed, ROWS, dtype=np.float64)
            got, _ = window_gradient(kind, sizes, plans, True)(batch)
            assert_close(got, whole_gradient(kind, True)(batch), 1e-12)


@pytest.mark.parametrize(("kind", "plans"), [("terms", True), ("own", False)])
def test_scanning_the_step_is_calling_it(kind: str, plans: bool) -> None:
    """Catches a step that needs the host between attempts, or whose state is no fixed point."""
    batch = batch_of(3, ROWS)
    a, _ = window_gradient(kind, (6, 6), plans, False, True)(batch)
    b, _ = window_gradient(kind, (6, 6), plans, False)(batch)
    assert_close(a, b, 2e-6)


@pytest.mark.parametrize("kind", ["mean", "own"])
def test_mapping_the_step_over_states_is_calling_it_for_each(kind: str) -> None:
    """Catches a condition on a batched counter that breaks vmap."""
    step = step_of(KINDS[kind](), accumulate=2)
    pieces = [batch_of(s, 4) for s in range(4)]
    state = step.init(pieces[0])
    states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    run = jax.jit(lambda s, b: step.step(s, b).state)
    mapped = jax.jit(jax.vmap(lambda s, b: step.step(s, b).state))
    for first, second in ((0, 1), (2, 3)):
        states = mapped(states, jax.tree.map(lambda a, b: jnp.stack([a, b]), pieces[first], pieces[second]))
    one = run(run(state, pieces[0]), pieces[2])
    other = run(run(state, pieces[1]), pieces[3])
    assert_close(jax.tree.map(lambda x: x[0], states.variables), one.variables, 2e-6)
    assert_close(jax.tree.map(lambda x: x[1], states.variables), other.variables, 2e-6)


@given(st.lists(st.sampled_from([0.0, 0.0, 0.5, 3.0, 128.0]), min_size=4, max_size=4), st.integers(0, 100))
@settings(max_examples=12)
def test_any_masses_zero_among_them(masses: list[float], seed: int) -> None:
    """Catches microbatches weighted by their number, and a division by a zero mass."""
    batch = batch_of(seed, ROWS, masses=np.repeat(masses, 3))
    got, updates = window_gradient("mean", (3, 3, 3, 3), False, False)(batch)
    if sum(masses) == 0:
        assert int(updates) == 0
        assert all(not np.asarray(g).any() for g in jax.tree.leaves(got))
    else:
        assert int(updates) == 1
        assert_close(got, whole_gradient("mean", False)(batch), 2e-6)


@pytest.mark.parametrize("kind", ["mean", "whole", "own", "root", "rows"])
def test_a_window_reduces_the_sum_of_its_statistics(kind: str) -> None:
    """Law 1, independent of how a batch concatenates: catches a loss averaged over microbatches."""
    objective = KINDS[kind]()
    step = step_of(objective)
    params = step.initial_state(objective.initializer, step.key).variables["params"]
    pieces = split(batch_of(5, ROWS), (6, 6))

    def value(params: Any) -> Any:
        own = owns_statistics(objective)
        parts = [call_loss(objective, {"params": params}, p, Step(0, jax.random.key(0)))[0] for p in pieces]
        sums = functools.reduce(merge_statistics, [statistic.canonical(p, own=own) for p in parts])
        return statistic.reduce(objective, sums)[0]

    got, _ = window_gradient(kind, (6, 6), False, False)(batch_of(5, ROWS))
    assert_close(got, jax.grad(value)(params), 2e-6)


def test_scalars_are_terms_of_mass_one() -> None:
    """A scalar window is the mean of its microbatches, whatever their sizes."""
    step = step_of(Tiny("scalar"), accumulate=2)
    pieces = split(batch_of(1, ROWS), (2, 10))
    state = step.init(pieces[0])
    gradients = [jax.grad(lambda p, b=b: _scalar(p, b))(state.variables["params"]) for b in pieces]
    for piece in pieces:
        state = jax.jit(step.step)(state, piece).state
    assert_close(state.opt_state[0].trace, jax.tree.map(lambda a, b: (a + b) / 2, *gradients), 2e-6)


def _scalar(params: Any, batch: Any) -> Any:
    return Tiny("scalar").loss({"params": params}, batch, Step(0))


@pytest.mark.parametrize(("kind", "size"), [("mean", 5), ("terms", 5), ("own", 5), ("array", 4)])
def test_slicing_a_batch_equals_the_whole(kind: str, size: int) -> None:
    """Catches a remainder that is dropped (12 rows in slices of 5), also by the replay's stored slots (XS006)."""
    batch = batch_of(7, ROWS)
    step = step_of(KINDS[kind](), microbatch=size)
    result = jax.jit(step.step)(step.init(batch), batch)
    assert int(result.state.updates) == 1
    assert int(result.state.attempts) == -(-ROWS // size)
    assert_close(result.state.opt_state[0].trace, whole_gradient(kind, False)(batch), 2e-6)


def test_slicing_rows_equals_the_whole() -> None:
    size = 4
    batch = batch_of(7, ROWS)
    step = step_of(KINDS["rows"](), microbatch=size)
    result = jax.jit(step.step)(step.init(batch), batch)
    assert_close(result.state.opt_state[0].trace, whole_gradient("rows", False)(batch), 1e-6)


@pytest.mark.parametrize(("kind", "plans"), [("mean", False), ("terms", True), ("own", False), ("rows", False)])
def test_a_short_window_commits_with_its_own_mass(kind: str, plans: bool) -> None:
    """S02: a last window of one attempt out of two is that one's mean, and the next window starts empty."""
    step = step_of(KINDS[kind](), accumulate=2, plans=plans)
    batch = batch_of(9, ROWS)
    state = step.init(batch)
    window = step.window_of(state, [batch]) if plans else None
    state = jax.jit(step.step)(state, batch, window).state
    flush = jax.jit(step.flush)
    state = flush(state)
    assert (int(state.updates), int(state.window.slot)) == (1, 0)
    assert_close(state.opt_state[0].trace, whole_gradient(kind, False)(batch), 2e-6)
    assert int(flush(state).updates) == 1


@pytest.mark.parametrize("kind", ["mean", "own"])
def test_the_next_window_starts_from_nothing(kind: str) -> None:
    """Catches sums or stored microbatches that reach into the next window."""
    step = step_of(KINDS[kind](), accumulate=2)
    first, second = (batch_of(s, 8) for s in (1, 2))
    run = jax.jit(step.step)
    state = step.init(split(first, (4, 4))[0])
    for piece in split(first, (4, 4)):
        state = run(state, piece).state
    params = state.variables["params"]
    for piece in split(second, (4, 4)):
        state = run(state, piece).state
    objective = KINDS[kind]()

    def value(params: Any) -> Any:
        statistics, _ = call_loss(objective, {"params": params}, second, Step(0, jax.random.key(0)))
        return reduce_statistics(objective, statistics)[0]

    assert_close(state.opt_state[0].trace, jax.grad(value)(params), 2e-6)


@pytest.mark.parametrize(("kind", "plans"), [("mean", False), ("terms", True), ("own", False)])
def test_the_loss_of_each_attempt_is_its_own(kind: str, plans: bool) -> None:
    """S03: a logged loss that is divided by the number of attempts or by the window's mass."""
    objective = KINDS[kind]()
    step = step_of(objective, accumulate=2, plans=plans)
    pieces = split(batch_of(4, 8), (4, 4))
    state = step.init(pieces[0])
    window = step.window_of(state, pieces) if plans else None
    result = jax.jit(step.step)(state, pieces[0], window)
    statistics, _ = call_loss(objective, state.variables, pieces[0], Step(0, jax.random.key(0)))
    expected = reduce_statistics(objective, statistics)[0]
    np.testing.assert_allclose(result.outputs["loss"], expected, rtol=1e-6)


def test_a_plan_that_was_not_kept_loses_the_window_and_says_so() -> None:
    """Catches masses of four batches used for a window that got two: a gradient half its size."""
    step = step_of(KINDS["terms"](), accumulate=2, plans=True)
    pieces = split(batch_of(4, 8), (4, 4))
    state = step.init(pieces[0])
    wrong = jax.tree.map(lambda m: 2 * m, step.window_of(state, pieces))
    run = jax.jit(step.step)
    after = run(run(state, pieces[0], wrong).state, pieces[1], wrong).state
    assert int(after.updates) == 0
    names = dict(zip(step.checked_names(after), np.asarray(after.rejections.finite).tolist(), strict=True))
    assert [n for n, ok in names.items() if not ok] == ["plan"]


def test_plans_need_masses() -> None:
    step = step_of(KINDS["terms"](), accumulate=2, plans=True)
    state = step.init(batch_of(1, 4))
    with pytest.raises(ValueError, match="window=window_of"):
        step.step(state, batch_of(1, 4))
    replaying = dataclasses.replace(step, plans=False)
    assert replaying.open(state, batch_of(1, 4)).window.planned is None
