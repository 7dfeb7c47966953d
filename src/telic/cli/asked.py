"""What a command was asked, checked before anything slow is loaded."""

from pathlib import Path


class UsageError(Exception):
    """The command was called wrongly; its text says what to write instead."""


def existing_directory(path: Path) -> Path:
    """Give a path that names a directory.

    Raises:
      UsageError: It does not.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is no directory; give a run's directory, such as runs/mine")
    return path


def is_taken(folder: Path) -> bool:
    """Say whether something is there already; an empty folder is free."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def free_folder(wanted: Path) -> Path:
    """Give the folder, or the first of folder-2, folder-3, ... that holds nothing: no run is written over another."""
    folder, number = wanted, 1
    while is_taken(folder):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def make_folder(folder: Path) -> None:
    """Make the folder of a run.

    Raises:
      UsageError: It holds something already, or cannot be made.
    """
    try:
        if is_taken(folder):
            what = "is not empty" if folder.is_dir() else "is a file"
            raise UsageError(f"--out must be a new or empty folder, and {folder} {what}; give another, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror or error}; give another folder") from error
