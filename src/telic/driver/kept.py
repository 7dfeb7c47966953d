"""Batches that are kept until it is known that the run goes on: one of them may be what it ends with."""

from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic.driver.slabs import Run
from telic.loop.ports import CountsAttempts
from telic.types import Batch, PyTree

KEPT_BYTES = 256 * 2**20
"""Memory of the batches that are kept until their health is read, at most; those of the newest dispatch always are."""


class Recent:
    """Batches of the dispatches whose health was not read yet."""

    def __init__(self, program: CountsAttempts):
        self._program = program
        # Dispatch, index of the first attempt, attempts of each batch, batches.
        self._groups: deque[tuple[int, int, int, Run]] = deque()
        self._next: int | None = None
        self._bytes = 0

    def add(self, generation: int, batches: Run, state: PyTree) -> None:
        """Keep the batches of a dispatch; `state` is the one before it."""
        if self._next is None:
            self._next = int(jax.device_get(self._program.attempts_made(state)))
        each = self._program.num_attempts(batches[0])
        self._groups.append((generation, self._next, each, batches))
        self._next += each * len(batches)
        self._bytes += len(batches) * batches.slab.row_bytes
        while self._bytes > KEPT_BYTES and len(self._groups) > 1:
            self._drop()

    def forget(self, generation: int) -> None:
        """Drop the batches of the dispatches up to one."""
        while self._groups and self._groups[0][0] <= generation:
            self._drop()

    def replaced(self, before: PyTree, after: PyTree) -> None:
        """Take note that a handler gave another state: its attempts may be counted from elsewhere."""
        if self._program.attempts_made(before) is not self._program.attempts_made(after):
            self._next = None

    def of_attempt(self, attempt: int) -> Batch | None:
        """Give the microbatch of an attempt as NumPy arrays of its own, or None when it is not kept."""
        for _, first, each, batches in reversed(self._groups):
            if first <= attempt < first + each * len(batches):
                index, part = divmod(attempt - first, each)
                return jax.tree.map(_on_host, self._program.attempt_batch(batches[index], part))
        return None

    def _drop(self) -> None:
        _, _, _, batches = self._groups.popleft()
        self._bytes -= len(batches) * batches.slab.row_bytes
        batches.release()


def _on_host(leaf: Any) -> Any:
    if jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(jax.device_get(leaf))
