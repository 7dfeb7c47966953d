"""What a spec makes of a leaf: its axes, its parts, its bytes."""

import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec


def axes_of(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Give the axes of each dimension of a spec."""
    return [() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec]


def num_parts(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    """Give how many parts a leaf of a spec is in."""
    return math.prod(sizes.get(axis, 1) for axes in axes_of(spec) for axis in axes)


def num_bytes(leaf: Any) -> int:
    """Give the bytes of a leaf; those of a PRNG key are not counted."""
    return math.prod(leaf.shape) * int(getattr(leaf.dtype, "itemsize", 0))
