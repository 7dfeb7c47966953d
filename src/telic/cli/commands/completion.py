"""``telic completion``."""

from importlib import import_module
from typing import Annotated, Literal

import tyro


def command(shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional], /) -> int:
    """Write what makes a shell complete telic's commands and flags.

    For bash: telic completion bash > ~/.local/share/bash-completion/completions/telic. For zsh: telic completion zsh
    into a file _telic of a folder in fpath.

    Args:
      shell: The shell.
    """
    return import_module("telic.cli").main(["--tyro-print-completion", shell])
