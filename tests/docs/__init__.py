"""Pages as a reader uses them: their blocks of code, in order, and what hidden comments say about each.

A comment right before a fence, which no reader sees, says how the block is run:

- ``<!-- docs: slow -->``: it takes long; ``pytest -m slow`` runs the page to its end, the quick tests up to
  here.
- ``<!-- docs: needs tokenizers -->``: it needs a package that the tests do not ask for; without it the page ends here.
- ``<!-- docs: printed -->``: not a program but what the block before it prints, ``...`` standing for anything.
- ``<!-- docs: hidden`` … ``-->``: Python that is run here and not shown.
"""

import contextlib
import doctest
import io
import linecache
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_HIDDEN = re.compile(r"<!-- docs: hidden\n(.*?)\n-->", re.DOTALL)
_MARKS = re.compile(r"((?:<!-- docs: [a-z]+[^\n]* -->\n+)+) *\Z")
_INCLUDE = re.compile(r'^--8<-- "(.+)"$')
KNOWN = ("slow", "needs", "printed")


@dataclass(frozen=True)
class Block:
    """One block of code of a page.

    Attributes:
      line: Number of its first line in the page, from 1.
      language: What stands after the fence; "" without one.
      text: Its lines.
      marks: What the comments before it say: ``{"slow": "", "needs": "tokenizers"}``.
    """

    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def included(self) -> str | None:
        """The file whose text stands here, if the block is an include."""
        found = _INCLUDE.match(self.text.strip())
        return found[1] if found else None

    @property
    def is_program(self) -> bool:
        return self.language in ("python", "py") and self.included is None


def pages() -> list[Path]:
    """Give every page a reader may meet: the README, the house rules, all of docs."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def blocks(page: Path) -> list[Block]:
    """Give the blocks of a page in the order in which they stand."""
    return blocks_of(page.read_text(encoding="utf-8"))


def blocks_of(text: str) -> list[Block]:
    """Give the blocks of a text, those that are not shown among them."""
    found: dict[int, Block] = {}
    for match in _FENCE.finditer(text):
        code = _dedented(match[3], match[1])
        found[match.start()] = Block(_line(text, match.start(3)), match[2], code, _marks(text, match))
    for match in _HIDDEN.finditer(text):
        found[match.start()] = Block(_line(text, match.start(1)), "python", match[1], _marks(text, match))
    return [found[start] for start in sorted(found)]


def run(page: Path, *, slow: bool) -> dict[str, Any]:
    """Run a page's programs as one reader would type them, in the working directory, and give their names.

    Args:
      page: The page.
      slow: Run it to its end; otherwise up to the first block that is marked slow.
    """
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    # Flax and dataclasses look for the module of a class there.
    sys.modules[module.__name__] = module
    printed = ""
    try:
        for block in blocks(page):
            if "slow" in block.marks and not slow:
                break
            if "needs" in block.marks:
                pytest.importorskip(block.marks["needs"])
            if "printed" in block.marks:
                assert_printed(block, printed, page)
            elif block.is_program:
                printed = _printed_by(block, module, page)
    finally:
        del sys.modules[module.__name__]
    return vars(module)


def assert_printed(block: Block, printed: str, page: Path) -> None:
    """Compare what a page says that a program prints with what it printed."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not doctest.OutputChecker().check_output(block.text, printed, flags):
        pytest.fail(f"{name_of(page)}, line {block.line} says\n{block.text}\nand the program printed\n{printed}")


def commands(text: str, *, prompt: bool) -> Iterator[str]:
    """Give the command lines of a block: continued lines joined, `a && b` apart, comments left out.

    Args:
      text: The block's.
      prompt: Commands stand after ``$`` and everything else is what they print.
    """
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        line = line.strip()
        if prompt:
            if not line.startswith("$ "):
                continue
            line = line[2:]
        if line and not line.startswith("#"):
            yield from (part.strip() for part in re.split(r"&&|;|\|", re.sub(r"\s#.*", "", line)))


def _printed_by(block: Block, module: ModuleType, page: Path) -> str:
    """Run a block; a traceback shows the page's own lines."""
    linecache.checkcache(str(page))
    program = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, vars(module))
    return out.getvalue()


def _marks(text: str, match: re.Match[str]) -> dict[str, str]:
    comments = _MARKS.search(text, 0, match.start())
    if comments is None:
        return {}
    found = re.findall(r"<!-- docs: ([a-z]+) ?([^\n]*?) -->", comments[1])
    for name, _ in found:
        if name not in KNOWN:
            raise ValueError(f"a comment 'docs: {name}' says nothing that is known; known are {', '.join(KNOWN)}")
    return dict(found)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _dedented(text: str, indent: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
