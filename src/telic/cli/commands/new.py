"""``telic new``."""

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.answers import answer
from telic.cli.asked import UsageError, is_taken

_FILES = {
    "train.py": "train.py.txt",
    "tests/test_train.py": "tests/test_train.py.txt",
    "pyproject.toml": "pyproject.toml.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
}
"""What a project has, and where its text lies in telic.cli/project."""


def command(name: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")], /) -> int:
    """Write a project to begin from: data, a model, an objective of its own, tests, and a README.

    It trains as it is: telic train train.py in its folder.

    Args:
      name: The project's folder, new or empty.
    """
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", name.resolve().name).strip("-._")
    if not word:
        raise UsageError(f"a project's name has letters or digits, got {str(name)!r}")
    try:
        if is_taken(name):
            raise UsageError(f"{name} is there already: give the name of a new or empty folder")
        for path, source in _FILES.items():
            place = name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            text = resources.files("telic.cli").joinpath("project", source).read_text(encoding="utf-8")
            place.write_text(text.replace("{name}", word).replace("{distribution}", word.lower()), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{name} cannot be written: {error.strerror or error}; give another folder") from error
    answer(
        f"{name} is written. Next:\n"
        f"  cd {name}\n"
        "  telic train train.py            trains it, as it is, in seconds\n"
        "  python -m pytest                its tests; pip install pytest brings it\n"
        "  README.md                       where your data and your objective go"
    )
    return 0
