"""Flax Linen modules as models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import errors
from flax import linen as nn
from flax.core import DenyList, meta

from telic.models.base import Call, Forward, call_of, has_changed, settled
from telic.tree import as_plain, fold_name, path_name
from telic.types import Key, Variables


@dataclass(frozen=True, eq=False)
class LinenModel:
    """A Linen module as a `Model`; make it with `adapt`.

    Collections that hold only what the module sows are found by what sowing does, tuples that grow with every call, and
    left out of the variables. A collection sown with a reduce function of its own has to be named in `sown`.
    """

    module: nn.Module
    call: Call
    sown: tuple[str, ...]

    def init(self, key: Key, inputs: Any) -> dict[str, Any]:
        """Initialise in training mode. The parameters are those of ``module.init(key, inputs)``."""
        boxed = self.module.init(
            {"params": key, "dropout": fold_name(key, "dropout")},
            method=self._runner(inputs, train=True),
            mutable=DenyList(("intermediates", "perturbations", *self.sown)),
        )
        variables: dict[str, Any] = {"params": {}, **_plain(boxed)}
        grown = self._growing(variables, inputs, key)
        return {name: settled(tree) for name, tree in variables.items() if name not in grown}

    def logical_axes(self, inputs: Any) -> dict[str, tuple[str | None, ...]]:
        """Give the names of each parameter's dimensions, by leaf, where Flax's partitioning gave them some."""
        key = jax.random.key(0)
        boxed = jax.eval_shape(
            lambda: self.module.init({"params": key, "dropout": key}, method=self._runner(inputs, train=True))
        )
        found = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda x: isinstance(x, meta.AxisMetadata))
        return {path_name(path): tuple(x.names) for path, x in found if isinstance(x, meta.Partitioned)}

    def forward(self, variables: Variables, inputs: Any, *, train: bool, key: Key | None = None) -> Forward:
        """Run the module; any stream of random numbers it asks for works when there is a key.

        Raises:
          flax.errors.InvalidRngError: The module draws random numbers and `key` is None.
        """
        given = {k: v for k, v in as_plain(variables).items() if k not in ("intermediates", *self.sown)}
        # Collections that are absent may be made only by sowing: statistics that were forgotten must not be made
        # afresh at every call, so Flax is left to say that they are missing.
        fixed = {"params", "perturbations"} | ({"batch_stats"} - given.keys() if train else {"batch_stats", *given})
        prediction, changed = self._apply(given, inputs, train, key, DenyList(tuple(sorted(fixed))))
        changed = {name: tree for name, tree in _plain(changed).items() if jax.tree.leaves(tree)}
        return Forward(
            prediction=prediction,
            state={n: settled(t) for n, t in changed.items() if n in given and has_changed(t, given[n])},
            sown={n: t for n, t in changed.items() if n not in given},
        )

    def bind(self, variables: Variables) -> nn.Module:
        """Give ``module.bind(variables)``; its calls still take the module's own training flag."""
        return self.module.bind(as_plain(variables))

    def held(self) -> None:
        """Give None: a Linen module is a description without weights."""
        return None

    def _apply(self, variables: Variables, inputs: Any, train: bool, key: Key | None, mutable: Any) -> Any:
        # Streams that are not named here draw from "params", each with its own count.
        rngs = {} if key is None else {name: fold_name(key, name) for name in ("params", "dropout")}
        try:
            return self.module.apply(variables, rngs=rngs, mutable=mutable, method=self._runner(inputs, train=train))
        except errors.InvalidRngError as error:
            if key is None:
                error.add_note("forward was called without a key; pass key= to a model that draws random numbers")
            raise

    def _runner(self, inputs: Any, *, train: bool) -> Callable[[Any], Any]:
        # The module's arguments stay in here: given to init or apply, one named "method" would be taken for theirs.
        args, kwargs = self.call.arguments(inputs)

        def run(module: Any) -> Any:
            try:
                return module(*args, **kwargs, **self.call.switches(train))
            except ValueError as error:
                if "use_running_average" in str(error) or "deterministic" in str(error):
                    error.add_note(
                        "A module with BatchNorm or Dropout takes a flag, which telic sets: write "
                        "def __call__(self, x, train: bool) and pass use_running_average=not train, "
                        "deterministic=not train"
                    )
                raise

        return run

    def _growing(self, variables: Variables, inputs: Any, key: Key) -> set[str]:
        tuples = [name for name, tree in variables.items() if name != "params" and _has_tuple(tree)]
        if not tuples:
            return set()
        mutable = DenyList(("params", "perturbations"))
        after = jax.eval_shape(lambda given: _plain(self._apply(given, inputs, True, key, mutable)[1]), variables)
        return {n for n in tuples if jax.tree.structure(after[n]) != jax.tree.structure(variables[n])}


def adapt_linen(module: nn.Module, *, sown: tuple[str, ...]) -> LinenModel:
    """Adapt a Linen module; see `telic.models.adapt`."""
    return LinenModel(module, call_of(module), sown)


def _plain(collections: Any) -> dict[str, Any]:
    return as_plain(meta.unbox(collections))


def _has_tuple(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(_has_tuple(inner) for inner in tree.values())  # pyright: ignore[reportUnknownVariableType]
    return isinstance(tree, tuple)
