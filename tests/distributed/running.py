"""Programs of these tests in processes of their own: with simulated devices, alone or several on the loopback."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Flags for XLA: these programs are compiled for longer than they run."""


def environment(devices: int = 1) -> dict[str, str]:
    """Give the environment of a process with a number of simulated devices."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICKLY}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src"))),
    }


def run(module: str, *arguments: Any, devices: int = 8) -> Any:
    """Run a module of these tests and give what its last line says as JSON."""
    command = [sys.executable, "-m", f"tests.distributed.{module}", *map(str, arguments)]
    done = subprocess.run(command, env=environment(devices), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{module} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def free_port() -> int:
    """Give a port of the loopback that nobody listens to."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Ended:
    """How processes that were launched together ended.

    Attributes:
      code: The exit code of `telic launch`.
      said: What they and it said.
      seconds: How long it took.
      results: What each process that got there made, by its index.
    """

    code: int
    said: str
    seconds: float
    results: dict[int, Any]


def launch(out: Path, *, processes: int = 2, devices: int = 4, **asked: Any) -> Ended:
    """Run the member program in several processes."""
    arguments = ["launch", "--processes", str(processes), "--devices", str(devices)]
    telic = "import sys; from telic.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", telic, *arguments, str(ROOT / "tests/distributed/member.py"), "--"]
    for old in out.parent.glob(f"{out.name}.*"):
        old.unlink()
    began = time.monotonic()
    done = subprocess.run(
        [*command, json.dumps({"out": str(out), **asked})],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    results = {int(path.suffix[1:]): json.loads(path.read_text()) for path in out.parent.glob(f"{out.name}.*")}
    return Ended(done.returncode, done.stdout, time.monotonic() - began, results)
