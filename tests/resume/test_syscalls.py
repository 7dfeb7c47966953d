"""A save killed before each of its system calls: what is left is always a run that starts, with exact bits.

strace delivers the SIGKILL, so the places of death are those of the kernel's interface and nobody had to think of them.
"""

import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from telic.checkpoints import Checkpoints, verify
from telic.checkpoints.directory import RunDirectory
from tests.resume.processes import ROOT, environment
from tests.resume.save_server import leaves, save

CALLS = (
    *("write", "pwrite64", "writev", "fsync", "fdatasync", "rename", "renameat", "renameat2"),
    *("unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "link", "linkat", "ftruncate"),
)
"""What changes a file system."""

MOST = 200
"""Calls of one name that a save makes at most."""


class Saves:
    """Saves in processes of their own, killed where it is asked for."""

    def __init__(self, root: Path):
        self.root = root
        command = [sys.executable, "-m", "tests.resume.save_server"]
        self._server = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        save(root / "before", 1)

    def killed(self, call: str, number: int) -> bool:
        """Save after checkpoint 1, killed before a system call; False when the save made no such call."""
        run = self.root / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.root / "before", run)
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(run, file=self._server.stdin, flush=True)
        pid = int(self._server.stdout.readline())
        inject = f"inject=?{call}:signal=KILL:when={number}"
        tracer = subprocess.Popen(
            ["strace", "-f", "-p", str(pid), "-e", f"trace=?{call}", "-e", inject, "-o", "/dev/null"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        if "attached" not in said:
            subprocess.run(["kill", "-KILL", str(pid)], check=False)
            pytest.skip(f"strace cannot attach here: {said.strip()}")
        subprocess.run(["kill", "-CONT", str(pid)], check=True)
        code = int(self._server.stdout.readline())
        tracer.communicate()
        assert code in (0, -9), (call, number, code)
        self._check(run, finished=code == 0, where=f"{call} {number}")
        return code == -9

    def _check(self, run: Path, *, finished: bool, where: str) -> None:
        """The run starts, holds step 1 or step 2 bit by bit, can be saved again, and then has no litter."""
        directory = RunDirectory(Checkpoints(run, keep=1))
        directory.open()
        found = directory.find()
        assert found.saved is not None, where
        assert not found.rejected, where
        step = found.saved.body["note"]
        assert step in ((2,) if finished else (1, 2)), where
        for name, expected in leaves(step).items():
            assert found.saved.arrays[name].data.tobytes() == expected.tobytes(), (where, name)
        directory.close()
        save(run, 3)
        report = verify(run)
        assert (report.whole, report.damaged, report.leftovers, report.strays) == (("3",), {}, (), ()), where

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait(timeout=30)


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Saves]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: it delivers the kills")
    made = Saves(tmp_path)
    yield made
    made.close()


def test_killed_before_some_system_calls(saves: Saves) -> None:
    """Catches an order of writes, flushes and renames that a death between two of them turns into a lost run."""
    draw = random.Random(0)
    died = 0
    for call in ("fsync", "rename", "linkat", "unlinkat"):
        died += saves.killed(call, 1)
        died += saves.killed(call, draw.randint(2, 5))
    # Python's names for these calls differ between versions: most of them must have been made.
    assert died >= 5


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_killed_before_every_system_call(saves: Saves) -> None:
    """As the sample, before every call that changes a file system, of every thread of the save."""
    made: dict[str, int] = {}
    for call in CALLS:
        for number in range(1, MOST):
            if not saves.killed(call, number):
                break
            made[call] = number
        else:
            pytest.fail(f"more than {MOST} calls of {call}: raise MOST")
    print("killed before each of:", made)
    assert set(made) & {"fsync", "fdatasync"}
    assert set(made) & {"rename", "renameat", "renameat2"}
    assert sum(made.values()) >= 30
