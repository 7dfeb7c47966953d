"""Where files go: a path of this machine's file system, whatever a user wrote."""

import os
import re
from pathlib import Path

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""How addresses begin, also where `Path` has made one slash of two."""


def local(path: str | os.PathLike[str]) -> Path:
    """Give a path as it is written, and refuse an address.

    Taken for a path, ``gs://bucket/run`` is a folder called ``gs:`` on this machine's own disk, and gone with it.

    Args:
      path: Where a file or directory lies or is to be made.
    Raises:
      ValueError: It is the address of something elsewhere, such as a bucket.
    """
    if _ADDRESS.match(os.fspath(path)):
        raise ValueError(
            f"files go to a directory of this machine, got the address {os.fspath(path)!r}: mount it and give the path "
            "where it is mounted, or write to the disk and copy from there"
        )
    return Path(path)
