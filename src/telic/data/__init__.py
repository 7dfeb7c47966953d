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
    from telic.data.rollouts import Rollouts
    from telic.data.sources import as_source
    from telic.data.table import columns
    from telic.data.text.chat import ChatFormat, Role, conversations, preference_pairs, prompt_rows
    from telic.data.text.corpus import standard_library
    from telic.data.text.documents import TokenDocuments, open_tokens, tokenize, write_tokens
    from telic.data.text.file_tokenizer import load_tokenizer
    from telic.data.text.packing import pack
    from telic.data.text.tokenizer import ByteTokenizer, Tokenizer
    from telic.data.validation import as_validation

_HOMES = {
    "ByteTokenizer": "text.tokenizer",
    "ChatFormat": "text.chat",
    "DataPartition": "dataset",
    "Dataset": "dataset",
    "Role": "text.chat",
    "Rollouts": "rollouts",
    "TokenDocuments": "text.documents",
    "Tokenizer": "text.tokenizer",
    "as_source": "sources",
    "as_validation": "validation",
    "columns": "table",
    "conversations": "text.chat",
    "digits": "mnist",
    "digits_split": "mnist",
    "load_tokenizer": "text.file_tokenizer",
    "open_tokens": "text.documents",
    "pack": "text.packing",
    "preference_pairs": "text.chat",
    "prompt_rows": "text.chat",
    "standard_library": "text.corpus",
    "tokenize": "text.documents",
    "write_tokens": "text.documents",
}

__all__ = [
    "ByteTokenizer",
    "ChatFormat",
    "DataPartition",
    "Dataset",
    "Role",
    "Rollouts",
    "TokenDocuments",
    "Tokenizer",
    "as_source",
    "as_validation",
    "columns",
    "conversations",
    "digits",
    "digits_split",
    "load_tokenizer",
    "open_tokens",
    "pack",
    "preference_pairs",
    "prompt_rows",
    "standard_library",
    "tokenize",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
