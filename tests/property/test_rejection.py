"""A rejected attempt changes nothing, to the last bit; a run of them ends the same whenever the host notices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic import optimizers, tree
from telic.ema import EMASpec
from telic.errors import NonFiniteError
from telic.precision import Dynamic
from tests.unit.train import tiny
from tests.unit.train.tiny import Own, Tiny, batch_of, changed, step_of

POISON = {
    "loss nan": (tiny.LOSS_NAN, "loss"),
    "loss inf": (tiny.LOSS_INF, "loss"),
    "gradient of one leaf": (tiny.GRADIENT, "gradient of params/b"),
    "Aux.variables": (tiny.VARIABLES, "Aux.variables"),
    "effects": (tiny.EFFECTS, "Aux.effects"),
    "optimizer result": (tiny.OPTIMIZER, "optimizer result"),
    "negative mass": (tiny.NEGATIVE_MASS, "mass ≥ 0"),
}
RECORD = (".rejections", ".attempts", ".loss_scale")


def fragile() -> optax.GradientTransformationExtraArgs:
    """Give AdamW whose update is infinite when the loss is large."""
    inner = optimizers.adamw(0.1, weight_decay=0.1)

    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        new, state = optax.with_extra_args_support(inner).update(updates, state, params, **extra)
        return jax.tree.map(lambda u: jnp.where(value > 100, jnp.inf, u).astype(u.dtype), new), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


@functools.cache
def prepared(kind: str, accumulate: int, dtype: str, plans: bool = False, **options: Any) -> Any:
    """Give (step, its compiled form, compiled flush, start) of a poisoned objective."""
    build = Own if kind == "own" else Tiny
    objective = build(kind, dtype=jnp.dtype(dtype), ema=EMASpec(0.9), poisoned=True)
    step = step_of(objective, fragile(), accumulate=accumulate, plans=plans, **options)
    start = step.init(batch_of(0, 4, poison=0, masses=1.0))
    return step, jax.jit(step.step), jax.jit(step.window_of), start


def only_record(before: Any, after: Any) -> bool:
    return all(any(part in name for part in RECORD) for name in changed(before, after))


def bad_names(step: Any, state: Any) -> list[str]:
    return [n for n, ok in zip(step.checked_names(state), np.asarray(state.rejections.finite), strict=True) if not ok]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("poison", POISON)
def test_a_rejected_attempt_changes_no_bit(poison: str, dtype: str) -> None:
    """S16: zeroed gradients that still move Adam's moments, its count, or decay the weights."""
    code, name = POISON[poison]
    step, run, _, start = prepared("mean", 1, dtype)
    state = run(start, batch_of(1, 4, poison=0, masses=1.0)).state
    assert int(state.updates) == 1
    result = run(state, batch_of(2, 4, poison=code, masses=1.0))
    assert not bool(result.accepted)
    assert only_record(state, result.state), changed(state, result.state)
    assert name in bad_names(step, result.state)
    assert (int(result.state.attempts), int(result.state.microbatches), int(result.state.rejections.last)) == (2, 1, 1)
    later = run(result.state, batch_of(3, 4, poison=0, masses=1.0)).state
    assert (int(later.updates), int(later.rejections.consecutive)) == (2, 0)


@pytest.mark.parametrize("kind", ["mean", "own"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_window_commits_what_was_accepted(kind: str, position: int) -> None:
    """Catches sums spoilt by one microbatch, and a window that is lost because its closing attempt was rejected."""
    codes = [tiny.LOSS_NAN, tiny.GRADIENT, tiny.EFFECTS] if kind == "mean" else [tiny.LOSS_NAN, tiny.EFFECTS]
    _, run, _, start = prepared(kind, 3, "float32")
    good = [batch_of(s, 4, poison=0, masses=1.0) for s in range(2)]
    _, one, _, clean = prepared(kind, 2, "float32")
    expected = clean
    for batch in good:
        expected = one(expected, batch).state
    for code in codes:
        state, batches = start, list(good)
        batches.insert(position, batch_of(9, 4, poison=code, masses=1.0))
        for batch in batches:
            before, state = state, run(state, batch).state
            if int(np.max(batch["poison"])) and position < 2:
                # A stored microbatch that was rejected is marked unused; no sum takes it in.
                free = (*RECORD, ".window.slot", ".window.stored")
                assert [n for n in changed(before, state) if not any(f in n for f in free)] == []
        assert (int(state.updates), int(state.microbatches), int(state.attempts)) == (1, 2, 3)
        for a, b in zip(jax.tree.leaves(state.variables), jax.tree.leaves(expected.variables), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
        assert float(state.variables["seen"]["e"]) == 2
        assert float(state.variables["count"]["n"]) == 2


def test_a_planned_window_is_rejected_whole() -> None:
    """One pass cannot take a microbatch out of its plan: the window goes back to its start, the next one commits."""
    step, run, plan, start = prepared("terms", 2, "float32", True)
    good, bad = batch_of(1, 4, poison=0, masses=1.0), batch_of(2, 4, poison=tiny.LOSS_NAN, masses=1.0)
    for batches in ([good, bad], [bad, good]):
        window = plan(start, [good, good])
        state = start
        for batch in batches:
            state = run(state, batch, window).state
        touched = {n for n in changed(start, state) if not any(r in n for r in (*RECORD, ".window.planned"))}
        assert touched == set()
        assert (int(state.rejections.total), int(state.rejections.windows)) == (1, 1)
        assert "loss" in bad_names(step, state)
        for batch in (good, good):
            state = run(state, batch, window).state
        assert (int(state.updates), int(state.rejections.windows)) == (1, 0)


def test_slices_are_rejected_alone() -> None:
    """Catches a batch that is lost whole because one slice of it was not finite."""
    objective = Tiny("mean", poisoned=True)
    step = step_of(objective, microbatch=4)
    batch = batch_of(5, 12, poison=0, masses=1.0)
    batch["poison"][4:8] = tiny.LOSS_NAN
    result = jax.jit(step.step)(step.init(batch), batch)
    assert (int(result.state.updates), int(result.state.microbatches), int(result.state.rejections.total)) == (1, 2, 1)
    kept = jax.tree.map(lambda x: np.concatenate([x[:4], x[8:]]), batch)
    expected = jax.jit(step.step)(step.init(kept), kept).state
    for a, b in zip(jax.tree.leaves(result.state.variables), jax.tree.leaves(expected.variables), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6)


def test_a_commit_that_is_always_undone_ends_the_run() -> None:
    """A window whose attempts are fine and whose update never is must not go on for ever."""
    step, run, _, start = prepared("mean", 2, "float32", max_rejected=3)
    state = start
    for i in range(8):
        state = run(state, batch_of(i, 4, poison=tiny.OPTIMIZER, masses=1.0)).state
    assert (int(state.updates), int(state.attempts), bool(state.rejections.stopped)) == (0, 6, True)
    with pytest.raises(NonFiniteError, match=r"3 lost window\(s\) in a row.*optimizer result") as caught:
        step.check_health(jax.device_get(step.health(state)), state)
    assert caught.value.leaves == ("optimizer result",)


def test_the_end_is_the_same_whenever_the_host_notices() -> None:
    """S15: after the budget nothing moves any more, the parameters are finite, and the error says what and where."""
    step, run, _, start = prepared("mean", 1, "float32", max_rejected=2)
    state = run(start, batch_of(0, 4, poison=0, masses=1.0)).state
    seen = []
    for i in range(6):
        state = run(state, batch_of(i, 4, poison=tiny.GRADIENT if i < 5 else 0, masses=1.0)).state
        seen.append(state)
    assert [bool(s.rejections.stopped) for s in seen] == [False, True, True, True, True, True]
    assert all(changed(seen[1], s) == set() for s in seen[2:])
    with pytest.raises(NonFiniteError, match="2 rejected attempt") as caught:
        step.check_health(jax.device_get(step.health(state)), state)
    assert caught.value.attempt == 2
    assert caught.value.leaves == ("gradient of params/b",)
    assert f"{float(seen[1].rejections.last_loss):.6g}" in str(caught.value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.variables))
    again = step.adopt(batch_of(0, 4, poison=0, masses=1.0), state)
    assert not bool(again.rejections.stopped)
    moved = run(again, batch_of(7, 4, poison=0, masses=1.0)).state
    assert int(moved.updates) == 2


def test_a_rejected_attempt_does_not_give_its_key_away() -> None:
    """Row 5: the attempt after a rejected one uses fold_in(key, attempts), not the rejected one's key."""
    step, run, _, start = prepared("mean", 1, "float32")
    bad = run(start, batch_of(0, 4, poison=tiny.LOSS_NAN, masses=1.0)).state
    key = lambda s: jax.random.key_data(step.moment(s).key)
    assert (int(bad.attempts), int(bad.microbatches)) == (1, 0)
    np.testing.assert_array_equal(key(bad), jax.random.key_data(jax.random.fold_in(start.key, 1)))


def test_raise_stops_at_the_first() -> None:
    step, run, _, start = prepared("mean", 1, "float32", nonfinite="raise")
    state = run(start, batch_of(0, 4, poison=tiny.LOSS_NAN, masses=1.0)).state
    with pytest.raises(NonFiniteError, match="1 rejected attempt"):
        step.check_health(jax.device_get(step.health(state)), state)


def test_allow_checks_nothing() -> None:
    step, run, _, start = prepared("mean", 1, "float32", nonfinite="allow")
    state = run(start, batch_of(0, 4, poison=tiny.GRADIENT, masses=1.0)).state
    assert int(state.updates) == 1
    assert np.isnan(state.variables["params"]["b"]).any()
    assert step.health(state) is None
    with pytest.raises(ValueError, match="overflows on purpose"):
        step_of(Tiny("mean"), nonfinite="allow", loss_scale=Dynamic())


def test_a_gradient_too_large_for_its_parameter_is_rejected_before_the_optimizer() -> None:
    """Finite in float32, infinite in the parameter's float16: sgd would write it where the result is unchecked."""
    objective = Tiny("mean", dtype=jnp.float16)
    step = step_of(objective, optax.sgd(1e-8), keep_previous=False)
    batch = batch_of(1, 4, masses=1.0)
    batch["y"] = batch["y"] + 1e6
    start = step.init(batch)
    result = jax.jit(step.step)(start, batch)
    assert not bool(result.accepted)
    assert only_record(start, result.state)


def test_a_replayed_window_that_overflows_shrinks_the_scale() -> None:
    """A replayed window sees its gradient at its close: a scale that never shrinks would lose every window."""
    objective = Own("own")
    step = step_of(objective, accumulate=2, loss_scale=Dynamic(2.0**127))
    batch = batch_of(1, 4, masses=1.0)
    batch["x"] = batch["x"] * 100
    state = step.init(batch)
    run = jax.jit(step.step)
    for _ in range(2):
        state = run(state, batch).state
    assert (int(state.updates), float(state.loss_scale.value)) == (0, 2.0**126)
    for _ in range(40):
        state = run(state, batch).state
    assert int(state.updates) > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_select_keeps_the_payload_of_a_nan(dtype: Any) -> None:
    """XLA's CPU backend selects bfloat16 in float32 and makes every NaN the same one."""
    word = jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else jnp.uint32
    payload = {jnp.bfloat16: 0x7FA5, jnp.float16: 0x7D55, jnp.float32: 0x7FA12345}[dtype]
    old = jax.lax.bitcast_convert_type(jnp.full((4,), payload, word), dtype)
    kept = jax.jit(tree.select)(jnp.asarray(False), old * 0 + 1, old)
    assert (np.asarray(jax.lax.bitcast_convert_type(kept, word)) == payload).all()
