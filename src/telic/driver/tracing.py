"""What a traced step is made of: constants, convolutions, leaves it hands on; and what this XLA knows."""

import functools
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from telic.errors import CaptureError, CaptureWarning
from telic.types import PyTree

LARGE_CONSTANT_BYTES = 2**20
"""A constant in the program above this size is warned about."""


def check_constants(closed: Any, program: Any) -> None:
    """Look through a traced program, sub-programs included, for arrays compiled in as constants.

    Raises:
      CaptureError: A captured array is one of the model's own weights.
    """
    held = {id(x) for x in jax.tree.leaves(getattr(program, "held_leaves", lambda: ())())}
    for constant in _constants(closed):
        size = getattr(constant, "nbytes", 0)
        if id(constant) in held:
            raise CaptureError(
                f"the program captures the model's own weights ({constant.dtype}{list(constant.shape)}) as constants: "
                "they would never be trained. Read them from `variables`, and return them from held_variables"
            )
        if size > LARGE_CONSTANT_BYTES:
            warnings.warn(
                f"an array of {size / 2**20:.1f} MiB ({constant.dtype}{list(constant.shape)}) is compiled into the "
                "program as a constant. Return it from held_variables, or pass frozen={'name': tree} to supervised",
                CaptureWarning,
                stacklevel=2,
            )


def _constants(closed: Any) -> list[Any]:
    """Give the arrays that a traced program, sub-programs included, holds as constants."""
    found: list[Any] = []
    for program in _programs(closed):
        found += [c for c in getattr(program, "consts", ()) if hasattr(c, "nbytes")]
        literals = (v for eqn in program.eqns for v in eqn.invars if isinstance(v, jax.extend.core.Literal))
        found += [v.val for v in literals if hasattr(v.val, "nbytes")]
    return found


def _programs(closed: Any) -> Iterator[Any]:
    """Give a traced program and its sub-programs. With JAX 0.12 a closed program and an open one are one class."""
    seen: set[int] = set()
    todo: list[Any] = [closed]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr):
            yield item
            todo += [value for eqn in item.eqns for value in eqn.params.values()]
        elif isinstance(item, tuple | list):
            todo += list(item)


def uses_convolution(closed: Any) -> bool:
    """Say whether a traced program, sub-programs included, holds a convolution."""
    return any(eqn.primitive.name == "conv_general_dilated" for p in _programs(closed) for eqn in p.eqns)


_RANDOM = {"random_bits", "random_gamma", "rng_bit_generator", "rng_uniform", "threefry2x32"}
"""Operations that draw random numbers."""


def draws(eqn: Any) -> bool:
    """Say whether an operation draws random numbers, or is a function that does."""
    if eqn.primitive.name in _RANDOM:
        return True
    return any(e.primitive.name in _RANDOM for p in _programs(tuple(eqn.params.values())) for e in p.eqns)


@functools.lru_cache(typed=True)
def knows_option(name: str, value: Any = True) -> bool:
    """Say whether this XLA knows a compile option and a value of it."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(jnp.zeros(())).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options for XLA that it does not know, before it is asked to compile a step with them.

    Raises:
      ValueError: XLA knows no such option, or not with this value.
    """
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str) or not knows_option(name, value):
            here = f"{jax.default_backend()}, jaxlib {metadata.version('jaxlib')}"
            raise ValueError(
                f"compiler_options: XLA here ({here}) knows no option {name!r} with the value {value!r}; take it out, "
                "or give one that this version has"
            )


def unwritten(traced: Any, state: PyTree) -> tuple[bool, ...]:
    """Say of each leaf of a state whether a traced step gives it back as it was given.

    They are no tree like the state: a user's state may check what it is made of.
    """
    pairs = zip(traced.jaxpr.invars, _origins(traced.jaxpr), strict=False)
    return tuple(before is after for before, after in pairs)[: jax.tree.structure(state).num_leaves]


def _origins(program: Any) -> list[Any]:
    """Give a program's results, and in place of those that a function in it hands on, what that was given."""
    handed: dict[Any, Any] = {}
    for eqn in program.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"].jaxpr
            given = dict(zip(inner.invars, eqn.invars, strict=True))
            # A literal is no variable, and cannot be looked up.
            results = [given.get(x) if isinstance(x, jax.extend.core.Var) else None for x in _origins(inner)]
            handed |= {out: came for out, came in zip(eqn.outvars, results, strict=True) if came is not None}
    return [handed.get(x, x) if isinstance(x, jax.extend.core.Var) else x for x in program.outvars]
