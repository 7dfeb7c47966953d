"""``telic doctor``: what training rests on, looked at piece by piece. Nothing is changed."""

import contextlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from telic.compose import Trainer
from telic.compose.caching import VARIABLE, cache_directory
from telic.objectives import supervised
from telic.reports.text import bytes_text, duration, visible

_PACKAGES = (
    "telic",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "rich",
    "tyro",
    "matplotlib",
)
_EXTRAS = {
    "altair": "live charts in notebooks: telic[plot]",
    "tensorboardX": "TensorBoard: telic[tensorboard]",
    "trackio": "trackio: telic[trackio]",
    "wandb": "Weights & Biases: telic[wandb]",
    "mlflow": "MLflow: telic[mlflow]",
    "tokenizers": "tokenizer.json files: telic[tokenizers]",
    "qwix": "LoRA: telic[lora]",
}
_LOW_DISK_BYTES = 2 * 2**30
_MARKS = {"good": "ok", "note": "--", "warning": "!!", "bad": "XX"}
_ACCELERATORS = {"nvidia-smi": "cuda12", "rocm-smi": "rocm"}


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
      level: "bad" where a run cannot work, "warning" where it may not work as wished, "note" and "good" otherwise.
      subject: What was looked at.
      text: What was found, and what to do.
    """

    level: Literal["good", "note", "warning", "bad"]
    subject: str
    text: str

    @property
    def line(self) -> str:
        """The check as a line."""
        return f"{_MARKS[self.level]}  {self.subject:<12} {self.text}"


def examine(folder: Path) -> list[Check]:
    """Look at everything.

    Args:
      folder: Where runs are written; it need not exist.
    """
    parts: Iterable[Callable[[], Iterable[Check]]] = (
        _python,
        _versions,
        _extras,
        _devices,
        _step,
        _settings,
        _cache,
        lambda: _disk(folder),
        _tools,
    )
    return [check for part in parts for check in _looked(part)]


def _looked(part: Callable[[], Iterable[Check]]) -> list[Check]:
    """Give the checks of a part; one that fails is a finding and does not hide the others."""
    found: list[Check] = []
    try:
        found.extend(part())
    except Exception as error:
        text = visible(f"{type(error).__name__}: {error}", 400)
        found.append(Check("bad", getattr(part, "__name__", "disk").strip("_<>"), f"could not be looked at: {text}"))
    return found


def _python() -> Iterator[Check]:
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    yield Check("good", "python", here)
    if platform.system() == "Windows":
        yield Check("bad", "python", "checkpoints lock their directory with fcntl, which Windows lacks: use WSL")


def _versions() -> Iterator[Check]:
    found = {name: metadata.version(name) for name in _PACKAGES}
    yield Check("good", "versions", ", ".join(f"{name} {version}" for name, version in found.items()))
    if found["jax"] != found["jaxlib"]:
        yield Check(
            "warning", "versions", f"jax {found['jax']} beside jaxlib {found['jaxlib']}: install both at one version"
        )
    if not found["orbax-checkpoint"].startswith("0.12."):
        text = f"checkpoints are written by orbax 0.12, and {found['orbax-checkpoint']} is installed"
        yield Check("bad", "versions", f"{text}: pip install 'orbax-checkpoint>=0.12,<0.13'")


def _extras() -> Iterator[Check]:
    missing = [text for package, text in _EXTRAS.items() if find_spec(package) is None]
    if missing:
        yield Check("note", "extras", f"not installed, and needed for these alone: {'; '.join(missing)}")
    else:
        yield Check("good", "extras", "all are installed")


def _devices() -> Iterator[Check]:
    devices = jax.devices()
    first = devices[0]
    kinds = f"{len(devices)} {first.platform} device{'' if len(devices) == 1 else 's'} ({visible(first.device_kind)})"
    stats = first.memory_stats() or {}
    limit = stats.get("bytes_limit")
    memory = f", {bytes_text(stats.get('bytes_in_use', 0))} of {bytes_text(limit)} in use" if limit else ""
    yield Check("good", "devices", kinds + memory)
    if first.platform == "cpu":
        for tool, plugin in _ACCELERATORS.items():
            if shutil.which(tool) is not None:
                text = (
                    f"{tool} is here and JAX sees no such device: pip install 'jax[{plugin}]', or look at JAX_PLATFORMS"
                )
                yield Check("warning", "devices", text)


def _step() -> Iterator[Check]:
    """Train two steps, to see that the device compiles and computes."""
    pair = (lambda key, x: {"w": jnp.zeros((4, 1))}, lambda params, x: x @ params["w"])
    batch = (np.ones((8, 4), np.float32), np.ones((8, 1), np.float32))
    began = time.perf_counter()
    trainer = Trainer(supervised(pair, "mean_squared_error"), optax.sgd(0.1), key=0)
    state = trainer.fit([batch] * 2, steps=2, log_every=0)
    # Gradient -2, then -2 + 2 · 4 · 0.2 = -0.4, for each of the four weights: 0.2, then 0.24.
    found = np.asarray(state.variables["params"]["w"]).ravel()
    seconds = duration(time.perf_counter() - began)
    if np.allclose(found, 0.24, atol=1e-3):
        yield Check("good", "a step", f"compiled and trained two updates in {seconds}")
    else:
        yield Check("bad", "a step", f"two updates gave {found.tolist()} instead of 0.24: the device computes wrongly")


def _settings() -> Iterator[Check]:
    asked = {name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_ENABLE_X64") if name in os.environ}
    if asked:
        yield Check("note", "settings", visible(", ".join(f"{n}={v}" for n, v in asked.items())))
    for name, text in (
        ("jax_disable_jit", "nothing is compiled, so every step is slow: unset JAX_DISABLE_JIT"),
        (
            "jax_debug_nans",
            "training refuses it, since its state holds NaN where there is no loss: use nonfinite='raise'",
        ),
        ("jax_check_tracer_leaks", "tracing is slow and nothing is cached: unset JAX_CHECK_TRACER_LEAKS"),
    ):
        if jax.config.values.get(name):
            yield Check("warning", "settings", f"{name} is on: {text}")
    if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        text = "memory of the device is taken piece by piece, which is slower and may fragment"
        yield Check("note", "settings", f"XLA_PYTHON_CLIENT_PREALLOCATE is off: {text}")


def _cache() -> Iterator[Check]:
    chosen = cache_directory(None)
    theirs: Any = jax.config.values.get("jax_compilation_cache_dir")
    place = chosen or (Path(theirs) if theirs else None)
    if place is None:
        text = f"compiled programs are not kept: compile_cache=True, or {VARIABLE}=FOLDER, spares the next start"
        yield Check("note", "cache", text)
        return
    if not place.exists():
        yield Check("good", "cache", f"{visible(place)}, made when a program is compiled")
        return
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    count = sum(1 for path in place.iterdir() if path.name.endswith("-cache"))
    level = "good" if os.access(place, os.W_OK) else "warning"
    yield Check(level, "cache", f"{visible(place)}: {count} programs, {bytes_text(size)}{_unless_writable(place)}")


def _disk(folder: Path) -> Iterator[Check]:
    there = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    free = shutil.disk_usage(there).free
    level = "warning" if free < _LOW_DISK_BYTES else "good"
    text = f"{bytes_text(free)} free for {visible(folder)}"
    yield Check(level, "disk", text + ("; a checkpoint that finds no room is given up" if level == "warning" else ""))
    if not os.access(there, os.W_OK):
        yield Check("bad", "disk", f"{visible(there)} cannot be written: give another --folder, or its owner")
        return
    try:
        with tempfile.TemporaryDirectory(prefix=".telic-", dir=there) as name:
            before, after = Path(name, "a"), Path(name, "b")
            before.write_bytes(b"x")
            began = time.perf_counter()
            with before.open("rb") as file:
                os.fsync(file.fileno())
            before.rename(after)
            os.link(after, before)
            seconds = time.perf_counter() - began
    except OSError as error:
        yield Check("bad", "disk", f"a file could not be written, renamed and linked below {visible(there)}: {error}")
        return
    level = "warning" if seconds > 0.5 else "good"
    yield Check(level, "disk", f"writing through to it took {duration(seconds)}")


def _tools() -> Iterator[Check]:
    if shutil.which("git") is None:
        yield Check("note", "git", "is not installed: run.json will not say which code a run was")
    with contextlib.suppress(AttributeError, OSError):
        load = os.getloadavg()[0]
        cores = os.cpu_count() or 1
        if load > 1.5 * cores:
            yield Check("warning", "load", f"{load:.1f} processes want {cores} cores: times measured now mean little")


def _unless_writable(place: Path) -> str:
    return "" if os.access(place, os.W_OK) else "; it cannot be written"
