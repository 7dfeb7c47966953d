"""What every adapted model is, and what the adapters share: reading signatures and naming leaves."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, runtime_checkable

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from telic.errors import ContractError
from telic.tree import path_name
from telic.types import Key, PyTree, Variables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward:
    """What one forward pass of a model gives.

    An objective function returns ``(loss, output)``, and the output is a Forward: the one it got, the last of several,
    or one with another prediction, ``output.replace(prediction=similarities)``. The prediction may be any pytree; it is
    what metrics read. The state becomes part of the next variables. When an objective runs the model more than once,
    the state of the output it returns is the one that counts.

    Attributes:
      prediction: What the model returned: an array, or a tuple or mapping of arrays.
      state: Whole collections other than ``params`` that changed, with the structure they have in the variables, for
        example ``{"batch_stats": ...}``. Empty in inference.
      sown: Collections that the model recorded in passing, for example ``{"intermediates": ...}`` or
        ``{"losses": ...}``. The objective may read them; they are never part of the variables.
    """

    prediction: Any
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sown: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def replace(self, **changes: Any) -> "Forward":
        """Give a copy with some fields changed; an unknown field raises TypeError."""
        return dataclasses.replace(self, **changes)


@runtime_checkable
class Model(Protocol):
    """An adapted model: pure functions over variables, the same for every library."""

    def init(self, key: Key, inputs: Any) -> dict[str, Any]:
        """Give the variables, ``{"params": ..., ...}``: collections of nested dictionaries with string keys.

        Args:
          key: PRNG key. A model value that already holds its weights gives those and does not use the key.
          inputs: One batch of inputs, or arrays of its shapes and dtypes.
        """
        ...

    def forward(self, variables: Variables, inputs: Any, *, train: bool, key: Key | None = None) -> Forward:
        """Run the model on a batch.

        Args:
          variables: Collections as `init` gave them. Collections the model does not have are ignored.
          inputs: One batch of inputs. A tuple is spread over the model's arguments when the model requires more than
            one positional argument; a mapping is spread by name when it has the names that the model requires and no
            other names than the model accepts. Anything else is the model's first argument.
          train: Whether dropout draws and running statistics move.
          key: PRNG key for this call. Needed where the model draws random numbers.
        """
        ...

    def bind(self, variables: Variables) -> Any:
        """Give a usable model of the library's own kind, with these variables, for inference."""
        ...

    def held(self) -> dict[str, Any] | None:
        """Give the variables the model value came with, or None when it has none."""
        ...


FLAGS: Mapping[str, bool] = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}
"""Parameter names that say whether a call trains, with the value that means yes."""


@dataclass(frozen=True)
class Call:
    """What a model's call accepts, read once from its signature.

    Attributes:
      required: Parameters for data without a default, in order.
      num_positional: How many of those can be given by position.
      accepted: All parameters for data that can be given by name.
      flags: Parameters that say whether the call trains, with the value that means yes.
      special: Parameters such as ``key`` that the adapter fills, with whether they lack a default.
    """

    required: tuple[str, ...]
    num_positional: int
    accepted: frozenset[str]
    flags: Mapping[str, bool]
    special: Mapping[str, bool]

    @staticmethod
    def of(
        fn: Callable[..., Any],
        *,
        skip: int,
        special: Sequence[str] = (),
        flags: Mapping[str, bool] = FLAGS,
    ) -> "Call":
        """Read a signature.

        Args:
          fn: The function that is called.
          skip: Leading parameters that are not data, such as ``self``.
          special: Names of parameters that the adapter fills itself.
          flags: Names that say whether the call trains, with the value that means yes.
        """
        parameters = list(inspect.signature(fn).parameters.values())[skip:]
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [p for p in parameters if p.kind in (*by_position, *by_name)]
        data = [p for p in named if p.name not in special and p.name not in flags]
        required = [p for p in data if p.default is inspect.Parameter.empty]
        return Call(
            required=tuple(p.name for p in required),
            num_positional=sum(p.kind in by_position for p in required),
            accepted=frozenset(p.name for p in data if p.kind in by_name),
            flags={p.name: flags[p.name] for p in named if p.name in flags},
            special={p.name: p.default is inspect.Parameter.empty for p in named if p.name in special},
        )

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Lay inputs out as (positional, keyword) arguments; the rule is in `Model.forward`.

        Raises:
          ContractError: A mapping has all of several required names, and others that the model does not accept; or
            the model requires more arguments than the inputs give.
        """
        if isinstance(inputs, tuple) and self.num_positional > 1:
            if len(inputs) < self.num_positional:  # pyright: ignore[reportUnknownArgumentType]
                raise self._too_few(f"a tuple of {len(inputs)}")  # pyright: ignore[reportUnknownArgumentType]
            return tuple(inputs), {}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if isinstance(inputs, Mapping) and self.required:
            given: dict[Any, Any] = dict(inputs)  # pyright: ignore[reportUnknownArgumentType]
            unknown = [name for name in given if name not in self.accepted]
            if all(name in given and name in self.accepted for name in self.required):
                if not unknown:
                    return (), given
                if len(self.required) > 1:
                    raise ContractError(
                        f"inputs have the names the model requires ({', '.join(self.required)}) and others that it "
                        f"does not accept: {', '.join(map(str, unknown))}. Drop them, or let the model take them."
                    )
            if len(self.required) > 1:
                raise self._too_few(f"a mapping with {', '.join(map(str, given)) or 'no names'}")
        if len(self.required) > 1:
            is_array = isinstance(inputs, jax.Array | np.ndarray)
            raise self._too_few(f"one array {jnp.shape(inputs)}" if is_array else f"one {type(inputs).__name__}")
        return (inputs,), {}

    def _too_few(self, got: str) -> ContractError:
        names = ", ".join(self.required)
        return ContractError(
            f"the model's call requires {len(self.required)} arguments ({names}), and a batch's inputs are {got}: give "
            f"inputs as a tuple in that order or as a mapping with those names, or give the others a default. A flag "
            f"for training is filled by telic when it is called {', '.join(FLAGS)}"
        )

    def switches(self, train: bool) -> dict[str, bool]:
        """Give the keyword arguments that say whether the call trains."""
        return {name: train if yes else not train for name, yes in self.flags.items()}


def call_of(model: Any, *, special: Sequence[str] = (), flags: Mapping[str, bool] = FLAGS) -> Call:
    """Read the signature of a module's ``__call__``.

    Raises:
      TypeError: The module has none.
    """
    if not callable(model):
        raise TypeError(
            f"{type(model).__name__} must define __call__(self, inputs) to be trained, and does not; "
            "add one that calls the method you mean"
        )
    return Call.of(type(model).__call__, skip=1, special=special, flags=flags)


def words(path: Sequence[Any]) -> tuple[str, ...]:
    """Give the words of a leaf's key path: dictionary keys, attribute names and indices as strings."""
    return tuple(path_name((part,)) for part in path)


def nest(leaves: Iterable[tuple[Sequence[str], Any]]) -> Any:
    """Build nested dictionaries from leaves and the words that lead to them; a leaf without words is the tree.

    Raises:
      ContractError: Two leaves have one name.
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves:
        if not path:
            return leaf
        inner = tree
        for word in path[:-1]:
            inner = inner.setdefault(word, {})
        if not isinstance(inner, dict) or path[-1] in inner:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ContractError(f"two leaves of the model have the name {'/'.join(path)}; rename one of them")
        inner[path[-1]] = leaf
    return tree


def pick(variables: Variables, path: Sequence[str]) -> Any:
    """Give the leaf that some words lead to.

    Raises:
      ContractError: The variables lack it.
    """
    inner: Any = variables
    for word in path:
        if not isinstance(inner, Mapping) or word not in inner:
            raise ContractError(
                f"the variables must have the leaf {'/'.join(path)}, and do not have it; "
                "start from the variables that init gave, and replace leaves in them"
            )
        inner = inner[word]  # pyright: ignore[reportUnknownVariableType]
    return inner  # pyright: ignore[reportUnknownVariableType]


def plain(tree: PyTree) -> Any:
    """Turn any pytree into nested dictionaries with string keys; `restored` turns it back."""
    return nest((words(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree))


def restored(tree: Any, like: PyTree) -> PyTree:
    """Give the leaves of a `plain` tree in the structure of another."""
    return jax.tree_util.tree_map_with_path(lambda path, _: pick(tree, words(path)), like)


def settled(tree: PyTree) -> PyTree:
    """Turn numbers, NumPy arrays and weakly typed arrays into arrays of a fixed dtype, so that state keeps its type."""
    return jax.tree.map(_settle, tree)


def _settle(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic):
        return jnp.asarray(leaf, dtype=jnp.result_type(leaf))
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        return jax.lax.convert_element_type(leaf, leaf.dtype)
    return leaf


def has_changed(new: PyTree, old: PyTree) -> bool:
    """Say whether a tree is another than it was; a leaf that is the same object has not changed."""
    new_leaves, new_def = jax.tree.flatten(new)
    old_leaves, old_def = jax.tree.flatten(old)
    return new_def != old_def or any(n is not o for n, o in zip(new_leaves, old_leaves, strict=True))


@functools.cache
def _absent_impl() -> Any:
    def draw(*_: Any) -> NoReturn:
        raise ContractError(
            "the model draws random numbers, but forward got no key; pass key=, or make the model draw in training only"
        )

    return jax.extend.random.define_prng_impl(
        key_shape=(1,),
        seed=lambda _: jnp.zeros((1,), jnp.uint32),
        split=lambda _, shape: jnp.zeros((*shape, 1), jnp.uint32),
        fold_in=lambda key, _: key,
        random_bits=draw,
        name="absent",
        tag="absent",
    )


def absent_key() -> Key:
    """Give a key that may be passed on and split, and that raises ContractError when numbers are drawn from it.

    Models carry and split their keys in inference too, where nothing draws. A constant key would let a forgotten key
    pass unnoticed and give the same numbers at every call.
    """
    return jax.random.wrap_key_data(jnp.zeros((1,), jnp.uint32), impl=_absent_impl())
