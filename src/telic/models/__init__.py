"""One small interface over Flax Linen, Flax NNX, Equinox and plain functions.

`adapt` turns a model of any of these libraries into a value with ``init``, ``forward``, ``bind`` and ``held``. All of
them name leaves alike: variables are collections of nested plain dictionaries with string keys.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telic.models.base import Forward, Model
    from telic.models.dispatch import adapt

__all__ = ["Forward", "Model", "adapt"]

_HOMES = {"Forward": "base", "Model": "base", "adapt": "dispatch"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
