"""The fields of a supervised batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic.errors import DataError
from telic.types import Batch


@dataclass(frozen=True)
class Fields:
    """A supervised batch taken apart.

    Attributes:
      inputs: What the model reads, [batch, ...] (any pytree).
      targets: What the loss compares with; None in data without targets.
      weights: Masses of the losses, [batch, ...] or [batch]; None weighs all alike.
    """

    inputs: Any
    targets: Any
    weights: Any


_FORMS = "(inputs, targets), (inputs, targets, weights) or a mapping with those names"


def supervised_fields(batch: Batch, *, needs_targets: bool = True) -> Fields:
    """Take a supervised batch apart.

    Raises:
      DataError: It has none of the accepted forms, or lists of numbers where arrays belong.
    """
    match batch:
        case (_, None, *_) if needs_targets and len(batch) <= 3:
            got = "None in place of the targets"
        case (inputs, targets):
            return _arrays(Fields(inputs, targets, None))
        case (inputs, targets, weights):
            return _arrays(Fields(inputs, targets, weights))
        case Mapping() if "inputs" in batch and ("targets" in batch or not needs_targets):
            unknown = set(batch) - {"inputs", "targets", "weights"}
            if unknown:
                raise DataError(
                    f"a supervised batch has the fields inputs, targets and weights; unknown: {sorted(unknown)}. "
                    "Write an Objective to read fields of your own"
                )
            return _arrays(Fields(batch["inputs"], batch.get("targets"), batch.get("weights")))
        case Mapping():
            got = f"a mapping with {sorted(map(str, batch))}"
        case tuple() | list():
            got = f"a {type(batch).__name__} of {len(batch)}"
        case _:
            got = f"{type(batch).__name__}" + (f" of shape {batch.shape}" if hasattr(batch, "shape") else "")
    raise DataError(f"a supervised batch is {_FORMS}, got {got}")


def _arrays(fields: Fields) -> Fields:
    """Refuse lists of numbers, which JAX takes for a tree with an array in each of its places."""
    for name, value in vars(fields).items():
        if isinstance(value, list) and value and not any(jnp.ndim(leaf) for leaf in jax.tree.leaves(value)):
            raise DataError(
                f"{name} of a supervised batch must be an array or a tree of arrays, got a list of numbers with "
                f"{len(value)} entries; convert it: numpy.asarray({name})"
            )
    return fields
