"""`compile_cache=`: compiled programs kept for the next start, and JAX's settings left as they were."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import telic
from telic.compose.caching import cache_directory

BATCHES = [np.ones(3, np.float32)] * 2


def run(factor: float, **options: Any) -> Any:
    loop = telic.Loop(lambda s, b: s + factor * b.sum(), lambda b: np.float32(0))
    return loop.drive(**options).run(BATCHES).step_state


def settings() -> tuple[Any, Any]:
    return jax.config.values["jax_compilation_cache_dir"], jax.config.values[
        "jax_persistent_cache_min_compile_time_secs"
    ]


def test_programs_are_kept_and_found(tmp_path: Path) -> None:
    """Catches a cache that small programs never reach or nobody reads, and settings that leak into the process."""
    before = settings()
    first = run(2.0, compile_cache=tmp_path / "programs")
    kept = {path.name for path in (tmp_path / "programs").iterdir()}
    assert any(name.startswith("jit_") for name in kept)
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event.endswith("/cache_hits"):
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    jax.clear_caches()
    try:
        again = run(2.0, compile_cache=tmp_path / "programs")
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert hits
    assert (first == again).all()
    assert settings() == before


def test_nothing_is_kept_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that is on by default, or that False does not turn off."""
    monkeypatch.delenv("TELIC_COMPILE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory(None) is None
    run(3.0)
    monkeypatch.setenv("TELIC_COMPILE_CACHE", str(tmp_path / "named"))
    run(3.0, compile_cache=False)
    assert list(tmp_path.iterdir()) == []


def test_who_may_name_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an environment variable that goes before what the program says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TELIC_COMPILE_CACHE", str(tmp_path / "named"))
    assert cache_directory(None) == tmp_path / "named"
    assert cache_directory(True) == tmp_path / "home" / "telic" / "programs"
    assert cache_directory("given") == Path("given")
    with pytest.raises(TypeError, match="compile_cache is a directory, True or False, got 3"):
        telic.Trainer(telic.supervised((lambda k, x: {}, lambda v, x: x), "mean_squared_error"), "adam", key=0).loop(
            compile_cache=3  # pyright: ignore[reportArgumentType] what is tested
        )


def test_an_error_puts_the_settings_back(tmp_path: Path) -> None:
    """Catches a failed run after which every later program is written to its cache."""
    before = settings()
    loop = telic.Loop(lambda s, b: s + b.missing, lambda b: np.float32(0)).drive(compile_cache=tmp_path)
    with pytest.raises(AttributeError):
        loop.run(BATCHES)
    assert settings() == before
