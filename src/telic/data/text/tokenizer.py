"""What a tokenizer is here, and the one that is built in: bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""Special tokens with which the built-in tokenizer begins a turn of a conversation."""


class Tokenizer(Protocol):
    """Text to token ids and back.

    Attributes:
      vocab_size: Ids are in [0, vocab_size).
      eos_id: Ends a document; None when there is no such token.
      pad_id: Fills up rows; None when there is no such token.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int | None: ...

    @property
    def pad_id(self) -> int | None: ...

    @property
    def token_bytes(self) -> NDArray[Any]:
        """Bytes of text that each id stands for, int [vocab_size]; 0 for special tokens."""
        ...

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int32]:
        """Give the ids of a text; no token is added.

        Args:
          text: The text.
          special: Whether the names of special tokens in the text stand for those tokens. Leave it False for text that
            others wrote: it cannot then end a turn or open one.
        """
        ...

    def decode(self, ids: Any) -> str:
        """Give the text of ids; special tokens are left out."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte of UTF-8 is a token, and special tokens follow from 256 on.

    Nothing is learned and nothing is out of vocabulary, and a loss per token is a loss per byte.

    Args:
      special: Names of the special tokens, in the order of their ids.
      eos: Which of them ends a document; None for none.
      pad: Which of them fills up rows; None for none.
    Example:
      >>> tokenizer = ByteTokenizer()
      >>> tokenizer.encode("né").tolist()
      [110, 195, 169]
      >>> tokenizer.decode([110, 195, 169, tokenizer.eos_id])
      'né'
    """

    special: tuple[str, ...] = ("<|end|>", "<|pad|>", *ROLE_TOKENS)
    eos: str | None = "<|end|>"
    pad: str | None = "<|pad|>"
    _ids: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(set(self.special)) != len(self.special) or not all(self.special):
            raise ValueError(f"special tokens need names that differ, got {self.special!r}")
        for what, name in (("eos", self.eos), ("pad", self.pad)):
            if name is not None and name not in self.special:
                raise ValueError(f"{what}={name!r} is none of the special tokens {self.special!r}")
        object.__setattr__(self, "_ids", {name: 256 + i for i, name in enumerate(self.special)})

    @property
    def vocab_size(self) -> int:
        """256 and the special tokens."""
        return 256 + len(self.special)

    @property
    def eos_id(self) -> int | None:
        """Id that ends a document."""
        return None if self.eos is None else self._ids[self.eos]

    @property
    def pad_id(self) -> int | None:
        """Id that fills up rows."""
        return None if self.pad is None else self._ids[self.pad]

    @property
    def token_bytes(self) -> NDArray[np.uint8]:
        """1 for each byte, 0 for each special token, [vocab_size]."""
        return np.repeat(np.asarray([1, 0], np.uint8), [256, len(self.special)])

    def encode(self, text: str, *, special: bool = False) -> NDArray[np.int32]:
        """Give the bytes of a text as ids, int32; a lone surrogate becomes a question mark.

        Args:
          text: The text.
          special: Whether names of special tokens in it stand for those tokens.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"a tokenizer encodes text, got {type(text).__name__}")
        if not special:
            return _bytes_of(text)
        parts: list[NDArray[np.int32]] = []
        while text:
            places = [(at, name) for name in self.special if (at := text.find(name)) >= 0]
            if not places:
                parts.append(_bytes_of(text))
                break
            # Of names that begin at one place, the longest.
            at, name = min(places, key=lambda place: (place[0], -len(place[1])))
            parts += [_bytes_of(text[:at]), np.asarray([self._ids[name]], np.int32)]
            text = text[at + len(name) :]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def decode(self, ids: Any) -> str:
        """Give the text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: An id is outside the vocabulary.
        """
        flat = as_ids(ids, self.vocab_size)
        return flat[flat < 256].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def id_of(self, name: str) -> int | None:
        """Give the id of a special token, or None."""
        return self._ids.get(name)


def _bytes_of(text: str) -> NDArray[np.int32]:
    return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int32)


def as_ids(ids: Any, vocab_size: int) -> NDArray[np.int64]:
    """Give ids as one row of whole numbers, checked.

    Raises:
      ValueError: They are no whole numbers, or one is outside [0, vocab_size); its place is named.
    """
    flat = np.asarray(ids)
    if flat.size and not np.issubdtype(flat.dtype, np.integer):
        raise ValueError(f"token ids must be whole numbers, got {flat.dtype}")
    flat = flat.reshape(-1).astype(np.int64)
    outside = (flat < 0) | (flat >= vocab_size)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise ValueError(f"token ids must be in [0, {vocab_size}), got {int(flat[at])} at place {at}")
    return flat


def with_end(ids: Sequence[int] | NDArray[Any], tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Give ids that end with the tokenizer's end of text, once.

    Raises:
      ValueError: The tokenizer has no such token.
    """
    row = np.asarray(ids, np.int32).reshape(-1)
    if tokenizer.eos_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has no end-of-text token (eos_id is None), so documents cannot be ended with "
            "one: name it when the tokenizer is made, or pass append_eos=False"
        )
    if row.size and row[-1] == tokenizer.eos_id:
        return row
    return np.append(row, np.int32(tokenizer.eos_id))
