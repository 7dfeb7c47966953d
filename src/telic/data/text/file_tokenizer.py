"""Tokenizers stored as ``tokenizer.json``, read by the `tokenizers` library (``pip install "telic[tokenizers]"``)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from telic.data.text.tokenizer import as_ids
from telic.errors import DataError


class FileTokenizer:
    """A tokenizer from a file; make it with `load_tokenizer`."""

    def __init__(self, inner: Any, *, eos: str | None, pad: str | None, what: str):
        self._inner = inner
        self._what = what
        self.eos_id = self._named("eos", eos)
        """Id that ends a document, or None."""
        self.pad_id = self._named("pad", pad)
        """Id that fills up rows, or None."""

    def _named(self, what: str, name: str | None) -> int | None:
        if name is None:
            return None
        found = self.id_of(name)
        if found is None:
            raise ValueError(f"{what}={name!r} is no token of {self._what}")
        return found

    @property
    def vocab_size(self) -> int:
        """Ids are below it; a model's own vocabulary may be padded to a larger one."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """Bytes of text that each id stands for, [vocab_size]; 0 for special tokens and unused ids."""
        description = json.loads(self._inner.to_str())
        is_byte_level = "ByteLevel" in json.dumps([description.get("decoder"), description.get("pre_tokenizer")])
        special = {token["id"] for token in description.get("added_tokens", ()) if token.get("special")}
        added = {token["id"]: token["content"] for token in description.get("added_tokens", ())}
        out = np.zeros(self.vocab_size, np.int32)
        for token, index in self._inner.get_vocab(with_added_tokens=True).items():
            if index in special:
                continue
            if index in added:
                out[index] = len(added[index].encode())
            elif is_byte_level:
                # In this alphabet every character stands for one byte.
                out[index] = len(token)
            elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                out[index] = 1
            else:
                out[index] = len(token.removeprefix("##").replace("▁", " ").encode())
        return out

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int32]:
        """Give the ids of a text; no token is added.

        Args:
          text: The text.
          special: Whether names of special tokens in it stand for those tokens.
        """
        # A setting of the tokenizer, not of the call.
        self._inner.encode_special_tokens = not special
        return np.asarray(self._inner.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Any) -> str:
        """Give the text of ids, without special tokens."""
        return self._inner.decode(as_ids(ids, self.vocab_size).tolist(), skip_special_tokens=True)

    def id_of(self, name: str) -> int | None:
        """Give the id of a token by its name, or None."""
        return self._inner.token_to_id(name)


def load_tokenizer(path: str | os.PathLike[str], *, eos: str | None = None, pad: str | None = None) -> FileTokenizer:
    """Read a tokenizer from ``tokenizer.json`` or the folder it lies in, such as that of a checkpoint.

    The tokens that end and fill are those that ``tokenizer_config.json`` beside it names, unless given here.

    Args:
      path: The file, or its folder.
      eos: Name of the token that ends a document.
      pad: Name of the token that fills up rows.
    Raises:
      ImportError: The `tokenizers` library is not installed.
      FileNotFoundError: There is no such file.
      DataError: The file is no tokenizer.
      ValueError: `eos` or `pad` is no token of it.
    """
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.exists():
        raise FileNotFoundError(f"there is no tokenizer at {file}: give a tokenizer.json, or the folder that has one")
    try:
        from tokenizers import Tokenizer as Inner  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError('a tokenizer file needs the tokenizers library: pip install "telic[tokenizers]"') from error
    try:
        inner: Any = Inner.from_file(str(file))
    except Exception as error:
        raise DataError(f"{file} is no tokenizer that this version of tokenizers reads: {error}") from error
    named = _named_tokens(file.with_name("tokenizer_config.json"))
    # Rows are cut and filled where they are packed.
    inner.no_truncation()
    inner.no_padding()
    return FileTokenizer(inner, eos=eos or named["eos_token"], pad=pad or named["pad_token"], what=str(file))


def _named_tokens(config: Path) -> dict[str, str | None]:
    read: Any = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    out: dict[str, str | None] = {}
    for name in ("eos_token", "pad_token"):
        value = read.get(name)
        # Some write the token itself, some a description of it.
        content = cast(Mapping[str, Any], value).get("content") if isinstance(value, Mapping) else value
        out[name] = content if isinstance(content, str) else None
    return out
