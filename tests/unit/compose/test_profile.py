"""`profile=`: where the time of a run goes, and who gets to know."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.cli import main
from telic.compose import metering
from telic.profiling import PARTS, STEP_PARTS, Report, read_goodput

MODEL = (
    lambda key, x: {"params": {"w": jax.random.normal(key, (4, 2))}},
    lambda variables, x, *, train=False: x @ variables["params"]["w"],
)
DATA = [(np.ones((8, 4), np.float32), np.zeros((8, 2), np.float32))] * 6


def trainer(**options: Any) -> telic.Trainer:
    return telic.Trainer(telic.supervised(MODEL, "mean_squared_error"), "adam", key=0, **options)


def test_the_split_adds_up_to_the_wall_time() -> None:
    """Catches time that is in no part, or in two: a slow source, a slow handler and a dispatch each in its own."""

    def slow(epoch: int) -> Any:
        for batch in DATA:
            time.sleep(0.01)
            yield batch

    def handler(state: telic.LoopState) -> None:
        time.sleep(0.02)

    reports: list[Report] = []
    loop = trainer().loop(log=0, profile=reports.append).handle_event("iteration_completed", handler, name="mine")
    began = time.perf_counter()
    loop.run(slow, epochs=2)
    wall = time.perf_counter() - began
    (report,) = reports
    assert set(report.seconds) == set(PARTS)
    # What is outside the account is a few calls before its first and after its last look at the clock, and the
    # measurement of the device's peak at the end.
    assert 0 <= wall - sum(report.seconds.values())
    assert report.step_seconds == pytest.approx(sum(report.seconds[part] for part in STEP_PARTS))
    # Sleeping takes at least as long as it says, whatever else the machine does.
    assert report.handlers["mine"] >= 12 * 0.02
    assert report.seconds["handlers"] == pytest.approx(sum(report.handlers.values()))
    assert report.seconds["compile"] > 0
    assert (report.iterations, report.examples) == (12, 96)
    assert report.flops is not None
    assert report.flops > 0
    text = str(report)
    assert all(part in text for part in STEP_PARTS)
    assert "mine" in text


def test_a_profile_changes_no_bit() -> None:
    """Catches a meter that groups iterations otherwise, or reads a batch twice."""
    plain = trainer().fit(DATA, epochs=2, log_every=0)
    profiled = trainer(profile=lambda report: None).fit(DATA, epochs=2, log_every=0)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), plain.variables, profiled.variables))


def test_a_smaller_last_batch_does_not_stand_for_all() -> None:
    """Catches operations of the program compiled last, that of one row, multiplied by the rate of whole batches."""
    flops: list[float | None] = []
    for rows in (0, 1):
        last = [(np.ones((rows, 4), np.float32), np.zeros((rows, 2), np.float32))] * rows
        trainer(profile=lambda report: flops.append(report.flops)).fit([*DATA, *last], log_every=0)
    assert flops[0] == flops[1]


def test_a_line_says_what_the_device_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a utilisation that is invented where no peak is known, and one that is no share of the one that is."""
    said: list[dict[str, Any]] = []
    for peak in (None, 1e12):
        monkeypatch.setattr(metering, "published_peak", lambda kind, dtype, peak=peak: peak)
        place = tmp_path / str(peak)
        trainer().loop(log=0).record(place, interval=3).run(DATA)
        said.append(json.loads((place / "metrics.jsonl").read_text().splitlines()[1])["speed"])
    unknown, known = said
    assert unknown["utilisation"] == "unknown"
    assert unknown["flops_per_second"] > 0
    assert known["utilisation"] == pytest.approx(known["flops_per_second"] / 1e12, rel=1e-4)


def test_tokens_are_counted() -> None:
    """Catches examples per second where tokens were meant: a batch of [4, 16] ids has 64."""
    model = (
        lambda key, x: {"params": {"w": jnp.zeros((5, 3))}},
        lambda variables, x, *, train=False: variables["params"]["w"][x],
    )
    batch = {"inputs": np.zeros((4, 16), np.int32), "targets": np.zeros((4, 16), np.int32)}
    reports: list[Report] = []
    telic.trainer(model, "softmax_cross_entropy", "adam", log=0, profile=reports.append).run([batch] * 3)
    assert (reports[0].examples, reports[0].tokens) == (12, 192)
    assert "tokens/s" in str(reports[0])


def test_a_run_with_a_directory_keeps_the_record(tmp_path: Path) -> None:
    """Catches a profile that is only printed, and a second start whose time is not joined to the first's."""
    for epochs in (1, 2):
        saved = trainer(checkpoints=telic.Checkpoints(tmp_path / "run"), profile=lambda report: None)
        saved.fit(DATA, epochs=epochs, log_every=0)
    goodput = read_goodput(tmp_path / "run")
    assert goodput.starts == 2
    assert goodput.seconds["lost"] == 0
    assert goodput.seconds["checkpoint"] > 0
    assert goodput.seconds["restore"] > 0
    assert goodput.seconds["training"] > 0
    kept = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert kept["iterations"] == 6
    assert kept["steps_per_second"] > 0


def test_the_report_comes_when_a_run_fails() -> None:
    """Catches the runs that one most wants to know about, and which leave nothing."""
    reports: list[Report] = []

    def fails(state: telic.LoopState) -> None:
        raise RuntimeError("mine")

    loop = trainer().loop(log=0, profile=reports.append)
    with pytest.raises(RuntimeError, match="mine"):
        loop.handle_event("epoch_completed", fails).run(DATA)
    assert reports[0].iterations == 6


def test_a_raw_step_is_profiled_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a profile that needs an objective; True prints it."""
    telic.Loop(lambda s, b: s + b.sum(), lambda b: 0.0).drive(profile=True).run([np.ones(3)] * 4)
    assert "profile: 4 batches" in capsys.readouterr().out


def test_what_profile_takes() -> None:
    """Catches a directory or a word that is silently taken for True."""
    with pytest.raises(TypeError, match="profile is True, which prints a report, or a function that takes it, got 'x'"):
        trainer(profile="x")
    with pytest.raises(TypeError, match="profile is True"):
        trainer().loop(profile=3)  # pyright: ignore[reportArgumentType] what is tested


PROGRAM = """
import sys
import numpy as np
import telic
print(sys.argv[1:], __name__)
telic.Loop(lambda s, b: s + b.sum(), lambda b: 0.0).run([np.ones(3)] * int(sys.argv[1]))
"""


def test_the_command_profiles_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a program that has to be changed, loses its arguments, or leaves the process changed."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    before = sys.argv[:], sys.path[:]
    assert main(["profile", str(tmp_path / "mine.py"), "5"]) == 0
    out = capsys.readouterr().out
    assert "['5'] __main__" in out
    assert "profile: 5 batches" in out
    assert (sys.argv, sys.path) == before
    telic.Loop(lambda s, b: s + b.sum(), lambda b: 0.0).run([np.ones(3)])
    assert "profile" not in capsys.readouterr().out


def test_the_command_shows_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a directory that is run as a program."""
    trainer(checkpoints=telic.Checkpoints(tmp_path / "run"), profile=lambda report: None).fit(DATA, log_every=0)
    assert main(["profile", str(tmp_path / "run")]) == 0
    assert "goodput" in capsys.readouterr().out
    assert main(["profile", str(tmp_path)]) == 2
    assert "goodput.jsonl" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "none.py")]) == 2
    assert "is no file" in capsys.readouterr().err


@pytest.mark.endurance
def test_a_killed_run_counts_what_it_lost(tmp_path: Path) -> None:
    """Catches a record that a real SIGKILL leaves unreadable, or that counts twice what was done twice."""
    program = tmp_path / "killed.py"
    program.write_text(
        "import os, signal, sys, time\nimport numpy as np\nimport telic\n"
        "def handler(state):\n    time.sleep(0.3)\n"
        "    if sys.argv[1] == 'kill' and state.iteration == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "loop = telic.Loop(lambda s, b: s + b.sum(), lambda b: np.float32(0)).drive(profile=True)\n"
        "loop.handle_event('iteration_completed', handler)\n"
        "loop.save(telic.Checkpoints('run'), checkpoint_every=4)\n"
        "loop.run([np.ones(3, np.float32)] * 10)\n"
    )
    for kind in ("kill", "finish"):
        ended = subprocess.run([sys.executable, program.name, kind], cwd=tmp_path, capture_output=True, check=False)
        assert ended.returncode == (0 if kind == "finish" else -9), ended.stderr.decode()
    goodput = read_goodput(tmp_path / "run")
    assert goodput.starts == 2
    assert goodput.seconds["lost"] > 0
