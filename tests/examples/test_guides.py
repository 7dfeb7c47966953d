"""The programs of the guides run as they stand: each block of a page continues the one before it."""

import re
from pathlib import Path
from typing import Any

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"


@pytest.mark.parametrize("name", ["precision", "accumulation", "lora"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix.*")
def test_the_guide_runs(name: str) -> None:
    """Catches a page that shows a call which is not there, or a claim in it that does not hold."""
    if name == "lora":
        pytest.importorskip("qwix")
    text = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 2
    scope: dict[str, Any] = {"__name__": f"guide_{name}"}
    for block in blocks:
        exec(compile(block, f"{name}.md", "exec"), scope)
