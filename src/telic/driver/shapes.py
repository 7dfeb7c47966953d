"""Shapes of batches: which belong to one program, and which a run may meet."""

from collections.abc import Sequence
from typing import Any

import jax

from telic import tree
from telic.errors import ShapeError
from telic.types import Batch

Signature = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
"""Structure of a batch, with shape and dtype of each leaf."""


def signature_of(batch: Batch) -> Signature:
    """Give a batch's structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(batch)
    return structure, tuple([(x.shape, x.dtype) if hasattr(x, "dtype") else ((), type(x)) for x in leaves])


def differences(batch: Batch, before: Signature, after: Signature) -> list[str]:
    """Say what changed from one batch shape to another, leaf by leaf."""
    if before[0] != after[0]:
        return [f"the structure was {before[0]} and is {after[0]}"]
    names = tree.leaf_names(batch) or ["batch"]
    return [
        f"leaf {name or 'batch'!r} was {old[1]}{list(old[0])} and is {new[1]}{list(new[0])}"
        for name, old, new in zip(names, before[1], after[1], strict=True)
        if old != new
    ]


def check_admissible(batch: Batch, first: Signature, seen: Sequence[Signature], *, epoch: int, iteration: int) -> None:
    """Admit one smaller last batch and nothing else beside batches of the first one's shape.

    Args:
      batch: A batch of another shape than the first.
      first: The run's own shape.
      seen: All shapes met so far.
      epoch: Its epoch.
      iteration: Its number in the epoch.
    Raises:
      ShapeError: It is another shape; batch, epoch, leaf and both shapes are named.
    """
    signature = signature_of(batch)
    smaller_seen = any(other != first for other in seen)
    smaller = (
        not smaller_seen
        and signature[0] == first[0]
        and all(
            new[1] == old[1] and new[0][1:] == old[0][1:] and len(new[0]) == len(old[0]) > 0 and new[0][0] < old[0][0]
            for new, old in zip(signature[1], first[1], strict=True)
        )
    )
    if smaller:
        return
    where = f"batch {iteration} of epoch {epoch}"
    remedy = (
        "Make batches of one shape (drop the remainder, or pad), cast before the loop, or run with strict=False "
        "and pay a compilation for each shape"
    )
    if signature[0] != first[0]:
        raise ShapeError(f"{where} has another structure: expected {first[0]}, got {signature[0]}. {remedy}")
    names = tree.leaf_names(batch) or ["batch"]
    for name, new, old in zip(names, signature[1], first[1], strict=True):
        if new != old:
            raise ShapeError(
                f"{where}: leaf {name or 'batch'!r} has shape {new[0]} and dtype {new[1]}, the first batch had "
                f"{old[0]} and {old[1]}"
                + (", and one smaller last batch was seen already" if smaller_seen else "")
                + f". {remedy}"
            )
