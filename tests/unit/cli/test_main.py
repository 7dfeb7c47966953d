"""The command line: how it answers, and the demonstration."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from telic.cli import digits, main

# A process started in the background may have been told to ignore SIGINT; a terminal's has not.
RUN = [
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from telic.cli import main; sys.exit(main())",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a version that is not the package's own."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "telic 0.1.0\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a bare `telic` that is an error."""
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "demo" in out
    if arguments[:1] == ["demo"]:
        assert all(flag in out for flag in ("--plain", "--seed", "--out", "--epochs"))


def test_closed_output_is_no_traceback() -> None:
    """Catches `telic --help >&-` ending in an AttributeError: Python has no standard output then."""
    code = f"exec {subprocess.list2cmdline(RUN[:1])} -c {RUN[2]!r} --help >&- 2>&-"
    assert subprocess.run(["bash", "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--sed", "3"], "--seed"),
        (["demo", "--seed", "x"], "invalid literal for int"),
        (["deno"], "demo"),
        (["demo", "--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["demo", "--seed", "-1"], "--seed must be from 0 to"),
        (["demo", "--out", "taken"], "taken is not empty; give another"),
        (["demo", "--out", "taken/file"], "file is a file; give another"),
        (["demo", "--out", "taken/file/below"], "cannot be written"),
    ],
)
def test_wrong_call_is_a_message_and_code_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback for a slip of the finger, and a run that writes over another."""
    (folder / "taken").mkdir()
    (folder / "taken" / "file").write_text("mine")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert "Traceback" not in captured.err
    assert (folder / "taken" / "file").read_text() == "mine"


def test_help_does_not_load_jax() -> None:
    """Catches a second of waiting before a wrong flag is answered."""
    program = (
        "import sys; from telic.cli import main; code = main(['demo', '--sed', '1']); print(code, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines()[-1] == "2 False"


def test_demo_leaves_a_run_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a run directory that lacks a file, and numbers in it that contradict each other."""
    # A seventh of the digits: what is written is under test here, what is learned below.
    monkeypatch.setattr(digits, "HELD_OUT", 9000)
    assert main(["demo", "--epochs", "2", "--seed", "5"]) == 0
    out = folder / "runs" / "demo"
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "metrics.jsonl", "profile.json", "run.json"]
    run = json.loads((out / "run.json").read_text())
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert run["status"] == "completed"
    assert run["settings"]["seed"] == 5
    assert set(run["versions"]) >= {"python", "telic", "jax", "flax", "optax", "numpy"}
    assert [r["kind"] for r in records].count("epoch") == 2
    assert run["result"]["validation_accuracy"] == records[-1]["metrics"]["validation_accuracy"]
    text = capsys.readouterr().out
    assert f"Read {run['result']['validation_accuracy']:.2%}" in text
    assert "Next:" in text
    assert "\x1b" not in text

    assert main(["demo", "--epochs", "1", "--out", "runs/demo"]) == 2
    assert json.loads((out / "run.json").read_text()) == run


def test_default_folder_is_never_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a second demo that overwrites the first."""
    for name in ("demo", "demo-2"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "run.json").write_text("{}")
    asked: list[Path] = []
    monkeypatch.setattr(digits, "run", lambda out, **options: asked.append(out))
    assert main(["demo"]) == 0
    assert asked == [Path("runs/demo-3")]


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_ends_with_a_message_and_130(folder: Path) -> None:
    """Catches a traceback after Ctrl-C, and a run.json that still says running."""
    process = subprocess.Popen([*RUN, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    metrics = folder / "runs" / "demo" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped by Ctrl-C" in err
    assert "Traceback" not in out + err
    assert json.loads((folder / "runs" / "demo" / "run.json").read_text())["status"] == "interrupted"


def test_reader_that_leaves_is_no_traceback(folder: Path) -> None:
    """Catches `telic demo | head` ending in a BrokenPipeError."""
    process = subprocess.Popen([*RUN, "demo"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=240) == 1


@pytest.mark.slow
def test_demo_reads_975_of_1000_digits(folder: Path) -> None:
    """Catches a demonstration that no longer keeps its promise."""
    assert main(["demo"]) == 0
    run = json.loads((folder / "runs" / "demo" / "run.json").read_text())
    assert run["result"]["validation_accuracy"] >= 0.975


def saved_run(folder: Path) -> Path:
    import jax.numpy as jnp
    import numpy as np

    import telic

    pair = (lambda key, x: {"w": jnp.zeros((2, 1))}, lambda params, x: x @ params["w"])
    trainer = telic.Trainer(
        telic.supervised(pair, "mean_squared_error"), "sgd", key=0, checkpoints=telic.Checkpoints(folder / "run")
    )
    batch = (np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
    trainer.fit([batch] * 3, steps=3, log_every=0, checkpoint_every=2)
    return folder / "run"


def test_verify_reads_every_checkpoint_and_says_which_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a scrub that calls a damaged checkpoint whole, or that ends with 0 all the same."""
    run = saved_run(folder)
    assert main(["verify", str(run)]) == 0
    assert "2 whole, 0 damaged" in capsys.readouterr().out
    largest = max((p for p in run.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    assert main(["verify", str(run)]) == 1
    assert "damaged" in capsys.readouterr().out


def test_inspect_shows_arrays_and_a_wrong_path_is_a_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback for a path that is no run."""
    run = saved_run(folder)
    assert main(["inspect", str(run)]) == 0
    assert "variables/params/w  float32[2, 1]" in capsys.readouterr().out
    assert main(["inspect", str(folder / "nothing")]) == 2
    assert "is no directory" in capsys.readouterr().err
    (folder / "empty").mkdir()
    assert main(["inspect", str(folder / "empty")]) == 1
    assert "is no checkpoint" in capsys.readouterr().err


def test_a_console_of_few_characters_ends_no_command(tmp_path: Path) -> None:
    """Catches a traceback where the console's encoding lacks a character, such as that of infinity."""
    line = {"kind": "epoch", "epoch": 0, "total_iterations": 1, "metrics": {"loss": "Infinity"}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", "import telic.cli; raise SystemExit(telic.cli.main())", "watch", str(tmp_path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"loss \\u221e" in done.stdout


def test_an_error_names_what_a_terminal_would_obey(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an escape code in a directory's name that reaches the terminal with the error about it."""
    assert main(["report", str(tmp_path / "\x1b[2Jrun")]) == 2
    assert "\\x1b[2Jrun is no directory" in capsys.readouterr().err
