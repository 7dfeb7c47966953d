"""Conversations as documents of tokens with the role of each token, preference pairs and prompts."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from telic.data.dataset import Dataset, as_count
from telic.data.table import columns
from telic.data.text.documents import TokenDocuments
from telic.data.text.tokenizer import Tokenizer, with_end
from telic.errors import DataError, unknown_name

Message: TypeAlias = Mapping[str, str]
"""``{"role": "user", "content": "..."}``."""

Keep: TypeAlias = Literal["start", "end"]


class Role(enum.IntEnum):
    """Who wrote a token. `FORMAT` is what the format adds: headers of turns, and padding."""

    FORMAT = 0
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL = 4


_ROLES = {role.name.lower(): role for role in Role if role is not Role.FORMAT}


@dataclass(frozen=True)
class ChatFormat:
    r"""How turns are written as text; names of special tokens in it stand for those tokens.

    What was said, and `stop` after it, belong to the turn's role: a model that learns the assistant's tokens learns to
    stop. `start` and `gap` belong to nobody.

    Args:
      start: Begins a turn; ``{role}`` in it is the role's name.
      stop: Ends what was said.
      gap: Stands between a stop and the next turn.
    Example:
      >>> chatml = ChatFormat("<|im_start|>{role}\n", "<|im_end|>", "\n")
    """

    start: str = "<|{role}|>"
    stop: str = "<|end|>"
    gap: str = ""

    def encode(self, messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Give the ids of a conversation and the role of each, [tokens].

        What was said is never read as a special token.

        Raises:
          DataError: A message lacks a role or its content, or a role is unknown.
        """
        ids: list[NDArray[np.int32]] = []
        roles: list[NDArray[np.uint8]] = []

        def add(part: NDArray[np.int32], role: Role) -> None:
            ids.append(part)
            roles.append(np.full(len(part), role, np.uint8))

        for number, message in enumerate(messages):
            role, content = _read(message, number)
            if number and self.gap:
                add(tokenizer.encode(self.gap, special=True), Role.FORMAT)
            add(tokenizer.encode(self.start.replace("{role}", role.name.lower()), special=True), Role.FORMAT)
            add(np.concatenate([tokenizer.encode(content), tokenizer.encode(self.stop, special=True)]), role)
        if not ids:
            raise DataError("a conversation has no messages")
        return np.concatenate(ids), np.concatenate(roles)

    def prompt(self, messages: Sequence[Message], tokenizer: Tokenizer) -> NDArray[np.int32]:
        """Give the ids of a conversation that the assistant is to continue: its header stands at the end."""
        said = self.encode(messages, tokenizer)[0]
        header = self.gap + self.start.replace("{role}", "assistant")
        return np.concatenate([said, tokenizer.encode(header, special=True)])


def _read(message: Any, number: int) -> tuple[Role, str]:
    fields = cast(Mapping[str, Any], message) if isinstance(message, Mapping) else {}
    role, content = fields.get("role"), fields.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(f'message {number} must be {{"role": ..., "content": ...}} with two texts, got {message!r:.80}')
    if role not in _ROLES:
        raise DataError(f"message {number}: {unknown_name('role', role, _ROLES)}")
    return _ROLES[role], content


def conversations(
    chats: Iterable[Sequence[Message]], tokenizer: Tokenizer, *, format: ChatFormat | None = None
) -> TokenDocuments:
    """Turn conversations into documents with roles: pack them with ``pack(documents, whole=True, ...)``.

    Learn the assistant's tokens alone with ``LMObjective(model, loss_roles=(Role.ASSISTANT,))``.

    Args:
      chats: Conversations, each a list of messages ``{"role": ..., "content": ...}`` with the roles system, user,
        assistant and tool.
      tokenizer: What makes ids of them.
      format: How turns are written; the default is that of `ByteTokenizer`'s special tokens.
    Raises:
      DataError: A conversation is empty or a message malformed; the conversation is named.
    """
    written = format or ChatFormat()
    made: list[tuple[NDArray[np.int32], NDArray[np.uint8]]] = []
    for number, chat in enumerate(chats):
        try:
            made.append(written.encode(chat, tokenizer))
        except DataError as error:
            raise DataError(f"conversation {number}: {error}") from error
    documents = TokenDocuments.of((ids for ids, _ in made), vocab_size=tokenizer.vocab_size)
    roles = np.concatenate([roles for _, roles in made]) if made else np.zeros(0, np.uint8)
    return TokenDocuments(documents.tokens, documents.offsets, documents.vocab_size, roles)


def preference_pairs(
    pairs: Iterable[tuple[str, str, str]],
    tokenizer: Tokenizer,
    *,
    length: int,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    keep: Keep = "end",
    append_eos: bool = True,
    held_out: int = 0,
) -> Dataset:
    """Make a data set of preference pairs: chosen and rejected answers to one prompt.

    A batch has ``tokens``, int32 [batch, 2, length], the chosen first; ``completion_mask`` of that shape, 1 at the
    answer's tokens; and ``segment_ids``, 0 at the padding on the right. All are aligned; nothing is shifted.

    Args:
      pairs: (prompt, chosen, rejected) as texts.
      tokenizer: What makes ids of them.
      length: Tokens of a row. A prompt that is too long is cut; an answer never is.
      batch: Pairs per batch over all processes.
      seed: Of the order.
      shuffle: Draw the order anew for each epoch.
      keep: Which end of a prompt stays.
      append_eos: End each answer with the tokenizer's end of text, once.
      held_out: Pairs taken off the end for validation.
    Raises:
      DataError: Chosen and rejected are equal, an answer is empty or longer than a row; the pair is named.
      ValueError: `append_eos`, and the tokenizer has no end of text.
    """
    length = as_count("preference_pairs length", length, minimum=2)
    rows: dict[str, list[Any]] = {"tokens": [], "completion_mask": [], "segment_ids": []}
    for number, (prompt, chosen, rejected) in enumerate(pairs):
        if chosen == rejected:
            raise DataError(f"pair {number}: chosen and rejected are equal, {chosen!r:.60}; there is nothing to prefer")
        sides = [
            _pair_row(number, prompt, answer, tokenizer, length, keep, append_eos) for answer in (chosen, rejected)
        ]
        for name, found in zip(rows, zip(*sides, strict=True), strict=True):
            rows[name].append(np.stack(found))
    if not rows["tokens"]:
        raise DataError("there are no preference pairs")
    table = {name: np.stack(values) for name, values in rows.items()}
    return columns(table, batch=batch, seed=seed, shuffle=shuffle, held_out=held_out)


def _pair_row(
    number: int, prompt: str, answer: str, tokenizer: Tokenizer, length: int, keep: Keep, append_eos: bool
) -> tuple[NDArray[Any], ...]:
    before, ids = tokenizer.encode(prompt), tokenizer.encode(answer)
    ids = with_end(ids, tokenizer) if append_eos else ids
    if not answer or not len(ids):
        raise DataError(f"pair {number}: an answer is empty, so that there is no token to score")
    room = length - len(ids)
    if room < 1:
        raise DataError(
            f"pair {number}: an answer of {len(ids)} tokens leaves no room for a prompt in rows of {length}; give "
            "longer rows"
        )
    # The answer's place is counted from what is left of the prompt.
    before = (before[-room:] if keep == "end" else before[:room]) if len(before) > room else before
    if not len(before):
        raise DataError(f"pair {number}: the prompt is empty, so that the answer's first token has nothing before it")
    size = len(before) + len(ids)
    tokens = np.full(length, tokenizer.pad_id or 0, np.int32)
    tokens[:size] = np.concatenate([before, ids])
    place = np.arange(length)
    is_answer = (place >= len(before)) & (place < size)
    return tokens, is_answer.astype(np.int32), (place < size).astype(np.int32)


def prompt_rows(
    prompts: Iterable[str | Sequence[int]],
    tokenizer: Tokenizer,
    *,
    length: int | None = None,
) -> dict[str, NDArray[np.int32]]:
    """Give prompts as rows padded on the left, so that all end where the answer begins.

    Args:
      prompts: Texts, or sequences of ids such as `ChatFormat.prompt` gives.
      tokenizer: What makes ids of texts, and whose padding is used.
      length: Tokens of a row; None takes the longest prompt's.
    Returns:
      tokens: Ids, int32 [prompts, length].
      mask: 1 where a prompt has a token, int32 [prompts, length].
    Raises:
      DataError: A prompt is empty or longer than a row; it is named.
    """
    ids = [tokenizer.encode(p) if isinstance(p, str) else np.asarray(p, np.int32).reshape(-1) for p in prompts]
    if not ids:
        raise DataError("there are no prompts")
    width = max(map(len, ids)) if length is None else as_count("prompt_rows length", length, minimum=1)
    tokens = np.full((len(ids), width), tokenizer.pad_id or 0, np.int32)
    mask = np.zeros((len(ids), width), np.int32)
    for number, row in enumerate(ids):
        if not len(row):
            raise DataError(f"prompt {number} is empty: there is nothing to continue")
        if len(row) > width:
            raise DataError(
                f"prompt {number} has {len(row)} tokens, more than the {width} of a row; cut it, or give more"
            )
        tokens[number, width - len(row) :] = row
        mask[number, width - len(row) :] = 1
    return {"tokens": tokens, "mask": mask}
