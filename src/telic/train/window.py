"""The sums of an accumulation window: how a microbatch is folded in, and what a closed window gives.

Three ways, by what the loss is made of:

- *shared*: one denominator (`Mean`, arrays, scalars). The gradient of each microbatch's mean is added by its mass.
- *planned*: `Terms` whose masses are known for the whole window beforehand. One pass, one gradient sum.
- *replayed*: everything else. Microbatches are stored; when the window closes, the pooled statistics give the
  cotangent that is pulled back through each of them again, at the window's parameters and with its own key.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from telic import tree
from telic.errors import ContractError, ShapeError
from telic.mean import Rows
from telic.train import statistics as statistic
from telic.train.attempt import Attempt
from telic.train.state import Window
from telic.types import Array, Batch, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """Stored microbatches of one shape, stacked along a first dimension of K.

    Attributes:
      batch: The microbatches.
      read: The collections that each read and `Aux.variables` rewrites.
      attempt: Attempt index of each, int32 [K]: its key.
      step: Accepted microbatches before each, int32 [K].
      used: Whether the slot holds an accepted microbatch of this window, bool [K].
    """

    batch: Any
    read: Any
    attempt: Array
    step: Array
    used: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Start:
    """What a window whose unit of rejection is the window itself goes back to.

    Attributes:
      collections: Layer state at its first attempt.
      microbatches: Accepted microbatches then, int32.
      failed: Whether an attempt of it was rejected.
    """

    collections: Any
    microbatches: Array
    failed: Array


def _zeros(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def _zero() -> Array:
    return jnp.zeros((), jnp.int32)


def _observed(shapes: Attempt) -> dict[str, Any]:
    return {
        "effects": _zeros(
            jax.tree.map(lambda e: jax.ShapeDtypeStruct(e.shape, _sum_dtype(e.dtype)), shapes.aux.effects)
        ),
        "qk_stats": jax.tree.map(lambda q: jnp.full(q.shape, -jnp.inf, q.dtype), shapes.aux.qk_stats),
    }


def _sum_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def shared(shapes: Attempt, gradient: PyTree) -> Window:
    """Give an empty window for losses with one denominator."""
    return Window(
        _zero(), _zeros(gradient), _zeros(jax.eval_shape(statistic.canonical, shapes.statistics)), **_observed(shapes)
    )


def planned(shapes: Attempt, gradient: PyTree, collections: Mapping[str, Any], microbatches: Array) -> Window:
    """Give an empty window for `Terms` whose masses are planned."""
    sums = jax.eval_shape(statistic.canonical, shapes.statistics)
    return Window(
        _zero(),
        _zeros(gradient),
        _zeros(sums),
        planned=_zeros({name: mean.mass for name, mean in sums.items()}),
        stored=Start(tree.copy_leaves(dict(collections)), jnp.array(microbatches, copy=True), jnp.zeros((), bool)),
        **_observed(shapes),
    )


def replayed(
    shapes: Attempt,
    batch: Batch,
    collections: Mapping[str, Any],
    microbatches: Array,
    *,
    accumulate: int,
    own: bool,
) -> Window:
    """Give an empty window that stores its microbatches."""
    sums = jax.eval_shape(lambda s: statistic.canonical(s, own=own), shapes.statistics)
    read = {name: collections[name] for name in (shapes.aux.variables or {})}
    start = None
    if statistic.has_rows(shapes.statistics):
        start = Start(tree.copy_leaves(dict(collections)), jnp.array(microbatches, copy=True), jnp.zeros((), bool))
        sums = None
    return Window(
        _zero(),
        None,
        None if sums is None else _zeros(sums),
        stored=((_slots(batch, read, accumulate),), start),
        **_observed(shapes),
    )


def _slots(batch: Batch, read: PyTree, accumulate: int) -> Slots:
    def room(x: Any) -> Array:
        return jnp.zeros((accumulate, *jnp.shape(x)), jnp.asarray(x).dtype if not hasattr(x, "dtype") else x.dtype)

    return Slots(
        jax.tree.map(room, batch),
        jax.tree.map(room, read),
        jnp.zeros((accumulate,), jnp.int32),
        jnp.zeros((accumulate,), jnp.int32),
        jnp.zeros((accumulate,), bool),
    )


# -- fold --------------------------------------------------------------------------------------------------------


def add(window: Window, attempt: Attempt, accepted: Array) -> Window:
    """Fold a differentiated attempt in; every sum keeps its bits where it is not accepted."""
    sums = statistic.canonical(attempt.statistics)
    if window.planned is not None:
        gradient = jax.tree.map(jnp.add, window.gradient, attempt.gradient)
    else:
        gradient = jax.tree.map(lambda s, g: s + g * sums.mass.astype(g.dtype), window.gradient, attempt.gradient)
    new = dataclasses.replace(
        window, gradient=gradient, statistics=statistic.add(window.statistics, sums), **_seen(window, attempt)
    )
    return tree.select(accepted, new, window)


def store(
    window: Window,
    attempt: Attempt,
    accepted: Array,
    *,
    batch: Batch,
    variables: Mapping[str, Any],
    index: Array,
    step: Array,
    own: bool,
) -> Window:
    """Store a microbatch to be replayed, and add its statistics."""
    groups, start = window.stored
    read = {name: variables[name] for name in groups[0].read}
    batch = jax.tree.map(jnp.asarray, batch)
    shapes = [jnp.shape(x) for x in jax.tree.leaves(batch)]
    place = next(
        (i for i, g in enumerate(groups) if [x.shape[1:] for x in jax.tree.leaves(g.batch)] == shapes), len(groups)
    )
    if place == len(groups):
        if window.statistics is None:
            raise ShapeError(
                "a loss with Rows accumulates microbatches of one shape: drop the last smaller batch, choose a size "
                f"that divides the batch, or give Mean statistics; got leaves of shape {shapes}"
            )
        # Microbatches of another shape have slots of their own; the state keeps them from then on.
        groups = (*groups, _slots(batch, read, groups[0].used.shape[0]))
    group = groups[place]
    entry = Slots(batch, read, index, step, jnp.asarray(accepted))
    filled = jax.tree.map(lambda room, x: room.at[window.slot].set(x.astype(room.dtype)), group, entry)
    groups = tuple(filled if i == place else g for i, g in enumerate(groups))
    if window.statistics is None:
        sums = None
    else:
        added = statistic.add(window.statistics, statistic.canonical(attempt.statistics, own=own))
        sums = tree.select(accepted, added, window.statistics)
    seen = tree.select(accepted, _seen(window, attempt), {"effects": window.effects, "qk_stats": window.qk_stats})
    return dataclasses.replace(window, statistics=sums, stored=(groups, start), **seen)


def _seen(window: Window, attempt: Attempt) -> dict[str, Any]:
    return {
        "effects": jax.tree.map(lambda s, e: s + jnp.asarray(e, s.dtype), window.effects, attempt.aux.effects),
        "qk_stats": jax.tree.map(jnp.maximum, window.qk_stats, attempt.aux.qk_stats),
    }


# -- close -------------------------------------------------------------------------------------------------------

Replay = Callable[[PyTree, Batch, Mapping[str, Any], Array, Array], PyTree]
"""(trained, batch, read collections, attempt, step) -> canonical statistics of that microbatch."""


def summed_gradient(window: Window) -> tuple[Array, PyTree, Array]:
    """Give (loss, gradient, has_data) of a window that sums gradients, over the microbatches so far."""
    return shared_gradient(window) if window.planned is None else planned_gradient(window)


def shared_gradient(window: Window) -> tuple[Array, PyTree, Array]:
    """Give (loss, gradient, has_data) of a window with one denominator."""
    mass = window.statistics.mass
    safe = jnp.where(mass > 0, mass, 1)
    gradient = jax.tree.map(lambda g: g / safe.astype(g.dtype), window.gradient)
    return window.statistics.value(), gradient, window.statistics.has_data()


def planned_gradient(window: Window) -> tuple[Array, PyTree, Array]:
    """Give (loss, gradient, has_data) of a window whose masses were planned."""
    means = list(window.statistics.values())
    value = jnp.stack([m.value() for m in means]).sum()
    has_data = jnp.stack([m.has_data() for m in means]).any()
    return value, window.gradient, has_data & ~window.stored.failed


def kept_plan(window: Window) -> Array:
    """Say whether the masses of a planned window are those that were planned, to the rounding of their sums."""
    return jnp.stack(
        [jnp.abs(m.mass - window.planned[n]) <= 1e-3 * jnp.abs(m.mass) for n, m in window.statistics.items()]
    ).all()


def replayed_gradient(
    window: Window,
    trained: PyTree,
    *,
    replay: Replay,
    reduce: Callable[[PyTree], tuple[Array, Array]],
    scale: Any,
    count: int | None = None,
) -> tuple[Array, PyTree, Array]:
    """Give (loss, gradient, has_data) of a window whose microbatches are stored.

    Args:
      window: The window.
      trained: Trainable parameters, the same for every attempt of the window.
      replay: Runs a stored microbatch again.
      reduce: Pooled statistics to (value, has_data).
      scale: Loss scale, applied to the cotangent and taken out of the gradient.
      count: Attempts in the window when it is not full; needed for `Rows`, whose number of rows is static.
    """
    groups, start = window.stored
    if window.statistics is not None:
        pooled: PyTree = window.statistics
    else:
        pooled = _concatenated(groups[0], trained, replay, count)
    (value, has_data), cotangent = _cotangent(pooled, reduce, scale)
    gradient = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), trained)
    for group in groups:
        used = group if count is None else jax.tree.map(lambda x: x[:count], group)
        per_entry = _per_entry(cotangent, used.used.shape[0])
        gradient = _pull(gradient, trained, used, per_entry, replay)
    gradient = scale.unscale(gradient)
    if start is not None:
        has_data = has_data & ~start.failed
    return value, gradient, has_data


def _concatenated(group: Slots, trained: PyTree, replay: Replay, count: int | None) -> PyTree:
    """Run the stored microbatches and pool their statistics, rows in the order of attempts."""
    used = group if count is None else jax.tree.map(lambda x: x[:count], group)

    def one(_: None, entry: Slots) -> tuple[None, PyTree]:
        return None, replay(trained, entry.batch, entry.read, entry.attempt, entry.step)

    _, stacked = jax.lax.scan(one, None, used)

    def pool(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return Rows(leaf.values.reshape(-1, *leaf.values.shape[2:]))
        return leaf.sum(0, dtype=leaf.dtype)

    return jax.tree.map(pool, stacked, is_leaf=lambda x: isinstance(x, Rows))


def _cotangent(pooled: PyTree, reduce: Callable[[PyTree], tuple[Array, Array]], scale: Any) -> Any:
    """Give ((value, has_data), cotangent of the scaled value for each floating leaf, None elsewhere)."""
    floats = jax.tree.map(lambda x: x if tree.is_float(x) else None, pooled)

    def value_of(floats: PyTree) -> tuple[Array, tuple[Array, Array]]:
        value, has_data = reduce(tree.combine(pooled, floats))
        return scale.scale(value), (value, has_data)

    cotangent, answer = jax.grad(value_of, has_aux=True)(floats)
    return answer, cotangent


def _per_entry(cotangent: PyTree, entries: int) -> PyTree:
    """Give the cotangent of each entry: rows are dealt out, sums are the same for all."""

    def deal(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return Rows(leaf.values.reshape(entries, -1, *leaf.values.shape[1:]))
        return jnp.broadcast_to(leaf, (entries, *leaf.shape))

    return jax.tree.map(deal, cotangent, is_leaf=lambda x: isinstance(x, Rows))


def _pull(gradient: PyTree, trained: PyTree, group: Slots, cotangents: PyTree, replay: Replay) -> PyTree:
    """Add each used entry's pullback of its cotangent."""

    def one(total: PyTree, item: tuple[Slots, PyTree]) -> tuple[PyTree, None]:
        entry, cotangent = item

        def statistics_of(trained: PyTree) -> PyTree:
            out = replay(trained, entry.batch, entry.read, entry.attempt, entry.step)
            return jax.tree.map(lambda x: x if tree.is_float(x) else None, out)

        _, pull = jax.vjp(statistics_of, trained)
        (own,) = pull(cotangent)
        added = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, own)
        return tree.select(entry.used, added, total), None

    total, _ = jax.lax.scan(one, gradient, (group, cotangents))
    return total


def cleared(window: Window) -> Window:
    """Give the window with its sums empty; its slot and what it is made for stay."""
    zero = jax.tree.map(jnp.zeros_like, (window.gradient, window.statistics, window.planned, window.effects))
    stored = window.stored
    match stored:
        case Start():
            stored = dataclasses.replace(stored, failed=jnp.zeros_like(stored.failed))
        case (groups, start):
            groups = tuple(dataclasses.replace(g, used=jnp.zeros_like(g.used)) for g in groups)
            if start is not None:
                start = dataclasses.replace(start, failed=jnp.zeros_like(start.failed))
            stored = (groups, start)
        case _:
            pass
    return Window(
        window.slot,
        *zero[:3],
        effects=zero[3],
        qk_stats=jax.tree.map(lambda q: jnp.full_like(q, -jnp.inf), window.qk_stats),
        stored=stored,
    )


def holds_attempts(window: Window) -> bool:
    """Say whether attempts were made in a window since it was empty."""
    return not isinstance(window.slot, Tracer | jax.ShapeDtypeStruct) and int(window.slot) > 0


def same_kind(window: Window, empty: Window, accumulate: int) -> bool:
    """Say whether a window can go on as one of the kind of an empty one; an open one with other batch shapes can."""
    is_open = holds_attempts(window)
    if is_open and int(window.slot) >= accumulate:
        return False

    def form(w: Window) -> Any:
        stored = w.stored
        slots = None
        if isinstance(stored, tuple):
            groups, start = stored
            slots, stored = groups[0].used.shape, (None if is_open else groups, start)
        whole = dataclasses.replace(w, stored=stored)
        shapes = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(whole)]
        return jax.tree.structure(whole), shapes, slots

    return form(window) == form(empty)


def start_of(window: Window) -> Start | None:
    """Give what the window goes back to when it is the unit of rejection, else None."""
    match window.stored:
        case Start() as start:
            return start
        case (_, start):
            return start
        case _:
            return None


def with_start(window: Window, start: Start) -> Window:
    """Give the window with another start."""
    match window.stored:
        case Start():
            return dataclasses.replace(window, stored=start)
        case (groups, _):
            return dataclasses.replace(window, stored=(groups, start))
        case _:
            raise ContractError("this window has no start of its own")
