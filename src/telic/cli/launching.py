"""Several processes of one program on one machine: started, listened to, and ended together."""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

SILENT_SECONDS = 10.0
"""A process that says nothing for so long is stopped, or hangs with the interpreter in its hands."""

STARTING_SECONDS = 60.0
"""How long the first sign of life may take on a busy machine."""

GRACE_SECONDS = 60.0
"""How long the others may go on once one has ended by a signal it was sent: they save the same step."""

_SAVED = (130, 143)
"""Exit codes of runs that a signal ended after a save."""


@dataclass
class _Member:
    index: int
    process: subprocess.Popen[bytes]
    beats: int
    last: float = field(default_factory=time.monotonic)
    has_spoken: bool = False


def launch(
    program: Path,
    arguments: tuple[str, ...],
    *,
    processes: int,
    devices: int | None = None,
    say: Callable[[str], None],
) -> int:
    """Run a program in several processes and give how it ended: 0, or the exit code of the first that failed.

    When one fails, is killed or stops answering, the others are ended at once: they would wait for it.

    Args:
      program: The Python file.
      arguments: What follows it.
      processes: How many.
      devices: CPU devices to simulate in each; None leaves them as they are.
      say: Takes what is to be known of the processes.
    """
    coordinator = f"127.0.0.1:{_free_port()}"
    members: list[_Member] = []
    try:
        for index in range(processes):
            members.append(_start(program, arguments, coordinator, processes, index, devices))
        with _signals(members) as received:
            return _watch(members, received, say)
    finally:
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.process.wait()
            os.close(member.beats)


def _start(
    program: Path, arguments: tuple[str, ...], coordinator: str, count: int, index: int, devices: int | None
) -> _Member:
    listening, speaking = os.pipe()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if devices is not None:
        flags = environment.get("XLA_FLAGS", "")
        environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
        environment["JAX_PLATFORMS"] = "cpu"
    place = f"{coordinator},{count},{index},{speaking}"
    process = subprocess.Popen(
        [sys.executable, "-m", "telic.cli.rank", place, str(program), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=None if index == 0 else subprocess.PIPE,
        stderr=None if index == 0 else subprocess.STDOUT,
        pass_fds=(speaking,),
        # A group of its own: Ctrl-C comes to us, and workers end with it.
        start_new_session=True,
    )
    os.close(speaking)
    if process.stdout is not None:
        threading.Thread(target=_repeat, args=(process.stdout, index), daemon=True).start()
    return _Member(index, process, listening)


def _repeat(lines: IO[bytes], index: int) -> None:
    """Write what a process says, with its number in front."""
    with contextlib.suppress(ValueError, OSError):
        for line in lines:
            sys.stderr.write(f"[{index}] {line.decode(errors='replace')}")
            sys.stderr.flush()


def _watch(members: list[_Member], received: list[int], say: Callable[[str], None]) -> int:
    running = {member.index: member for member in members}
    code, until = 0, float("inf")
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.beats, selectors.EVENT_READ, member)
        while running:
            for key, _ in selector.select(0.2):
                member = key.data
                if os.read(member.beats, 4096):
                    member.last, member.has_spoken = time.monotonic(), True
                else:
                    selector.unregister(member.beats)
            now = time.monotonic()
            for member in list(running.values()):
                ended = member.process.poll()
                if ended is not None:
                    del running[member.index]
                    code = code or _exit_code(ended)
                    if ended in _SAVED:
                        until = min(until, now + GRACE_SECONDS)
                    elif ended:
                        say(f"process {member.index} of {len(members)} {_how(ended)}; the others are ended")
                        return code
                elif now - member.last > (SILENT_SECONDS if member.has_spoken else STARTING_SECONDS):
                    silence = f"has not answered for {now - member.last:.0f} s: it is stopped, or hangs"
                    say(f"process {member.index} of {len(members)} {silence}; all are ended")
                    return 1
            if now > until:
                left = ", ".join(map(str, running))
                say(f"process {left} still ran {GRACE_SECONDS:.0f} s after another had ended; it is ended")
                return code
            if len(received) > 1:
                say("a second signal: all are ended")
                return 128 + received[0]
    return code


def _exit_code(ended: int) -> int:
    return ended if ended >= 0 else 128 - ended


def _how(ended: int) -> str:
    if ended < 0:
        return f"was ended by {signal.Signals(-ended).name}"
    return f"ended with exit code {ended}"


@contextmanager
def _signals(members: list[_Member]) -> Generator[list[int]]:
    """Hand SIGTERM and Ctrl-C on to the processes as SIGTERM, which saves; give those that came."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)
        for member in members if len(received) == 1 else ():
            with contextlib.suppress(ProcessLookupError):
                member.process.send_signal(signal.SIGTERM)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
