"""Names and directories of checkpoints: what is ours, how it becomes visible, how it goes.

A checkpoint is a directory ``<updates>`` or, where a later one has as many updates, ``<updates>.<ordinal>``. It is
written as ``<name>.writing``, flushed to the disk, and becomes visible by one rename. It goes by a rename to
``<name>.trash``. Nothing else in a run directory is ever written, moved or deleted.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from telic.checkpoints.points import reach
from telic.errors import BusyError, CheckpointError

LOCK = ".lock"
WRITING = ".writing"
PARTS_WRITING = ".parts.writing"
"""Where the processes of a run put their parts, until all are there and the checkpoint is written around them."""
TRASH = ".trash"
EARLIER = "earlier"
"""Where a run that is to begin anew puts the checkpoints of the one before it."""

Order = tuple[int, int]
"""Updates and ordinal: what checkpoints are sorted by, never by their times."""

_NAME = re.compile(r"(0|[1-9][0-9]{0,17})(?:\.([1-9][0-9]{0,8}))?\Z", re.ASCII)
_LEFTOVER = re.compile(
    r"(?:0|[1-9][0-9]{0,17})(?:\.[1-9][0-9]{0,8})?\.(?:writing|parts\.writing|trash)(?:\.orbax-checkpoint-tmp[-.0-9]*)?\Z",
    re.ASCII,
)
_OURS = ("manifest", "arrays", "_CHECKPOINT_METADATA")
_MAX_LOCK_BYTES = 4096


def parse(name: str) -> Order | None:
    """Give the order of a checkpoint's name, or None for a name that is no checkpoint's."""
    found = _NAME.match(name)
    return None if found is None else (int(found[1]), int(found[2] or 0))


def name_of(order: Order) -> str:
    """Give the name of a checkpoint."""
    updates, ordinal = order
    return str(updates) if ordinal == 0 else f"{updates}.{ordinal}"


def inside(root: Path, name: str) -> Path:
    """Give the path of a checkpoint's or leftover's name in a run directory.

    Raises:
      CheckpointError: The name is none that a checkpoint has, so it could lead anywhere.
    """
    if parse(name) is None and not _LEFTOVER.match(name):
        raise CheckpointError(f"a checkpoint is called <updates> or <updates>.<ordinal>, got {name!r}")
    return root / name


def listing(root: Path) -> tuple[list[Order], list[str]]:
    """Give the checkpoints of a run directory, oldest first, and the names that look like some and are not.

    A directory counts when it holds anything that a checkpoint consists of; an empty ``999`` somebody made does not.
    """
    found: list[Order] = []
    strays: list[str] = []
    for entry in _entries(root):
        order = parse(entry.name)
        if order is None:
            if re.match(r"[0-9]+", entry.name) and not _LEFTOVER.match(entry.name):
                strays.append(entry.name)
        elif _is_directory(entry) and any((Path(entry.path) / part).exists() for part in _OURS):
            found.append(order)
        else:
            strays.append(entry.name)
    return sorted(found), sorted(strays)


def leftovers(root: Path) -> list[Path]:
    """Give the directories that an interrupted save or deletion left."""
    return sorted(root / e.name for e in _entries(root) if _LEFTOVER.match(e.name) and _is_directory(e))


def clean(root: Path) -> list[str]:
    """Remove what interrupted saves and deletions left; give the names. The lock must be held."""
    gone: list[str] = []
    found = leftovers(root)
    reach("leftovers_listed")
    for path in found:
        shutil.rmtree(path)
        gone.append(path.name)
    reach("leftovers_removed")
    return gone


def set_aside(root: Path, orders: list[Order]) -> Path:
    """Move checkpoints out of the way of a run that begins anew; nothing is deleted."""
    number = 1
    while (root / EARLIER / str(number)).exists():
        number += 1
    aside = root / EARLIER / str(number)
    aside.mkdir(parents=True)
    for order in orders:
        os.rename(inside(root, name_of(order)), aside / name_of(order))
    sync_directory(root)
    return aside


def commit(root: Path, name: str) -> None:
    """Make a written checkpoint visible: flush all of it to the disk, rename it, flush the run directory."""
    writing = inside(root, name + WRITING)
    for folder, _, files in os.walk(writing):
        for file in files:
            _sync(Path(folder) / file, os.O_RDONLY)
        sync_directory(Path(folder))
    reach("synced")
    os.rename(writing, inside(root, name))
    sync_directory(root)
    reach("committed")


def remove(root: Path, name: str) -> None:
    """Delete a checkpoint: it disappears by one rename, and then its files go."""
    path, trash = inside(root, name), inside(root, name + TRASH)
    if path.is_symlink():
        raise CheckpointError(f"{path} is a link, not a checkpoint this run wrote; it is left alone")
    os.rename(path, trash)
    sync_directory(root)
    reach("moved_to_trash")
    shutil.rmtree(trash)
    reach("trash_removed")


def sync_directory(path: Path) -> None:
    """Flush a directory's entries to the disk."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a directory; that is no reason to lose the checkpoint.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def size(path: Path) -> int:
    """Give the bytes of a directory's files, each counted once however many names it has."""
    found = [(Path(folder) / file).lstat() for folder, _, files in os.walk(path) for file in files]
    return sum({(one.st_dev, one.st_ino): one.st_size for one in found}.values())


def link_tree(source: Path, target: Path) -> None:
    """Give a directory's files a second name each, below a new directory; where that is impossible, copies."""
    shutil.copytree(source, target, copy_function=link, symlinks=True)


def link(source: str, target: str) -> None:
    """Give a file a second name; where that is impossible, a copy."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        shutil.copyfile(source, target, follow_symlinks=False)


def _entries(root: Path) -> list[os.DirEntry[str]]:
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return list(entries)


def _is_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


@contextlib.contextmanager
def locked(root: Path) -> Generator[None]:
    """Hold a run directory's lock: one run writes to it at a time.

    The lock is the kernel's, so it goes with its process however that ends. What the file says is for people.

    Raises:
      BusyError: Another run holds it; the text says which process on which machine.
    """
    path = root / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise BusyError(
                f"{root} is being written by another run: {_holder(descriptor)}. Wait for it, stop it, or give "
                "another directory"
            ) from None
        os.ftruncate(descriptor, 0)
        here = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        os.pwrite(descriptor, json.dumps(here).encode(), 0)
        reach("lock_taken")
        yield
    finally:
        os.close(descriptor)


def is_held(root: Path) -> bool:
    """Say whether a run on this machine holds a directory's lock, without touching the lock.

    Where the system does not tell (it is asked through ``/proc/locks``), what the lock file says is believed if such a
    process lives.
    """
    path = root / LOCK
    try:
        found = path.stat()
        with contextlib.suppress(OSError):
            lock = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
            return any(lock in line.split() for line in Path("/proc/locks").read_text().splitlines())
        here: Any = json.loads(path.read_bytes()[:_MAX_LOCK_BYTES])
        if here["host"] != socket.gethostname():
            return False
        os.kill(int(here["pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _holder(descriptor: int) -> str:
    try:
        found: Any = json.loads(os.pread(descriptor, _MAX_LOCK_BYTES, 0))
        return f"process {int(found['pid'])} on {str(found['host'])!r}, since {str(found['started'])!r}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said which it is"
