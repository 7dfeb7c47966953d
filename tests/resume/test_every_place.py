"""A run taken up again at every step, and at every iteration inside a window, ends with the bits of one never ended."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from telic.errors import Preempted
from tests.resume import program


def run(stop_at: int | None = None, **options: Any) -> dict[str, str] | None:
    """Run the program in this process; None when it was stopped by the signal at an iteration."""
    o = {**program.DEFAULTS, **options}
    loop = program.make_loop(o)
    if stop_at is not None:
        # The filter is by the run's own count, so that a continued run is stopped once.
        loop.handle_event(
            "iteration_completed",
            lambda s: os.kill(os.getpid(), signal.SIGTERM) if s.total_iterations == stop_at else None,
        )
    limit = {"steps": o["steps"]} if o["steps"] is not None else {"epochs": o["epochs"]}
    try:
        return program.digests(loop.run(program.make_data(o), **limit))
    except Preempted:
        return None


def differing(a: dict[str, str] | None, b: dict[str, str] | None) -> list[str]:
    assert a is not None
    assert b is not None
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def resumed_at(step: int, kept: Path, work: Path, **options: Any) -> dict[str, str] | None:
    """Run on from one checkpoint as if the process had died right after it."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    shutil.copytree(kept / str(step), work / str(step))
    return run(directory=str(work), **options)


# Each is a short run of everything that has a memory: BatchNorm, dropout, EMA, windows that a short one ends.
SHORT = {
    "columns, 3 a window": {"records": 14, "epochs": 2},
    "one continuous stream": {"records": 14, "steps": 5},
    "smaller last batch": {"data": "list", "records": 9, "accumulate": 2, "epochs": 2},
    "grain": {"data": "grain", "records": 8, "accumulate": 1, "epochs": 2},
    "convolution": {"model": "conv", "records": 10, "accumulate": 2},
}


@pytest.fixture(scope="module")
def whole() -> dict[str, str] | None:
    """The end of a run of 14 records that nothing interrupted."""
    return run(records=14)


@pytest.mark.parametrize("name", ["columns, 3 a window", "grain"])
def test_resume_at_a_step_in_each_epoch(name: str, tmp_path: Path) -> None:
    """Catches what is saved but not restored, or the reverse: layer state, moments, average, clock, position
    (XS018, XS025, XS106).
    """
    options = SHORT[name]
    whole = run(directory=str(tmp_path / "whole"), keep=100, **options)
    assert whole is not None
    steps = sorted(int(p.name) for p in (tmp_path / "whole").iterdir() if p.name.isdigit())
    assert len(steps) >= 4
    for step in (steps[0], steps[-2]):
        again = resumed_at(step, tmp_path / "whole", tmp_path / "again", **options)
        assert differing(whole, again) == [], f"resumed at step {step}"


def test_saving_changes_no_bit(whole: dict[str, str], tmp_path: Path) -> None:
    """Catches a save that draws a key, moves a counter, or leaves a view of a buffer that a step then overwrites."""
    assert differing(run(directory=str(tmp_path / "a"), records=14), whole) == []


@pytest.mark.parametrize("stop_at", [1, 7])
def test_stopped_inside_a_window(stop_at: int, whole: dict[str, str], tmp_path: Path) -> None:
    """Catches a window whose sums, masses or slot are lost when SIGTERM comes between its microbatches, and again
    (S05, XS009).
    """
    options: dict[str, Any] = {"records": 14, "directory": str(tmp_path / "run")}
    assert run(stop_at=stop_at, **options) is None
    # Twice in a row: a state that was restored must be one that can be saved.
    assert run(stop_at=stop_at + 3, **options) is None
    assert differing(whole, run(**options)) == []


def test_handlers_remember(tmp_path: Path) -> None:
    """Catches an early stop or a plateau that counts its patience anew after each restart (XS133)."""
    options: dict[str, Any] = {"records": 8, "accumulate": 1, "early_stop": True, "epochs": 4}
    whole = run(directory=str(tmp_path / "whole"), keep=100, **options)
    assert whole is not None
    assert "early_stop" in whole["handler_state"]
    again = resumed_at(9, tmp_path / "whole", tmp_path / "again", **options)
    assert differing(whole, again) == []


@pytest.mark.parametrize("what", ["position", "key", "ema", "window"])
def test_what_is_forgotten_is_noticed(
    what: str, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches these tests passing whatever is restored: each part, left out, must change the end."""
    from telic.compose.resume import Session

    for method in ("fill", "cursor", "check_batch"):
        monkeypatch.setattr(Session, method, getattr(Session, method))
    # Its last stop is inside a window.
    options: dict[str, Any] = {"records": 14, "directory": str(tmp_path / "run")}
    assert run(stop_at=4, **options) is None
    program.forget(what)
    assert differing(whole, run(**options)) != []


@pytest.mark.endurance
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", SHORT)
def test_resume_at_every_step(name: str, tmp_path: Path) -> None:
    """Catches a fault of one place only: an epoch's first step, its last, the step after a short window."""
    options = SHORT[name]
    whole = run(directory=str(tmp_path / "whole"), keep=100, **options)
    steps = sorted(int(p.name) for p in (tmp_path / "whole").iterdir() if p.name.isdigit())
    for step in steps:
        again = resumed_at(step, tmp_path / "whole", tmp_path / "again", **options)
        assert differing(whole, again) == [], f"resumed at step {step}"


@pytest.mark.endurance
@pytest.mark.timeout(0)
@pytest.mark.parametrize("data", ["columns", "grain"])
def test_stopped_at_every_iteration(data: str, tmp_path: Path) -> None:
    """Catches an iteration at which a signal loses or repeats something, with every part that has a memory."""
    options: dict[str, Any] = {"data": data, "records": 14, "early_stop": True}
    whole = run(**options)
    for stop_at in range(14):
        directory = str(tmp_path / str(stop_at))
        if run(stop_at=stop_at, directory=directory, **options) is None:
            assert differing(whole, run(directory=directory, **options)) == [], f"stopped at iteration {stop_at}"
