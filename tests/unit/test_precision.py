"""telic.precision: policies of dtypes and the three loss scales."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic import precision
from telic.precision import Custom, Dynamic, Identity, LossScale, Policy, Static

# Policies.


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("bfloat16", ("float32", "bfloat16", "float32")),
        ("float16", ("float32", "float16", "float32")),
        ("float32", ("float32", "float32", "float32")),
        ("params=float32,compute=bfloat16,output=float32", ("float32", "bfloat16", "float32")),
        (" compute = float16 , output=bfloat16", (None, "float16", "bfloat16")),
    ],
)
def test_policy_text(text: str, dtypes: tuple[str | None, ...]) -> None:
    """Parameters held in the dtype of computation, or a part that was not named being cast."""
    assert Policy.parse(text) == Policy(*dtypes)
    assert precision.policy(text) == Policy(*dtypes)
    expected = tuple(None if d is None else jnp.dtype(d) for d in dtypes)
    policy = Policy.parse(text)
    assert (policy.params, policy.compute, policy.output) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bfloat", "Did you mean 'bfloat16'"),
        ("param=float32", "Did you mean 'params'"),
        ("params=int32", "unknown dtype for params 'int32'"),
        ("params=float32,params=float16", "names params twice"),
        ("params=float32,bfloat16", "is written"),
    ],
)
def test_unknown_policy_text_is_refused(text: str, message: str) -> None:
    """A misspelt part that leaves the run in float32 without a word."""
    with pytest.raises(ValueError, match=message):
        precision.policy(text)


def test_policy_takes_dtypes_policies_and_none_only() -> None:
    """An integer dtype would floor every parameter."""
    assert precision.policy(None) == Policy()
    assert precision.policy(Policy(compute=jnp.bfloat16)) == Policy(compute="bfloat16")
    with pytest.raises(ValueError, match="floating-point"):
        Policy(params=jnp.int32)
    with pytest.raises(TypeError, match="precision is a Policy"):
        precision.policy(16)


def test_only_real_floating_point_leaves_are_cast() -> None:
    """Token ids rounded to bfloat16, a key or a complex leaf that breaks, a mask that becomes a number."""
    tree = {
        "w": jnp.ones(2),
        "half": jnp.ones(2, jnp.float16),
        "ids": jnp.asarray([257, 258]),
        "mask": jnp.asarray([True]),
        "key": jax.random.key(0),
        "wave": jnp.ones(2, jnp.complex64),
        "host": np.ones(2, np.float32),
        "none": None,
        "number": 1.5,
    }
    cast = Policy("float32", "bfloat16", "float16").cast_compute(tree)
    moved = {name for name in tree if getattr(cast[name], "dtype", None) != getattr(tree[name], "dtype", None)}
    assert moved == {"w", "half", "host"}
    assert {cast[name].dtype for name in moved} == {jnp.dtype("bfloat16")}
    assert cast["ids"] is tree["ids"]


def test_each_cast_uses_its_own_dtype_and_none_leaves_the_tree() -> None:
    """Outputs cast to the dtype of computation; a policy without casts that copies."""
    x = {"x": jnp.ones(2)}
    policy = Policy("float64", "bfloat16", "float16")
    with jax.enable_x64(True):
        assert policy.cast_params(x)["x"].dtype == jnp.float64
    assert policy.cast_compute(x)["x"].dtype == jnp.bfloat16
    assert policy.cast_output(x)["x"].dtype == jnp.float16
    assert Policy().cast_params(x) is x
    assert Policy("float32").cast_params(x)["x"] is x["x"]


# Loss scales.


def seed_init() -> Any:
    return {"loss_scale": jnp.float32(8), "overflows": jnp.int32(0)}


def seed_scale(loss: Any, state: Any) -> Any:
    return jax.tree.map(lambda x: x * state["loss_scale"], loss)


def seed_unscale(grads: Any, state: Any) -> Any:
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    new = {
        "loss_scale": jnp.where(finite, state["loss_scale"], state["loss_scale"] / 2),
        "overflows": state["overflows"] + jnp.where(finite, 0, 1),
    }
    return jax.tree.map(lambda g: g / state["loss_scale"], grads), new


SCALES = [
    pytest.param(Identity(), id="identity"),
    pytest.param(Static(3.0**15), id="static"),
    pytest.param(Dynamic(64, period=3, factor=4.0, minimum=0.25), id="dynamic"),
    pytest.param(Custom(seed_init(), seed_scale, seed_unscale), id="custom"),
]


@pytest.mark.parametrize("scale", SCALES)
def test_unscale_is_the_inverse_of_scale_on_every_leaf(scale: LossScale) -> None:
    """A leaf that stays scaled; gradients of a half-precision model left in half precision."""
    tree = {"a": jnp.asarray([1.0, -2.5]), "b": (jnp.asarray(0.125, jnp.bfloat16), jnp.asarray(3.0, jnp.float16))}
    back = scale.unscale(scale.scale(tree))
    assert {x.dtype for x in jax.tree.leaves(back)} == {jnp.dtype("float32")}
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(x, y.astype(jnp.float32), rtol=1e-6)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.usefixtures("strict_promotion")
def test_a_scale_is_a_fixed_point_of_the_compiled_step(scale: LossScale) -> None:
    """Options lost through jit (jmp's min_loss_scale), a weak type that compiles the step a second time."""

    traces = []

    @jax.jit
    def step(scale: Any, finite: Any) -> Any:
        traces.append(finite)
        return scale.adjust(finite)

    leaves, structure = jax.tree.flatten(scale)
    first = step(scale, jnp.asarray(True))
    second = step(first, jnp.asarray(False))
    step(second, jnp.asarray(True))
    assert len(traces) == 1
    assert jax.tree.structure(first) == structure
    assert [jnp.result_type(x) for x in jax.tree.leaves(second)] == [jnp.result_type(x) for x in leaves]
    assert jax.tree.unflatten(structure, leaves) == scale
    if isinstance(scale, Dynamic):
        assert (second.period, second.factor, second.minimum) == (3, 4.0, 0.25)


@pytest.mark.parametrize("scale", SCALES)
def test_scaling_a_half_precision_loss_does_not_overflow_it(scale: LossScale) -> None:
    """A float16 loss times 2¹⁵ is infinite in float16."""
    scaled = scale.scale(jnp.asarray(300, jnp.float16))
    assert scaled.dtype == jnp.float32
    assert np.isfinite(scaled)


def test_gradients_that_are_none_integers_or_float64_keep_their_kind() -> None:
    """A frozen leaf's None or an integer parameter's float0 reaching a division; float64 rounded to float32."""
    none = np.zeros(2, jax.dtypes.float0)
    with jax.enable_x64(True):
        grads = Static(4).unscale({"a": None, "b": none, "c": jnp.asarray(1.0, jnp.float64)})
        assert grads["a"] is None
        assert grads["b"] is none
        assert grads["c"].dtype == jnp.float64
        assert float(grads["c"]) == 0.25


def run(scale: Dynamic, outcomes: list[bool]) -> tuple[list[float], list[int]]:
    step = jax.jit(lambda s, finite: s.adjust(finite))
    values, counters = [], []
    for finite in outcomes:
        scale = step(scale, finite)
        values.append(float(scale.value))
        counters.append(int(scale.counter))
    return values, counters


def test_the_scale_grows_after_a_whole_period_of_finite_steps() -> None:
    """Growth one step early or late; a counter that does not start again."""
    assert run(Dynamic(10, period=5), [True] * 6) == ([10, 10, 10, 10, 20, 20], [1, 2, 3, 4, 0, 1])
    assert run(Dynamic(10, period=1), [True] * 3) == ([20, 40, 80], [0, 0, 0])


def test_an_overflow_shrinks_the_scale_to_its_minimum_and_restarts_the_count() -> None:
    """A scale that falls to zero, or growth counted across an overflow."""
    assert run(Dynamic(10, period=5), [False] * 6) == ([5, 2.5, 1.25, 1, 1, 1], [0] * 6)
    assert run(Dynamic(20, period=5, minimum=2), [False] * 5) == ([10, 5, 2.5, 2, 2], [0] * 5)
    assert run(Dynamic(10, period=3), [True, True, False, True, True, True])[0] == [10, 10, 5, 5, 5, 10]


def test_the_scale_does_not_grow_to_infinity() -> None:
    """An infinite scale makes every later gradient NaN."""
    assert run(Dynamic(2.0**127, period=1), [True] * 2) == ([2.0**127] * 2, [0, 0])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_nan_counts_as_overflow_like_infinity(bad: float) -> None:
    """The seed looks for infinities only: NaN kept the scale at 1024 and advanced the counter (B38)."""
    scale = Dynamic(1024, period=5)
    grads = scale.unscale({"w": jnp.asarray([1.0, bad])})
    after = scale.adjust(jnp.isfinite(grads["w"]).all())
    assert (float(after.value), int(after.counter)) == (512, 0)


def test_a_counter_beyond_a_shorter_period_still_grows() -> None:
    """A run resumed with a shorter period waits for the counter to come round for ever."""
    assert run(Dynamic(4, 7, period=3), [True, True]) == ([8, 8], [0, 1])


def test_custom_functions_keep_their_state_through_steps() -> None:
    """The state of the seed's three functions thrown away, so that the scale never moves."""
    scale = precision.loss_scale((seed_init, seed_scale, seed_unscale))
    assert float(scale.scale(jnp.float32(2))) == 16
    after = scale.adjust(jnp.asarray(False)).adjust(jnp.asarray(True))
    assert isinstance(after, Custom)
    assert {k: float(v) for k, v in after.state.items()} == {"loss_scale": 4, "overflows": 1}
    assert float(after.unscale(jnp.float32(8))) == 2


def test_loss_scale_by_name_and_default() -> None:
    """A default other than 2¹⁵, or a name that gives another scale."""
    assert isinstance(precision.loss_scale(None), Identity)
    assert isinstance(precision.loss_scale("identity"), Identity)
    assert precision.loss_scale("static") == Static(2.0**15)
    assert precision.loss_scale("dynamic") == Dynamic(2.0**15, period=2000, factor=2.0, minimum=1.0)
    mine = Static(3)
    assert precision.loss_scale(mine) is mine


def test_anything_else_is_refused_as_a_loss_scale() -> None:
    """The seed took even nonsense for a loss scale and trained without one (B4)."""
    with pytest.raises(ValueError, match="Did you mean 'dynamic'"):
        precision.loss_scale("dynamik")
    for wrong in (Dynamic, 1024, (seed_init, seed_scale), object()):
        with pytest.raises(TypeError, match="a loss scale is"):
            precision.loss_scale(wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Static(0), "Static.value"),
        (lambda: Static(float("inf")), "Static.value"),
        (lambda: Static(np.float32(-1)), "Static.value"),
        (lambda: Dynamic(float("nan")), "Dynamic.value"),
        (lambda: Dynamic(0.5), "at least minimum"),
        (lambda: Dynamic(period=0), "period"),
        (lambda: Dynamic(period=1.5), "period"),
        (lambda: Dynamic(factor=1.0), "factor"),
        (lambda: Dynamic(minimum=0.0), "minimum"),
    ],
)
def test_options_that_cannot_work_are_refused_when_made(make: Any, message: str) -> None:
    """A scale of zero, or one that never grows, found out from NaN gradients."""
    with pytest.raises(ValueError, match=message):
        make()
