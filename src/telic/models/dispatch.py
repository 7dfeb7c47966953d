"""Which adapter a model gets."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from telic.errors import ContractError
from telic.models.base import Forward, Model
from telic.models.equinox import adapt_equinox, equinox_parts
from telic.models.linen import adapt_linen
from telic.models.nnx import adapt_nnx
from telic.models.pair import adapt_pair
from telic.types import Key, Variables

_FORMS = (
    "a Flax Linen module, a Flax NNX module, an Equinox module (with state: the pair that eqx.nn.make_with_state "
    "gives), a pair of functions (init(key, inputs) -> variables, apply(variables, inputs) -> prediction), or a "
    "constructor lambda key: Model(...)"
)


@dataclass(frozen=True, eq=False)
class ConstructedModel:
    """A constructor ``lambda key: Model(...)`` of an NNX or Equinox module as a `Model`; make it with `adapt`.

    The module is built inside the program that calls `init`, so no weight is computed or held outside of it.
    """

    make: Callable[[Key], Any]
    sown: tuple[str, ...]
    batched: bool

    def init(self, key: Key, inputs: Any) -> dict[str, Any]:
        """Build the module with this key and give its weights."""
        return self._build(key).init(key, inputs)

    def forward(self, variables: Variables, inputs: Any, *, train: bool, key: Key | None = None) -> Forward:
        """Run a module of the constructed structure."""
        return self._structure.forward(variables, inputs, train=train, key=key)

    def bind(self, variables: Variables) -> Any:
        """Give the constructed module with these weights for inference."""
        return self._structure.bind(variables)

    def held(self) -> None:
        """Give None: nothing is built before `init`."""
        return None

    def _build(self, key: Key) -> Any:
        built = self.make(key)
        adapted = _adapt_value(built, sown=self.sown, batched=self.batched)
        if adapted is None:
            raise ContractError(
                f"a constructor must return an NNX or Equinox module, got {type(built).__name__}; "
                "give a Linen module or a pair (init, apply) to adapt directly"
            )
        return adapted

    @functools.cached_property
    def _structure(self) -> Any:
        found: list[Any] = []

        def probe(key: Key) -> None:
            found.append(self._build(key).without_arrays())

        jax.eval_shape(probe, jax.eval_shape(lambda: jax.random.key(0)))
        return found[0]


def adapt(model: Any, *, sown: Sequence[str] = (), batched: bool = False) -> Model:
    """Give a model of any library as a `Model`: init, forward, bind and held over plain variables.

    Accepted are a Flax Linen module, a Flax NNX module, an Equinox module or the (module, state) of
    ``eqx.nn.make_with_state``, a pair of functions (init, apply), and a constructor ``lambda key: Model(...)`` of an
    NNX or Equinox module, which builds the weights in place. NNX and Equinox modules are their weights: `init` gives
    those. What the model is, and the module's own object, are not changed.

    Args:
      model: The model. One that is adapted already is returned as it is.
      sown: Collections that the model only records, such as ``("losses",)``. They are given in `Forward.sown` and are
        never part of the variables. "intermediates" always is one.
      batched: Whether an Equinox module takes whole batches. False maps it over the leading dimension.
    Raises:
      TypeError: The value is no model; the message says what is.
      ValueError: `batched` was given for a model that is no Equinox module.
    Example:
      >>> model = adapt(nn.Dense(3))
      >>> variables = model.init(jax.random.key(0), jax.numpy.ones((2, 4)))
      >>> model.forward(variables, jax.numpy.ones((2, 4)), train=False).prediction.shape
      (2, 3)
    """
    if isinstance(sown, str):
        raise TypeError(f"sown is a sequence of collection names, got the string {sown!r}; write sown=({sown!r},)")
    sown = tuple(sown)
    if isinstance(model, type):
        raise TypeError(_class_message(model))
    value = _adapt_value(model, sown=sown, batched=batched)
    if value is not None:
        return value
    if _is_constructor(model):
        return ConstructedModel(model, sown, batched)
    if batched:
        raise ValueError(f"batched=True is for Equinox modules, got {type(model).__name__}; leave it out")
    if isinstance(model, nn.Module):
        return adapt_linen(model, sown=sown)
    if _is_pair(model):
        return adapt_pair(*model, sown=sown)
    if isinstance(model, Model):
        if sown:
            raise ValueError("this model is adapted already; give sown= when it is adapted first")
        return model
    raise TypeError(f"a model is {_FORMS}; got {_describe(model)}")


def _adapt_value(model: Any, *, sown: tuple[str, ...], batched: bool) -> Any:
    """Adapt a module that holds its weights; None for anything else."""
    if isinstance(model, nnx.Module):
        if batched:
            raise ValueError("batched=True is for Equinox modules, and NNX modules take whole batches; leave it out")
        return adapt_nnx(model, sown=sown)
    parts = equinox_parts(model)
    return None if parts is None else adapt_equinox(*parts, batched=batched)


def _is_constructor(model: Any) -> bool:
    if isinstance(model, nn.Module) or not callable(model):
        return False
    try:
        parameters = inspect.signature(model).parameters.values()
    except ValueError:  # builtins without a signature
        return False
    required = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    return len(required) == 1 and required[0].kind is not inspect.Parameter.KEYWORD_ONLY


def _is_pair(model: Any) -> bool:
    if not isinstance(model, tuple) or len(model) != 2 or not all(map(callable, model)):  # pyright: ignore
        return False
    # A named tuple says what its functions are: an optax transformation is also two functions.
    return getattr(model, "_fields", ("init", "apply")) == ("init", "apply")  # pyright: ignore


def _class_message(kind: type) -> str:
    name = kind.__name__
    eqx = sys.modules.get("equinox")
    if issubclass(kind, nn.Module):
        return f"a model is a module, got the class {name}; write {name}(...) with its arguments"
    if issubclass(kind, nnx.Module):
        return f"a model is a module, got the class {name}; write lambda key: {name}(..., rngs=nnx.Rngs(key))"
    if eqx is not None and issubclass(kind, eqx.Module):
        return f"a model is a module, got the class {name}; write lambda key: {name}(..., key=key)"
    return f"a model is {_FORMS}; got the class {name}"


def _describe(model: Any) -> str:
    if callable(model):
        try:
            return f"a function with the signature {inspect.signature(model)}"
        except ValueError:
            return f"{model!r}"
    return f"{model!r} ({type(model).__name__})"
