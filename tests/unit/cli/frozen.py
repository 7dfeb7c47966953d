"""The whole command line as text, to compare with what it was.

``python -m tests.unit.cli.frozen`` writes ``commands.txt`` anew. A change of that file is a change of what users typed.
"""

import contextlib
import io
import os
import re
from importlib import metadata
from pathlib import Path
from unittest import mock

from telic.cli import main
from telic.cli.commands import COMMANDS

FILE = Path(__file__).with_name("commands.txt")


def help_of(name: str | None) -> str:
    """Give a command's help, or telic's own, without boxes and line breaks, which belong to the terminal."""
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
    ):
        assert main(["--help"] if name is None else [name, "--help"]) == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    lines = (" ".join(re.sub(r"[─-╿]|^ *[-•*]+ *$|^ *[•*] ", " ", line).split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def whole() -> str:
    """Give the help of every command, under its name."""
    parts = [f"== telic\n{help_of(None)}", *(f"== telic {name}\n{help_of(name)}" for name in COMMANDS)]
    return "\n\n".join([f"written with tyro {metadata.version('tyro')}", *parts]) + "\n"


def flags(text: str) -> dict[str, list[str]]:
    """Give the flags of each command."""
    found: dict[str, list[str]] = {}
    for part in text.split("\n\n== ")[1:]:
        name, _, body = part.partition("\n")
        found[name] = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", body)))
    return found


if __name__ == "__main__":
    FILE.write_text(whole(), encoding="utf-8")
