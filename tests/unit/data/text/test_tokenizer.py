"""Bytes as tokens, files of tokenizers, and ends of text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telic.data import ByteTokenizer, load_tokenizer, tokenize
from telic.data.text.tokenizer import with_end
from telic.errors import DataError


@given(st.text(), st.booleans())
def test_bytes_come_back(text: str, special: bool) -> None:
    """Catches a character that is lost or split wrongly; special names in what others wrote stay text."""
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "replace").decode("utf-8")
    ids = tokenizer.encode(f"<|end|>{text}<|user|>", special=special)
    assert (ids[0] == tokenizer.eos_id) == special
    assert (tokenizer.encode("<|end|>") < 256).all()


def test_special_tokens() -> None:
    """Catches special ids that overlap with bytes, and ones that count as text."""
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 262
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.id_of("<|assistant|>")) == (256, 257, 260)
    assert tokenizer.encode("a<|user|>b", special=True).tolist() == [97, 259, 98]
    assert tokenizer.decode([97, 256, 98, 257]) == "ab"
    assert tokenizer.token_bytes.tolist() == [1] * 256 + [0] * 6
    assert tokenizer.decode([0xC3]) == "\ufffd"
    with pytest.raises(ValueError, match=r"in \[0, 262\), got 262 at place 1"):
        tokenizer.decode([1, 262])
    with pytest.raises(ValueError, match="none of the special tokens"):
        ByteTokenizer(special=("<|a|>",))
    with pytest.raises(TypeError, match="encodes text, got bytes"):
        tokenizer.encode(b"a")  # type: ignore[arg-type]


def test_an_end_is_appended_once_or_refused() -> None:
    """XS154, XS159: an end that is None, and a second one after a template's own."""
    tokenizer = ByteTokenizer()
    assert with_end([5], tokenizer).tolist() == with_end([5, 256], tokenizer).tolist() == [5, 256]
    assert with_end([], tokenizer).tolist() == [256]
    bare = ByteTokenizer(special=(), eos=None, pad=None)
    with pytest.raises(ValueError, match=r"eos_id is None.*append_eos=False"):
        tokenize(["a"], bare)
    assert tokenize(["a"], bare, append_eos=False)[0].tolist() == [97]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level BPE trained on two words, as a checkpoint's folder has it."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["hello hello", "héllo"], trainer)
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_tokenizer_file_is_read(folder: Path) -> None:
    """Catches a special token in a user's text that is taken at its word, and a file's own truncation of rows."""
    tokenizer = load_tokenizer(folder)
    text = "hello héllo <|endoftext|> hello"
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id == tokenizer.pad_id
    assert tokenizer.eos_id not in ids
    assert len(ids) > 2
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id in tokenizer.encode(text, special=True)
    # Bytes of the tokens are those of the text, so bits per byte compare with a byte-level model's.
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.token_bytes[tokenizer.eos_id] == 0
    assert ids.max() < tokenizer.vocab_size == len(tokenizer.token_bytes)


def test_files_that_are_no_tokenizers(folder: Path) -> None:
    """Catches a parser's own error, without the file's name."""
    with pytest.raises(FileNotFoundError, match="no tokenizer at"):
        load_tokenizer(folder / "nowhere")
    with pytest.raises(ValueError, match="eos='<s>' is no token"):
        load_tokenizer(folder, eos="<s>")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(folder / "tokenizer.json")


def test_ids_are_whole_numbers() -> None:
    """Catches a float that is cut."""
    with pytest.raises(ValueError, match="whole numbers"):
        ByteTokenizer().decode(np.asarray([1.5]))
