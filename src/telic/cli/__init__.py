"""The command ``telic``: what it takes, and how it ends.

Exit codes: 0 when it did what it was asked; 1 when it could not; 2 when it was asked wrongly; 130 after Ctrl-C. How to
add a command: `telic.cli.commands`.
"""

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from telic.cli.answers import complain
from telic.cli.asked import UsageError
from telic.cli.commands import COMMANDS
from telic.errors import CheckpointError

__all__ = ["main"]

_ABOUT = """Telic trains JAX models from objective functions.

Start with `telic demo`: it trains a small network on real handwritten digits and shows what a run leaves behind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code.

    Args:
      arguments: What follows ``telic``; None reads the command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _spell_out()
    try:
        if given in (["--version"], ["-V"]):
            print(f"telic {metadata.version('telic')}")
            return 0
        return _dispatch(given or ["--help"])
    except SystemExit as stop:  # tyro has written its message
        return 0 if stop.code is None else stop.code if isinstance(stop.code, int) else 2
    except UsageError as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        complain("stopped by Ctrl-C")
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, CheckpointError) as error:
        complain(error)
        return 1


def _spell_out() -> None:
    """Let a character that the console's encoding lacks be written as an escape, and not end the command.

    A stream that whoever started the command has closed takes what is written and keeps nothing.
    """
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] Python's, where it is closed
        sys.stdout = open(os.devnull, "w")
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] as above
        sys.stderr = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _dispatch(given: list[str]) -> int:
    # Nothing of tyro is imported before it is needed: the commands import it.
    typed = {name: import_module(f"{__name__}.commands.{name.replace('-', '_')}").command for name in COMMANDS}
    tyro = import_module("tyro")
    return tyro.extras.subcommand_cli_from_dict(typed, prog="telic", description=_ABOUT, args=given)
