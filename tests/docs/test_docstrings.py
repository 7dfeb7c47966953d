"""Every example of a docstring is one that `pytest --doctest-modules` finds and runs."""

import ast
import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs import ROOT

SOURCES = {path.relative_to(ROOT / "src").as_posix(): path for path in sorted((ROOT / "src" / "telic").rglob("*.py"))}
WITH_EXAMPLES = [name for name, path in SOURCES.items() if ">>> " in path.read_text()]


def texts(path: Path) -> list[str]:
    """Give the docstrings of a file, also those below assignments."""
    tree = ast.parse(path.read_text())
    return [
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_every_example_is_found(name: str) -> None:
    """Catches an example that no test runs: of a wrapped function, an attribute, a module that is not collected."""
    path = SOURCES[name]
    written = sum(len(doctest.DocTestParser().get_examples(text)) for text in texts(path))
    module = import_module(".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__"))
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    assert sum(len(test.examples) for test in found) == written


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_no_example_is_skipped(name: str) -> None:
    """Catches an example that is collected and told not to run."""
    assert "doctest: +SKIP" not in SOURCES[name].read_text()


def test_examples_are_prompted() -> None:
    """Catches an `Example:` that is code without a prompt, which nothing runs."""
    bare = [
        name
        for name, path in SOURCES.items()
        for text in texts(path)
        for section in re.findall(r"^ *Examples?:\n((?: +.*\n?|\n)+)", text, re.MULTILINE)
        if ">>>" not in section
    ]
    assert bare == []
