"""The digits that travel with the package."""

import hashlib
from importlib import resources

import numpy as np
import pytest

from telic.data import columns, digits, digits_split


def test_digits_are_the_ones_of_the_provenance() -> None:
    """Catches a damaged or exchanged file, and a wheel built without it."""
    stored = digits()
    assert {name: (a.shape, str(a.dtype)) for name, a in stored.items()} == {
        "images": ((10000, 28, 28), "uint8"),
        "labels": ((10000,), "uint8"),
    }
    together = hashlib.sha256(stored["images"].tobytes() + stored["labels"].tobytes()).hexdigest()
    assert together == "25d5404ad3c98b3710ad8bf22d0710a009eb64dc2466b0e02d49601bb51a75ed"
    text = resources.files("telic.data").joinpath("mnist10k.txt").read_text()
    assert "CC BY-SA 3.0" in text


def test_splits_part_at_row_8000() -> None:
    """Catches a test digit that training sees."""
    stored = digits()
    train, test, every = digits_split("train"), digits_split("test"), digits_split("all")
    assert (len(train["targets"]), len(test["targets"])) == (8000, 2000)
    assert np.array_equal(test["targets"], stored["labels"][8000:])
    for name in ("inputs", "targets"):
        assert np.array_equal(np.concatenate([train[name], test[name]]), every[name])


def test_inputs_are_scaled_with_a_channel() -> None:
    """Catches inputs left in 0 to 255, in float64, or without the channel a convolution needs."""
    stored, test, flat = digits(), digits_split("test"), digits_split("test", flat=True)
    assert (test["inputs"].shape, str(test["inputs"].dtype)) == ((2000, 28, 28, 1), "float32")
    assert (flat["inputs"].shape, str(test["targets"].dtype)) == ((2000, 784), "int32")
    assert (test["inputs"].min(), test["inputs"].max()) == (0.0, 1.0)
    assert np.array_equal(np.rint(test["inputs"][..., 0] * 255).astype(np.uint8), stored["images"][8000:])


def test_split_feeds_columns() -> None:
    """Catches names that `columns` would pass on and no objective reads."""
    data = columns(digits_split("train"), batch=64)
    assert data.batches_per_epoch == 125


def test_unknown_split() -> None:
    """Catches "validation" giving an empty or the whole split."""
    with pytest.raises(ValueError, match="split must be one of 'train', 'test', 'all', got 'validation'"):
        digits_split("validation")  # type: ignore[arg-type]
