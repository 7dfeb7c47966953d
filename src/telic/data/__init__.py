"""Batches for the loop: data sets, column arrays, and adapters for what users already have.

`columns` turns arrays into a `Dataset`; `as_source` turns a data set, a list, a function of the epoch, a Grain or torch
loader into the port the loop reads; `as_validation` gives batches that can be read once per validation. Names are
imported when they are first used: importing this package loads no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telic.data.dataset import DataPartition, Dataset
    from telic.data.mnist import digits, digits_split
    from telic.data.sources import as_source
    from telic.data.table import columns
    from telic.data.validation import as_validation

_HOMES = {
    "DataPartition": "dataset",
    "Dataset": "dataset",
    "as_source": "sources",
    "as_validation": "validation",
    "columns": "table",
    "digits": "mnist",
    "digits_split": "mnist",
}

__all__ = ["DataPartition", "Dataset", "as_source", "as_validation", "columns", "digits", "digits_split"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
