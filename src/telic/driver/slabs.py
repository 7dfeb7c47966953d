"""Memory for consecutive batches, and the runs of them that one dispatch takes.

A slab holds batches of one shape, stacked. It is placed on the device once, and any run of its rows can be dispatched
from there. The CPU backend may read the memory in place, so it is written again only after a result of the last
dispatch that read it is ready.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic.driver.shapes import Signature, signature_of
from telic.loop.ports import Placement, Position
from telic.types import Batch

_ALIGNMENT = 64
"""Bytes; XLA's CPU backend takes host memory as it is only where it begins at a multiple of this."""


class Slab:
    """Room for batches of one shape.

    Args:
      example: A batch of that shape.
      room: How many there is room for.
      stacked: Whether the program takes them stacked; otherwise each is placed by itself.
      keep: Keep batches as they are instead of copying them: nobody writes to them again.
    """

    def __init__(self, example: Batch, room: int, *, stacked: bool, keep: bool = False):
        self.signature: Signature = signature_of(example)
        self.room = room
        self.count = 0
        self.ticket: Any = None
        self.free: deque[Slab] | None = None
        self._stacked = stacked
        self._positions: list[tuple[Sequence[Position], int]] = []
        self._placed: Any = None
        self._holders = 0
        leaves, self._structure = jax.tree.flatten(example)
        self._memory = [_memory(leaf, room) if not keep and _on_host(leaf) else None for leaf in leaves]
        self._rows: list[list[Any]] = [[] for _ in leaves]
        self.row_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in leaves)

    @property
    def is_full(self) -> bool:
        """Whether there is room for no more."""
        return self.count == self.room

    def put(self, batch: Batch, position: Position) -> bool:
        """Copy a batch in, and say whether it has this shape; another is not copied."""
        leaves, structure = jax.tree.flatten(batch)
        if structure != self._structure:
            return False
        for leaf, (shape, dtype) in zip(leaves, self.signature[1], strict=True):
            if hasattr(leaf, "dtype"):
                if leaf.shape != shape or leaf.dtype != dtype:
                    return False
            elif shape or dtype is not type(leaf):
                return False
        count = self.count
        for memory, rows, leaf in zip(self._memory, self._rows, leaves, strict=True):
            if memory is None:
                rows.append(leaf)
            else:
                memory[count] = leaf
        self._positions.append(((position,), 0))
        self.count += 1
        return True

    @property
    def rest(self) -> Batch | None:
        """The memory that is empty, to be written from outside; None where batches are kept or on a device."""
        host = [memory for memory in self._memory if memory is not None]
        if len(host) < len(self._memory):
            return None
        return self._structure.unflatten([memory[self.count :] for memory in host])

    def written(self, positions: Sequence[Position]) -> None:
        """Take note that the next rows were written from outside."""
        self._positions += [(positions, i) for i in range(len(positions))]
        self.count += len(positions)

    def place(self, placement: Placement) -> Any:
        """Put the batches on the device, once: stacked, or a list of them."""
        if self._placed is None:
            if self._stacked:
                parts = [
                    _stack(r, self.room) if m is None else m for m, r in zip(self._memory, self._rows, strict=True)
                ]
                self._placed = placement.put(self._structure.unflatten(parts), fresh=True, stacked=True)
            else:
                self._placed = [placement.put(self.row(i), fresh=True) for i in range(self.count)]
        return self._placed

    def row(self, index: int) -> Batch:
        """Give a batch: a view of the memory."""
        pairs = zip(self._memory, self._rows, strict=True)
        return self._structure.unflatten([r[index] if m is None else m[index, ...] for m, r in pairs])

    def position(self, index: int) -> Position:
        """Give where the source stands after a batch."""
        positions, at = self._positions[index]
        return positions[at]

    def hold(self) -> None:
        """Keep the memory as it is."""
        self._holders += 1

    def release(self) -> None:
        """Let go of the memory; nobody holding it, it may be filled again."""
        self._holders -= 1
        if self._holders == 0 and self.free is not None:
            self.free.append(self)

    def clear(self) -> None:
        """Make it empty, once the last dispatch that read it is done."""
        if self.ticket is not None:
            jax.block_until_ready(self.ticket)
        self.count, self._positions, self._placed, self.ticket = 0, [], None, None
        for rows in self._rows:
            rows.clear()


class Run:
    """Consecutive batches of one slab: what a dispatch takes. A sequence of batches on the host."""

    def __init__(self, slab: Slab, start: int, stop: int):
        self.slab = slab
        self.start = start
        self.stop = stop
        slab.hold()

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: int) -> Batch:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.slab.row((self.start if index >= 0 else self.stop) + index)

    def __iter__(self) -> Iterator[Batch]:
        return (self.slab.row(i) for i in range(self.start, self.stop))

    @property
    def position(self) -> Position:
        """Where the source stands after the last of them."""
        return self.slab.position(self.stop - 1)

    def split(self, count: int) -> tuple["Run", "Run | None"]:
        """Give the first `count`, and the rest where there is one. The run itself is used up."""
        if count >= len(self):
            return self, None
        rest = Run(self.slab, self.start + count, self.stop)
        self.stop = self.start + count
        return self, rest

    def join(self, other: Any) -> bool:
        """Take the batches that follow in the same memory, and say whether those are they. `other` is used up then."""
        if not isinstance(other, Run) or other.slab is not self.slab or other.start != self.stop:
            return False
        self.stop = other.stop
        other.release()
        return True

    def release(self) -> None:
        """Let go of the batches."""
        self.slab.release()


def slab_of(batches: Sequence[Batch], room: int, *, stacked: bool) -> Slab:
    """Give a slab with copies of batches of one shape."""
    slab = Slab(batches[0], room, stacked=stacked)
    for batch in batches:
        slab.put(batch, None)
    return slab


def _on_host(leaf: Any) -> bool:
    """Say whether a leaf's numbers can be read by the host without moving them."""
    if not isinstance(leaf, jax.Array):
        return True
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or not leaf.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in leaf.devices()) and len(leaf.devices()) == 1


def _memory(leaf: Any, room: int) -> Any:
    dtype, shape = np.asarray(leaf).dtype, (room, *np.shape(leaf))
    size = int(np.prod(shape)) * dtype.itemsize
    # Zeros, since JAX casts all of the memory where it has no such dtype, and what was in it before can overflow.
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _stack(rows: list[Any], room: int) -> Any:
    """Stack what was kept; rows past the last are never read."""
    if room == 1:
        return rows[0][None] if hasattr(rows[0], "dtype") else np.asarray(rows[0])[None]
    return jnp.stack([*rows, *[rows[0]] * (room - len(rows))])
