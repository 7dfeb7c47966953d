"""The programs of the guides run, page by page, in order, as one reader would type them."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
PAGES = (
    "check",
    "debugging",
    "decoder",
    "evaluation",
    "events",
    "language",
    "memory",
    "metrics",
    "plots",
    "pretrained",
    "probes",
    "profiling",
    "trackers",
)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A program may set up logging; the next test must not notice."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers, root.level = handlers, level


@pytest.mark.parametrize("page", PAGES)
def test_guide_programs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a guide whose code has gone stale."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    programs = re.findall(r"```python\n(.*?)```", (GUIDES / f"{page}.md").read_text(), re.DOTALL)
    assert programs
    for number, program in enumerate(programs):
        exec(compile(program, f"{page}.md, program {number}", "exec"), names)
