"""The site: every page is in the nav, every public name on a reference page, and mkdocs builds it without a warning."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import telic
from tests.docs import ROOT, name_of, pages

DOCS = ROOT / "docs"
MKDOCS = (ROOT / "mkdocs.yml").read_text()
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
DIRECTIVES = {name for page in REFERENCE for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}


def test_every_page_is_in_the_nav() -> None:
    """Catches a page that nobody can reach, and a line of the nav whose page is gone."""
    nav = set(re.findall(r"[\w/-]+\.md\b", MKDOCS.split("\nnav:\n")[1]))
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"decisions/template.md"}
    assert there - nav == set(), "add these to the nav of mkdocs.yml"
    assert nav - there == set()


def test_links_between_pages_lead_somewhere() -> None:
    """Catches a link to a page or a picture that was renamed; mkdocs checks the anchors as well."""
    lost = [
        f"{name_of(page)}: {target}"
        for page in pages()
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        if not target.startswith(("http", "mailto")) and not (page.parent / target).exists()
    ]
    assert lost == []


def test_every_method_of_a_loop_is_shown() -> None:
    """Catches a handler that the reference forgot: the members of a loop are listed there, as its bases hold them."""
    options = (DOCS / "reference" / "loop.md").read_text().split("::: telic.Loop\n")[1].split(":::")[0]
    public = {name for name in dir(telic.Loop) if not name.startswith("_")}
    assert set(re.findall(r"^ {8}- (\w+)$", options, re.MULTILINE)) == public


@pytest.mark.parametrize("name", sorted(telic._HOMES))
def test_public_name_is_on_a_reference_page(name: str) -> None:
    """Catches a public name that the reference forgot; three filters and the statuses are values, named in prose."""
    prose = (DOCS / "reference" / "loop.md").read_text()
    assert f"telic.{name}" in DIRECTIVES or f"`telic.{name}`" in prose


@pytest.mark.parametrize("name", sorted(telic._MODULES))
def test_public_module_is_on_a_reference_page(name: str) -> None:
    """Catches a public module, or a name in its table of contents, that the reference forgot."""
    if f"telic.{name}" in DIRECTIVES:
        return
    module = importlib.import_module(f"telic.{name}")
    homes = {f"{module.__name__}.{public}" for public in module.__all__}
    homes -= {f"{module.__name__}.{public}" for public in telic.__all__}
    assert homes <= DIRECTIVES


def test_directives_name_what_exists() -> None:
    """Catches a reference page of a name that was renamed, before mkdocs is asked."""
    for directive in DIRECTIVES:
        value: object = telic
        path = directive.removeprefix("telic.").split(".")
        for i, part in enumerate(path):
            value = (
                getattr(value, part)
                if hasattr(value, part)
                else importlib.import_module(f"telic.{'.'.join(path[: i + 1])}")
            )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mkdocs_builds_without_a_warning(tmp_path: Path) -> None:
    """Catches a broken anchor, a docstring that names an argument which is gone, an include that is missing."""
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the extra 'docs' is not installed: pip install -e '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
    # Nothing is fetched from elsewhere when a page is read.
    page = (tmp_path / "site" / "start" / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css))', page) == []
