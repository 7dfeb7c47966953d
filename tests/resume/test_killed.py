"""Real processes, killed for real: started again, they end with the bits of one that was never killed."""

import json
import os
import random
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from telic.checkpoints import verify
from telic.checkpoints.points import POINTS
from tests.resume.processes import Child, server
from tests.resume.program import DEFAULTS, digests, make_data, make_loop

SMALL: dict[str, Any] = {"records": 14, "epochs": 2}


def start(**options: Any) -> Child:
    assert set(options) <= set(DEFAULTS)
    place = Path(options.get("directory") or options["out"]).parent
    place.mkdir(parents=True, exist_ok=True)
    return server().start(options, place / f"output-{uuid.uuid4().hex[:8]}.txt")


def run(**options: Any) -> tuple[int, str]:
    return start(**options).finish()


def finished(directory: Path, **options: Any) -> dict[str, str]:
    out = directory.parent / "end.json"
    code, text = run(directory=str(directory), out=str(out), **options)
    assert code == 0, text
    return json.loads(out.read_text())


def uninterrupted(tmp_path: Path, **options: Any) -> dict[str, str]:
    out = tmp_path / "whole.json"
    code, text = run(out=str(out), **options)
    assert code == 0, text
    return json.loads(out.read_text())


def lines(log: Path) -> list[dict[str, Any]]:
    """Give the lines of a log of metrics without their times."""
    found = [json.loads(line) for line in log.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def test_killed_stopped_and_started_again(tmp_path: Path) -> None:
    """Catches whatever a process takes with it: kill -9 while a save is half written and while an old one is deleted,
    SIGTERM inside a window, Ctrl-C; the log of metrics must read as if nothing had happened (XS133).
    """
    directory, log = tmp_path / "run", tmp_path / "metrics.jsonl"
    options: dict[str, Any] = {**SMALL, "record": str(log)}
    again: dict[str, Any] = {**options, "directory": str(directory)}
    code, text = run(**again, kill_at="arrays_written", kill_number=2)
    assert code == -signal.SIGKILL, text
    code, text = run(**again, signal_at=5)
    assert code == 143, text
    assert "saved at 1 updates" in text
    code, text = run(**again, kill_at="moved_to_trash", kill_number=1)
    assert code == -signal.SIGKILL, text
    code, text = run(**again, signal_at=9, signal="SIGINT")
    assert code == 130, text
    assert "Traceback" not in text
    end = finished(directory, **options)
    interrupted_log = lines(log)
    log.unlink()
    # The run that was never killed is in this process, so that a difference between processes is noticed too.
    o = {**DEFAULTS, **options}
    whole = make_loop(o).run(make_data(o), epochs=o["epochs"])
    assert end == json.loads(json.dumps(digests(whole)))
    assert interrupted_log == lines(log)
    assert verify(directory).is_fine


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"model": "conv"}, id="conv", marks=pytest.mark.slow),
        pytest.param(
            {"data": "grain", "early_stop": True}, id="grain", marks=[pytest.mark.endurance, pytest.mark.timeout(0)]
        ),
    ],
)
def test_killed_at_every_point(options: dict[str, Any], tmp_path: Path) -> None:
    """Catches a moment of a save, a restore or a clean-up at which death loses the run; every point must be hit."""
    options = {**SMALL, **options}
    whole = uninterrupted(tmp_path, **options)
    # Each point once in the first process, and once in one that continues.
    for number, point in enumerate(POINTS):
        directory = tmp_path / str(number) / "run"
        directory.parent.mkdir()
        died = 0
        for kill_number in (2, 1):
            code, text = run(directory=str(directory), kill_at=point, kill_number=kill_number, **options)
            died += code == -signal.SIGKILL
            assert code in (0, -signal.SIGKILL), text
        assert died, f"no process reached {point}"
        assert finished(directory, **options) == whole, point


@pytest.mark.endurance
@pytest.mark.timeout(0)
def test_killed_at_random(tmp_path: Path) -> None:
    """Catches an instant nobody thought of: 200 kills at random times, none of which may cost a bit or a start."""
    options: dict[str, Any] = {**SMALL, "epochs": 6, "pause": 0.02}
    whole = uninterrupted(tmp_path, **options)
    draw = random.Random(0)
    kills = 0
    for number in range(200):
        directory = tmp_path / str(number) / "run"
        directory.parent.mkdir()
        while True:
            process = start(directory=str(directory), out=str(directory.parent / "end.json"), **options)
            process.poll(draw.uniform(0.2, 5.0))
            if process.poll() is None:
                process.kill()
                kills += 1
            code, text = process.finish()
            assert code in (0, -signal.SIGKILL), text
            if code == 0:
                break
            if kills >= 200:
                finished(directory, **options)
                break
        assert json.loads((directory.parent / "end.json").read_text()) == whole
        if kills >= 200:
            return


@pytest.mark.slow
def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Catches a process that cannot be ended while it saves, and one whose older checkpoint suffers from it (XS134)."""
    directory = tmp_path / "run"
    options: dict[str, Any] = {**SMALL, "pause": 0.5}
    process = start(directory=str(directory), **options)
    deadline = time.monotonic() + 120
    while not (directory / "1").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.finish()[0] == 143
    assert finished(directory, **SMALL) == uninterrupted(tmp_path, **SMALL)


@pytest.mark.slow
def test_disk_full(tmp_path: Path) -> None:
    """Catches a full disk that damages older checkpoints, leaves its own litter, or goes unsaid."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no mount here")
    try:
        options: dict[str, Any] = {**SMALL, "width": 2000, "ema": False, "keep": 100}
        code, text = run(directory=str(disk / "run"), **options)
        assert code == 1, text
        assert "could not be saved" in text
        assert "disk is full" in text or "No space" in text
        report = verify(disk / "run")
        assert report.is_fine
        assert report.whole
        assert not report.leftovers
    finally:
        subprocess.run(["umount", str(disk)], check=True)
