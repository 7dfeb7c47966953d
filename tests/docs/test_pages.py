"""Every program on every page runs, in order, as one reader would type it; every command is one that exists."""

import functools
import logging
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from telic.cli import main
from telic.cli.commands import COMMANDS
from tests.docs import ROOT, blocks, blocks_of, commands, name_of, pages, run

PAGES = {name_of(page): page for page in pages()}
WITH_PROGRAMS = [name for name, page in PAGES.items() if any(block.is_program for block in blocks(page))]
WITH_SLOW = [name for name in WITH_PROGRAMS if any("slow" in block.marks for block in blocks(PAGES[name]))]
SHELL = ("sh", "bash", "shell", "console")
LANGUAGES = ("python", *SHELL, "text", "toml", "json", "yaml")


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program may write files and set up logging; the next test must not notice.

    Most of a page is compilation of programs that run for a moment, so XLA is told to do little about them.
    """
    monkeypatch.chdir(tmp_path)
    root, before = logging.getLogger(), jax.config.read("jax_disable_most_optimizations")
    handlers, level = list(root.handlers), root.level
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    root.handlers, root.level = handlers, level


@pytest.mark.parametrize("name", [name for name in WITH_PROGRAMS if name != "README.md"])
def test_programs_run(name: str) -> None:
    """Catches a page whose code has gone stale."""
    run(PAGES[name], slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_SLOW)
def test_long_programs_run(name: str) -> None:
    """Catches the same on pages whose programs take long."""
    run(PAGES[name], slow=True)


def test_readme_programs_run_and_learn() -> None:
    """Catches a README whose code has gone stale, or trains nothing."""
    names = run(PAGES["README.md"], slow=True)
    assert names["final"].history[1]["validation_accuracy"] > 0.85
    params = names["state"].variables["params"]
    np.testing.assert_allclose([params["slope"], params["offset"]], [3, 1], atol=1e-3)


def test_readme_first_screen_shows_ladder_and_commands() -> None:
    """Catches a first screen that grew until the two commands or a rung fell off it."""
    screen = "\n".join(PAGES["README.md"].read_text().splitlines()[:24])
    assert "pip install -e . && telic demo" in screen
    assert "pip install -e '.[test]' && pytest" in screen
    assert [line[2] for line in screen.splitlines() if re.match(r"\| \d \|", line)] == list("12345")


@pytest.mark.parametrize("name", PAGES)
def test_blocks_say_what_they_are(name: str) -> None:
    """Catches a program that is not run because its fence names no language, and an include of a file that is gone."""
    for block in blocks(PAGES[name]):
        assert block.language in LANGUAGES, f"{name}, line {block.line}: a block of {block.language or 'no language'}"
        if block.included:
            # Programs of examples/ are run by tests/examples, which asks for a test of each.
            assert block.included.startswith(("examples/", "recipes/"))
            assert (ROOT / block.included).is_file(), f"{name}, line {block.line}"
    fences = re.findall(r"^ *```", PAGES[name].read_text(), re.MULTILINE)
    assert len(fences) == 2 * sum(block.language != "" for block in _shown(name)), f"{name}: a fence is not closed"


def _shown(name: str) -> list[Any]:
    return blocks_of(re.sub(r"<!-- docs: hidden\n.*?\n-->", "", PAGES[name].read_text(), flags=re.DOTALL))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that the command line was asked for; none of them is carried out."""
    asked: list[str] = []
    for name in COMMANDS:
        module = import_module(f"telic.cli.commands.{name.replace('-', '_')}")
        monkeypatch.setattr(module, "command", _only_parsed(module.command, name, asked))
    return asked


def _only_parsed(command: Any, name: str, asked: list[str]) -> Any:
    """Give a function with the signature of a command that notes its name."""

    @functools.wraps(command)
    def note(*_: Any, **__: Any) -> int:
        asked.append(name)
        return 0

    return note


def _typed(name: str) -> list[tuple[int, str]]:
    """Give the command lines that a page shows, with their lines: of shell blocks, and `telic …` within sentences."""
    found = [
        (block.line, command)
        for block in blocks(PAGES[name])
        if block.language in SHELL
        for command in commands(block.text, prompt=block.language == "console")
    ]
    prose = re.sub(r"^ *```.*?^ *```$", "", PAGES[name].read_text(), flags=re.DOTALL | re.MULTILINE)
    return found + [(0, command) for command in re.findall(r"`(telic [a-z][^`]*)`", prose)]


@pytest.mark.parametrize("name", [name for name in PAGES if _typed(name)])
def test_commands_are_understood(name: str, parsed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command, option or extra that was renamed, and a page that still shows the old one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line, command in _typed(name):
        where = f"{name}, line {line}: {command}"
        for asked in re.findall(r"(?:telic|\.)\[([\w,]+)\]", command):
            assert set(asked.split(",")) <= set(extras), where
        words = shlex.split(command)
        if words[0] == "telic":
            assert len(words) > 1, where
            if line == 0 and (len(words) == 2 or any(word.isupper() for word in words)):
                # A sentence names a command, or says N for a number.
                assert words[1] in COMMANDS, where
                continue
            code = main(words[1:])
            assert code == 0, f"{where}\n{capsys.readouterr().err}"
            if not words[1].startswith("-") and "--help" not in words:
                assert parsed, where
                assert parsed[-1] == words[1], where
        elif words[0] in ("python", "pytest"):
            files = [word for word in words[1:] if word.startswith(("examples/", "tests/", "benchmarks/"))]
            assert all((ROOT / file).exists() for file in files), where


def test_a_block_that_is_not_python_fails(tmp_path: Path) -> None:
    """Catches a test of pages that runs nothing: a program that is wrong must be found, with the page's own line."""
    hidden = "<!-- docs: hidden\ny = x + 1\n-->"
    text = f"Words.\n\n```python\nx = 1\n```\n\n{hidden}\n\n<!-- docs: slow -->\n```python\nz = y\n```\n"
    first, second, last = blocks_of(text)
    assert (first.line, second.text, last.marks) == (4, "y = x + 1", {"slow": ""})
    broken = tmp_path / "broken.md"
    broken.write_text(text.replace("x = 1", "x = 1 / 0"))
    with pytest.raises(ZeroDivisionError) as caught:
        run(broken, slow=False)
    assert caught.traceback[-1].lineno == 3


def test_what_a_page_says_is_printed_is_compared(tmp_path: Path) -> None:
    """Catches output on a page that the program above it no longer prints."""
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('one', 2)\n```\n\n<!-- docs: printed -->\n```text\none ...\n```\n")
    run(page, slow=False)
    page.write_text(page.read_text().replace("one ...", "two"))
    with pytest.raises(pytest.fail.Exception, match="and the program printed"):
        run(page, slow=False)
