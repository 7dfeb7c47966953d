"""Text that every machine with Python has: the source of the standard library."""

import sysconfig
import zlib
from pathlib import Path
from typing import Literal, TypeAlias

Split: TypeAlias = Literal["train", "held_out", "all"]

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
)
_HELD_OUT_EVERY = 20


def standard_library(split: Split = "all", *, max_bytes: int | None = None) -> dict[str, str]:
    """Read the Python source of the running interpreter's standard library, without its tests.

    A module is held out by its name alone (one in 20), so that the split is the same in every version of Python that
    has the module.

    Args:
      split: "train", "held_out" or "all".
      max_bytes: Stop before the module that would pass this many bytes; None reads all, some 10 MB.
    Returns:
      Source by module path, such as ``json/decoder.py``, in alphabetical order.
    Raises:
      ValueError: The split is none of these, or `max_bytes` leaves no module.
      FileNotFoundError: This Python has no source of its standard library beside it.
    Example:
      >>> "json/decoder.py" in standard_library()
      True
    """
    if split not in ("train", "held_out", "all"):
        raise ValueError(f"split must be 'train', 'held_out' or 'all', got {split!r}")
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"there is no Python source in {root}: this Python came without it")
    found: dict[str, str] = {}
    size = 0
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if split != "all" and (zlib.crc32(name.encode()) % _HELD_OUT_EVERY == 0) != (split == "held_out"):
            continue
        raw = path.read_bytes()
        if max_bytes is not None and size + len(raw) > max_bytes:
            break
        size += len(raw)
        # A few modules are written in other encodings, on purpose.
        found[name] = raw.decode("utf-8", errors="replace")
    if not any(found.values()):
        raise ValueError(f"max_bytes={max_bytes} leaves no module of the split {split!r}; give more")
    return found
