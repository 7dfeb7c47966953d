"""Names for the kinds of values that travel between the layers."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
"""One array, of any dtype and shape."""

PyTree: TypeAlias = Any
"""Any nesting of containers whose leaves are arrays."""

Variables: TypeAlias = Mapping[str, Any]
"""Collections of arrays by name: ``{"params": ..., "batch_stats": ...}``."""

Batch: TypeAlias = Any
"""A pytree of arrays that share their leading dimension."""

Key: TypeAlias = jax.Array
"""A typed JAX PRNG key."""
