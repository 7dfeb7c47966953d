"""Bridges to other libraries. Each is a module of its own and imports its library when it is used.

`load_huggingface` and `save_huggingface` read and write pretrained language models; `telic.interop.lora` adds low-rank
adapters.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telic.interop.huggingface import load_huggingface, save_huggingface

__all__ = ["load_huggingface", "save_huggingface"]

_HOMES = {"load_huggingface": "huggingface", "save_huggingface": "huggingface"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
