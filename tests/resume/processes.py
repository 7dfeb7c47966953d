"""Processes for tests to kill, forked from one that has imported what is slow to import: ``python -m`` is the server.

Nothing of JAX's runtime exists when it forks, so each child starts its own, as a fresh interpreter would; it ends as
the interpreter ends a program, with its exit code and traceback.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """Give the environment of a process of these tests."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}


class Child:
    """A forked process: the part of `subprocess.Popen` that the tests use."""

    def __init__(self, server: "Server", pid: int, log: Path):
        self._server = server
        self._log = log
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, timeout: float = 0.0) -> int | None:
        """Give the exit code, or minus the number of the signal, once it has ended."""
        if self.returncode is None and (line := self._server.read(timeout)) is not None:
            self.returncode = int(line)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def finish(self, timeout: float = 300.0) -> tuple[int, str]:
        """Wait for its end; give how it ended and what it said."""
        if self.poll(timeout) is None:
            self.kill()
            raise TimeoutError(f"the process still ran after {timeout} s; it said:\n{self.said()}")
        assert self.returncode is not None
        return self.returncode, self.said()

    def said(self) -> str:
        """Give its output so far."""
        return self._log.read_text(errors="replace")


class Server:
    """Forks one process at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.resume.processes"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._child: Child | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a process runs: a test gave up waiting for it, and what the server says next would be of that one."""
        return self._child is not None and self._child.poll() is None

    def end(self) -> None:
        """Kill the process that runs, and the server."""
        if self._child is not None:
            self._child.kill()
        self._process.kill()
        self._process.wait()

    def start(self, options: dict[str, Any], log: Path) -> Child:
        """Fork a process that runs the program with these options."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"options": options, "log": str(log)}).encode() + b"\n")
        self._process.stdin.flush()
        pid = self.read(120.0)
        if pid is None:
            raise TimeoutError("the server of processes did not start")
        self._child = Child(self, int(pid), log)
        return self._child

    def read(self, timeout: float) -> str | None:
        """Give the server's next line, if it comes in time."""
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], timeout)
        # Lines are short and written whole, and the buffer is not used: select would not see what lies in it.
        return os.read(out.fileno(), 64).decode().strip() if ready else None


@cache
def _server() -> Server:
    return Server()


def server() -> Server:
    """Give the server of this test process; it ends with its standard input."""
    if _server().is_busy:
        _server().end()
        _server.cache_clear()
    return _server()


def asked() -> dict[str, Any]:
    """Fork for each line of standard input; returns in the children, with what they are to do."""
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            # Whoever started pytest may have told it to ignore SIGINT; a terminal's programs do not.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for target, source in ((0, nothing), (1, log), (2, log)):
                os.dup2(source, target)
            return job["options"]
        os.write(1, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        # Two lines at once would be read as one.
        time.sleep(0.01)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    sys.exit(0)


if __name__ == "__main__":
    import orbax.checkpoint  # noqa: F401 the slowest of what is imported late

    from tests.resume.program import DEFAULTS, main

    given = asked()
    warnings.simplefilter("error")
    # torchdata calls a function that torch has deprecated.
    warnings.filterwarnings("ignore", message=".*set_vital")
    main({**DEFAULTS, **given})
