"""Equinox modules as models. Equinox is optional and is loaded only when a value of its own is adapted."""

import dataclasses
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from telic.errors import ContractError
from telic.models.base import FLAGS, Call, Forward, absent_key, call_of, has_changed, nest, pick, settled, words
from telic.tree import leading_dimension
from telic.types import Key, Variables

CONSTANTS = "constants"
"""The collection of arrays that are not floating-point: integers, booleans, keys."""

STATE = "state"
"""The collection of what an ``eqx.nn.State`` holds."""

AXIS = "batch"
"""Name of the mapped axis, for layers such as ``eqx.nn.BatchNorm(axis_name="batch")``."""


@dataclass(frozen=True, eq=False)
class EquinoxModel:
    """An Equinox module as a `Model`; make it with `adapt`.

    The module maps one example and is mapped over the leading dimension, with the axis name "batch"; `batched` says
    that it takes whole batches. Training sets every inference flag of the module False, inference sets it True.
    """

    static: Any
    treedef: Any
    names: tuple[tuple[str, ...], ...]
    state_def: Any
    state_names: tuple[tuple[str, ...], ...]
    call: Call
    batched: bool
    arrays: dict[str, Any] | None

    def init(self, key: Key, inputs: Any) -> dict[str, Any]:
        """Give the weights the module already has."""
        del key, inputs
        if self.arrays is None:
            raise AssertionError("a structure without arrays has no init")
        return self.arrays

    def forward(self, variables: Variables, inputs: Any, *, train: bool, key: Key | None = None) -> Forward:
        """Run the module; each example gets its own key.

        Raises:
          ContractError: The module draws from a key that it requires, and `key` is None; under jit, when the program is
            lowered.
        """
        import equinox as eqx

        module, state = self._merge(variables, train=train)

        def one(example: Any, key: Key | None) -> tuple[Any, Any]:
            args, kwargs = self.call.arguments(example)
            if key is not None:
                kwargs["key"] = key
            if state is None:
                return module(*args, **kwargs, **self.call.switches(train)), None
            # A State may be used once, and tracing may run this function more than once.
            fresh = jax.tree.unflatten(self.state_def, jax.tree.leaves(state))
            returned = module(*args, state=fresh, **kwargs, **self.call.switches(train))
            match returned:
                case (prediction, eqx.nn.State() as after):
                    return prediction, after
                case _:
                    raise ContractError(
                        f"a stateful Equinox module must return (prediction, state), got {type(returned).__name__}"
                    )

        own = self._own_key(key)
        if self.batched:
            prediction, after = one(inputs, own)
        else:
            keys = None if own is None else jax.random.split(own, _rows(inputs))
            mapped = jax.vmap(one, in_axes=(0, None if keys is None else 0), out_axes=(0, None), axis_name=AXIS)
            try:
                prediction, after = mapped(inputs, keys)
            except ValueError as error:
                if state is not None and "out_axes" in str(error):
                    error.add_note(
                        f"the state must be one for the whole batch; combine it over the examples with "
                        f"jax.lax.pmean(..., {AXIS!r})"
                    )
                raise
        return Forward(prediction=prediction, state=self._changed(after, variables) if train else {})

    def bind(self, variables: Variables) -> Any:
        """Give the module with these weights in inference mode; (module, state) if it was given with a state."""
        module, state = self._merge(variables, train=False)
        return module if state is None else (module, state)

    def held(self) -> dict[str, Any] | None:
        """Give the weights the module came with."""
        return self.arrays

    def without_arrays(self) -> "EquinoxModel":
        """Give the same structure holding no array."""
        return dataclasses.replace(self, arrays=None)

    def _own_key(self, key: Key | None) -> Key | None:
        if "key" not in self.call.special:
            return None
        return absent_key() if key is None and self.call.special["key"] else key

    def _merge(self, variables: Variables, *, train: bool) -> tuple[Any, Any]:
        import equinox as eqx

        arrays = jax.tree.unflatten(self.treedef, [pick(variables, name) for name in self.names])
        module = eqx.nn.inference_mode(eqx.combine(arrays, self.static), value=not train)
        if self.state_def is None:
            return module, None
        return module, jax.tree.unflatten(self.state_def, [pick(variables, name) for name in self.state_names])

    def _changed(self, after: Any, variables: Variables) -> dict[str, Any]:
        if after is None:
            return {}
        state = nest(zip(self.state_names, jax.tree.leaves(after), strict=True))
        return {n: settled(tree) for n, tree in state.items() if has_changed(tree, variables[n])}


def equinox_parts(model: Any) -> tuple[Any, Any] | None:
    """Give (module, state or None) when a value is an Equinox module or a pair of one and its state, else None."""
    eqx: Any = sys.modules.get("equinox")  # whoever has a value of Equinox has loaded it
    if eqx is None:
        return None
    match model:
        case (module, eqx.nn.State() as state) if isinstance(module, eqx.Module):
            return module, state
        case eqx.Module():
            return model, None
        case _:
            return None


def adapt_equinox(module: Any, state: Any, *, batched: bool) -> EquinoxModel:
    """Adapt an Equinox module and its state, or None; see `telic.models.adapt`.

    Raises:
      TypeError: A stateful module came without its state.
    """
    import equinox as eqx

    is_index = lambda x: isinstance(x, eqx.nn.StateIndex)  # noqa: E731
    name = type(module).__name__
    call = call_of(module, special=("key", "state"), flags=_flags(module))
    is_stateful = any(map(is_index, jax.tree.leaves(module, is_leaf=is_index))) or call.special.get("state", False)
    if state is None and is_stateful:
        raise TypeError(
            f"{name} keeps state, so it must come with it: adapt(eqx.nn.make_with_state({name})(...)), "
            "which is a pair (module, state)"
        )
    arrays, static = eqx.partition(module, eqx.is_array)
    flat, treedef = jax.tree_util.tree_flatten_with_path(arrays)
    names = tuple(("params" if eqx.is_inexact_array(x) else CONSTANTS, *words(path)) for path, x in flat)
    state_names = () if state is None else _state_names(state)
    values = [settled(x) for x in (*(x for _, x in flat), *jax.tree.leaves(state))]
    return EquinoxModel(
        static=static,
        treedef=treedef,
        names=names,
        state_def=None if state is None else jax.tree.structure(state),
        state_names=state_names,
        call=call,
        batched=batched,
        arrays={"params": {}, **nest(zip((*names, *state_names), values, strict=True))},
    )


def _flags(module: Any) -> Mapping[str, bool]:
    # Equinox' own layers take the deprecated `deterministic` beside `inference`.
    if type(module).__module__.startswith("equinox."):
        return {"inference": False}
    return {**FLAGS, "inference": False}


def _state_names(state: Any) -> tuple[tuple[str, ...], ...]:
    """Name the leaves of a State by the attributes of the layers they belong to."""
    values, markers = state.tree_flatten()
    names: list[tuple[str, ...]] = []
    for i, (value, marker) in enumerate(zip(values, markers, strict=True)):
        # make_with_state marks a leaf with "Class.layers[0].norm.index"; State(model) with a bare object.
        parts = re.findall(r"[^.\[\]'\"]+", marker)[1:] if isinstance(marker, str) else []
        owner = tuple(parts) or (str(i),)
        names += [(STATE, *owner, *words(path)) for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    return tuple(names)


def _rows(inputs: Any) -> int:
    rows = leading_dimension(inputs)
    if rows is None:
        raise ContractError(
            "an Equinox module is mapped over the leading dimension of its inputs, and they have none; "
            "use adapt(module, batched=True) for a module that takes the inputs as they are"
        )
    return rows
