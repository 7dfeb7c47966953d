"""What a run's metrics are called in trackers."""

from collections.abc import Mapping
from typing import Any

import numpy as np

_VALIDATION = "validation_"


def tracked_name(name: str) -> str:
    """Give ``validation/accuracy`` for ``validation_accuracy``, and ``train/<name>`` for every other name."""
    return f"validation/{name.removeprefix(_VALIDATION)}" if name.startswith(_VALIDATION) else f"train/{name}"


def as_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Give metrics as scalars by their tracked names; those of one element, since no chart shows the others."""
    return {tracked_name(name): float(np.ravel(value)[0]) for name, value in metrics.items() if np.size(value) == 1}
