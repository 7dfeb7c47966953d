"""telic.optimizers: the table, rates in state, several optimizers by path, schedules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from telic import optimizers

GRADS = ([0.5, -0.25], [-1.0, 0.1], [0.25, 4.0])


def three_steps(optimizer: optax.GradientTransformation) -> Any:
    params = jnp.asarray([1.0, -2.0])
    state = optimizer.init(params)
    for grads in GRADS:
        updates, state = optimizer.update(jnp.asarray(grads), state, params)
        params = optax.apply_updates(params, updates)
    return params


VALUES: list[tuple[str, Callable[[], optax.GradientTransformation], list[float]]] = [
    ("adagrad", optimizers.adagrad, [0.99980515, -2.00061536]),
    ("adam", optimizers.adam, [0.99950278, -1.99927378]),
    ("adamw", optimizers.adamw, [0.99950278, -1.99927378]),
    ("adamw decay", lambda: optimizers.adamw(weight_decay=0.1), [0.99920297, -1.99867415]),
    ("lamb", optimizers.lamb, [1.00505340, -1.99055076]),
    ("radam", optimizers.radam, [0.99987990, -2.00111866]),
    ("rmsprop", optimizers.rmsprop, [0.98962420, -2.01222730]),
    ("rmsprop centered", lambda: optimizers.rmsprop(centered=True), [0.98825413, -2.01226306]),
    ("rmsprop momentum", lambda: optimizers.rmsprop(momentum=0.9), [0.96126354, -1.96920955]),
    ("sgd", optimizers.sgd, [1.00249994, -2.03850007]),
    ("sgd momentum", lambda: optimizers.sgd(0.1, momentum=0.9), [1.02950001, -2.35124993]),
    ("sgd nesterov", lambda: optimizers.sgd(0.1, momentum=0.9, nesterov=True), [1.05155003, -2.70112491]),
    ("yogi", optimizers.yogi, [0.99505770, -1.99289739]),
]


@pytest.mark.parametrize(("name", "make", "expected"), VALUES, ids=[row[0] for row in VALUES])
def test_three_steps_with_the_seeds_defaults(name: str, make: Any, expected: list[float]) -> None:
    """A default other than the seed's, or an option that is not passed on."""
    np.testing.assert_allclose(three_steps(make()), expected, rtol=2e-7)


OPTAX = {
    "adabelief": lambda: optax.adabelief(1e-3),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "lion": lambda: optax.lion(1e-4),
    "adafactor": lambda: optax.adafactor(1e-3),
    "muon": lambda: optax.contrib.muon(2e-2),
}


@pytest.mark.parametrize("name", sorted(OPTAX))
def test_optimizers_without_a_value_in_the_seed_are_optaxs(name: str) -> None:
    """An option in the wrong place of Optax's argument list."""
    np.testing.assert_allclose(three_steps(optimizers.get(name)), three_steps(OPTAX[name]()), rtol=1e-6)


def test_adabelief_is_not_adam() -> None:
    """The seed's adabelief has the second moment of g, not of g - m: it is Adam (B40)."""
    assert np.abs(three_steps(optimizers.adabelief()) - three_steps(optimizers.adam())).max() > 1e-5


def test_the_table_holds_the_seeds_ten_optimizers() -> None:
    """A name of the seed that the trainer does not know."""
    seeds = {"adabelief", "adagrad", "adam", "adamw", "lamb", "noisy_sgd", "radam", "rmsprop", "sgd", "yogi"}
    assert seeds <= set(optimizers.NAMES)
    assert all(optimizers.NAMES[name] is getattr(optimizers, name) for name in optimizers.NAMES)


def test_get_passes_transformations_and_refuses_the_rest() -> None:
    """A misspelt or uncalled optimizer found out only in the first step."""
    mine = optax.chain(optax.clip(1.0), optax.sgd(0.1))
    assert optimizers.get(mine) is mine
    with pytest.raises(ValueError, match="Did you mean 'adamw'"):
        optimizers.get("adamww")
    with pytest.raises(TypeError, match=r"call it: adam\(\)"):
        optimizers.get(optimizers.adam)
    for wrong in (None, 1e-3, {"**": "adam"}, (lambda p: p, lambda g, s, p: (g, s))):
        with pytest.raises(TypeError, match="an optimizer is a name"):
            optimizers.get(wrong)


# Dtypes.

TREES = {"w": (4, 3), "b": (3,)}
VARIANTS: dict[str, Callable[..., optax.GradientTransformation]] = {
    **optimizers.NAMES,
    "rmsprop with momentum": lambda rate: optimizers.rmsprop(rate, momentum=0.9, centered=True),
    "sgd with momentum": lambda rate: optimizers.sgd(rate, momentum=0.9),
    "adafactor with momentum": lambda rate: optimizers.adafactor(rate, momentum=0.9),
    "adamw with decay": lambda rate: optimizers.adamw(rate, weight_decay=0.1),
}


def dtypes(tree: Any) -> Any:
    return [(jax.tree_util.keystr(path), x.dtype) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_state_and_updates_keep_their_dtypes(name: str, dtype: Any) -> None:
    """A float32 rate in the state widens bfloat16 moments at the first update (XS089), or the updates (XS088)."""
    params = {**{k: jnp.ones(shape, dtype) for k, shape in TREES.items()}, "frozen": None}
    optimizer = VARIANTS[name](1e-3)
    state = optimizer.init(params)
    updates, after = optimizer.update(jax.tree.map(lambda x: x * 0.5, params), state, params)
    assert dtypes(after) == dtypes(state)
    assert dtypes(updates) == dtypes(params)


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.asarray, jnp.float32, jnp.bfloat16, jnp.asarray])
def test_every_kind_of_number_is_the_same_learning_rate(kind: Any) -> None:
    """A NumPy scalar that is not a float never reaches the state; a bfloat16 one gives another update dtype (XS088)."""
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = optimizers.sgd(kind(0.25))
    state = optimizer.init(params)
    updates, after = optimizer.update(params, state, params)
    assert dtypes(after) == dtypes(state)
    assert optimizers.hyperparams(after)["learning_rate"].dtype == jnp.float32
    assert updates["w"].dtype == jnp.bfloat16
    assert np.asarray(updates["w"], np.float32).tolist() == [-0.25] * 3


def test_an_integer_rate_is_a_float_in_the_state() -> None:
    """sgd(1) with an int32 rate: set to 0.5 it becomes 0."""
    state = optimizers.sgd(1).init({"w": jnp.ones(3)})
    assert optimizers.hyperparams(state)["learning_rate"].dtype == jnp.float32


def test_rates_follow_the_parameters_to_float64() -> None:
    """A rate rounded to float32 moves float64 parameters by 1e-8 of each step."""
    with jax.enable_x64(True):
        params = jnp.ones(2, jnp.float64)
        optimizer = optimizers.sgd(0.1)
        updates, _ = optimizer.update(params, optimizer.init(params), params)
        assert np.asarray(updates).tolist() == [-0.1, -0.1]


@pytest.mark.parametrize("rate", ["fast", None, True, [0.1], np.ones(2), jnp.ones(2)])
def test_what_is_no_rate_is_refused_when_built(rate: Any) -> None:
    """A list of rates broadcast against the parameters."""
    with pytest.raises(TypeError, match="learning_rate must be a number"):
        optimizers.adam(rate)


def test_a_traced_learning_rate_can_be_swept_with_vmap() -> None:
    """Rates turned into Python numbers when the optimizer is built."""

    def step(rate: Any) -> Any:
        optimizer = optimizers.sgd(rate)
        params = jnp.ones(())
        return optimizer.update(params, optimizer.init(params), params)[0]

    np.testing.assert_allclose(jax.vmap(step)(jnp.asarray([0.1, 0.5])), [-0.1, -0.5], rtol=1e-6)


# Rates in the state.


def test_a_schedule_counts_updates_inside_a_compiled_step() -> None:
    """A count baked into the trace: the rate stays that of the first step (XS091)."""
    optimizer = optimizers.sgd(lambda count: count)
    params = jnp.zeros(())
    state = optimizer.init(params)
    step = jax.jit(optimizer.update)
    rates = []
    for _ in range(5):
        updates, state = step(jnp.ones(()), state, params)
        rates.append(-float(updates))
    assert rates == [0, 1, 2, 3, 4]
    assert step._cache_size() == 1
    assert float(optimizers.hyperparams(state)["learning_rate"]) == 4


def test_a_set_rate_is_used_without_compiling_again() -> None:
    """A new rate whose weak type or placement compiles the whole step a second time."""
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optimizers.lion(1.0, weight_decay=0.5))
    params = jax.device_put(jnp.ones(2), jax.devices()[0])
    state = jax.device_put(optimizer.init(params), jax.devices()[0])
    step = jax.jit(optimizer.update)
    updates, state = step(params, state, params)
    changed = optimizers.set_hyperparams(state, learning_rate=0.25, weight_decay=np.float64(0.0))
    half, changed = step(params, changed, params)
    assert step._cache_size() == 1
    np.testing.assert_allclose(updates, [-1.5, -1.5], rtol=1e-6)
    np.testing.assert_allclose(half, [-0.25, -0.25], rtol=1e-6)
    assert {k: float(v) for k, v in optimizers.hyperparams(changed).items()} == {
        "learning_rate": 0.25,
        "weight_decay": 0.0,
    }
    assert float(optimizers.hyperparams(state)["learning_rate"]) == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.rmsprop(0.5, momentum=0.9),
        lambda: optimizers.noisy_sgd(0.5),
        lambda: optax.chain(optax.clip(1.0), optimizers.sgd(0.5)),
        lambda: optax.MultiSteps(optimizers.sgd(0.5), 2),
        lambda: optax.masked(optimizers.sgd(0.5), {"w": True}),
        lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.5),
    ],
)
def test_the_rate_is_found_at_any_depth(make: Any) -> None:
    """Plateau handlers that read element 0 of the state crash on everything composed (B25)."""
    state = make().init({"w": jnp.ones(2)})
    assert float(optimizers.hyperparams(state)["learning_rate"]) == 0.5
    assert (
        float(optimizers.hyperparams(optimizers.set_hyperparams(state, learning_rate=0.125))["learning_rate"]) == 0.125
    )


def test_a_state_without_rates_has_no_hyperparameters() -> None:
    """A crash, or a rate made up, for a plain Optax optimizer."""
    state = optax.adam(1e-3).init({"w": jnp.ones(2)})
    assert optimizers.hyperparams(state) == {}
    with pytest.raises(ValueError, match="unknown hyperparameter 'learning_rate'"):
        optimizers.set_hyperparams(state, learning_rate=1.0)


def test_setting_what_is_unknown_or_no_scalar_is_refused() -> None:
    """A misspelt name that changes nothing; a vector that changes the state's shape."""
    state = optimizers.adamw().init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="Did you mean 'learning_rate'"):
        optimizers.set_hyperparams(state, learning_rat=1.0)
    for wrong in (jnp.ones(2), "fast"):
        with pytest.raises(ValueError, match="number or a scalar array"):
            optimizers.set_hyperparams(state, learning_rate=wrong)


def test_a_scheduled_rate_is_changed_by_its_factor() -> None:
    """A value set over a schedule is gone at the next update (B25)."""
    optimizer = optimizers.sgd(lambda count: 0.5 / (1 + count))
    params = jnp.ones(())
    state = optimizer.init(params)
    with pytest.raises(ValueError, match="learning_rate_scale"):
        optimizers.set_hyperparams(state, learning_rate=1.0)
    state = optimizers.set_hyperparams(state, learning_rate_scale=0.5)
    first, state = optimizer.update(params, state, params)
    second, state = optimizer.update(params, state, params)
    assert [float(first), float(second)] == [-0.25, -0.125]
    assert {k: float(v) for k, v in optimizers.hyperparams(state).items()} == {
        "learning_rate": 0.25,
        "learning_rate_scale": 0.5,
    }


def test_rates_can_be_set_under_jit() -> None:
    """A handler's change inside a compiled step that reads a traced value on the host."""
    state = optimizers.sgd(1.0).init({"w": jnp.ones(2)})
    changed = jax.jit(lambda s, rate: optimizers.set_hyperparams(s, learning_rate=rate))(state, 0.5)
    assert dtypes(changed) == dtypes(state)
    assert float(optimizers.hyperparams(changed)["learning_rate"]) == 0.5


# Several optimizers by path.

PARAMS = {"encoder": {"kernel": 1.0, "bias": 1.0}, "head": {"kernel": 1.0, "bias": 1.0}}


def arrays(tree: Any = PARAMS) -> Any:
    return jax.tree.map(lambda x: jnp.full(2, x), tree)


def test_each_leaf_follows_the_first_rule_that_names_it() -> None:
    """A later rule that wins, or a leaf that two optimizers move."""
    optimizer = optimizers.by_path(
        {"**/bias": optimizers.sgd(1.0), "encoder/**": optimizers.sgd(10.0), "**": optimizers.sgd(100.0)}
    )
    params = arrays()
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert jax.tree.map(lambda u: float(u[0]), updates) == {
        "encoder": {"kernel": -10.0, "bias": -1.0},
        "head": {"kernel": -100.0, "bias": -1.0},
    }


def test_leaves_that_are_none_take_no_part() -> None:
    """XS145: a frozen leaf, None in the trainable tree, that needs a rule or breaks the update."""
    optimizer = optimizers.by_path({"**/bias": "sgd", "**/kernel": "adam"})
    params = {"encoder": {"kernel": jnp.ones(2), "bias": None}, "head": {"kernel": None, "bias": jnp.ones(2)}}
    state = optimizer.init(params)
    updates, after = jax.jit(optimizer.update)(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_rates_of_several_optimizers_are_told_apart() -> None:
    """One rate that hides the other's, and a plateau that halves only one of them."""
    optimizer = optimizers.by_path({"**/bias": optimizers.sgd(0.5), "**": optimizers.adamw(0.25)})
    state = optimizer.init(arrays())
    names = {"learning_rate[**/bias]": 0.5, "learning_rate[**]": 0.25, "weight_decay": 0.0}
    assert {k: float(v) for k, v in optimizers.hyperparams(state).items()} == names
    one = optimizers.set_hyperparams(state, **{"learning_rate[**]": 1.0})
    assert {k: float(v) for k, v in optimizers.hyperparams(one).items()} == {**names, "learning_rate[**]": 1.0}
    both = optimizers.hyperparams(optimizers.set_hyperparams(state, learning_rate=2.0))
    assert [float(both["learning_rate[**/bias]"]), float(both["learning_rate[**]"])] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"**/bias": "sgd"}, "no rule for the leaf 'encoder/kernel'"),
        ({"**/scale": "sgd", "**": "adam"}, "names no leaf"),
        ({"**": "adam", "**/bias": "sgd"}, "takes no leaf"),
    ],
)
def test_rules_that_do_not_cover_the_leaves_are_refused(rules: Any, message: str) -> None:
    """A misspelt glob: its leaves silently follow another rule, or none."""
    with pytest.raises(ValueError, match=message):
        optimizers.by_path(rules).init(arrays())


def test_malformed_rules_are_refused_when_built() -> None:
    """A wrong optimizer found out in the first step."""
    with pytest.raises(ValueError, match="at least one rule"):
        optimizers.by_path({})
    with pytest.raises(ValueError, match="unknown optimizer 'adm'"):
        optimizers.by_path({"**": "adm"})


def test_optax_can_still_map_over_the_parameters_in_the_state() -> None:
    """Optax's tree_map_params initialises from a placeholder without leaves, which no rule names."""
    optimizer = optimizers.by_path({"**/bias": optimizers.sgd(0.1, momentum=0.9), "**": "adam"})
    state = optimizer.init(arrays())
    moved = optax.tree_map_params(optimizer, lambda x: x + 1, state)
    before, after = jax.tree.leaves(state), jax.tree.leaves(moved)
    changed = sum(bool((a != b).any()) for a, b in zip(before, after, strict=True))
    assert changed == 2 + 2 * 2


# Schedules.

COUNTS = [0, 1, 2, 5, 10, 20]
RATES = [
    (optimizers.linear_decay(0.1, warmup=2, steps=10), [0, 0.05, 0.1, 0.0625, 0, 0]),
    (optimizers.exponential_decay(0.1), [0.1, 0.09948838, 0.09897938, 0.09746794, 0.095, 0.09025]),
    (optimizers.exponential_decay(0.1, staircase=True), [0.1, 0.1, 0.1, 0.1, 0.095, 0.09025]),
    (optimizers.cosine_decay(0.1, alpha=0.1), [0.1, 0.09779754, 0.09140576, 0.055, 0.01, 0.01]),
    (optimizers.polynomial_decay(0.1), [0.1, 0.08119, 0.06436, 0.02575, 0.001, 0.001]),
    (optimizers.constant(0.1), [0.1] * 6),
]


@pytest.mark.parametrize(("schedule", "expected"), RATES)
def test_schedules_have_the_seeds_values(schedule: Any, expected: list[float]) -> None:
    """A decay factor in place of a rate (B61), or a decay that never ends."""
    jitted = jax.jit(schedule)
    np.testing.assert_allclose([float(jitted(jnp.int32(n))) for n in COUNTS], expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose([float(schedule(n)) for n in COUNTS], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("shape", "half"), [("cosine", 0.5), ("linear", 0.5), ("sqrt", 1 - 0.5**0.5)])
def test_shapes_of_the_final_decay(shape: Any, half: float) -> None:
    """XS078: a decay that starts early or does not reach its end."""
    schedule = optimizers.warmup_stable_decay(1.0, warmup=2, steps=20, decay_steps=8, end_value=0.2, decay=shape)
    expected = [0.2, 0.6, 1.0, 1.0, 1.0, 0.2 + 0.8 * half, 0.2, 0.2]
    np.testing.assert_allclose([float(schedule(n)) for n in (0, 1, 2, 11, 12, 16, 20, 30)], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optimizers.linear(0.1, warmup=11, steps=10),
        lambda: optimizers.cosine(0.1, warmup=-1, steps=10),
        lambda: optimizers.warmup_cosine(0.1, warmup=11, steps=10),
        lambda: optimizers.warmup_stable_decay(0.1, warmup=6, steps=10, decay_steps=6),
        lambda: optimizers.warmup_stable_decay(0.1, steps=10, decay_steps=6, decay="exponential"),
    ],
)
def test_schedules_that_do_not_fit_are_refused(make: Any) -> None:
    """A warm-up longer than the run: the rate never reaches its peak."""
    with pytest.raises(ValueError, match=r"warmup|decay"):
        make()
