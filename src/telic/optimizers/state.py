"""Reading and changing the hyperparameters that live in an optimizer's state."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from telic.errors import unknown_name
from telic.types import Array, PyTree


class _Found(NamedTuple):
    """One hyperparameter: its name in its own state, the words that lead to that state, its value."""

    name: str
    where: str
    value: Array
    scheduled: bool


def hyperparams(opt_state: PyTree) -> dict[str, Array]:
    """Give the hyperparameters held in an optimizer state, by name.

    Args:
      opt_state: State of any optimizer; injected hyperparameters are found at any depth.
    Returns:
      Scalars by name. Where several optimizers hold one name, each comes as ``learning_rate[where]``, where `where` is
      the rule of `by_path` or the position in a chain. A scheduled rate is that of the last update (before any, of the
      first), without the factor ``learning_rate_scale``.
    """
    return {key: found.value for key, found in _keyed(opt_state).items()}


def set_hyperparams(opt_state: PyTree, **values: Any) -> PyTree:
    """Give an optimizer state with hyperparameters changed; the next update uses them.

    Args:
      opt_state: State of any optimizer.
      **values: New scalars, by the names that `hyperparams` gives. A name that several optimizers hold sets all of
        them; ``**{"learning_rate[where]": x}`` sets one. Dtypes and placement stay, so nothing compiles again.
    Raises:
      ValueError: A name is unknown (the known ones are listed), follows a schedule, or its value is not a scalar.
    Example:
      >>> import jax.numpy as jnp
      >>> from telic import optimizers
      >>> state = set_hyperparams(optimizers.sgd().init({"w": jnp.ones(2)}), learning_rate=0.5)
      >>> float(hyperparams(state)["learning_rate"])
      0.5
    """
    known = _keyed(opt_state)
    new: dict[tuple[str, str], Any] = {}
    for key, value in values.items():
        targets = [found for full, found in known.items() if key in (full, found.name)]
        if not targets:
            raise unknown_name("hyperparameter", key, known)
        for found in targets:
            if found.scheduled:
                raise ValueError(
                    f"{key} follows a schedule, which would set it back at the next update; "
                    "set learning_rate_scale, a factor on the schedule, instead"
                )
            new[found.where, found.name] = value

    def change(where: str, name: str, old: Any) -> Any:
        return _like(old, new[where, name], name) if (where, name) in new else old

    return _rebuild(opt_state, "", change)


def _keyed(opt_state: PyTree) -> dict[str, _Found]:
    found = list(_walk(opt_state, ""))
    times = Counter(f.name for f in found)
    return {f.name if times[f.name] == 1 else f"{f.name}[{f.where}]": f for f in found}


def _walk(state: PyTree, where: str) -> Iterator[_Found]:
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_injected):
        if not _is_injected(node):
            continue
        here = _join(where, path)
        scheduled = getattr(node, "hyperparams_states", {})
        for name, value in node.hyperparams.items():
            yield _Found(name, here, value, name in scheduled)
        yield from _walk(node.inner_state, here)


def _rebuild(state: PyTree, where: str, change: Callable[[str, str, Any], Any]) -> PyTree:
    def one(path: Any, node: Any) -> Any:
        if not _is_injected(node):
            return node
        here = _join(where, path)
        return node._replace(
            hyperparams={name: change(here, name, value) for name, value in node.hyperparams.items()},
            inner_state=_rebuild(node.inner_state, here, change),
        )

    return jax.tree_util.tree_map_with_path(one, state, is_leaf=_is_injected)


class _Injected(NamedTuple):
    """What both of Optax's states with injected hyperparameters have."""

    count: Any
    hyperparams: Mapping[str, Any]
    inner_state: Any


def _is_injected(node: Any) -> TypeGuard[_Injected]:
    return isinstance(node, optax.InjectStatefulHyperparamsState | optax.InjectHyperparamsState)


def _join(where: str, path: Any) -> str:
    """Name a place by the keys and positions that lead to it; the attributes of Optax's states say nothing."""
    words = [where] if where else []
    for part in path:
        match part:
            case jax.tree_util.DictKey():
                words.append(str(part.key))
            case jax.tree_util.SequenceKey():
                words.append(str(part.idx))
            case _:
                pass
    return "/".join(words)


def _like(old: Any, value: Any, name: str) -> Array:
    """Give a value in the dtype and placement of the one it replaces."""
    if not isinstance(value, int | float | np.number | np.ndarray | jax.Array) or jnp.ndim(value) != 0:
        raise ValueError(f"{name} must be a number or a scalar array, got {value!r}")
    if isinstance(old, Tracer) or isinstance(value, Tracer):
        return jnp.asarray(value).astype(old.dtype)
    new = np.asarray(value).astype(jnp.result_type(old))
    if isinstance(old, jax.Array) and old.committed:
        return jax.device_put(new, old.sharding)
    return jnp.asarray(new)
