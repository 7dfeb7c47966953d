"""Which tokens are targets: the shift, documents, padding, roles and weights; and what is refused."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from telic.errors import DataError, ShapeError
from telic.objectives.language.batch import check_ids, check_rows, token_rows

TOKENS = np.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], np.int32)


def kept(**fields: Any) -> Any:
    options = {k: fields.pop(k) for k in ("pad_id", "eos_id", "loss_roles") if k in fields}
    batch = {"tokens": TOKENS, **fields}
    check_rows(batch)
    return np.asarray(token_rows(batch, **options).weights)


def test_the_shift_is_made_once() -> None:
    """S42, XS150: rows shifted twice train t + 2, and flattened rows predict the next row's first token."""
    rows = token_rows({"tokens": TOKENS})
    np.testing.assert_array_equal(rows.inputs, TOKENS[:, :-1])
    np.testing.assert_array_equal(rows.targets, TOKENS[:, 1:])
    np.testing.assert_array_equal(rows.weights, np.ones((2, 4)))


def test_no_target_crosses_documents_or_lies_in_padding() -> None:
    """S41: the first token of a document is no target of the last one before it."""
    segments = np.asarray([[1, 1, 2, 2, 0], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(kept(segment_ids=segments), [[1, 0, 1, 0], [1, 1, 0, 0]])
    rows = token_rows({"tokens": TOKENS, "segment_ids": segments, "positions": segments})
    np.testing.assert_array_equal(rows.segment_ids, segments[:, :-1])
    np.testing.assert_array_equal(rows.positions, segments[:, :-1])


def test_padding_by_id_on_either_side() -> None:
    """Catches a target that a padding token is to predict."""
    right = np.asarray([[3, 1, 4, 0, 0], [9, 2, 6, 5, 3]])
    np.testing.assert_array_equal(kept(tokens=right, pad_id=0), [[1, 1, 0, 0], [1, 1, 1, 1]])
    left = np.asarray([[0, 0, 3, 1, 4], [0, 9, 2, 6, 5]])
    np.testing.assert_array_equal(kept(tokens=left, pad_id=0), [[0, 0, 1, 1], [0, 1, 1, 1]])
    np.testing.assert_array_equal(token_rows({"tokens": right}, pad_id=0).segment_ids[0], [1, 1, 1, 0])


def test_an_end_that_is_also_the_padding_stays_a_target() -> None:
    """Catches a model that never learns to stop, because its end of text is masked as padding."""
    tokens = np.asarray([[3, 1, 7, 7, 7], [9, 7, 6, 5, 7]])
    np.testing.assert_array_equal(kept(tokens=tokens, pad_id=7), [[1, 0, 0, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(kept(tokens=tokens, pad_id=7, eos_id=7), [[1, 1, 0, 0], [1, 1, 1, 1]])


def test_only_chosen_roles_are_learned() -> None:
    """Catches the role of the input token in place of the target's."""
    roles = np.asarray([[1, 1, 2, 2, 1], [2, 2, 2, 3, 3]])
    np.testing.assert_array_equal(kept(roles=roles, loss_roles=(2,)), [[0, 1, 1, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(kept(roles=roles, loss_roles=(2, 3)), [[0, 1, 1, 0], [1, 1, 1, 1]])
    with pytest.raises(DataError, match=r"reads the field `roles`, which the batch lacks; it has tokens"):
        kept(loss_roles=(2,))
    with pytest.raises(DataError, match="give loss_roles"):
        kept(roles=roles)


def test_weights_of_tokens_and_of_rows() -> None:
    """Catches weights aligned with the inputs, and a row's weight that is broadcast along the rows."""
    weights = np.asarray([[9, 0.5, 1, 0, 2], [9, 1, 1, 1, 1]], np.float32)
    np.testing.assert_array_equal(kept(weights=weights), weights[:, 1:])
    np.testing.assert_array_equal(kept(weights=np.asarray([2.0, 0])), [[2] * 4, [0] * 4])
    segments = np.asarray([[1, 1, 2, 2, 2], [1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(kept(weights=weights, segment_ids=segments)[0], [0.5, 0, 0, 2])


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        (TOKENS, DataError, r"reads a mapping with tokens .*got an array of shape \(2, 5\)"),
        ({"segment_ids": TOKENS}, DataError, "reads tokens .*segment_ids .*weights .*got segment_ids"),
        ({"tokens": TOKENS, "labels": TOKENS}, DataError, "shifts by itself.*'labels'; give tokens"),
        ({"tokens": TOKENS, "targets": TOKENS}, DataError, "no field 'targets'"),
        ({"tokens": TOKENS, "attention_mask": TOKENS}, DataError, "give segment_ids"),
        ({"tokens": TOKENS, "segment_id": TOKENS}, DataError, "Did you mean 'segment_ids'"),
        ({"tokens": TOKENS[0]}, ShapeError, "must be rows"),
        ({"tokens": TOKENS[:, :1]}, ShapeError, r"at least 2 tokens.*\(2, 1\)"),
        ({"tokens": TOKENS, "segment_ids": TOKENS[:, 1:]}, ShapeError, r"\(2, 5\), got \(2, 4\)"),
        ({"tokens": TOKENS.astype(np.float32)}, TypeError, "tokens must be integers, got float32"),
    ],
)
def test_what_is_refused(batch: Any, error: type[Exception], text: str) -> None:
    """Catches a batch that trains on something else than its writer meant."""
    with pytest.raises(error, match=f"(?s){text}"):
        check_rows(batch)


def test_ids_outside_the_vocabulary_are_named() -> None:
    """Catches an embedding that clips an id without a word."""
    with pytest.raises(DataError, match=r"batch 3: token ids must be in \[0, 9\), got 9 in row 1 at place 0 \(1 such"):
        check_ids(TOKENS, 9, where="batch 3")
    check_ids(jnp.asarray(TOKENS), 10, where="batch 3")


def test_other_fields_pass() -> None:
    """Catches a field for a user's own metric that is refused."""
    check_rows({"tokens": TOKENS, "source": np.zeros(2, np.int32)})
