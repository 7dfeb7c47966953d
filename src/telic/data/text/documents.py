"""Documents of tokens: one long row and where each document begins in it, in memory or mapped from files."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telic.data.text.tokenizer import Tokenizer, with_end
from telic.errors import DataError
from telic.places import local

_FORMAT = "telic-tokens"
_VERSION = 1


@dataclass(frozen=True, eq=False)
class TokenDocuments:
    """Documents as ids: document i is ``tokens[offsets[i] : offsets[i + 1]]``.

    Attributes:
      tokens: Ids of all documents, one after the other, [tokens]. May be mapped from a file.
      offsets: Where each document begins, and where the last one ends, int64 [documents + 1].
      vocab_size: Ids are below it; None when it is not known.
      roles: Who wrote each token, uint8 [tokens]; None where documents are no conversations.
    Raises:
      DataError: The offsets do not fit the tokens.
    Example:
      >>> documents = TokenDocuments.of([[1, 2, 3], [4, 5]])
      >>> len(documents), documents[1].tolist()
      (2, [4, 5])
    """

    tokens: NDArray[Any]
    offsets: NDArray[np.int64]
    vocab_size: int | None = None
    roles: NDArray[np.uint8] | None = None

    def __post_init__(self) -> None:
        offsets = self.offsets
        if self.tokens.ndim != 1 or not np.issubdtype(self.tokens.dtype, np.integer):
            raise DataError(f"tokens must be one row of whole numbers, got {self.tokens.dtype} {self.tokens.shape}")
        if offsets.ndim != 1 or not offsets.size or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise DataError("offsets must begin with 0 and not decrease: the start of each document, and the end")
        if offsets[-1] != len(self.tokens):
            raise DataError(f"offsets end at {int(offsets[-1])}, and there are {len(self.tokens)} tokens")
        if self.roles is not None and self.roles.shape != self.tokens.shape:
            raise DataError(f"roles must be one for each of {len(self.tokens)} tokens, got {self.roles.shape}")

    @staticmethod
    def of(documents: Iterable[Any], *, vocab_size: int | None = None) -> "TokenDocuments":
        """Join documents, each a sequence of ids, in memory.

        Args:
          documents: Sequences of ids.
          vocab_size: Ids must be below it, where it is given.
        Raises:
          DataError: An id is negative or not below `vocab_size`; document and place are named.
        """
        rows = [as_document(ids, i, vocab_size) for i, ids in enumerate(documents)]
        return TokenDocuments(
            tokens=np.concatenate(rows) if rows else np.zeros(0, np.int32),
            offsets=np.cumsum([0, *map(len, rows)], dtype=np.int64),
            vocab_size=vocab_size,
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there are {len(self)} documents, got index {index}")
        index %= len(self)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, [documents]."""
        return np.diff(self.offsets)

    def part(self, first: int, last: int) -> "TokenDocuments":
        """Give the documents from `first` up to `last`, sharing memory."""
        start, end = int(self.offsets[first]), int(self.offsets[last])
        roles = None if self.roles is None else self.roles[start:end]
        return TokenDocuments(self.tokens[start:end], self.offsets[first : last + 1] - start, self.vocab_size, roles)


def as_document(ids: Any, index: int, vocab_size: int | None) -> NDArray[np.int32]:
    """Give one document's ids as int32, checked; its number is for the error."""
    row = np.asarray(ids)
    if row.size == 0:
        return np.zeros(0, np.int32)
    if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
        raise DataError(f"document {index} must be a row of whole numbers, got {row.dtype} {row.shape}")
    outside = (row < 0) | (row >= (2**31 if vocab_size is None else vocab_size))
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        limit = "2**31" if vocab_size is None else str(vocab_size)
        raise DataError(f"document {index}: token ids must be in [0, {limit}), got {int(row[at])} at place {at}")
    return row.astype(np.int32)


def tokenize(texts: Iterable[str], tokenizer: Tokenizer, *, append_eos: bool = True) -> TokenDocuments:
    """Turn texts into documents of tokens, in memory.

    Args:
      texts: One text for each document.
      tokenizer: What makes ids of them.
      append_eos: End each document with the tokenizer's end of text, once.
    Raises:
      ValueError: `append_eos`, and the tokenizer has no such token.
    Example:
      >>> from telic.data import ByteTokenizer
      >>> tokenize(["ab"], ByteTokenizer())[0].tolist()
      [97, 98, 256]
    """
    return TokenDocuments.of(_encoded(texts, tokenizer, append_eos), vocab_size=tokenizer.vocab_size)


def _encoded(texts: Iterable[str], tokenizer: Tokenizer, append_eos: bool) -> Iterator[NDArray[np.int32]]:
    if isinstance(texts, str):
        raise TypeError("texts is one string: give a list with a text for each document")
    for text in texts:
        ids = tokenizer.encode(text)
        yield with_end(ids, tokenizer) if append_eos else ids


def write_tokens(
    folder: str | os.PathLike[str],
    texts: Iterable[Any],
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    append_eos: bool = True,
) -> TokenDocuments:
    """Write documents into a folder of token files, one at a time, and open it.

    Ids take two bytes where the vocabulary allows it, else four. The folder appears whole or not at all.

    Args:
      folder: Where; it must not exist.
      texts: Texts for the tokenizer, or without one sequences of ids.
      tokenizer: What makes ids of texts.
      vocab_size: Ids are below it; needed without a tokenizer.
      append_eos: End each text with the tokenizer's end of text, once. Ids are taken as they are.
    Raises:
      FileExistsError: There is such a folder.
      DataError: An id is outside the vocabulary; document and place are named.
      ValueError: Neither `tokenizer` nor `vocab_size` is given.
    """
    target = local(folder)
    if target.exists():
        raise FileExistsError(f"{target} exists: open it with open_tokens, or write elsewhere")
    if tokenizer is not None:
        size, documents = tokenizer.vocab_size, _encoded(texts, tokenizer, append_eos)
    elif vocab_size is not None:
        size, documents = vocab_size, iter(texts)
    else:
        raise ValueError("write_tokens needs tokenizer=, or vocab_size= for documents that are ids")
    dtype = np.dtype("<u2" if size <= 2**16 else "<u4")
    draft = target.with_name(f".{target.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        offsets = [0]
        with (draft / "tokens.bin").open("wb") as file:
            for index, ids in enumerate(documents):
                row = as_document(ids, index, size)
                file.write(row.astype(dtype).tobytes())
                offsets.append(offsets[-1] + len(row))
        (draft / "documents.bin").write_bytes(np.asarray(offsets, "<i8").tobytes())
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "dtype": dtype.str,
            "tokens": offsets[-1],
            "documents": len(offsets) - 1,
            "vocab_size": size,
        }
        (draft / "tokens.json").write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return open_tokens(target)


def open_tokens(folder: str | os.PathLike[str]) -> TokenDocuments:
    """Open a folder that `write_tokens` wrote; its tokens are mapped, not read.

    Raises:
      FileNotFoundError: There is no such folder.
      DataError: It is no folder of tokens, or a file has another size than its description says.
    """
    path = Path(folder)
    description = path / "tokens.json"
    if not description.exists():
        raise FileNotFoundError(f"{path} holds no tokens.json: give a folder that telic.data.write_tokens wrote")
    try:
        header: Any = json.loads(description.read_text(encoding="utf-8"))
        if header["format"] != _FORMAT or header["version"] != _VERSION:
            raise ValueError(f"format {header['format']!r}, version {header['version']!r}")
        dtype, tokens, documents = np.dtype(header["dtype"]), int(header["tokens"]), int(header["documents"])
        size = int(header["vocab_size"])
        if dtype.str not in ("<u2", "<u4") or tokens < 0 or documents < 0:
            raise ValueError(f"dtype {dtype.str}, {tokens} tokens, {documents} documents")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{description} does not describe files of tokens: {error}") from error
    for name, expected in (("tokens.bin", tokens * dtype.itemsize), ("documents.bin", (documents + 1) * 8)):
        found = (path / name).stat().st_size if (path / name).exists() else 0
        if found != expected:
            raise DataError(
                f"{path / name} must have {expected} bytes, got {found}: it was cut, or changed; write anew"
            )
    offsets = np.fromfile(path / "documents.bin", "<i8")
    mapped = np.memmap(path / "tokens.bin", dtype, "r") if tokens else np.zeros(0, dtype)
    return TokenDocuments(mapped, offsets.astype(np.int64), size)
