"""Documents in rows: every token a target once, nothing across documents, resumable and sharded."""

from collections import Counter
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telic.data import DataPartition, TokenDocuments, as_source, pack
from telic.errors import DataError
from telic.loop.ports import View

ALL = DataPartition()


def documents(lengths: Any, **fields: Any) -> TokenDocuments:
    """Give documents whose tokens say where they are: 100 · document + place."""
    return TokenDocuments.of([100 * i + np.arange(n) for i, n in enumerate(lengths)], **fields)


def epoch(data: Any) -> list[Any]:
    return list(islice(iter(data.train(ALL)), data.batches_per_epoch))


def targets(batches: list[Any]) -> Counter[tuple[int, int]]:
    """Count the pairs of a token and its target within one document of a row."""
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for (a, b), (s, t) in zip(pairwise(tokens.tolist()), pairwise(segments.tolist()), strict=True):
                if s == t != 0:
                    found[a, b] += 1
    return found


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 7))
def test_cut_documents_give_every_target_once(lengths: list[int], length: int) -> None:
    """XS153: a target across documents, twice, or not at all; positions and segments are those of the rows."""
    made = documents(lengths)
    pairs = {pair for d in made for pair in pairwise(d.tolist())}
    if sum(lengths) < 2:
        return
    whole = TokenDocuments.of([np.arange(length + 1)])
    rows = list(pack(whole, length=length, batch=1, val=made).val(ALL))  # type: ignore[operator, misc]
    assert targets(rows) == dict.fromkeys(pairs, 1)
    for batch in rows:
        for i in range(len(batch["tokens"])):
            segments, positions = batch["segment_ids"][i], batch["positions"][i]
            is_new = np.diff(segments, prepend=-1) != 0
            starts = np.maximum.accumulate(np.where(is_new, np.arange(length + 1), 0))
            np.testing.assert_array_equal(positions[segments > 0], (np.arange(length + 1) - starts)[segments > 0])


def test_training_rows_are_full() -> None:
    """Catches padding in rows that need none, and a last row that is short."""
    data = pack(documents([5, 9, 3]), length=4, batch=2, shuffle=False)
    batch = epoch(data)[0]
    assert data.records == 4
    assert (batch["segment_ids"] > 0).all()
    np.testing.assert_array_equal(batch["tokens"], [[0, 1, 2, 3, 4], [4, 100, 101, 102, 103]])
    np.testing.assert_array_equal(batch["segment_ids"], [[1] * 5, [1, 2, 2, 2, 2]])
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]])


@given(st.lists(st.integers(2, 9), min_size=1, max_size=12))
def test_whole_documents_are_never_cut(lengths: list[int]) -> None:
    """Catches a document split over rows, lost or packed twice, and rows filled past their end."""
    made = documents(lengths)
    data = pack(made, length=8, batch=1, whole=True)
    rows = epoch(data)
    found = [b["tokens"][0][b["segment_ids"][0] == s] for b in rows for s in range(1, b["segment_ids"].max() + 1)]
    assert sorted(map(tuple, found)) == sorted(map(tuple, made))
    # No two rows could have been one.
    fill = sorted(int((b["segment_ids"] > 0).sum()) for b in rows)
    assert len(fill) < 2 or fill[0] + fill[1] > 9 - 1


@pytest.mark.parametrize(("keep", "expected"), [("start", [0, 1, 2, 3]), ("end", [6, 7, 8, 9])])
def test_what_does_not_fit_a_row_is_dropped(keep: Any, expected: list[int]) -> None:
    """XS153: the tail of a long answer packed as if it were a document of its own."""
    data = pack(documents([10, 3]), length=3, batch=1, whole=True, keep=keep)
    rows = [b["tokens"][0].tolist() for b in epoch(data)]
    assert sorted(rows) == [expected, [100, 101, 102, 0]]


def test_roles_are_cut_with_their_tokens() -> None:
    """XS152: ids 12, prompt 8, row of 10, the end kept: 6 tokens of the prompt and 4 of the answer."""
    roles = np.asarray([2] * 8 + [3] * 4, np.uint8)
    made = TokenDocuments(np.arange(12), np.asarray([0, 12]), roles=roles)
    data = pack(made, length=9, batch=1, whole=True, keep="end", needs_roles=(3,))
    (batch,) = epoch(data)
    np.testing.assert_array_equal(batch["roles"], [[2] * 6 + [3] * 4])
    np.testing.assert_array_equal(batch["tokens"][0], np.arange(2, 12))
    with pytest.raises(DataError, match=r"document 0, cut to 8 tokens, has no token of the roles \[3\].*keep='end'"):
        pack(made, length=7, batch=1, whole=True, keep="start", needs_roles=(3,))


def test_the_stream_resumes_and_is_sharded() -> None:
    """Catches rows seen twice or never after a resume, and processes that read other batches than one would."""
    made = documents([7, 5, 30, 2, 18, 9])
    data = pack(made, length=6, batch=2, seed=3)
    source = as_source(data)
    source.begin(0, continuous=True)
    batches, positions = zip(*(source.next(View(None, 0, i)) for i in range(13)), strict=True)
    assert targets(list(batches[: data.batches_per_epoch])).total() > 0
    again = as_source(pack(made, length=6, batch=2, seed=3))
    again.set_state(positions[7])
    again.begin(0, continuous=True)
    for i in range(8, 13):
        batch, _ = again.next(View(None, 0, i))
        for name in batch:
            np.testing.assert_array_equal(batch[name], batches[i][name])
    halves = [iter(data.train(DataPartition(i, 2))) for i in range(2)]
    for batch in batches[:5]:
        joined = np.concatenate([next(half)["tokens"] for half in halves])
        np.testing.assert_array_equal(joined, batch["tokens"])
    other = as_source(pack(documents([7, 5, 30, 2, 18, 10]), length=6, batch=2, seed=3))
    with pytest.raises(DataError, match="the position was taken with"):
        other.set_state(positions[7])


def test_epochs_have_orders_of_their_own() -> None:
    """Catches a seed that is not used, and rows lost from an epoch."""
    made = documents([40, 33])
    data = pack(made, length=5, batch=2)
    stream = iter(data.train(ALL))
    first, second = ([next(stream)["tokens"] for _ in range(data.batches_per_epoch or 0)] for _ in range(2))
    assert not np.array_equal(first, second)
    assert sorted(np.concatenate(first).tolist()) == sorted(np.concatenate(second).tolist())
    other = next(iter(pack(made, length=5, batch=2, seed=1).train(ALL)))["tokens"]
    assert not np.array_equal(other, first[0])


def test_held_out_documents_are_never_trained_on() -> None:
    """Catches a validation document in training, and one that validation leaves out."""
    data = pack(documents([9, 8, 7, 6]), length=4, batch=2, held_out=2)
    seen = {int(t) // 100 for b in epoch(data) for t in b["tokens"].flat}
    val = [b for b in data.val(ALL)]  # type: ignore[operator, union-attr]
    held = targets(val)
    assert seen == {0, 1}
    assert {a // 100 for a, _ in held} == {2, 3}
    assert held.total() == 6 + 5
    assert data.held_out == 3


def test_ids_of_another_tokenizer_are_named() -> None:
    """Catches ids past the model's vocabulary, which an embedding clips."""
    data = pack(documents([3, 4]), length=2, batch=1, shuffle=False, vocab_size=102)
    with pytest.raises(DataError, match=r"in \[0, 102\), got 102 in document 1 at place 2"):
        epoch(data)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"length": 0}, "pack length must be an integer of at least 1"),
        ({"batch": 99}, "make 1 rows of 5, less than a batch of 99"),
        ({"held_out": 2}, "less than the 2 documents"),
        ({"keep": "middle"}, "'start' or 'end'"),
        ({"needs_roles": (3,)}, "pass whole=True"),
        ({"held_out": 1, "val": documents([3])}, "not both"),
        ({"val": documents([1])}, "no token to predict"),
    ],
)
def test_what_is_refused(options: Any, text: str) -> None:
    """Catches a data set that is empty or not what was asked for, found out in the middle of a run."""
    with pytest.raises(ValueError, match=text):
        pack(documents([3, 4]), **{"length": 4, "batch": 1, **options})


def test_rows_written_into_memory_are_those_taken() -> None:
    """Catches what the last batch left in memory that is used again, where a row has padding."""
    made = TokenDocuments.of([[1] * 9, [2] * 3, [3] * 5, [4] * 9], vocab_size=5)
    rows = pack(made, length=8, batch=2, whole=True, shuffle=False).train.table  # type: ignore[attr-defined]
    memory = {name: np.full((3, 2, 9), 99, np.int32) for name in ("tokens", "segment_ids", "positions")}
    rows.fill(memory, np.asarray([[0, 1], [1, 2]]))
    for name, array in memory.items():
        np.testing.assert_array_equal(array[0], rows.take(np.asarray([0, 1]))[name])
        np.testing.assert_array_equal(array[1], rows.take(slice(1, 3))[name])
        assert (array[2] == 99).all()
