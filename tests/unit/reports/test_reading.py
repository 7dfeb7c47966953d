"""Run directories as values: odd files, all states, curves."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from telic.reports import Log, find_runs, findings, read_run, visible
from telic.reports import log as reading_log
from telic.reports.reading import Run
from telic.reports.series import MAX_POINTS, metric_panels, split, thinned
from telic.reports.text import scaled


def write(directory: Path, record: Any = None, lines: list[Any] | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if record is not None:
        (directory / "run.json").write_text(json.dumps(record))
    if lines is not None:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def line(batches: int, *, epoch: int = 0, kind: str = "interval", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "epoch": epoch, "total_iterations": batches, "seconds": batches / 10, **more}


def test_reading_loads_neither_jax_nor_numpy() -> None:
    """Catches a report that waits for JAX, or cannot be made where it is not installed."""
    program = "import sys, telic.reports; print([m for m in ('jax', 'numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "null", '{"metrics": 3}', "\x00" * 50, '{"epoch": "x", "total_iterations": 1}', "[" * 5000],
)
def test_odd_files_are_left_out(content: str, tmp_path: Path) -> None:
    """Catches a run that takes the page of all others with it."""
    for name in ("run.json", "metrics.jsonl", "profile.json"):
        (tmp_path / name).write_text(content + "\n")
    run = read_run(tmp_path)
    assert run.lines == ()
    assert run.status == "unknown"
    assert findings([run]) == ([] if run.bad_lines == 0 else findings([run]))


def test_lines_are_read_with_what_json_has_no_word_for(tmp_path: Path) -> None:
    """Catches a NaN that is read as text, a nested value that ends the page, and an unfinished last line counted."""
    write(
        tmp_path, lines=[line(1, metrics={"loss": "NaN", "odd": {"a": 1}, "list": [1], "flag": True, "big": 10**400})]
    )
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 0, "total_it')
    run = read_run(tmp_path)
    assert set(run.lines[0].metrics) == {"loss"}
    assert math.isnan(run.lines[0].metrics["loss"])
    assert run.bad_lines == 0


def test_statuses(tmp_path: Path) -> None:
    """Catches a killed run that is shown as running, and one on another machine that is called dead."""
    here = socket.gethostname()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    cases: dict[str, tuple[Any, str]] = {
        "mine": ({"status": "running", "process": {"pid": os.getpid(), "host": here}}, "running"),
        "killed": ({"status": "running", "process": {"pid": done.pid, "host": here}}, "gone"),
        "elsewhere": ({"status": "running", "process": {"pid": done.pid, "host": here + "x"}}, "running"),
        "odd": ({"status": "running", "process": {"pid": "1", "host": here}}, "running"),
        "huge": ({"status": "running", "process": {"pid": 10**30, "host": here}}, "gone"),
        "done": ({"status": "completed"}, "completed"),
        "invented": ({"status": "<b>"}, "unknown"),
        "none": ({}, "unknown"),
    }
    for name, (record, status) in cases.items():
        assert read_run(write(tmp_path / name, record)).status == status, name


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    """Catches a checkpoint taken for a run, and two runs of one name."""
    for name in ("a", "deep/a", "a/100", "a/earlier/1", ".hidden"):
        write(tmp_path / name, {"status": "completed"})
    assert set(find_runs(tmp_path)) == {"a", "deep/a"}
    assert set(find_runs(tmp_path / "a")) == {"a"}


def test_panels_put_validation_beside_training(tmp_path: Path) -> None:
    """Catches a named set or a validation that gets a panel of its own."""
    metrics = {"accuracy": 0.5, "loss": 1.0, "validation_loss": 2.0, "validation_far_loss": 3.0, "validation_fid": 4.0}
    run = read_run(write(tmp_path, lines=[line(1, metrics=metrics)]))
    panels = {name: [curve.name for curve in curves] for name, curves in metric_panels([run]).items()}
    assert panels == {
        "loss": ["training", "validation", "validation far"],
        "accuracy": ["training"],
        "fid": ["validation"],
    }
    assert next(iter(panels)) == "loss"


def test_thinning_keeps_the_extremes() -> None:
    """Catches a spike that is drawn in a short run and lost in a long one."""
    points = tuple((i, 0.0 if i != 7777 else 9.0) for i in range(20_000))
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS + 2
    assert (7777, 9.0) in kept
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert list(kept) == sorted(kept)


def told(tmp_path: Path, record: Any = None, lines: list[Any] | None = None) -> dict[str, str]:
    return {f.title: f.level for f in findings([read_run(write(tmp_path, record, lines))])}


def test_findings_say_what_happened(tmp_path: Path) -> None:
    """Catches an explanation that is missing where it is needed, or given where nothing is wrong."""
    fine = [line(i, metrics={"loss": 1 / i}, training={"learning_rate": 0.1}) for i in range(1, 9)]
    assert told(tmp_path / "fine", {"status": "completed"}, fine) == {}
    bad = [line(i, metrics={"loss": "NaN", "rejected": 3.0}) for i in range(1, 3)]
    assert told(tmp_path / "nan", {"status": "completed"}, bad) == {
        "loss was not finite": "bad",
        "Attempts were rejected": "warning",
    }
    assert told(tmp_path / "failed", {"status": "failed", "error": "ValueError: x"}) == {"The run failed": "bad"}
    worse = [
        line(i, kind="epoch", epoch=i, metrics={"loss": 1 / (i + 1), "validation_loss": 1.0 + 0.1 * abs(i - 2)})
        for i in range(8)
    ]
    assert told(tmp_path / "over", {"status": "halted"}, worse) == {
        "The run overfits": "warning",
        "The run was halted": "note",
    }
    slow = [line(1, metrics={"loss": 1.0}, speed={"seconds": {"data": 60.0, "device": 40.0}})]
    assert told(tmp_path / "slow", {"status": "completed"}, slow) == {"The run waits for data": "warning"}
    git = {"status": "completed", "git": {"changed": ["a.py", "b.py"]}}
    assert told(tmp_path / "git", git, fine) == {"The code was not committed": "note"}
    grown = [line(i, metrics={"loss": float(i * i)}) for i in range(1, 6)]
    assert told(tmp_path / "grown", {"status": "completed"}, grown) == {"The loss grew": "bad"}


def test_findings_compare_runs(tmp_path: Path) -> None:
    """Catches losses of two versions of JAX that are compared without a word."""
    runs: list[Run] = []
    for name, version in (("a", "1"), ("b", "2")):
        runs.append(read_run(write(tmp_path / name, {"status": "completed", "versions": {"jax": version, "x": "1"}})))
    (found,) = findings(runs)
    assert found.title == "Other versions"
    assert found.text.startswith("jax differ")


def test_split_adds_up(tmp_path: Path) -> None:
    """Catches time that is counted twice or lost between lines."""
    made = [line(i, speed={"seconds": {"data": 1.0, "device": 0.5}}) for i in range(4)]
    assert split(read_run(write(tmp_path, lines=made))) == {"data": 4.0, "device": 2.0}


def test_visible_leaves_nothing_to_obey() -> None:
    """Catches an escape code, a bidirectional override or a line break in a name."""
    assert visible("a\x1b[31m\u202eb\nc") == "a\\x1b[31m\\u202eb\\nc"
    assert visible("été ✓") == "été ✓"
    assert len(visible("x" * 1000)) == 200


def test_large_rates_have_a_unit_of_their_size() -> None:
    """Catches a rate of twelve digits, one of 1000 G, and a NaN or infinity that ends the page."""
    values = (0.5, 12.0, 1e3, 999.6e9, 2.5e11, 9.89e14, 3e18, math.inf, math.nan)
    shown = ["0.5 F", "12 F", "1 kF", "1 TF", "250 GF", "989 TF", "3e+03 PF", "inf PF", "nan PF"]
    assert [scaled(value, "F") for value in values] == shown


def test_the_beginning_of_a_very_long_record_is_left_out(tmp_path: Path) -> None:
    """Catches a whole record that is called damaged because it was read from its middle."""
    place = write(tmp_path, lines=[line(i, metrics={"loss": 1.0}) for i in range(100)])
    run = read_run(place, log=Log(place / "metrics.jsonl", max_bytes=500))
    assert 0 < len(run.lines) < 100
    assert run.lines[-1].batches == 99
    assert run.bad_lines == 0


def test_a_log_that_grows_or_begins_anew_reads_as_if_read_once(tmp_path: Path) -> None:
    """Catches lines read twice or lost as a file grows, a half line counted, and a new file taken for the old."""
    place = tmp_path / "metrics.jsonl"
    log = Log(place)
    assert log.read() == ((), 0)
    rows = [json.dumps(line(i, metrics={"loss": float(i)})) + "\n" for i in range(6)]
    whole = "".join(rows[:3]) + "no line\n" + "".join(rows[3:])
    for end in range(0, len(whole) + 1, 7):
        place.write_text(whole[:end])
        assert log.read() == Log(place).read(), end
    place.write_text(rows[5] * 20)
    assert log.read() == Log(place).read()
    place.unlink()
    assert log.read() == ((), 0)


def test_a_log_that_is_cut_back_and_goes_on_is_read_anew(tmp_path: Path) -> None:
    """Catches a run that went on from a checkpoint, whose record was cut back and has grown past where it was read."""
    rows = [json.dumps(line(i, metrics={"loss": float(i)})) + "\n" for i in range(9)]
    place = tmp_path / "metrics.jsonl"
    place.write_text("".join(rows[:6]))
    log = Log(place)
    assert len(log.read()[0]) == 6
    again = [json.dumps(line(i, metrics={"loss": -float(i)})) + "\n" for i in range(9)]
    place.write_text("".join(rows[:3] + again[3:]))
    found, bad = log.read()
    assert [one.metrics["loss"] for one in found] == [0, 1, 2, -3, -4, -5, -6, -7, -8]
    assert bad == 0


def test_a_long_log_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a page that reads the many megabytes of a long run again for each new line."""
    place = tmp_path / "metrics.jsonl"
    row = json.dumps(line(0, metrics={f"metric {i}": 0.5 for i in range(1000)})) + "\n"
    place.write_text(row * 300)
    assert place.stat().st_size > 5 * 2**20
    parsed: list[int] = []
    before = reading_log._line
    monkeypatch.setattr(reading_log, "_line", lambda row: parsed.append(len(row)) or before(row))
    log = Log(place)
    assert len(log.read()[0]) == 300
    parsed.clear()
    with place.open("a") as file:
        file.write(row + row[:100])
    assert len(log.read()[0]) == 301
    # The new line and the half one.
    assert parsed == [len(row) - 1, 100]


def test_a_log_that_grew_by_more_than_is_read_shows_its_newest_lines(tmp_path: Path) -> None:
    """Catches a follower that was away for long and counts half a line as damage, or stops at its limit."""
    rows = [json.dumps(line(i, metrics={"loss": float(i)})) + "\n" for i in range(200)]
    place = tmp_path / "metrics.jsonl"
    place.write_text("".join(rows[:5]))
    log = Log(place, max_bytes=1000)
    assert [one.batches for one in log.read()[0]] == [0, 1, 2, 3, 4]
    place.write_text("".join(rows))
    found, bad = log.read()
    assert bad == 0
    assert [one.batches for one in found] == list(range(200 - len(found), 200))
    assert 0 < len(found) < 20


@pytest.mark.parametrize("odd", [b"\xff\xfe\x00{", b"\x1b[2J", '{"epoch": 0}'.encode("utf-16"), b"\r"])
def test_bytes_that_are_no_line_are_left_out(odd: bytes, tmp_path: Path) -> None:
    """Catches another encoding or a control character that ends the reading of all that follows."""
    row = json.dumps(line(7)).encode()
    place = tmp_path / "metrics.jsonl"
    place.write_bytes(odd + b"\n" + row + b"\r\n" + odd)
    found, bad = Log(place).read()
    assert [one.batches for one in found] == [7]
    assert bad == (1 if odd.strip() else 0)
