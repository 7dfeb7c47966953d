"""What a run is, in its directory: ``run.json``, beside the numbers in ``metrics.jsonl``."""

import json
import logging
import os
import platform
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from telic import tree
from telic.compose.identity import configuration
from telic.compose.programs import described
from telic.display.previews import write_text
from telic.jsonable import as_json
from telic.loop import events as ev
from telic.loop.ports import StepProgram
from telic.loop.state import LoopState, scalars
from telic.train.state import TrainState

FILE = "run.json"

_PACKAGES = ("telic", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_SECRET = ("key", "token", "secret", "password")
_GIT_SECONDS = 2.0
"""What a run waits for git at most."""

_log = logging.getLogger("telic.compose")


class RunFile:
    """Writes ``run.json``: what was run, on what, from which code, and how it ended.

    It appears complete or not at all, when the run starts and when it ends, also by an error. A disk that is full ends
    the record and not the run.

    Args:
      directory: The run's directory; made when the run starts.
      program: The loop's step.
      settings: What the user wants to be kept with it; nested mappings of plain values.
      clock: Seconds since 1970.
    """

    def __init__(
        self,
        directory: Path,
        program: StepProgram,
        settings: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ):
        self._path = directory / FILE
        self._program = program
        self._settings = dict(settings or {})
        self._clock = clock
        self._began = 0.0
        self._record: dict[str, Any] | None = None

    def on_start(self, state: LoopState) -> None:
        """Write what the run is."""
        self._began = self._clock()
        now = self._now()
        before = _read(self._path) if state.total_iterations else {}
        earlier = before.get("starts")
        starts = cast(list[Any], earlier) if isinstance(earlier, list) else []
        here = {"at": now, "iterations": state.total_iterations}
        self._record = {
            "status": "running",
            "started": before.get("started", now),
            "starts": [*starts, here],
            "settings": self._settings,
            "configuration": configured(self._program, state.step_state),
            "plan": {"epochs": state.max_epoch, "updates": state.max_steps, "batches_per_epoch": state.max_iteration},
            "command": command(sys.argv),
            "versions": {"python": platform.python_version()} | versions(),
            "device": device(),
            "git": git_state(_program_folder()),
            "process": {"pid": os.getpid(), "host": socket.gethostname()},
        }
        self._write()

    def on_end(self, state: LoopState) -> None:
        """Write how it ended, with its last metrics."""
        if self._record is None:
            return
        last = state.history[max(state.history)] if state.history else {}
        # An interruption may come between a step and its metrics: those of the moment cannot be read then.
        now = {} if state.status == ev.INTERRUPTED else scalars(dict(state.metrics))
        result = {**now, **last}
        self._finish(state.status or "completed", {"result": result, "iterations": state.total_iterations})

    def close(self) -> None:
        """Write that it failed, where it did not end; harmless when it has ended."""
        if self._record is None:
            return
        error = sys.exc_info()[1]
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            self._finish("interrupted", {})
            return
        text = None if error is None else f"{type(error).__name__}: {error}"[:2000]
        self._finish("failed" if error is not None else "interrupted", {} if text is None else {"error": text})

    def _finish(self, status: str, more: Mapping[str, Any]) -> None:
        if self._record is not None:
            seconds = round(self._clock() - self._began, 1)
            self._record |= {"status": status, "ended": self._now(), "seconds": seconds, **more}
            self._write()
            self._record = None

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="seconds")

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(as_json(self._record), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            _log.warning("%s could not be written, training goes on: %s", self._path, error)


def configured(program: StepProgram, state: Any) -> dict[str, Any]:
    """Give what a step is: what trackers are told, the optimizer, the seed and the number of parameters."""
    made = {name: value for name, value in described(program).items() if name != "versions"}
    made |= configuration(program, state)
    key = getattr(program, "key", None)
    if key is not None:
        made["seed"] = seed_of(key)
    if isinstance(state, TrainState):
        params = state.variables.get("params") if isinstance(state.variables, Mapping) else state.variables
        made["parameters"] = sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params) if tree.is_float(leaf))
    return made


def seed_of(key: Any) -> int | list[int]:
    """Give the seed that a key was made of; the words of a key that is no seed's."""
    typed = jax.numpy.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = [int(word) for word in np.ravel(jax.random.key_data(key) if typed else key)]
    return words[-1] if not any(words[:-1]) else words


def versions() -> dict[str, str]:
    """Give the versions of the packages that training rests on."""
    return {name: metadata.version(name) for name in _PACKAGES}


def device() -> dict[str, Any]:
    """Give what the run computes on."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": jax.device_count(),
        "processes": jax.process_count(),
    }


def command(arguments: list[str]) -> list[str]:
    """Give a command line without what follows a flag that asks for a secret."""
    made: list[str] = []
    hidden = False
    for argument in arguments:
        name, is_joined, _ = argument.partition("=")
        asks = name.startswith("-") and any(word in name.lower() for word in _SECRET)
        made.append(f"{name}=..." if asks and is_joined else "..." if hidden else argument)
        hidden = asks and not is_joined
    return made


def _program_folder() -> str:
    """Give the folder of the program that runs; the working directory where there is none, as in a notebook."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(main)) if main else os.getcwd()


@cache
def git_state(folder: str) -> dict[str, Any] | None:
    """Give commit, branch and changed files of the git work tree that a folder is in; None where it is in none.

    It is asked once in a process, and waited for two seconds at most.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    changed = None if status is None else [line[3:] for line in status.splitlines()]
    return {"commit": commit.strip(), "branch": None if branch is None else branch.strip(), "changed": changed}


def _git(folder: str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, "--no-optional-locks", *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").rstrip() if done.returncode == 0 else None


def memory() -> dict[str, int]:
    """Give the memory in use now, in bytes: the process's, and the first device's where it says."""
    found: dict[str, int] = {}
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            found["host_bytes"] = int(file.read(200).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        # Its peak, where the system does not say what it is now: in KiB, on macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        found["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    stats = jax.local_devices()[0].memory_stats() or {}
    for name, key in (("device_bytes", "bytes_in_use"), ("device_peak_bytes", "peak_bytes_in_use")):
        if key in stats:
            found[name] = int(stats[key])
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
