"""Values as strict JSON, for files that people and other programs read."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def as_json(value: Any) -> Any:
    """Give a value in strict JSON: arrays as lists, NaN and infinities by name, since JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if hasattr(value, "tolist"):
        return as_json(np.asarray(value).tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
