"""The command line stays what people and scripts type: its help is compared with a stored text.

A change is deliberate when ``python -m tests.unit.cli.frozen`` was run and the text's difference was read.
"""

from importlib import metadata

import pytest

from telic.cli.commands import COMMANDS
from tests.unit.cli.frozen import FILE, flags, whole


@pytest.fixture(scope="module")
def now() -> str:
    return whole()


def test_no_command_and_no_flag_came_or_went(now: str) -> None:
    """Catches a renamed flag, which breaks the scripts that use it."""
    assert flags(now) == flags(FILE.read_text(encoding="utf-8"))
    assert list(flags(now))[1:] == [f"telic {name}" for name in COMMANDS]


def test_help_says_what_it_said(now: str) -> None:
    """Catches a default, a choice or a sentence that changed unnoticed. The words around them are tyro's."""
    then = FILE.read_text(encoding="utf-8")
    if then.splitlines()[0] != f"written with tyro {metadata.version('tyro')}":
        pytest.skip("another version of tyro words its help otherwise; flags are compared all the same")
    assert now == then
