"""Programs of these tests in processes of their own: with simulated devices, alone or several on the loopback."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from telic.driver.tracing import knows_option

ROOT = Path(__file__).resolve().parents[2]

_FUSION_EMITTERS = "xla_cpu_use_fusion_emitters"


def quickly() -> str:
    """Give flags for XLA: these programs are compiled for longer than they run."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    # The older way to compile a fusion takes 40 % less time; newer XLA has it no more.
    return f"{flags} --{_FUSION_EMITTERS}=false" if knows_option(_FUSION_EMITTERS, False) else flags


compiled: list[Path] = []
"""Where the programs of this run of pytest keep what XLA compiles, for each other: one directory, or none."""


def environment(devices: int = 1) -> dict[str, str]:
    """Give the environment of a process with a number of simulated devices."""
    return {
        **os.environ,
        **({"JAX_COMPILATION_CACHE_DIR": str(compiled[0])} if compiled else {}),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {quickly()}",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src"))),
    }


def run(module: str, *arguments: Any, devices: int = 8) -> Any:
    """Run a module of these tests and give what its last line says as JSON."""
    command = [sys.executable, "-m", f"tests.distributed.{module}", *map(str, arguments)]
    done = subprocess.run(command, env=environment(devices), cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{module} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Ended:
    """How processes that were launched together ended.

    Attributes:
      code: The exit code of the command, `telic launch` as a rule.
      said: What they and it said.
      seconds: How long it took.
    """

    code: int
    said: str
    seconds: float


TELIC = [sys.executable, "-c", "import sys; from telic.cli import main; sys.exit(main())"]


def launch(program: str, *arguments: str, processes: int = 2, devices: int = 1) -> Ended:
    """Run a program of these tests in several processes."""
    options = ["launch", "--processes", str(processes), "--devices", str(devices)]
    path = ROOT / "tests" / "distributed" / program
    return ended([*TELIC, *options, str(path), "--", *arguments], environment(), ROOT, timeout=500)


def replayed(run: Path, step: int) -> Ended:
    """Let one process with two devices compute a checkpoint of two processes' run of `member` again."""
    asked = json.dumps({"directory": str(run), "kind": "none", "rank": 0, "step": 0})
    member = str(ROOT / "tests" / "distributed" / "member.py")
    command = [*TELIC, "replay", member, str(run), "--step", str(step), "--", asked]
    return ended(command, environment(devices=2), ROOT, timeout=300)


def ended(command: list[str], env: dict[str, str], here: Path, *, timeout: float) -> Ended:
    """Run a command in a directory to its end, its errors among what it says."""
    began = time.monotonic()
    done = subprocess.run(
        command,
        env=env,
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(done.returncode, done.stdout, time.monotonic() - began)


def checks(place: Path, names: list[str], *, processes: int, devices: int = 1) -> dict[str, list[Any]]:
    """Launch `checks` and give what each of them gave, by process."""
    launched = launch("checks.py", str(place), *names, processes=processes, devices=devices)
    assert launched.code == 0, launched.said[-8000:]
    told = [json.loads((place / f"results.{index}").read_text()) for index in range(processes)]
    return {name: [one[name] for one in told] for name in names} | {"said": [launched.said]}


def common(factory: pytest.TempPathFactory) -> Path:
    """Give the directory that the workers of this run of pytest have in common."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """Give what is made once in a run of pytest, whatever the number of its workers: the others wait for the first.

    Args:
      factory: Knows where files of this run go.
      name: Of what is made.
      make: Makes it, in JSON; takes a directory that is kept.
    """
    place = common(factory) / name
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = place / "made.json"
        if not made.exists():
            try:
                made.write_text(json.dumps({"gave": make(place)}))
            except Exception as error:
                made.write_text(json.dumps({"failed": f"{type(error).__name__}: {error}"}))
                raise
        found = json.loads(made.read_text())
    if "failed" in found:
        pytest.fail(f"another test waited for the same {name}, and it failed: {found['failed']}")
    return found["gave"]
