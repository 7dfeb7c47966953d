"""Documents packed into rows of one length, with the document and the position of each token."""

import bisect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telic.data.dataset import Dataset, as_count
from telic.data.table import ColumnReader, HeldOutReader, epoch_order
from telic.data.text.documents import TokenDocuments
from telic.errors import DataError

Keep: TypeAlias = Literal["start", "end"]

Pieces: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Where each piece of a document begins, its size, and the number of the first piece of each row."""


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows made of pieces of documents, gathered when they are asked for.

    Attributes:
      documents: What the pieces are cut from.
      width: Tokens of a row.
      starts: Where each piece begins in ``documents.tokens``, int64 [pieces].
      sizes: Tokens of each piece, int64 [pieces].
      firsts: Number of the first piece of each row, and of all pieces, int64 [rows + 1].
      pad_id: Id that fills up rows.
    """

    documents: TokenDocuments
    width: int
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    firsts: NDArray[np.int64]
    pad_id: int

    def __len__(self) -> int:
        return len(self.firsts) - 1

    @property
    def fingerprint(self) -> str:
        """What the rows are made of, in words: a position of other rows is refused."""
        documents = self.documents
        kind = "with roles " if documents.roles is not None else ""
        return (
            f"{len(self)} rows of {self.width} {kind}from {len(documents)} documents of {len(documents.tokens)} tokens"
        )

    def take(self, records: NDArray[np.int64] | slice) -> dict[str, NDArray[Any]]:
        """Gather rows into a new batch: tokens, segment_ids and positions, and roles where there are any.

        Raises:
          DataError: An id is outside the vocabulary; its document and place are named.
        """
        chosen = np.arange(len(self))[records] if isinstance(records, slice) else records
        out = {name: np.empty((len(chosen), self.width), np.int32) for name in self._names}
        self._gather(out, chosen)
        return out

    def fill(self, memory: Any, records: NDArray[np.int64]) -> None:
        """Gather the rows of several batches, [batches, rows], into the first rows of arrays of one more dimension."""
        for i, chosen in enumerate(records):
            self._gather({name: memory[name][i] for name in self._names}, chosen)

    @property
    def _names(self) -> tuple[str, ...]:
        return ("tokens", "segment_ids", "positions") + (() if self.documents.roles is None else ("roles",))

    def _gather(self, out: dict[str, NDArray[Any]], chosen: NDArray[np.int64]) -> None:
        """Write rows into arrays [rows, width]."""
        for name in self._names:
            out[name][...] = self.pad_id if name == "tokens" else 0
        roles = self.documents.roles
        for row, number in enumerate(chosen):
            at = 0
            for segment, piece in enumerate(range(int(self.firsts[number]), int(self.firsts[number + 1])), start=1):
                start, size = int(self.starts[piece]), int(self.sizes[piece])
                place = slice(at, at + size)
                out["tokens"][row, place] = self.documents.tokens[start : start + size]
                out["segment_ids"][row, place] = segment
                out["positions"][row, place] = np.arange(size, dtype=np.int32)
                if roles is not None:
                    out["roles"][row, place] = roles[start : start + size]
                at += size
        self._check(out["tokens"], out["segment_ids"], chosen)

    def _check(self, tokens: NDArray[Any], segments: NDArray[Any], chosen: NDArray[np.int64]) -> None:
        limit = self.documents.vocab_size
        if limit is None:
            return
        outside = ((tokens < 0) | (tokens >= limit)) & (segments != 0)
        if not outside.any():
            return
        row, column = (int(x) for x in np.argwhere(outside)[0])
        before = int(self.firsts[chosen[row]])
        piece = before + int(segments[row, column]) - 1
        within = column - int(self.sizes[before:piece].sum())
        where = int(self.starts[piece]) + within
        document = int(np.searchsorted(self.documents.offsets, where, side="right")) - 1
        raise DataError(
            f"token ids must be in [0, {limit}), got {int(tokens[row, column])} in document {document} at place "
            f"{where - int(self.documents.offsets[document])}: the tokens were made by another tokenizer"
        )


def pack(
    documents: TokenDocuments,
    *,
    length: int,
    batch: int,
    seed: int = 0,
    shuffle: bool = True,
    whole: bool = False,
    keep: Keep = "start",
    held_out: int = 0,
    val: TokenDocuments | None = None,
    pad_id: int = 0,
    vocab_size: int | None = None,
    needs_roles: Collection[int] | None = None,
) -> Dataset:
    """Make a data set of rows for a language objective: ``tokens``, ``segment_ids``, ``positions``, and ``roles``.

    A row has ``length + 1`` tokens, so that the model reads `length`. Each document in a row is a segment with
    positions from 0, so that attention and targets stay within it.

    By default documents are laid one after the other and cut at the ends of rows: no padding, and every token but the
    first of its document is a target exactly once. A document that goes on in the next row is a segment of its own
    there: its positions begin anew and it does not see what came before. With `whole` no document is cut that fits a
    row: rows are filled by the documents that leave the least space, the rest is padding, and a longer document loses
    what does not fit; what it loses is not packed as if it were a document.

    The rows are made once, and their order drawn for each epoch. The stream can be resumed, and gives the same global
    batches for any number of processes.

    Args:
      documents: What to train on.
      length: Tokens the model reads in each row.
      batch: Rows per batch over all processes.
      seed: Of the order of documents and of rows.
      shuffle: Draw these orders; False keeps documents and rows as they are.
      whole: Keep documents whole.
      keep: Which end of a document longer than a row stays, with `whole`.
      held_out: Documents taken off the end for validation, in their order.
      val: Other documents for validation, in place of `held_out`.
      pad_id: Id that fills up rows; it is in no segment, so it is never read or predicted.
      vocab_size: Ids must be below it; by default what the documents say.
      needs_roles: Roles of which each document must have a token after it was cut, such as the assistant's.
    Raises:
      ValueError: A count is out of range, or both `held_out` and `val` are given.
      DataError: There are not enough tokens for one batch, or a document lacks the roles it needs.
    Example:
      >>> from telic.data import DataPartition
      >>> data = pack(TokenDocuments.of([[1, 2, 3], [4, 5]]), length=4, batch=1, shuffle=False)
      >>> batch = next(iter(data.train(DataPartition())))
      >>> batch["tokens"].tolist(), batch["segment_ids"].tolist(), batch["positions"].tolist()
      ([[1, 2, 3, 4, 5]], [[1, 1, 1, 2, 2]], [[0, 1, 2, 0, 1]])
    """
    length = as_count("pack length", length, minimum=1)
    batch = as_count("pack batch", batch, minimum=1)
    seed = as_count("pack seed", seed, minimum=0)
    held_out = as_count("pack held_out", held_out, minimum=0)
    if keep not in ("start", "end"):
        raise ValueError(f"keep must be 'start' or 'end', got {keep!r}")
    if held_out and val is not None:
        raise ValueError("give held_out= or val=, not both")
    if held_out and held_out >= len(documents):
        raise ValueError(f"held_out must be less than the {len(documents)} documents there are, got {held_out}")
    if held_out:
        last = len(documents) - held_out
        documents, val = documents.part(0, last), documents.part(last, len(documents))
    layout = _Layout(length + 1, whole, keep, pad_id, vocab_size, frozenset(needs_roles or ()))
    rows = layout.rows(documents, epoch_order(seed, 0, len(documents)) if shuffle else np.arange(len(documents)))
    full = len(rows) - (0 if whole or not len(rows) or _is_full(rows) else 1)
    if full < batch:
        raise DataError(
            f"{len(documents)} documents of {len(documents.tokens)} tokens make {full} rows of {length + 1}, less than "
            f"a batch of {batch}; give shorter rows, a smaller batch or more documents"
        )
    held: PackedRows | None = None
    if val is not None:
        held = layout.rows(val, np.arange(len(val)))
        if not len(held):
            raise DataError("the documents held out for validation have no token to predict")
    return Dataset(
        train=ColumnReader(rows, full, batch, seed, bool(shuffle)),
        val=None if held is None else HeldOutReader(held, 0, len(held), batch),
        records=full,
        batch=batch,
        held_out=0 if held is None else len(held),
    )


def _is_full(rows: PackedRows) -> bool:
    return int(rows.sizes[int(rows.firsts[-2]) :].sum()) == rows.width


@dataclass(frozen=True)
class _Layout:
    width: int
    whole: bool
    keep: Keep
    pad_id: int
    vocab_size: int | None
    needs_roles: frozenset[int]

    def rows(self, documents: TokenDocuments, order: NDArray[np.int64]) -> PackedRows:
        if self.vocab_size is not None:
            documents = TokenDocuments(documents.tokens, documents.offsets, self.vocab_size, documents.roles)
        starts, sizes, firsts = self._whole(documents, order) if self.whole else self._cut(documents, order)
        return PackedRows(documents, self.width, starts, sizes, firsts, self.pad_id)

    def _cut(self, documents: TokenDocuments, order: NDArray[np.int64]) -> Pieces:
        """Lay documents one after the other; a row begins with the last token of the row before it."""
        if self.needs_roles:
            raise ValueError("needs_roles= is for conversations, which are kept whole: pass whole=True")
        lengths = documents.lengths[order]
        order, lengths = order[lengths > 0], lengths[lengths > 0]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        stride = self.width - 1
        count = max(-(-(total - 1) // stride), 0)
        row_starts = np.arange(count, dtype=np.int64) * stride
        row_ends = np.minimum(row_starts + self.width, total)
        # The documents that each row touches, from the one its first token is in to that of its last.
        low = np.searchsorted(ends, row_starts, side="right")
        high = np.searchsorted(ends, row_ends - 1, side="right")
        firsts = np.concatenate([[0], np.cumsum(high - low + 1)]).astype(np.int64)
        row_of = np.repeat(np.arange(count), high - low + 1)
        touched = np.arange(int(firsts[-1])) - firsts[row_of] + low[row_of]
        begin = np.maximum(ends[touched] - lengths[touched], row_starts[row_of])
        end = np.minimum(ends[touched], row_ends[row_of])
        starts = documents.offsets[order[touched]] + begin - (ends[touched] - lengths[touched])
        return starts.astype(np.int64), (end - begin).astype(np.int64), firsts

    def _whole(self, documents: TokenDocuments, order: NDArray[np.int64]) -> Pieces:
        """Put each document into the row in which it leaves the least space."""
        offsets = documents.offsets
        rows: list[list[tuple[int, int]]] = []
        # Rows with space left, by (space, row).
        open_rows: list[tuple[int, int]] = []
        for number in order:
            start, end = int(offsets[number]), int(offsets[number + 1])
            size = min(end - start, self.width)
            if size < 2:
                continue
            if self.keep == "end":
                start = end - size
            self._check_roles(documents, int(number), start, size)
            at = bisect.bisect_left(open_rows, (size, -1))
            if at == len(open_rows):
                space, row = self.width, len(rows)
                rows.append([])
            else:
                space, row = open_rows.pop(at)
            rows[row].append((start, size))
            if space - size >= 2:
                bisect.insort(open_rows, (space - size, row))
        pieces = [piece for row in rows for piece in row]
        flat = np.asarray(pieces, np.int64).reshape(-1, 2)
        return flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, rows)], dtype=np.int64)

    def _check_roles(self, documents: TokenDocuments, number: int, start: int, size: int) -> None:
        if not self.needs_roles:
            return
        if documents.roles is None:
            raise DataError("needs_roles= needs documents with roles, such as those of telic.data.conversations")
        # The first token of a row is no target.
        if not np.isin(documents.roles[start + 1 : start + size], list(self.needs_roles)).any():
            raise DataError(
                f"document {number}, cut to {size} tokens, has no token of the roles {sorted(self.needs_roles)} to "
                f"learn: give longer rows or keep={'start' if self.keep == 'end' else 'end'!r}, or leave it out"
            )


__all__ = ["PackedRows", "pack"]
