"""Documents of tokens in memory and in mapped files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telic.data import ByteTokenizer, TokenDocuments, open_tokens, tokenize, write_tokens
from telic.errors import DataError


@given(st.lists(st.lists(st.integers(0, 9))))
def test_documents_come_back(rows: list[list[int]]) -> None:
    """Catches an offset that is one off, and empty documents that vanish."""
    documents = TokenDocuments.of(rows, vocab_size=10)
    assert [d.tolist() for d in documents] == rows
    assert documents.lengths.tolist() == list(map(len, rows))
    if rows:
        part = documents.part(1, len(rows))
        assert [d.tolist() for d in part] == rows[1:]
        assert documents[-1].tolist() == rows[-1]
    with pytest.raises(IndexError):
        documents[len(rows)]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_files_hold_what_was_written(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    """Catches ids that wrap around in two bytes, and files read whole."""
    rows = [[0, vocab_size - 1], [], [7]]
    written = write_tokens(tmp_path / "corpus", rows, vocab_size=vocab_size)
    for documents in (written, open_tokens(tmp_path / "corpus")):
        assert [d.tolist() for d in documents] == rows
        assert isinstance(documents.tokens, np.memmap)
        assert documents.tokens.dtype == dtype
        assert documents.vocab_size == vocab_size
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
    with pytest.raises(FileExistsError, match="open it with open_tokens"):
        write_tokens(tmp_path / "corpus", rows, vocab_size=vocab_size)


def test_texts_are_written_as_they_are_tokenized(tmp_path: Path) -> None:
    """Catches an end of text that the file lacks."""
    texts = ["def f():", "é"]
    written = write_tokens(tmp_path / "corpus", iter(texts), tokenizer=ByteTokenizer())
    in_memory = tokenize(texts, ByteTokenizer())
    np.testing.assert_array_equal(written.tokens, in_memory.tokens)
    np.testing.assert_array_equal(written.offsets, in_memory.offsets)


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    """Catches half a corpus that looks whole."""
    with pytest.raises(DataError, match=r"document 1: token ids must be in \[0, 5\), got 9 at place 2"):
        write_tokens(tmp_path / "corpus", [[1], [1, 2, 9]], vocab_size=5)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="needs tokenizer=, or vocab_size="):
        write_tokens(tmp_path / "corpus", [[1]])


def test_damaged_files_are_named(tmp_path: Path) -> None:
    """Catches a truncated copy whose last documents are noise."""
    write_tokens(tmp_path / "corpus", [[1, 2, 3]], vocab_size=5)
    tokens, header = tmp_path / "corpus" / "tokens.bin", tmp_path / "corpus" / "tokens.json"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"tokens\.bin must have 6 bytes, got 5"):
        open_tokens(tmp_path / "corpus")
    tokens.write_bytes(whole)
    changed: dict[str, Any] = {**json.loads(header.read_text()), "dtype": "|O"}
    header.write_text(json.dumps(changed))
    with pytest.raises(DataError, match="does not describe files of tokens"):
        open_tokens(tmp_path / "corpus")
    with pytest.raises(FileNotFoundError, match=r"holds no tokens\.json"):
        open_tokens(tmp_path)


def test_what_is_no_document() -> None:
    """Catches text and floats among ids, and one text in place of a list of them."""
    with pytest.raises(DataError, match="document 0 must be a row of whole numbers"):
        TokenDocuments.of([[0.5]])
    with pytest.raises(TypeError, match="one string"):
        tokenize("abc", ByteTokenizer())
    with pytest.raises(DataError, match="offsets end at 2, and there are 3 tokens"):
        TokenDocuments(np.arange(3), np.asarray([0, 2]))
    with pytest.raises(DataError, match="roles must be one for each"):
        TokenDocuments(np.arange(3), np.asarray([0, 3]), roles=np.zeros(2, np.uint8))
