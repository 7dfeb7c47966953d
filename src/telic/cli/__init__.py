"""The command ``telic``: what it takes, and how it ends.

Exit codes: 0 when it did what it was asked; 1 when it could not; 2 when it was asked wrongly; 130 after Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Annotated

from telic.errors import CheckpointError

__all__ = ["main"]

_ABOUT = """Telic trains JAX models from objective functions.

Start with `telic demo`: it trains a small network on real handwritten digits and shows what a run leaves behind."""


class UsageError(Exception):
    """The command was called wrongly; its text says what to write instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit code.

    Args:
      arguments: What follows ``telic``; None reads the command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given in (["--version"], ["-V"]):
            print(f"telic {metadata.version('telic')}")
            return 0
        return _dispatch(given or ["--help"])
    except SystemExit as stop:  # tyro has written its message
        return stop.code if isinstance(stop.code, int) else 2
    except UsageError as error:
        print(f"telic: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("telic: stopped by Ctrl-C", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has gone; Python would complain once more when it closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, CheckpointError) as error:
        print(f"telic: {error}", file=sys.stderr)
        return 1


def _dispatch(given: list[str]) -> int:
    import tyro

    # The settings of tyro go where its types are, so that nothing of tyro is imported before it is needed.
    def demo(
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
        folder = _free_folder(Path("runs/demo")) if out is None else out
        _check_folder(folder)
        # Loaded here, so that a wrong flag is answered at once: JAX takes a second to load.
        import_module(f"{__name__}.digits").run(folder, seed=seed, epochs=epochs, plain=plain)
        return 0

    def verify(run: Annotated[Path, tyro.conf.Positional], /) -> int:
        """Read every checkpoint of a run and check every byte that counts. Exit code 1 when one is damaged.

        Args:
          run: The run's directory, as it was given to telic.Checkpoints.
        """
        report = import_module("telic.checkpoints").verify(_existing(run))
        print(report)
        return 0 if report.is_fine else 1

    def inspect(checkpoint: Annotated[Path, tyro.conf.Positional], /) -> int:
        """Show what is in a checkpoint: arrays by name with shapes and dtypes, sizes, versions.

        Args:
          checkpoint: One checkpoint, or a run's directory, whose newest is taken.
        """
        print(import_module("telic.checkpoints").inspect(_existing(checkpoint)))
        return 0

    commands = {"demo": demo, "verify": verify, "inspect": inspect}
    return tyro.extras.subcommand_cli_from_dict(commands, prog="telic", description=_ABOUT, args=given)


def _existing(path: Path) -> Path:
    """Check that a path names a directory.

    Raises:
      UsageError: It does not.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is no directory; give a run's directory, such as runs/mine")
    return path


def _is_taken(folder: Path) -> bool:
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _free_folder(wanted: Path) -> Path:
    """Give the folder, or the first of folder-2, folder-3, ... that holds nothing: no run is written over another."""
    folder, number = wanted, 1
    while _is_taken(folder):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _check_folder(folder: Path) -> None:
    """Make the folder of a run.

    Raises:
      UsageError: It holds something already, or cannot be made.
    """
    try:
        if _is_taken(folder):
            what = "is not empty" if folder.is_dir() else "is a file"
            raise UsageError(f"--out must be a new or empty folder, and {folder} {what}; give another, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror or error}; give another folder") from error
