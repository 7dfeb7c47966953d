"""Compiled programs kept on disk, so that the next start of a program need not compile them again."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from telic.places import local

VARIABLE = "TELIC_COMPILE_CACHE"
"""Environment variable that names the directory for runs that do not say otherwise."""

_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def cache_directory(compile_cache: Any) -> Path | None:
    """Give the directory of compiled programs, or None for no cache of ours.

    Args:
      compile_cache: A directory; True for one in the user's cache directory; False for none; None leaves it to the
        environment variable ``TELIC_COMPILE_CACHE``, and without that to JAX's own settings.
    Raises:
      TypeError: It is none of these.
    """
    if compile_cache is None:
        named = os.environ.get(VARIABLE, "")
        return local(named).expanduser() if named else None
    if isinstance(compile_cache, bool):
        home = os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"
        return Path(home).expanduser() / "telic" / "programs" if compile_cache else None
    if not isinstance(compile_cache, str | os.PathLike) or not os.fspath(compile_cache):
        raise TypeError(f"compile_cache is a directory, True or False, got {compile_cache!r}")
    return local(compile_cache).expanduser()


@contextmanager
def compile_cache_in(directory: Path | None) -> Generator[None]:
    """Keep the programs that are compiled inside in a directory, and take those that are there already.

    JAX has one cache in a process: what it was before is put back at the end.
    """
    if directory is None or str(directory) == jax.config.values["jax_compilation_cache_dir"]:
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    before = {name: jax.config.values[name] for name in _SETTINGS}
    # Small programs too: a start compiles a dozen of them, and they are what a second start waits for.
    _configure({"jax_compilation_cache_dir": str(directory), "jax_persistent_cache_min_compile_time_secs": 0.0})
    try:
        yield
    finally:
        _configure(before)


def _configure(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    # JAX opens the directory once; this lets it look again.
    compilation_cache.reset_cache()
