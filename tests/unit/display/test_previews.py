"""Previews as files: names that lose nothing and lead nowhere."""

from pathlib import Path

import numpy as np
import pytest

from telic.artifacts import ImageGrid, Representations, Scalars, TextSamples
from telic.display import PreviewFolder


@pytest.mark.parametrize("name", ["plain", "lr_0.5", "v1.2.3", ".hidden", "set/a", "../outside", "ends."])
def test_a_name_keeps_all_of_itself(name: str, tmp_path: Path) -> None:
    """Catches the part after a dot, and with it the number, that is taken for a suffix and cut off; and a way out."""
    sink = PreviewFolder(tmp_path / "in")
    for step in (1, 2):
        sink.artifact(name, ImageGrid(np.zeros((1, 2, 2, 1), np.float32)), step)
        sink.artifact(name, TextSamples(("a",), ("b",)), step)
        sink.artifact(f"{name}s", Scalars({"x": 1.0}), step)
        sink.artifact(f"{name}r", Representations(np.ones((3, 2), np.float32)), step)
    flat = name.replace("/", "_")
    expected = {f"{flat}_00000{step}.{kind}" for step in (1, 2) for kind in ("png", "txt", "json")}
    expected |= {f"{flat}{tail}_00000{step}.{kind}" for step in (1, 2) for tail, kind in (("s", "json"), ("r", "png"))}
    assert {path.name for path in (tmp_path / "in").iterdir()} == expected
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
