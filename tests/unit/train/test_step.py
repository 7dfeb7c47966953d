"""The train step's contract: counters, states it adopts, what is trained, and the errors before anything compiles."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import telic
from telic import optimizers
from telic.contract import Aux, Objective, Step
from telic.ema import EMASpec
from telic.errors import ContractError, ReplayWarning
from telic.mean import Mean, Terms
from telic.precision import Dynamic, Policy
from telic.train.state import TrainState
from tests.unit.train.tiny import Own, Tiny, batch_of, bits, changed, step_of

BATCH = batch_of(0, 4, masses=1.0)


class Free(Objective):
    """An objective made of two functions."""

    def __init__(self, params: Any, loss: Any, others: Any = None):
        self.params, self.fn, self.others = params, loss, others or {}

    def init(self, key: Any, variables: Any = None) -> Any:
        del key, variables
        return {"params": self.params, **self.others}

    def loss(self, variables: Any, batch: Any, step: Step) -> Any:
        return self.fn(variables, batch, step)


def run(step: Any, state: TrainState, *batches: Any) -> TrainState:
    one = jax.jit(step.step)
    for batch in batches:
        state = one(state, batch).state
    return state


# Counters and clocks.


def test_counters_have_one_rule_each() -> None:
    """XS004, XS007: a step counter that counts microbatches here and updates there."""
    step = step_of(Tiny("mean"), accumulate=2)
    state = run(step, step.init(BATCH), *[BATCH] * 5)
    assert (int(state.attempts), int(state.microbatches), int(state.updates), int(state.window.slot)) == (5, 5, 2, 1)


def test_parameters_keep_their_bits_until_the_window_closes() -> None:
    """Row 1."""
    step = step_of(Tiny("mean"), optimizers.adamw(0.1, weight_decay=0.1), accumulate=2)
    start = step.init(BATCH)
    half = run(step, start, BATCH)
    assert not any(".variables" in n or ".opt_state" in n for n in changed(start, half))


def test_schedules_count_updates() -> None:
    """S20, XS077, XS091: a rate that falls with each microbatch, or one that is baked into the program."""
    loss = lambda v, b, s: v["params"]["w"].sum()
    step = step_of(Free({"w": jnp.zeros(1)}, loss), optimizers.sgd(lambda n: 1.0 + n), accumulate=2)
    state = run(step, step.init(BATCH), *[BATCH] * 6)
    assert float(state.variables["params"]["w"][0]) == -(1 + 2 + 3)


def test_clipping_acts_on_the_windows_gradient() -> None:
    """S50, XS179: gradients 3 and -2 clipped one by one give 0 where the window's is 0.5."""
    loss = lambda v, b, s: (v["params"]["w"] * b["g"]).sum()
    step = step_of(
        Free({"w": jnp.zeros(1)}, loss), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), accumulate=2
    )
    batches = [{"g": jnp.asarray([3.0])}, {"g": jnp.asarray([-2.0])}]
    state = run(step, step.init(batches[0]), *batches)
    np.testing.assert_allclose(state.variables["params"]["w"], [-0.5])
    single = step_of(Free({"w": jnp.zeros(1)}, loss), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    state = run(single, single.init(batches[0]), {"g": jnp.asarray([10.0])})
    np.testing.assert_allclose(state.variables["params"]["w"], [-1.0], rtol=1e-6)


def test_layer_state_moves_once_per_accepted_microbatch() -> None:
    """S39, B59, XS147: running means updated by the last microbatch only, or twice by a replay."""
    for kind in (Tiny("mean", poisoned=True), Tiny("terms", poisoned=True), Own("own", poisoned=True)):
        step = step_of(kind, accumulate=2)
        batches = [batch_of(s, 4, poison=0, masses=1.0) for s in range(4)]
        state = run(step, step.init(batches[0]), *batches)
        assert float(state.variables["count"]["n"]) == 4
        # Effects are summed over a window and given once per commit.
        assert float(state.variables["seen"]["e"]) == 4


def test_a_running_mean_is_sequential() -> None:
    """S39: momentum .9, microbatch means 1 and 3, from 0: .9 * .1 + .3 = .39."""

    def loss(v: Any, b: Any, s: Any) -> Any:
        mean = 0.9 * v["stats"]["mean"] + 0.1 * b["x"].mean()
        return Mean((v["params"]["w"] * b["x"]).sum(), 4.0), Aux(variables={"stats": {"mean": mean}})

    objective = Free({"w": jnp.ones(())}, loss, {"stats": {"mean": jnp.zeros(())}})
    batches = [{"x": jnp.full(4, 1.0)}, {"x": jnp.full(4, 3.0)}]
    step = step_of(objective, accumulate=2)
    state = run(step, step.init(batches[0]), *batches)
    np.testing.assert_allclose(state.variables["stats"]["mean"], 0.39, rtol=1e-6)


def test_a_window_without_mass_commits_nothing() -> None:
    """Row 9: weight decay, moments, the average and effects of a window without data."""
    empty = batch_of(1, 4, masses=0.0, poison=0)
    for accumulate in (1, 2):
        step = step_of(
            Tiny("mean", poisoned=True, ema=EMASpec(0.5)),
            optimizers.adamw(0.1, weight_decay=0.5),
            accumulate=accumulate,
        )
        start = step.init(empty)
        state = run(step, start, *[empty] * accumulate)
        assert (int(state.updates), int(state.microbatches)) == (0, accumulate)
        moved = {n for n in changed(start, state) if "rejections" not in n}
        assert moved == {".attempts", ".learner.microbatches", ".variables['count']['n']"}


def test_the_direct_gradient_is_the_steps() -> None:
    """Row 18, and a Mean with a data-free penalty (XS001): 8/4 + 1 = 3, counted once at full weight."""
    penalty = lambda v, b, s: Mean((v["params"]["w"] * b["l"]).sum(), b["n"].sum()) + 1.0
    objective = Free({"w": jnp.ones(())}, penalty)
    batches = [{"l": jnp.asarray([6.0]), "n": jnp.asarray([3.0])}, {"l": jnp.asarray([2.0]), "n": jnp.asarray([1.0])}]
    step = step_of(objective, accumulate=2)
    state = step.init(batches[0])
    state = run(step, state, *batches)
    np.testing.assert_allclose(state.opt_state[0].trace["w"], 2.0, rtol=1e-6)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), *batches)
    value, _ = telic.scalar_loss(objective, objective.init(None), both, Step())
    assert float(value) == 3.0


# What is trained.


def test_frozen_leaves_keep_their_bits_and_have_no_optimizer_state() -> None:
    """S38, XS143, B41, XS144: weight decay and momentum that move a leaf whose gradient is zero."""
    step = step_of(Tiny("mean"), optimizers.adamw(0.1, weight_decay=0.1), trainable="params/w")
    start = step.init(BATCH)
    assert not any("'b'" in name for name in bits(start.opt_state))
    state = run(step, start, *[BATCH] * 3)
    names = changed(start, state)
    assert ".variables['params']['w']" in names
    assert ".variables['params']['b']" not in names


def test_several_optimizers_by_path_in_both_spellings() -> None:
    """A rule written as users see names, params/w, that matches nothing in the tree the optimizer sees."""
    rules = {"params/w": optimizers.sgd(0.0), "b": optimizers.sgd(1.0)}
    step = step_of(Tiny("mean"), optimizers.by_path(rules))
    start = step.init(BATCH)
    names = changed(start, run(step, start, BATCH))
    assert ".variables['params']['b']" in names
    assert ".variables['params']['w']" not in names
    with pytest.raises(ContractError, match="by_path glob='params/v'"):
        step_of(Tiny("mean"), optimizers.by_path({"params/v": "sgd", "**": "sgd"})).init(BATCH)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        ("params/v", "names no leaf"),
        ("params/ww", "Did you mean 'params/w'"),
        (lambda name: False, "selects nothing"),
    ],
)
def test_a_filter_that_trains_nothing_is_refused(trainable: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(Tiny("mean"), trainable=trainable).init(BATCH)


def test_a_filter_may_select_everything() -> None:
    """It is what no filter does."""
    step = step_of(Tiny("mean"), trainable="params/**")
    assert len(jax.tree.leaves(step.trained(step.init(BATCH).variables))) == 2


def test_without_parameters_there_is_nothing_to_train() -> None:
    for params in ({}, {"n": jnp.zeros((), jnp.int32)}):
        with pytest.raises(ContractError, match="nothing to train"):
            step_of(Free(params, lambda v, b, s: jnp.zeros(()))).init(BATCH)


# Adopting states.


def test_weights_given_start_the_optimizer_and_the_average_too() -> None:
    """An average that starts from weights that were replaced, and is near them for thousands of updates."""
    step = step_of(Tiny("mean", ema=EMASpec(0.5)))
    given = {"params": {"w": np.full(3, 7.0, np.float32)}}
    state = step.adopt(BATCH, given)
    np.testing.assert_array_equal(state.averaged["params"]["w"], np.full(3, 7.0))
    fresh = step.init(BATCH)
    np.testing.assert_array_equal(state.variables["params"]["b"], fresh.variables["params"]["b"])
    with pytest.raises(ContractError, match="params/u"):
        step.adopt(BATCH, {"params": {"u": np.zeros(1)}})


def test_a_state_is_copied_and_may_run_again() -> None:
    step = step_of(Tiny("mean"))
    state = run(step, step.init(BATCH), BATCH)
    adopted = step.adopt(BATCH, state)
    assert bits(adopted) == bits(state)
    shared = {id(x) for x in jax.tree.leaves(state)} & {id(x) for x in jax.tree.leaves(adopted)}
    assert not shared


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: step_of(Tiny("mean"), optimizers.adam(0.1)), "opt_state"),
        (lambda: step_of(Tiny("mean", ema=EMASpec(0.5))), "ema"),
        (lambda: step_of(Tiny("mean", dtype=jnp.bfloat16)), "variables: params/b is float32"),
        (lambda: step_of(Tiny("mean"), loss_scale=Dynamic()), "loss_scale"),
        (lambda: step_of(Tiny("mean"), trainable="params/w"), "opt_state"),
    ],
)
def test_a_state_of_another_kind_is_refused_by_leaf(other: Any, message: str) -> None:
    state = step_of(Tiny("mean")).init(BATCH)
    with pytest.raises(ContractError, match=message):
        other().adopt(BATCH, state)


def test_a_state_without_a_window_is_told_how_to_get_one() -> None:
    """Catches "cannot unpack non-iterable NoneType" for the state of a step that commits at every attempt."""
    single, pair = step_of(Tiny("mean")), step_of(Tiny("mean"), accumulate=2)
    state = single.init(BATCH)
    with pytest.raises(ContractError, match=r"no window for accumulate=2.*step\.open\(state, batch\)"):
        pair.step(state, BATCH)
    assert int(run(pair, pair.open(state, BATCH), BATCH, BATCH).updates) == 1


def test_an_open_window_goes_on_only_where_it_fits() -> None:
    """Sums that are dropped without a word when the number of attempts changes in the middle of a window."""
    step = step_of(Tiny("mean"), accumulate=3)
    state = run(step, step.init(BATCH), BATCH, BATCH)
    assert bits(step.adopt(BATCH, state)) == bits(state)
    for accumulate in (1, 2):
        with pytest.raises(ContractError, match="open after 2 attempts"):
            step_of(Tiny("mean"), accumulate=accumulate).adopt(BATCH, state)
    closed = run(step, state, BATCH)
    assert step_of(Tiny("mean")).adopt(BATCH, closed).window.statistics is None


# Dtypes and compilation.


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_dtypes_are_a_fixed_point(dtype: Any, accumulate: int) -> None:
    """S24, XS089, XS095: moments widened by the first update, so that the second call compiles and donation fails."""
    step = step_of(Tiny("mean", dtype=dtype, ema=EMASpec(0.9)), optimizers.adamw(0.1), accumulate=accumulate)
    state = step.init(BATCH)
    after = jax.eval_shape(step.step, state, BATCH)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), after.state)
    assert after.outputs["loss"].dtype == jnp.float32
    assert jax.eval_shape(step.flush, state).variables["params"]["w"].dtype == dtype


def test_the_second_call_does_not_compile_and_the_state_can_be_donated() -> None:
    """S27: two leaves of the state that share one buffer."""
    objective = Tiny("terms", ema=EMASpec(0.9))
    step = step_of(objective, optimizers.adamw(0.1), accumulate=2)
    one = jax.jit(step.step, donate_argnums=0)
    state = step.init(BATCH)
    first = state.variables["params"]["w"]
    state = one(state, BATCH).state
    traced = objective.traced
    for _ in range(5):
        state = one(state, BATCH).state
    assert objective.traced == traced
    assert first.is_deleted()


def test_half_precision_sums_are_kept_in_float32() -> None:
    """XS008: bfloat16 gradients 1 + i/512 summed in bfloat16."""
    loss = lambda v, b, s: Mean((v["params"]["w"].astype(jnp.float32) * b["g"]).sum(), 1.0)
    step = step_of(Free({"w": jnp.zeros(1, jnp.bfloat16)}, loss), accumulate=8)
    batches = [{"g": jnp.asarray([1 + i * 2.0**-7])} for i in range(8)]
    state = run(step, step.init(batches[0]), *batches[:-1])
    assert state.window.gradient["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.window.gradient["w"], [7 + 21 * 2.0**-7], rtol=1e-6)


def test_the_loss_that_is_reported_is_not_scaled() -> None:
    """S17, XS059: losses above 5000 because they were read after the scale."""
    objective = Tiny("mean", dtype=jnp.float16)
    plain, scaled = step_of(objective), step_of(objective, loss_scale=Dynamic(2048.0))
    a, b = (jax.jit(s.step)(s.init(BATCH), BATCH) for s in (plain, scaled))
    assert float(a.outputs["loss"]) == float(b.outputs["loss"])
    np.testing.assert_allclose(a.outputs["gradient_norm"], b.outputs["gradient_norm"], rtol=1e-5)


def test_compute_is_cast_and_parameters_are_not() -> None:
    seen = {}

    def loss(v: Any, b: Any, s: Any) -> Any:
        seen["w"], seen["x"], seen["t"] = v["params"]["w"].dtype, b[0].dtype, b[1].dtype
        return (v["params"]["w"] * b[0]).sum(1)

    step = step_of(Free({"w": jnp.ones(3)}, loss), policy=Policy.parse("bfloat16"))
    batch = (np.ones((4, 3), np.float32), np.ones(4, np.float32))
    result = jax.jit(step.step)(step.init(batch), batch)
    assert seen == {"w": jnp.bfloat16, "x": jnp.bfloat16, "t": jnp.float32}
    assert result.state.variables["params"]["w"].dtype == jnp.float32
    assert result.outputs["loss"].dtype == jnp.float32


# Extra arguments of optimizers.


def test_the_windows_largest_logits_reach_the_optimizer() -> None:
    """QK-clip that sees the last microbatch's logits only."""

    def loss(v: Any, b: Any, s: Any) -> Any:
        return Mean((v["params"]["query"]["kernel"] * 0).sum(), 1.0), Aux(qk_stats={"max_logits": b["logits"]})

    params = {"query": {"kernel": jnp.ones((2, 2))}, "key": {"kernel": jnp.ones((2, 2))}}
    step = step_of(Free(params, loss), optax.chain(optax.sgd(1.0), optimizers.qk_clip(4.0)), accumulate=2)
    batches = [{"logits": jnp.asarray(v)} for v in ([16.0, 1.0], [2.0, 3.0])]
    state = run(step, step.init(batches[0]), *batches)
    np.testing.assert_allclose(state.variables["params"]["query"]["kernel"], [[0.5, 1], [0.5, 1]])


# Errors at trace time.


def pair(value: Any, **aux: Any) -> Any:
    return lambda v, b, s: (Mean((v["params"]["w"] ** 2).sum(), 4.0) if value is None else value(v), Aux(**aux))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda v, b, s: {"a": v["params"]["w"].sum()}, "must implement reduce_loss"),
        (lambda v, b, s: Mean(v["params"]["w"] ** 2, 3.0), r"must be a scalar, got shape \(3,\)"),
        (lambda v, b, s: Mean(v["params"]["w"].sum(), jnp.ones(3)), r"must be a scalar, got shape \(3,\)"),
        (lambda v, b, s: v["params"]["w"][None] ** 2, r"batch's leading dimension \(4\)"),
        (lambda v, b, s: None, "returned None"),
        (lambda v, b, s: (v["params"]["w"].sum(), {"m": 1}), "pair whose second item is dict"),
        (lambda v, b, s: Terms({"a": (1.0, v["params"]["w"].sum())}), "in place of the Mean"),
        (pair(None, variables={"params": {}}), "may not hold 'params'"),
        (pair(None, variables={"batch_stats": {}}), "'batch_stats', which the state lacks"),
        (pair(None, variables={"c": {"m": jnp.zeros(())}}), r"missing: \['n'\], unknown: \['m'\]"),
        (pair(None, variables={"c": {"n": jnp.zeros(2)}}), r"\['c'\]/n must have shape \(\), got \(2,\)"),
        (pair(None, metrics={"loss": 1.0}), "reports itself"),
        (pair(None, metrics={"v": jnp.zeros(3)}), "scalar or a Mean"),
        (pair(None, effects=jnp.zeros(())), "must implement apply_effects"),
        (pair(lambda v: Mean(v["params"]["w"].sum(), (v["params"]["w"] > 0).sum())), "mass depends on the trainable"),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_a_loss_may_not_return_is_refused_with_the_remedy(loss: Any, message: str, accumulate: int) -> None:
    objective = Free({"w": jnp.arange(3.0)}, loss, {"c": {"n": jnp.zeros(())}})
    step = step_of(objective, accumulate=accumulate)
    with pytest.raises(ContractError, match=message):
        jax.eval_shape(step.step, step.init(BATCH), BATCH)


def test_reduce_loss_must_return_a_pair() -> None:
    class Alone(Own):
        def reduce_loss(self, statistics: Any) -> Any:
            return super().reduce_loss(statistics)[0]

    with pytest.raises(ContractError, match=r"must return \(value, has_data\)"):
        step_of(Alone("own"), accumulate=2).init(BATCH)


def test_an_optimizer_that_does_not_fit_is_named() -> None:
    labels = {"w": "a", "other": "b"}
    optimizer = optax.multi_transform({"a": optax.sgd(1.0), "b": optax.sgd(1.0)}, labels)
    with pytest.raises(ContractError, match=r"(?s)optimizer does not fit the trainable parameters.*leaves b, w"):
        step_of(Tiny("mean"), optimizer).init(BATCH)


# Planned windows.


class Gated(Tiny):
    def statistics(self, params: Any, batch: Any, out: Any, error: Any) -> Any:
        mass = batch["m"].sum()
        match self.kind:
            case "parameters":
                mass = jax.lax.stop_gradient((out > 0).sum() * 1.0)
            case "unknown":
                # Both branches are the same, which a trace does not see.
                mass = jax.lax.cond(out.sum() > 0, lambda: batch["m"].sum(), lambda: batch["m"].sum() + 0)
            case _:
                pass
        return Terms({"fit": (params["w"].sum(), Mean((error * batch["m"]).sum(), mass))})


def test_masses_are_planned_only_where_they_come_from_the_batch() -> None:
    """A weight may read parameters, a mass may not: it is refused where it does, replayed where it cannot be told."""
    step = step_of(Gated("batch"), accumulate=2)
    assert step.can_plan(step.init(BATCH), BATCH)
    planning = dataclasses.replace(step, plans=True)
    assert planning.open(step.init(BATCH), BATCH).window.planned is not None
    for other in (step_of(Gated("batch")), step_of(Tiny("mean"), accumulate=2), step_of(Own("own"), accumulate=2)):
        assert not other.can_plan(other.init(BATCH), BATCH)
    with pytest.raises(ContractError, match=r"params/b, params/w.*stop_gradient does not help"):
        step_of(Gated("parameters"), accumulate=2).init(BATCH)
    unknown = step_of(Gated("unknown"), accumulate=2)
    with pytest.warns(ReplayWarning, match="may read params/b, params/w"):
        assert not unknown.can_plan(unknown.init(BATCH), BATCH)


def test_masses_that_read_moving_layer_state_are_not_planned() -> None:
    """Layer state changes within a window, so that masses read before it would be others."""

    def loss(v: Any, b: Any, s: Any) -> Any:
        terms = Terms({"a": (1.0, Mean(v["params"]["w"].sum(), 1 + v["c"]["n"]))})
        return terms, Aux(variables={"c": {"n": v["c"]["n"] + 1}})

    step = step_of(Free({"w": jnp.ones(3)}, loss, {"c": {"n": jnp.zeros(())}}), accumulate=2)
    with pytest.warns(ReplayWarning, match="variables/c/n"):
        assert not step.can_plan(step.init(BATCH), BATCH)
