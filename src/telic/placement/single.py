"""Where batches live on one device: copied out of memory a loader may write again, then placed."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from telic.loop.ports import Processes, Source
from telic.placement.processes import ONE
from telic.types import Batch, PyTree


class SingleDevice:
    """Placement on JAX's default device."""

    @property
    def processes(self) -> Processes:
        """This process alone."""
        return ONE

    @property
    def partition(self) -> tuple[int, int]:
        """All of the data: (0, 1)."""
        return 0, 1

    def learn(self, objective: Any) -> None:
        """Take note of nothing."""
        del objective

    def on_mesh(self) -> AbstractContextManager[Any]:
        """Give a context that changes nothing."""
        return nullcontext()

    @property
    def leads(self) -> bool:
        """True: the one process decodes and writes."""
        return True

    def put(self, batch: Batch, *, fresh: bool, stacked: bool = False) -> Batch:
        """Place a host batch; unless it is fresh, host arrays are copied first.

        A NumPy buffer that is refilled after dispatch corrupts the batch, since the CPU backend may read it in place.
        """
        del stacked
        if not fresh:
            batch = jax.tree.map(copied, batch)
        return jax.device_put(batch)

    def gather(self, values: PyTree) -> PyTree:
        """Give values as NumPy arrays on the host."""
        return jax.device_get(values)

    def whole(self, batch: Batch) -> Batch:
        """Give the batch: it is whole."""
        return batch

    def share(self, batch: Batch) -> Batch:
        """Give the batch: this process reads all of it."""
        return batch

    def settle(self, state: PyTree) -> PyTree:
        """Give the state as it is."""
        return state

    def spread(self, values: PyTree) -> PyTree:
        """Give the values."""
        return values

    def scatter(self, values: PyTree) -> PyTree:
        """Give the values."""
        return values

    def assembled(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], Any]) -> Any:
        """Give the array that is read whole."""
        return jax.device_put(read(tuple(slice(0, length) for length in shape)))

    def local(self, values: PyTree) -> PyTree:
        """Give the values."""
        return values

    def near(self, value: Any) -> Any:
        """Give the value."""
        return value

    def shardings(self, shapes: PyTree) -> None:
        """Give None: XLA places results by itself."""
        del shapes

    def rows(self, batch: Batch) -> None:
        """Give None: a batch lies on the device."""
        del batch

    @property
    def divides(self) -> int:
        """One: any rows will do."""
        return 1

    def pins(self, values: PyTree) -> None:
        """Give None: results lie where they were made."""
        del values

    def joined(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Give the batches as they are."""
        return batches

    def joined_source(self, source: Source) -> Source:
        """Give the source as it is."""
        return source


def copied(leaf: Any) -> Any:
    """Give a leaf in memory of its own, if it lies in memory of NumPy's."""
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
