"""The fields of a supervised batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
      DataError: It has none of the accepted forms.
    """
    match batch:
        case (_, None, *_) if needs_targets and len(batch) <= 3:
            got = "None in place of the targets"
        case (inputs, targets):
            return Fields(inputs, targets, None)
        case (inputs, targets, weights):
            return Fields(inputs, targets, weights)
        case Mapping() if "inputs" in batch and ("targets" in batch or not needs_targets):
            unknown = set(batch) - {"inputs", "targets", "weights"}
            if unknown:
                raise DataError(
                    f"a supervised batch has the fields inputs, targets and weights; unknown: {sorted(unknown)}. "
                    "Write an Objective to read fields of your own"
                )
            return Fields(batch["inputs"], batch.get("targets"), batch.get("weights"))
        case Mapping():
            got = f"a mapping with {sorted(map(str, batch))}"
        case tuple() | list():
            got = f"a {type(batch).__name__} of {len(batch)}"
        case _:
            got = f"{type(batch).__name__}" + (f" of shape {batch.shape}" if hasattr(batch, "shape") else "")
    raise DataError(f"a supervised batch is {_FORMS}, got {got}")
