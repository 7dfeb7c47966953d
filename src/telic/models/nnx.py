"""Flax NNX modules as models."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from telic.errors import ContractError
from telic.models.base import Call, Forward, absent_key, call_of, has_changed, nest, pick, settled
from telic.tree import fold_name
from telic.types import Key, Variables

CONSTANTS = "constants"
"""The collection of plain arrays among a module's attributes."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of a module's graph.

    Attributes:
      path: Collection and words, for example ``("params", "layers", "0", "kernel")``; for random state without the
        collection.
      kind: ``"key"`` or ``"count"`` for random state, else ``"array"``.
      shape: Shape of random state.
    """

    path: tuple[str, ...]
    kind: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class NNXModel:
    """An NNX module as a `Model`; make it with `adapt`.

    Random state is no part of the variables: each call sets the module's keys from `key` and the stream's path, and its
    counts to zero.
    """

    train_def: Any
    eval_def: Any
    leaves: tuple[Leaf, ...]
    call: Call
    sown: tuple[str, ...]
    arrays: dict[str, Any] | None
    keys: dict[tuple[str, ...], Any] | None

    def init(self, key: Key, inputs: Any) -> dict[str, Any]:
        """Give the weights the module already has."""
        del key, inputs
        if self.arrays is None:
            raise AssertionError("a structure without arrays has no init")
        return self.arrays

    def forward(self, variables: Variables, inputs: Any, *, train: bool, key: Key | None = None) -> Forward:
        """Run the module on a copy that has these variables.

        Raises:
          ContractError: The module draws random numbers and `key` is None; under jit, when the program is lowered.
        """
        source = absent_key() if key is None else key
        module = self._merge(variables, train=train, key=source)
        args, kwargs = self.call.arguments(inputs)
        if self.call.special.get("rngs", False) or ("rngs" in self.call.special and key is not None):
            kwargs["rngs"] = nnx.Rngs(source if key is None else fold_name(source, "rngs"))
        types = tuple(_sown_types(self.sown))

        def run(module: Any) -> Any:
            return module(*args, **kwargs, **self.call.switches(train))

        prediction, *captured = nnx.capture(run, *types)(module)
        recorded = [
            ((_collection(type(leaf)), *map(str, path)), leaf.get_raw_value())
            for state in captured
            for path, leaf in nnx.to_flat_state(state)
        ]
        return Forward(
            prediction=prediction,
            state=self._changed(module, variables) if train else {},
            sown=nest(recorded),
        )

    def bind(self, variables: Variables) -> Any:
        """Give the module with these variables in evaluation mode; its random streams start from its own keys."""
        return self._merge(variables, train=False, key=None)

    def held(self) -> dict[str, Any] | None:
        """Give the weights the module had when it was adapted."""
        return self.arrays

    def without_arrays(self) -> "NNXModel":
        """Give the same structure holding no array."""
        return dataclasses.replace(self, arrays=None, keys=None)

    def _merge(self, variables: Variables, *, train: bool, key: Key | None) -> Any:
        values = [self._value(leaf, variables, key) for leaf in self.leaves]
        return nnx.merge(self.train_def if train else self.eval_def, values)

    def _value(self, leaf: Leaf, variables: Variables, key: Key | None) -> Any:
        match leaf.kind:
            case "array":
                return pick(variables, leaf.path)
            case "count":
                return jnp.zeros(leaf.shape, jnp.uint32)
            case _ if key is None and self.keys is not None:
                return self.keys[leaf.path]
            case _:
                own = fold_name(jax.random.key(0) if key is None else key, "/".join(leaf.path))
                return jax.random.split(own, leaf.shape) if leaf.shape else own

    def _changed(self, module: Any, variables: Variables) -> dict[str, Any]:
        after = {tuple(map(str, path)): leaf for path, leaf in nnx.flatten(module)[1]}
        collections: dict[str, list[tuple[tuple[str, ...], Any]]] = {}
        for leaf in self.leaves:
            if leaf.kind == "array" and leaf.path[0] != "params":
                path = leaf.path[1:]
                collections.setdefault(leaf.path[0], []).append((path, _raw(after[path])))
        trees = {name: nest(items) for name, items in collections.items()}
        return {n: settled(t) for n, t in trees.items() if has_changed(t, variables[n])}


def adapt_nnx(module: nnx.Module, *, sown: tuple[str, ...]) -> NNXModel:
    """Adapt an NNX module; see `telic.models.adapt`. The module itself stays as it is."""
    copy: Any = nnx.clone(module)
    nnx.pop(copy, lambda _, leaf: isinstance(leaf, nnx.Variable) and _is_sown(type(leaf), sown))
    copy.train()
    train_def, flat = nnx.flatten(copy)
    copy.eval()
    eval_def, eval_flat = nnx.flatten(copy)
    if [path for path, _ in flat] != [path for path, _ in eval_flat]:
        raise ContractError(
            f"{type(module).__name__} must have the same variables in training and evaluation mode; "
            "train() and eval() may set attributes that are no arrays"
        )
    leaves: list[Leaf] = []
    arrays: list[tuple[tuple[str, ...], Any]] = []
    keys: dict[tuple[str, ...], Any] = {}
    for parts, leaf in flat:
        path = tuple(str(part) for part in parts)
        if isinstance(leaf, nnx.RngState):
            kind = "key" if isinstance(leaf, nnx.RngKey) else "count"
            leaves.append(Leaf(path, kind, jnp.shape(_raw(leaf))))
            if kind == "key":
                keys[path] = _raw(leaf)
            continue
        collection = _collection(type(leaf)) if isinstance(leaf, nnx.Variable) else CONSTANTS
        leaves.append(Leaf((collection, *path), "array"))
        arrays.append(((collection, *path), settled(_raw(leaf))))
    return NNXModel(
        train_def=train_def,
        eval_def=eval_def,
        leaves=tuple(leaves),
        call=call_of(module, special=("rngs",)),
        sown=sown,
        arrays={"params": {}, **nest(arrays)},
        keys=keys,
    )


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _collection(kind: type[nnx.Variable[Any]]) -> str:
    name = _name(kind)
    if name == "params" and not issubclass(kind, nnx.Param):
        raise ContractError(
            f"variables of type {kind.__name__} would be named 'params' but are no nnx.Param; "
            "subclass nnx.Param to have them trained, or give the class another name"
        )
    return name


def _name(kind: type[nnx.Variable[Any]]) -> str:
    """Give the collection of a kind of variable: Flax's name for it, or its class name in lower snake case."""
    if issubclass(kind, nnx.Param):
        return "params"
    try:
        return nnx.variable_name_from_type(kind)
    except ValueError:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).lower()


def _is_sown(kind: type[nnx.Variable[Any]], sown: tuple[str, ...]) -> bool:
    return issubclass(kind, nnx.Intermediate) or _name(kind) in sown


def _sown_types(sown: tuple[str, ...]) -> Iterator[type[nnx.Variable[Any]]]:
    """Give the types whose sown values are captured: Intermediate, its subclasses, and those named."""
    found: set[str] = set()
    for kind in _subclasses(nnx.Variable):
        if issubclass(kind, nnx.Perturbation) or issubclass(kind, nnx.Param | nnx.RngState):
            continue
        if _is_sown(kind, sown):
            found.add(_name(kind))
            yield kind
    for name in sown:
        if name not in found:
            yield nnx.variable_type_from_name(name, allow_register=True)


def _subclasses(kind: Any) -> list[type[nnx.Variable[Any]]]:
    # A class that inherits twice is listed once.
    direct: list[Any] = kind.__subclasses__()
    return list(dict.fromkeys([*direct, *(inner for k in direct for inner in _subclasses(k))]))
