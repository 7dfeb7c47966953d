"""What processes tell each other: JSON, and arrays in it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from telic.placement import ONE
from telic.placement.processes import _read, _written


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "bool", "bfloat16", "complex64"])
def test_an_array_comes_as_it_was_told(dtype: str) -> None:
    """Catches a metric on the host that gives an array, and of several processes all but the first wait for it."""
    value = np.array([[1, 0, 3]]).astype(jnp.dtype(dtype))
    told = _read(_written({"rows": value, "none": np.zeros((0, 2), value.dtype), "n": [1, None, "x"]}))
    assert told["rows"].dtype == value.dtype
    np.testing.assert_array_equal(told["rows"], value)
    assert told["none"].shape == (0, 2)
    assert told["n"] == [1, None, "x"]
    told["rows"][0, 0] = 0  # it is the receiver's own


def test_numbers_of_numpy_come_as_numbers() -> None:
    """Catches a scalar that JSON does not know."""
    assert _read(_written([np.float32(0.5), np.int64(3)])) == [0.5, 3]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()])])
def test_what_cannot_be_told_is_refused(value: Any) -> None:
    """Catches an object that is told by its memory's bytes, or pickled."""
    with pytest.raises(TypeError, match="processes tell each other numbers, text, arrays"):
        _written([value])


def test_one_process_has_nobody_to_tell() -> None:
    """Catches a single process that keeps what it tells, with nobody to forget it."""
    assert ONE.post is None
    assert ONE.exchange("anything", 3) == [3]
