"""The axes of a mesh, and where the arrays inside a program lie over them.

Which axes there are is known to the part that builds meshes and to the models and losses that run on them; neither of
these knows the other.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from telic.errors import ShapeError, unknown_name
from telic.types import Array

AXES = ("data", "fsdp", "expert", "sequence", "tensor")
"""Axes of every mesh, the outermost first: what is told most to a neighbour lies innermost."""

BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that a batch's rows are split over: each device of them works on rows of its own."""

Axes: TypeAlias = str | tuple[str, ...] | None
"""Axes of the mesh that one dimension is split over; None leaves it whole."""


def constrain(x: Array, *dims: Axes) -> Array:
    """Give an array that lies over these axes of the mesh that the program runs on.

    Without a mesh it is the array itself, and the program is the one there would be without the call. On a mesh XLA
    moves what lies elsewhere, so a model says it where it matters: of hidden states with rows of its own on each
    device, XLA gathers the weights for the time of their use; of hidden states that lie nowhere in particular it
    gathers those instead, over and over.

    Values do not depend on it, up to rounding, nor does what is legal: axes that the mesh lacks, and those that do not
    divide a dimension, are left out.

    Args:
      x: Any array, in a program that `Trainer` compiles or in one of your own under ``jax.sharding.use_abstract_mesh``.
      dims: Axes of each dimension, such as ``BATCH_AXES`` for the rows of a batch or ``"tensor"``; None leaves a
        dimension whole, and so are dimensions after the last.
    Raises:
      ValueError: An axis is none of `AXES`.
      ShapeError: There are more dims than dimensions.
    Example:
      >>> import jax.numpy as jnp
      >>> constrain(jnp.ones((8, 3)), BATCH_AXES).shape
      (8, 3)
    """
    wanted = [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in dims]
    for axis in itertools.chain(*wanted):
        if axis not in AXES:
            raise unknown_name("axis", axis, AXES)
    if len(wanted) > x.ndim:
        raise ShapeError(f"constrain was given the axes of {len(wanted)} dimensions, {dims}, for an array of {x.shape}")
    mesh = jax.sharding.get_abstract_mesh()
    # Inside of shard_map arrays are the device's own, and there is nothing to say.
    kinds = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    sizes = {axis: size for (axis, size), kind in kinds if kind == AxisType.Auto}
    if math.prod(sizes.values()) == 1:
        return x
    spec: list[Any] = [fitting_axes(axes, x.shape[i], sizes) or None for i, axes in enumerate(wanted)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def fitting_axes(axes: Sequence[str], size: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Give those of some axes that together divide a dimension into the most parts.

    Args:
      axes: Axes it may be split over.
      size: Of the dimension.
      sizes: Of the axes; those that are not there are left out.
    Example:
      >>> fitting_axes(BATCH_AXES, 6, {"data": 2, "fsdp": 4})
      ('data',)
    """
    known = [axis for axis in axes if axis in sizes]
    subsets = (c for n in range(len(known) + 1) for c in itertools.combinations(known, n))
    ways = {c: math.prod(sizes[axis] for axis in c) for c in subsets}
    return max((c for c in ways if size % ways[c] == 0), key=lambda c: (ways[c], len(c)))
