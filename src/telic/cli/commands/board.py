"""``telic board``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.asked import UsageError


def command(
    folder: Annotated[Path, tyro.conf.Positional] = Path("runs"),
    /,
    *,
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
) -> int:
    """Show the runs below a folder in a browser, each as its report that updates itself, several of them compared.

    It answers on 127.0.0.1 alone, and only who has the address it prints, with its random token, is let in. Ctrl-C
    ends it.

    Args:
      folder: Where the run directories are.
      port: Port to answer on; 0 takes a free one.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory; give the folder that holds your run directories")
    if not 0 <= port < 65536:
        raise UsageError(f"--port must be from 0 to 65535, got {port}")
    import_module("telic.cli.serving").serve(folder, port=port)
    return 0
