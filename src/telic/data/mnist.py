"""Ten thousand real handwritten digits that travel with the package, for examples and demonstrations.

Their origin and license (CC BY-SA 3.0) are in ``mnist10k.txt`` beside the file.
"""

import io
from importlib import resources
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Split: TypeAlias = Literal["train", "test", "all"]

_TEST_FROM = 8000
_ROWS: dict[str, slice] = {
    "train": slice(0, _TEST_FROM),
    "test": slice(_TEST_FROM, None),
    "all": slice(None),
}


def digits() -> dict[str, NDArray[np.uint8]]:
    """Read the digits as they are stored: ``images`` uint8 [10000, 28, 28] and ``labels`` uint8 [10000].

    Rows 8000 and up are the test split; `digits_split` gives either split ready for a model.

    Example:
      >>> digits()["images"].shape
      (10000, 28, 28)
    """
    packed = resources.files("telic.data").joinpath("mnist10k.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
        return {"images": stored["images"], "labels": stored["labels"]}


def digits_split(split: Split = "train", *, flat: bool = False) -> dict[str, NDArray[np.generic]]:
    """Give the columns ``inputs`` and ``targets`` of one split, ready for `telic.data.columns`.

    Args:
      split: "train" (8,000 digits), "test" (2,000 digits) or "all".
      flat: Give inputs [records, 784] for a dense model instead of [records, 28, 28, 1].
    Returns:
      inputs: float32 in [0, 1].
      targets: Class ids 0 to 9, int32 [records].
    Raises:
      ValueError: The split is not one of the three.
    Example:
      >>> digits_split("test")["inputs"].shape
      (2000, 28, 28, 1)
    """
    if split not in _ROWS:
        raise ValueError(f"split must be one of {', '.join(map(repr, _ROWS))}, got {split!r}")
    stored = digits()
    images = stored["images"][_ROWS[split]].astype(np.float32) / np.float32(255)
    shape = (-1, 784) if flat else (-1, 28, 28, 1)
    return {"inputs": images.reshape(shape), "targets": stored["labels"][_ROWS[split]].astype(np.int32)}
