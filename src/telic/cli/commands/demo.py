"""``telic demo``."""

from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from telic.cli.asked import UsageError, free_folder, make_folder


def command(
    *,
    plain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    epochs: Annotated[int, tyro.conf.arg(metavar="N")] = 8,
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
) -> int:
    """Train a small convolutional network on 8,000 handwritten digits and test it on 2,000 others.

    The digits are in the package; nothing is downloaded. The run leaves a folder with its settings (run.json), its
    metrics (metrics.jsonl) and its curves (curves.png).

    Args:
      plain: Write plain lines even on a terminal.
      seed: Decides the first weights, the order of the digits and every random draw.
      epochs: Passes over the training digits.
      out: Folder to write, new or empty; by default runs/demo, or runs/demo-2 and so on where that is taken.
    """
    if epochs < 1:
        raise UsageError(f"--epochs must be at least 1, got {epochs}")
    if not 0 <= seed < 2**31:
        raise UsageError(f"--seed must be from 0 to {2**31 - 1}, got {seed}")
    folder = free_folder(Path("runs/demo")) if out is None else out
    make_folder(folder)
    # Loaded here, so that a wrong flag is answered at once: JAX takes a second to load.
    import_module("telic.cli.digits").run(folder, seed=seed, epochs=epochs, plain=plain)
    return 0
