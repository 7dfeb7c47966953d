"""Mixed precision: in which dtypes to hold, compute and give values, and scaling the loss for float16 gradients."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from telic.errors import unknown_name
from telic.mean import wide
from telic.types import Array, PyTree

DTYPES: Mapping[str, Any] = MappingProxyType(
    {
        "bfloat16": np.dtype(jnp.bfloat16),
        "float16": np.dtype(np.float16),
        "float32": np.dtype(np.float32),
        "float64": np.dtype(np.float64),
    }
)
"""The dtypes a policy may name."""


@dataclass(frozen=True)
class Policy:
    """The dtypes of parameters, of computation and of outputs. None leaves a value as it is.

    Only real floating-point leaves are cast: integers, booleans, complex numbers and PRNG keys pass.

    Args:
      params: Dtype in which parameters are held and updated.
      compute: Dtype of parameters and inputs inside the forward pass.
      output: Dtype of what the forward pass gives.
    Example:
      >>> Policy.parse("bfloat16").compute
      dtype(bfloat16)
    """

    params: Any = None
    compute: Any = None
    output: Any = None

    def __post_init__(self) -> None:
        for name in ("params", "compute", "output"):
            object.__setattr__(self, name, _float_dtype(name, getattr(self, name)))

    @staticmethod
    def parse(text: str) -> "Policy":
        """Read ``params=float32,compute=bfloat16,output=float32``, or one dtype's name.

        A name alone means: compute in it, hold parameters and give outputs in float32 (float64 for float64).

        Raises:
          ValueError: A key or dtype is unknown, or a key comes twice.
        """
        if "=" not in text:
            compute = _float_dtype("compute", text.strip())
            outer = np.promote_types(np.float32, compute) if compute == np.float64 else np.dtype(np.float32)
            return Policy(outer, compute, outer)
        parts: dict[str, str] = {}
        for part in text.split(","):
            name, equals, dtype = (word.strip() for word in part.partition("="))
            if not equals:
                raise ValueError(f"a precision policy is written 'params=float32,compute=bfloat16', got {text!r}")
            if name not in ("params", "compute", "output"):
                raise unknown_name("part of a precision policy", name, ("params", "compute", "output"))
            if name in parts:
                raise ValueError(f"precision policy {text!r} names {name} twice")
            parts[name] = dtype
        return Policy(**parts)

    def cast_params(self, tree: PyTree) -> PyTree:
        """Cast a tree's floating-point leaves to the parameters' dtype."""
        return _cast(tree, self.params)

    def cast_compute(self, tree: PyTree) -> PyTree:
        """Cast a tree's floating-point leaves to the dtype of computation."""
        return _cast(tree, self.compute)

    def cast_output(self, tree: PyTree) -> PyTree:
        """Cast a tree's floating-point leaves to the dtype of outputs."""
        return _cast(tree, self.output)


def _float_dtype(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str):
        if value not in DTYPES:
            raise unknown_name(f"dtype for {name}", value, DTYPES)
        return DTYPES[value]
    dtype = np.dtype(value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"the {name} dtype of a policy must be floating-point, got {dtype}")
    return dtype


def _cast(tree: PyTree, dtype: Any) -> PyTree:
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if _is_real(x) and x.dtype != dtype else x, tree)


def _is_real(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "astype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def policy(value: Any) -> Policy:
    """Give a `Policy` from a policy, its text, or None (no cast at all).

    Raises:
      ValueError: The text names an unknown part or dtype.
      TypeError: It is something else.
    """
    match value:
        case None:
            return Policy()
        case Policy():
            return value
        case str():
            return Policy.parse(value)
        case _:
            raise TypeError(
                f"precision is a Policy, text such as 'bfloat16' or 'params=float32,compute=bfloat16', or None; "
                f"got {value!r} ({type(value).__name__})"
            )


@runtime_checkable
class LossScale(Protocol):
    """A factor on the loss that keeps float16 gradients from underflowing. An immutable pytree used inside the step."""

    def scale(self, loss: PyTree) -> PyTree:
        """Give the loss times the factor, in at least float32."""
        ...

    def unscale(self, grads: PyTree) -> PyTree:
        """Give gradients divided by the factor, in at least float32; leaves that are not floating-point pass."""
        ...

    def adjust(self, finite: Any) -> "LossScale":
        """Give the scale for the next attempt.

        Args:
          finite: Whether every gradient was finite: neither infinite nor NaN. Boolean scalar.
        """
        ...


def _multiply(tree: PyTree, factor: Any) -> PyTree:
    def one(x: Any) -> Array:
        x = wide(x)
        return x * jnp.asarray(factor, x.dtype)

    return jax.tree.map(one, tree)


def _divide(tree: PyTree, factor: Any) -> PyTree:
    def one(x: Any) -> Any:
        if not _is_real(x):
            return x
        x = wide(x)
        return x / jnp.asarray(factor, x.dtype)

    return jax.tree.map(one, tree)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Identity:
    """No scaling: what float32 and bfloat16 need."""

    def scale(self, loss: PyTree) -> PyTree:
        """Give the loss in at least float32."""
        return jax.tree.map(wide, loss)

    def unscale(self, grads: PyTree) -> PyTree:
        """Give the gradients in at least float32."""
        return jax.tree.map(lambda x: wide(x) if _is_real(x) else x, grads)

    def adjust(self, finite: Any) -> "Identity":
        """Give this scale: there is nothing to adjust."""
        del finite
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Static:
    """A fixed factor.

    Args:
      value: The factor, > 0. Default 2¹⁵.
    """

    value: Any = 2.0**15

    def __post_init__(self) -> None:
        _store(self, "value", _positive("Static.value", self.value))

    def scale(self, loss: PyTree) -> PyTree:
        """Give the loss times the factor, in at least float32."""
        return _multiply(loss, self.value)

    def unscale(self, grads: PyTree) -> PyTree:
        """Give gradients divided by the factor, in at least float32."""
        return _divide(grads, self.value)

    def adjust(self, finite: Any) -> "Static":
        """Give this scale: it is fixed."""
        del finite
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dynamic:
    """A factor that shrinks at each overflow and grows after a period without one.

    It grows at the `period`-th finite attempt in a row, unless it would overflow itself, and never falls below
    `minimum`. The counter starts again at each overflow and each growth.

    Args:
      value: The factor to start with, ≥ minimum. Default 2¹⁵.
      counter: Finite attempts since the last change, int32.
      period: Finite attempts in a row after which it grows. Static.
      factor: By how much it grows and shrinks, > 1. Static.
      minimum: The least it shrinks to, > 0. Static.
    Source: Micikevicius et al. 2018 section 3.2; agrees with jmp and torch.amp.GradScaler, tests/golden.
    """

    value: Any = 2.0**15
    counter: Any = 0
    period: int = field(default=2000, kw_only=True, metadata={"static": True})
    factor: float = field(default=2.0, kw_only=True, metadata={"static": True})
    minimum: float = field(default=1.0, kw_only=True, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.period < 1 or self.period != int(self.period):
            raise ValueError(f"Dynamic.period must be a whole number ≥ 1, got {self.period!r}")
        if not (math.isfinite(self.factor) and self.factor > 1):
            raise ValueError(f"Dynamic.factor must be a number > 1, got {self.factor!r}")
        if not (math.isfinite(self.minimum) and self.minimum > 0):
            raise ValueError(f"Dynamic.minimum must be a number > 0, got {self.minimum!r}")
        if isinstance(self.value, int | float | np.number) and self.value < self.minimum:
            raise ValueError(f"Dynamic.value must be at least minimum={self.minimum}, got {self.value!r}")
        _store(self, "value", _positive("Dynamic.value", self.value))
        if isinstance(self.counter, int | np.integer):
            _store(self, "counter", np.int32(self.counter))

    def scale(self, loss: PyTree) -> PyTree:
        """Give the loss times the factor, in at least float32."""
        return _multiply(loss, self.value)

    def unscale(self, grads: PyTree) -> PyTree:
        """Give gradients divided by the factor, in at least float32."""
        return _divide(grads, self.value)

    def adjust(self, finite: Any) -> "Dynamic":
        """Grow, shrink or keep the factor after an attempt whose gradients were finite or not."""
        finite, value = jnp.asarray(finite), jnp.asarray(self.value)
        counter = jnp.asarray(self.counter)
        factor = jnp.asarray(self.factor, value.dtype)
        full = counter >= self.period - 1
        grown = value * factor
        kept = jnp.where(full & jnp.isfinite(grown), grown, value)
        shrunk = jnp.maximum(value / factor, jnp.asarray(self.minimum, value.dtype))
        return replace(
            self,
            value=jnp.where(finite, kept, shrunk),
            counter=jnp.where(finite & ~full, counter + 1, 0).astype(counter.dtype),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Custom:
    """A scale made of functions over a state: the seed's ``(init, scale, unscale)``.

    The state moves by what `unscale_fn` returns for a probe gradient that is 0 after a finite attempt and infinite
    otherwise. A scale that looks at the size of gradients is a class of its own with the methods of `LossScale`.

    Args:
      state: The functions' state, any pytree.
      scale_fn: ``(loss, state) -> loss``.
      unscale_fn: ``(grads, state) -> (grads, state)``.
    """

    state: Any
    scale_fn: Callable[[Any, Any], Any] = field(metadata={"static": True})
    unscale_fn: Callable[[Any, Any], tuple[Any, Any]] = field(metadata={"static": True})

    def scale(self, loss: PyTree) -> PyTree:
        """Give what the scale function makes of the loss in at least float32."""
        return self.scale_fn(jax.tree.map(wide, loss), self.state)

    def unscale(self, grads: PyTree) -> PyTree:
        """Give what the unscale function makes of the gradients in at least float32."""
        return self.unscale_fn(jax.tree.map(lambda x: wide(x) if _is_real(x) else x, grads), self.state)[0]

    def adjust(self, finite: Any) -> "Custom":
        """Give this scale with the state that follows a finite or an overflowing attempt."""
        probe = jnp.where(finite, jnp.float32(0), jnp.float32(jnp.inf))
        new = self.unscale_fn(probe, self.state)[1]
        return replace(self, state=jax.tree.map(lambda n, o: jnp.asarray(n, jnp.result_type(o)), new, self.state))


NAMES: Mapping[str, type[Identity] | type[Static] | type[Dynamic]] = MappingProxyType(
    {"dynamic": Dynamic, "identity": Identity, "static": Static}
)
"""The loss scales that `loss_scale` knows, by name."""


def loss_scale(value: Any) -> LossScale:
    """Give a loss scale from its name, an instance, the seed's three functions, or None (no scaling).

    Raises:
      ValueError: No loss scale has that name; the nearest is named.
      TypeError: It is something else.
    """
    match value:
        case None:
            return Identity()
        case str():
            if value not in NAMES:
                raise unknown_name("loss scale", value, NAMES)
            return NAMES[value]()
        case (init, scale, unscale) if callable(init) and callable(scale) and callable(unscale):
            functions: Any = (scale, unscale)
            return Custom(init(), *functions)
        case LossScale() if not isinstance(value, type):
            return value
        case _:
            raise TypeError(
                "a loss scale is 'identity', 'static', 'dynamic', Static(value), Dynamic(value, ...), an object with "
                "scale, unscale and adjust, or functions (init, scale, unscale); "
                f"got {value!r} ({type(value).__name__})"
            )


def _positive(name: str, value: Any) -> Any:
    """Check a Python number and give it as float32; anything else (a tracer, a restored array) passes."""
    if not isinstance(value, int | float | np.number):
        return value
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return np.float32(value)


def _store(scale: Any, name: str, value: Any) -> None:
    """Set a field while its frozen dataclass is being made."""
    object.__setattr__(scale, name, value)
