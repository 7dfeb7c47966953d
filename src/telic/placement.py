"""Where batches live on one device: copied out of memory a loader may write again, then placed."""

from typing import Any

import jax
import numpy as np

from telic.types import Batch, PyTree


class SingleDevice:
    """Placement on JAX's default device."""

    def put(self, batch: Batch, *, fresh: bool) -> Batch:
        """Place a host batch; unless it is fresh, host arrays are copied first.

        A NumPy buffer that is refilled after dispatch corrupts the batch, since the CPU backend may read it in place.
        """
        if not fresh:
            batch = jax.tree.map(_copied, batch)
        return jax.device_put(batch)

    def gather(self, values: PyTree) -> PyTree:
        """Give values as NumPy arrays on the host."""
        return jax.device_get(values)

    @property
    def leads(self) -> bool:
        """True: the one process decodes and writes."""
        return True


def _copied(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def one_process(value: Any) -> Any:
    """Agree on a value when there is one process: its own."""
    return value
