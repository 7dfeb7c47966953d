"""Reference numbers computed by other people's code, and their reader.

Each file of `data` names its reference, versions and tolerance. Inputs are float64 values that float32 holds exactly.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"


def load(name: str) -> dict[str, Any]:
    """Read ``data/<name>.json``: {topic, what, reference, tol, notes, cases: [{name, config, in, out}]}, with arrays.

    Raises:
      FileNotFoundError: There is no such file.
    """
    document = json.loads((DATA / f"{name}.json").read_text())
    archive = DATA / f"{name}.npz"
    big = dict(np.load(archive)) if archive.exists() else {}

    def decode(value: Any) -> Any:
        match value:
            case {"npz": key, "shape": _}:
                return big[key]
            case {"dtype": dtype, "shape": shape, "data": data} if len(value) == 3:
                numbers = [float(x) if isinstance(x, str) else x for x in data]
                return np.array(numbers, dtype=dtype).reshape(shape)
            case dict():
                return {k: decode(v) for k, v in value.items()}
            case list():
                return [decode(v) for v in value]
            case "nan" | "inf" | "-inf":
                return float(value)
            case _:
                return value

    for case in document["cases"]:
        for part in ("config", "in", "out"):
            case[part] = decode(case[part])
    return document


def cases(name: str) -> list[Any]:
    """Give the cases of a file as parameters for ``pytest.mark.parametrize``, named as in the file."""
    return [pytest.param(case, id=case["name"]) for case in load(name)["cases"]]
