"""What a loss may be made of: `Mean`, `Terms` of several means, `Rows` that concatenate.

All three are additive: the statistics of two microbatches merge into those of both, so any split of a batch gives
the same loss and the same gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic.errors import ContractError, ShapeError
from telic.types import Array, PyTree


def wide(x: Any) -> Array:
    """Give a value in at least float32; float64 stays float64, and integers become floats."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.promote_types(jnp.float32, jnp.zeros((), float).dtype))
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A sum and the mass it is to be divided by.

    Return it from a loss whose terms share one denominator. Over a window of microbatches the committed gradient is
    that of the summed totals over the summed masses: exactly the gradient of one big batch.

    Attributes:
      total: Sum of the weighted terms, scalar (any shape for a metric).
      mass: Sum of the weights, scalar, ≥ 0, independent of the parameters. Zero mass means no data.
    Example:
      >>> Mean(total=jnp.asarray(6.0), mass=jnp.asarray(3.0)).value()
      Array(2., dtype=float32)
    """

    total: Any
    mass: Any

    @staticmethod
    def of(values: Any, weights: Any = None) -> "Mean":
        """Sum per-example values, weighted when weights are given.

        Args:
          values: Array of any shape.
          weights: Array of the same shape or of its leading shape; 0 drops an element (its value may be NaN).
        """
        values = wide(values)
        if weights is None:
            return Mean(values.sum(), jnp.asarray(values.size, values.dtype))
        weights = spread_weights(weights, values)
        kept = jnp.where(weights != 0, values, 0)
        return Mean((kept * weights).sum(), weights.sum())

    def value(self) -> Array:
        """Give total / mass in at least float32; 0 where the mass is 0."""
        total, mass = wide(self.total), jax.lax.stop_gradient(wide(self.mass))
        return jnp.where(mass != 0, total / jnp.where(mass != 0, mass, 1), 0)

    def has_data(self) -> Array:
        """Say whether the mass is positive."""
        return jnp.asarray(self.mass) > 0

    def measured(self) -> Array:
        """Give total / mass for a report: NaN where there is no data, so that nothing takes it for a good score."""
        return jnp.where(jnp.asarray(self.mass) != 0, self.value(), jnp.nan)

    def merge(self, other: "Mean") -> "Mean":
        """Give the Mean of both sets of terms."""
        return Mean(self.total + other.total, self.mass + other.mass)

    def __add__(self, penalty: Any) -> "Mean":
        """Add a data-free term `s`: Mean(total + s·mass, mass), which is value + s for any split."""
        if isinstance(penalty, Mean):
            raise ContractError(
                "Mean + Mean is ambiguous: use Terms({'a': (1.0, a), 'b': (1.0, b)}) for independent "
                "denominators, or a.merge(b) for one"
            )
        return Mean(self.total + penalty * self.mass, self.mass)

    __radd__ = __add__

    def __mul__(self, weight: Any) -> "Mean":
        return Mean(self.total * weight, self.mass)

    __rmul__ = __mul__


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Terms:
    """Several weighted means with independent denominators, reported by name.

    Args:
      terms: ``{name: (weight, Mean)}``; a weight is a number or a scalar array.
    Example:
      >>> loss = Terms({"data": (1.0, Mean(2.0, 4.0)), "prior": (0.5, Mean(1.0, 1.0))})
      >>> float(loss.value())
      1.0
    """

    terms: Mapping[str, tuple[Any, Mean]]

    def __post_init__(self) -> None:
        if not isinstance(self.terms, Mapping) or not self.terms:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise ContractError(f"Terms takes {{name: (weight, Mean)}}, got {self.terms!r}")
        for name, term in self.terms.items():
            if not (isinstance(term, tuple) and len(term) == 2):  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison] users' input
                raise ContractError(f"Terms[{name!r}] must be (weight, Mean), got {type(term).__name__}")
            if not isinstance(term[1], Mean):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
                raise ContractError(
                    f"Terms[{name!r}] must be (weight, Mean), got a {type(term[1]).__name__} in place of the Mean; "
                    "write (weight, Mean(total, mass)), or Mean.of(losses) for per-example losses"
                )

    def value(self) -> Array:
        """Give Σ weight · total / mass; a term without mass counts 0."""
        return sum((wide(w) * m.value() for w, m in self.terms.values()), start=jnp.zeros(()))

    def has_data(self) -> Array:
        """Say whether any term has mass."""
        return jnp.stack([m.has_data() for _, m in self.terms.values()]).any()

    def means(self) -> dict[str, Mean]:
        """Give the terms' means by name, without their weights."""
        return {name: mean for name, (_, mean) in self.terms.items()}

    def tree_flatten_with_keys(self) -> Any:
        names = tuple(sorted(self.terms))
        return [(jax.tree_util.DictKey(n), self.terms[n]) for n in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: Any) -> "Terms":
        terms = object.__new__(cls)
        object.__setattr__(terms, "terms", dict(zip(names, children, strict=True)))
        return terms


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """A leaf of objective-owned statistics that merges by concatenation along its first dimension.

    Use it for losses that compare the rows of a whole window with each other, such as contrastive ones.

    Attributes:
      values: Array [rows, ...].
    """

    values: Any


def merge_statistics(a: PyTree, b: PyTree) -> PyTree:
    """Merge two trees of additive statistics: sums, and concatenation at `Rows` leaves."""

    def one(x: Any, y: Any) -> Any:
        if isinstance(x, Rows):
            return Rows(jnp.concatenate([x.values, y.values]))
        return jnp.add(x, y)

    return jax.tree.map(one, a, b, is_leaf=lambda x: isinstance(x, Rows))


def spread_weights(weights: Any, values: Any) -> Array:
    """Give weights in the shape of the values they weigh, in at least float32.

    Raises:
      ShapeError: The weights' shape is neither the values' nor its leading part.
    """
    weights = wide(weights)
    shape = jnp.shape(values)
    if weights.shape != shape[: weights.ndim]:
        raise ShapeError(
            f"weights must have the shape of the values, {shape}, or its leading part, got {weights.shape}; "
            "give one weight per example (batch,) or one per value"
        )
    extra = (1,) * (len(shape) - weights.ndim)
    return jnp.broadcast_to(weights.reshape(weights.shape + extra), shape)
