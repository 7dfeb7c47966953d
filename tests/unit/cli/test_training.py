"""train, evaluate, sample, export: the commands over a recipe, as somebody types them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from telic.checkpoints import load_variables
from telic.cli import main
from tests.unit.config.programs import LINE


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "train.py").write_text(LINE)
    return tmp_path


def test_train_evaluate_sample_and_export_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches commands that do not find each other's run, or read another checkpoint than they say."""
    assert main(["train", "train.py", "--set", "learning_rate=0.2", "--set", "steps=4"]) == 0
    assert "train.py: into runs/train" in capsys.readouterr().out
    assert json.loads((folder / "runs/train/run.json").read_text())["settings"]["learning_rate"] == 0.2
    assert (folder / "runs/train/metrics.jsonl").is_file()

    assert main(["train", "train.py", "--set", "learning_rate=0.2"]) == 0
    out = capsys.readouterr().out
    assert "train: steps was 4, is 6 from here on" in out
    assert "continuing train at 4 of 6 updates" in out

    assert main(["evaluate", "train.py", "--json"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert set(scores) == {"loss", "size"}
    assert main(["evaluate", "train.py", "runs/train"]) == 0
    assert f"loss  {scores['loss']:.6g}" in capsys.readouterr().out

    assert main(["sample", "train.py", "--out", "shown"]) == 0
    assert "shown/scalars_000006.json" in capsys.readouterr().out

    weights = load_variables("runs/train")["params"]["w"]
    average = load_variables("runs/train", averaged=True)["params"]["w"]
    assert not np.array_equal(weights, average)
    for flags, expected in (((), weights), (("--averaged",), average)):
        assert main(["export", "runs/train", f"out{len(flags)}.npz", *flags]) == 0
        with np.load(f"out{len(flags)}.npz", allow_pickle=False) as found:
            assert found.files == ["params/w"]
            np.testing.assert_array_equal(found["params/w"], expected)


def test_settings_are_shown_and_nothing_is_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a look at the settings that starts a run."""
    assert main(["train", "train.py", "--show", "--set", "steps=9"]) == 0
    out = capsys.readouterr().out
    assert "steps = 9" in out
    assert "# learning_rate: a number" in out
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "none.py"], 2, "none.py is no file; give a Python program"),
        (["train", "train.py", "--set", "step=3"], 2, "unknown setting 'step'. Did you mean 'steps'?"),
        (["train", "train.py", "--set", "steps=x"], 2, "steps must be a whole number, got 'x'"),
        (["train", "train.py", "--resume", "must"], 1, "resume='must', and"),
        (["train", "bad.toml"], 2, "bad.toml is no TOML"),
        (["train", "train.py", "--load", "none.py"], 2, "none.py is no file"),
        (["evaluate", "train.py"], 2, "there is no run in runs/train: train it with telic train train.py"),
        (["sample", "train.py", "empty"], 1, "empty has no checkpoint; train the run first"),
        (["export", "none", "out.npz"], 2, "none is no directory"),
        (["export", "empty", "out.npz"], 1, "has no whole checkpoint to read: there is none"),
        (["export", "empty", "out.pt"], 2, "must end in .safetensors or .npz"),
        (["export", "empty", "bad.npz"], 2, "bad.npz is there already"),
        (["export", "empty", "model"], 2, "needs --recipe FILE"),
        (["export", "empty", "model", "--recipe", "train.py"], 2, "train.py trains Line: give a file that ends in"),
    ],
)
def test_a_wrong_call_is_a_message(
    arguments: list[str], code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback for a slip of the finger."""
    (folder / "bad.toml").write_text("steps = ")
    (folder / "bad.npz").write_text("mine")
    (folder / "empty").mkdir()
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert (folder / "bad.npz").read_text() == "mine"


def test_an_error_of_the_users_program_is_shown_whole(folder: Path) -> None:
    """Catches a program's own error that is swallowed: its author needs the line."""
    (folder / "broken.py").write_text("def build():\n    raise KeyError('their own')\n")
    with pytest.raises(KeyError, match="their own"):
        main(["train", "broken.py"])


def test_only_some_weights_are_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a filter that keeps everything, or nothing without a word."""
    assert main(["train", "train.py"]) == 0
    assert main(["export", "runs/train", "out.safetensors", "--only", "params/*"]) == 0
    assert "1 arrays, 2 numbers" in capsys.readouterr().out
    raw = Path("out.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["params/w"]["shape"] == [2, 1]
    assert main(["export", "runs/train", "none.npz", "--only", "params/x*"]) == 2
    assert not Path("none.npz").exists()


def test_answers_show_what_a_terminal_would_obey(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a metric, setting or folder whose name clears the terminal of whoever trains, evaluates or samples."""
    evil = "\x1b[2J"
    program = LINE.replace('Scalars({"size"', 'Scalars({"si\\x1b[2Jze"').replace("steps: int = 6", "steps: int = 2")
    (folder / "train.py").write_text(program)
    run = f"runs/{evil}run"
    for arguments in (
        ["train", "train.py", run],
        ["evaluate", "train.py", run],
        ["sample", "train.py", run],
        ["export", run, f"{evil}.npz"],
        ["runs"],
        ["inspect", run],
        ["verify", run],
        ["report", run],
        ["watch", run],
    ):
        assert main(arguments) == 0, arguments
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err, arguments
        assert captured.out, arguments


def test_an_objective_that_shows_nothing_says_what_to_write(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback through telic for a run whose objective has nothing to show."""
    (folder / "train.py").write_text(LINE.replace("def evaluate(", "def unused("))
    assert main(["train", "train.py", "--set", "steps=2"]) == 0
    assert main(["sample", "train.py"]) == 2
    assert "Line shows nothing: give it a method preview(" in capsys.readouterr().err


def test_completion_is_a_script_of_each_shell(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a completion that does not know a command."""
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "verify-resume" in script
        assert "evaluate" in script


def test_bash_takes_the_completion(folder: Path) -> None:
    """Catches a script that bash refuses, or that completes nothing."""
    done = subprocess.run(
        [sys.executable, "-c", "from telic.cli import main; main(['completion', 'bash'])"],
        capture_output=True,
        text=True,
        check=True,
    )
    (folder / "completion").write_text(done.stdout)
    ask = 'source completion; complete -p telic | grep -o -- "-F [^ ]*" | cut -c4-'
    name = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    assert name
    run = f"source completion; COMP_WORDS=(telic eva); COMP_CWORD=1; {name} telic eva telic; echo ${{COMPREPLY[@]}}"
    found = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["evaluate"]
