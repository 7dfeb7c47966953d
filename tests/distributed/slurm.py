"""Slurm for a dry run on one machine: ``sbatch``, ``srun`` and ``scontrol``, as far as recipes/cluster/slurm.sh asks.

`install` puts them into a directory for PATH, with `telic` beside them. A job is one node with two processes on the
loopback. Its time is up when the file ``time_is_up`` appears in the directory that it was submitted from; it is queued
again when it asks for that.
"""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

from tests.distributed.running import environment

TASKS = 2

COMMANDS = ("sbatch", "srun", "scontrol", "telic")

JAX_PORTS = 65536 - 2**12
"""JAX listens at this port plus the job's number, up to 4096 of them."""

KNOWN = ("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue")
"""Options of the script that are known to be Slurm's."""


def install(place: Path) -> dict[str, str]:
    """Write the commands into a directory and give the environment in which they are found."""
    place.mkdir()
    for name in COMMANDS:
        path = place / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.distributed.slurm {name} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    known = environment()
    return {**known, "PATH": os.pathsep.join((str(place), known["PATH"]))}


def job_number() -> int:
    """Give a job's number whose port of JAX's is free."""
    for number in range(os.getpid() % 4000, 4096):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", JAX_PORTS + number))
            return number
    raise OSError(f"no free port from {JAX_PORTS}")


def sbatch(script: str) -> int:
    """Run a script as a job, again when it was queued again; give how it ended."""
    for line in Path(script).read_text().splitlines():
        option = line.removeprefix("#SBATCH --").partition("=")[0]
        if line.startswith("#SBATCH") and option not in KNOWN:
            print(f"sbatch: error: unrecognized option '{line}'", file=sys.stderr)
            return 1
    job = {"SLURM_JOB_ID": str(job_number()), "SLURM_NTASKS": str(TASKS)}
    for _ in range(3):
        code = subprocess.run(["bash", script], env={**os.environ, **job}, check=False).returncode
        asked = Path("requeue")
        if not asked.exists() or asked.read_text() != job["SLURM_JOB_ID"]:
            return code
        asked.rename("requeued")
    return code


def scontrol(what: str, job: str) -> int:
    """Queue a job again."""
    if what != "requeue":
        return 1
    Path(what).write_text(job)
    return 0


def srun(*arguments: str) -> int:
    """Run a command in every task and give the largest of their exit codes."""
    options = [argument for argument in arguments if argument.startswith("--")]
    assert options == ["--kill-on-bad-exit=1"], options
    port = JAX_PORTS + int(os.environ["SLURM_JOB_ID"])
    step = {
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_STEP_NUM_NODES": "1",
        # What listens to everybody otherwise listens to this machine.
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
    }
    tasks = [
        subprocess.Popen(
            list(arguments[len(options) :]),
            env={**os.environ, **step, "SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)},
        )
        for index in range(TASKS)
    ]
    told = not _is_time_up()
    failed: float | None = None
    while any(task.poll() is None for task in tasks):
        time.sleep(0.1)
        if told and _is_time_up():
            told = False
            for task in tasks:
                task.send_signal(signal.SIGTERM)
        if failed is None and any(task.poll() for task in tasks):
            failed = time.monotonic()
            for task in tasks:
                task.send_signal(signal.SIGTERM)
        if failed is not None and time.monotonic() - failed > 30:
            for task in tasks:
                task.kill()
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


def _is_time_up() -> bool:
    return Path("time_is_up").exists()


def main(command: str, *arguments: str) -> int:
    match command:
        case "sbatch":
            return sbatch(*arguments)
        case "srun":
            return srun(*arguments)
        case "scontrol":
            return scontrol(*arguments)
        case _:
            from telic.cli import main as telic

            return telic(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
