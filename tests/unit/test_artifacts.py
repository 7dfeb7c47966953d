"""Artifacts: trees that cross jit with their texts, whose shapes are checked where they are made."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from telic import Mean
from telic.artifacts import (
    ImageGrid,
    Representations,
    Scalars,
    TextSamples,
    TokenScores,
    captions_of,
    find_artifact,
    texts_of,
)
from telic.errors import ContractError, ShapeError


def upper(ids: Any) -> str:
    return "".join(chr(65 + i) for i in np.asarray(ids).tolist())


ONE_OF_EACH = {
    "scores": TokenScores(np.zeros((2, 3)), np.ones(2), np.ones((2, 3), bool), np.ones((2, 3)), np.ones((2, 3))),
    "bare scores": TokenScores(np.zeros(4)),
    "images": ImageGrid(np.zeros((2, 4, 4, 1), np.float32), captions=["a", "b"], columns=2),
    "video": ImageGrid(np.zeros((2, 3, 4, 4, 3), np.float32), captions=np.arange(2)),
    "text": TextSamples(("a", "b"), ["c", "d"]),
    "ids": TextSamples(None, np.zeros((2, 3), np.int32), completion_mask=np.ones((2, 3)), decode=upper),
    "representations": Representations(np.zeros((2, 3)), np.zeros(2, np.int32), np.zeros((2, 3))),
    "scalars": Scalars({"a": Mean(1.0, 2.0), "b": 3.0}),
}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_round_trip_through_jit(name: str) -> None:
    """Catches a field that a flattening written by hand leaves out, and text that is taken for an array."""
    value = ONE_OF_EACH[name]
    back = jax.jit(lambda x: x)(value)
    assert type(back) is type(value)
    assert jax.tree.structure(back) == jax.tree.structure(value)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(value), strict=True):
        np.testing.assert_array_equal(a, b)
    for field in ("captions", "prompts", "completions", "columns", "decode"):
        if isinstance(getattr(value, field, None), str | tuple | int) or callable(getattr(value, field, None)):
            assert getattr(back, field) == getattr(value, field)
    assert all(tree_leaf is not None for tree_leaf in jax.tree.leaves(jax.eval_shape(lambda: value)))


REFUSED: dict[str, Any] = {
    "correct of another shape": (lambda: TokenScores(np.zeros((2, 3)), correct=np.zeros(2)), r"TokenScores.correct"),
    "mask over columns": (lambda: TokenScores(np.zeros((2, 3)), mask=np.zeros(3)), r"or its leading part, got \(3,\)"),
    "no channels": (lambda: ImageGrid(np.zeros((2, 4, 4), np.float32)), r"images\[\.\.\., None\]"),
    "two channels": (lambda: ImageGrid(np.zeros((2, 4, 4, 2), np.float32)), "1, 3 or 4 channels"),
    "captions": (lambda: ImageGrid(np.zeros((2, 4, 4, 1), np.float32), captions=("a",)), "one per picture, 2, got 1"),
    "prompts": (lambda: TextSamples(("a",), ("b", "c")), "1 prompts and 2 completions"),
    "mask of text": (lambda: TextSamples(("a",), ("b",), completion_mask=np.ones((1, 1))), "completion_mask"),
    "flat features": (lambda: Representations(np.zeros(3)), r"must be \[n, dim\], got \(3,\)"),
    "labels": (lambda: Representations(np.zeros((3, 2)), np.zeros((3, 1))), r"class ids \[3\]"),
    "partners": (lambda: Representations(np.zeros((3, 2)), None, np.zeros((3, 4))), "like features"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shapes_are_checked_where_they_are_made(case: str) -> None:
    """Catches a field that broadcasts, or pictures with their channels in front, noticed when they are drawn."""
    make, message = REFUSED[case]
    with pytest.raises(ShapeError, match=message):
        make()


def test_what_else_is_refused() -> None:
    """Catches pictures from 0 to 255 drawn white, and text among scalars."""
    with pytest.raises(TypeError, match="divide by 255"):
        ImageGrid(np.zeros((1, 2, 2, 1), np.uint8))
    for wrong in ("text", np.zeros(3), None, Mean(np.zeros(3), 1.0)):
        with pytest.raises(ContractError, match=r"Scalars\['a'\] must be a Mean or a scalar"):
            Scalars({"a": wrong})
    with pytest.raises(ContractError, match=r"takes \{name"):
        Scalars(3)  # type: ignore[arg-type]


def test_one_of_a_type_is_found() -> None:
    """Catches the first of two taken without a word."""
    a, b = Representations(jnp.zeros((1, 1))), Scalars({})
    assert find_artifact((b, a), Representations, "me") is a
    with pytest.raises(ContractError, match="me reads TokenScores, which no evaluation makes"):
        find_artifact((a, b), TokenScores, "me")
    with pytest.raises(ContractError, match="gave 2 of them"):
        find_artifact((a, a), Representations, "me")


def test_texts_and_captions() -> None:
    """Catches padding that is decoded, and a decoder of the sink that goes before the artifact's own."""
    ids, mask = np.array([[0, 1, 2], [3, 4, 5]]), np.array([[1, 1, 0], [1, 0, 0]])
    samples = TextSamples(("p", "q"), ids, completion_mask=mask, decode=upper)
    assert texts_of(samples, lambda ids: "wrong") == [
        {"prompt": "p", "completion": "AB"},
        {"prompt": "q", "completion": "D"},
    ]
    assert [t["completion"] for t in texts_of(TextSamples(None, ids), upper)] == ["ABC", "DEF"]
    assert texts_of(TextSamples(None, ids))[0]["completion"] == [0, 1, 2]
    pictures = np.zeros((2, 2, 2, 1), np.float32)
    assert captions_of(ImageGrid(pictures, captions=np.array([4, 7]))) == ["4", "7"]
    assert captions_of(ImageGrid(pictures, captions=np.array([4, 7]), decode=lambda i: f"class {i}")) == [
        "class 4",
        "class 7",
    ]
    assert captions_of(ImageGrid(pictures)) is None
