"""What commands write. Names in it come from files, so what a terminal would obey is written out as an escape."""

import sys
from typing import Any

from telic.reports.text import visible

_MAX_CHARACTERS = 4000
"""Of a line; longer ones end in an ellipsis."""


def answer(text: Any) -> None:
    """Write an answer for the person, or the program, who waits.

    Args:
      text: Anything; its string, of any number of lines.
    """
    print(_written_out(text), flush=True)


def complain(text: Any) -> None:
    """Write what is not the answer, to standard error.

    Args:
      text: Anything; its string, of any number of lines.
    """
    print(_written_out(f"telic: {text}"), file=sys.stderr, flush=True)


def _written_out(text: Any) -> str:
    return "\n".join(visible(line, _MAX_CHARACTERS) for line in str(text).expandtabs().split("\n"))
