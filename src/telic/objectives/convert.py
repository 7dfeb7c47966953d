"""Turning what a user wrote into an objective, or saying what to write instead."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telic import losses
from telic.contract import Objective, is_marked
from telic.objectives.from_model import FunctionObjective, Supervised

_FORMS = (
    "a loss is (targets, prediction), an objective function is (forward, variables, inputs, targets) -> (loss, "
    "output), marked with @telic.objective where its signature does not show it"
)


def as_objective(x: Any, model: Any = None) -> Objective:
    """Turn a loss, an objective function or an `Objective` into an `Objective`.

    Args:
      x: An `Objective`; a loss by name; a loss function; a list or mapping of (loss, weight) for several outputs; an
        objective function of four arguments.
      model: The model it is for; not needed for an `Objective`.
    Raises:
      TypeError: It is none of these; both function forms are named.
    """
    if isinstance(x, Objective):
        return x
    return supervised(model, x)


def supervised(model: Any, loss: Any, *, variables: Any = None, frozen: Mapping[str, Any] | None = None) -> Objective:
    """Build an objective from a model and a loss.

    Args:
      model: A Flax Linen, Flax NNX or Equinox module, a constructor ``lambda key: Model(...)``, or a pair of functions
        ``(init, apply)``.
      loss: A loss by name, a function ``(targets, prediction)``, a list or mapping of (loss, weight) for tuple or dict
        predictions, or a function ``(forward, variables, inputs, targets) -> (loss, output)``.
      variables: Weights to start from, full or partial: ``{"params": ...}``. What is missing or unused is listed.
      frozen: Trees by name that an objective function reads as ``variables[name]``, such as a teacher's weights.
    Raises:
      TypeError: The loss has none of these forms.
    Example:
      >>> objective = supervised((lambda key, x: {"w": 0.0}, lambda params, x: params["w"] * x), "mean_squared_error")
    """
    if model is None:
        raise TypeError("a loss needs a model: supervised(model, loss), or as_objective(loss, model)")
    if isinstance(loss, Objective):
        raise TypeError("that is an Objective already: use it as it is, as in telic.Trainer(objective, optimizer)")
    if loss is None:
        return Supervised(model, None, variables=variables, frozen=frozen)
    if isinstance(loss, str):
        return Supervised(model, losses.get(loss), variables=variables, frozen=frozen)
    if isinstance(loss, Mapping | Sequence):
        return Supervised(model, losses.weighted(loss), variables=variables, frozen=frozen)
    match _form(loss):
        case 2:
            return Supervised(model, loss, variables=variables, frozen=frozen)
        case _:
            return FunctionObjective(model, loss, variables=variables, frozen=frozen)


def _form(fn: Any) -> int:
    """Give 2 for a loss function and 4 for an objective function.

    Raises:
      TypeError: Neither, or a loss with Optax's order of arguments.
    """
    if not callable(fn):
        raise TypeError(f"expected a loss or an objective, got {type(fn).__name__} {fn!r}; {_FORMS}")
    if inspect.isclass(fn) and issubclass(fn, Objective):
        raise TypeError(f"got the class {fn.__name__}: pass an instance, {fn.__name__}(...)")
    bare = _unwrap(fn)
    if is_marked(fn) or is_marked(bare):
        return 4
    name = getattr(bare, "__name__", type(bare).__name__)
    if str(getattr(bare, "__module__", "")).startswith("optax"):
        raise TypeError(
            f"optax losses take (predictions, targets), a loss here takes (targets, prediction): write "
            f"`lambda targets, prediction: optax.{name}(prediction, targets)`, or a loss by name "
            f"({', '.join(sorted(losses.NAMES)[:4])}, ...)"
        )
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        raise TypeError(f"cannot read the signature of {name}; {_FORMS}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    if required and required[0].name in ("logits", "prediction", "predictions", "scores", "y_pred"):
        shown = ", ".join(p.name for p in required)
        raise TypeError(
            f"{name}({shown}) has its arguments the other way round: a loss takes (targets, prediction); write "
            f"`lambda targets, prediction: {name}(prediction, targets)`"
        )
    if len(required) in (2, 4) and not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return len(required)
    raise TypeError(f"{name}{inspect.signature(fn)} is neither a loss nor an objective function: {_FORMS}")


def _unwrap(fn: Callable[..., Any]) -> Any:
    """See through functools.partial, jax.jit, bound methods and callable objects."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif (wrapped := getattr(fn, "__wrapped__", None)) is not None:
            fn = wrapped
        elif inspect.ismethod(fn):
            fn = fn.__func__
        else:
            return fn
