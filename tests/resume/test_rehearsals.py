"""`telic verify-resume` and `telic replay` on a training script that knows nothing of them, in real processes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from telic.checkpoints import files
from telic.cli import main
from telic.cli.programs import Program
from telic.compose.rehearsal import VARIABLE, End, Rehearsal, placed, rehearsal

PROGRAM = Path(__file__).with_name("training.py")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def telic(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_verify_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a kill that is none, a comparison of a run with itself, and a test that writes into the author's run."""
    assert telic("verify-resume", PROGRAM, "--at", 7, "--out", "both", "--", "records") == 0
    said = capsys.readouterr().out
    assert "killed after update 7" in said
    assert "runs/first: the same bits in checkpoint 12" in said
    assert "metrics.jsonl: 8 lines, the same" in said
    assert [p.name for p in here.iterdir()] == ["both"]
    killed = Rehearsal(here / "both" / "killed").place("runs/first")
    # Both processes saved with a lock and a directory of their own.
    assert {"2", "4", "6", "12"} <= {p.name for p in killed.iterdir()}


def test_a_kill_before_the_first_checkpoint_proves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches "continues bit for bit" said of a run that was only ever started anew."""
    assert telic("verify-resume", PROGRAM, "--at", 1, "--out", "both", "--", "records") == 1
    captured = capsys.readouterr()
    assert "nothing was saved yet" in captured.out
    assert "nothing is proved: kill later" in captured.err
    assert "bit for bit" not in captured.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("counts", "state/variables/params/w: float32[2, 1], 2 of 2 values differ"),
        ("never", "runs/first: begins anew each time"),
        ("fails", "a bug of the program's own"),
        ("unsaved", "saves no checkpoint, so it cannot be continued"),
    ],
)
def test_verify_resume_says_what_is_wrong(
    argument: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a test that every program passes: each of these does not continue, and is told why."""
    assert telic("verify-resume", PROGRAM, "--at", 4, "--out", "both", "--", argument) == 1
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.out


def test_replay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a replay that compares a checkpoint with itself, one that finds no difference, and one that changes the
    run: this run was halved after its third iteration, which the replay is not.
    """
    run = here / "runs" / "first"
    made = Rehearsal(here / "made")
    assert Program(PROGRAM, ("counts",)).run(made, here / "log.txt") == 0
    run.parent.mkdir()
    shutil.copytree(made.place("runs/first"), run)
    before = sorted(p.name for p in run.iterdir())
    assert telic("replay", PROGRAM, "runs/first", "--step", 12) == 0
    assert "checkpoint 12 is computed again with the same bits" in capsys.readouterr().out
    assert telic("replay", PROGRAM, "runs/first", "--step", 4) == 1
    said = capsys.readouterr().out
    assert "differs from what is computed now; first in state/variables/params/w" in said
    assert "state/variables/params/w: float32[2, 1], 2 of 2 values differ" in said
    assert sorted(p.name for p in run.iterdir()) == before


def test_wrong_calls(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback, or a minute of training, before a slip of the finger is answered."""
    wrong: list[tuple[Sequence[object], str]] = [
        (("verify-resume", "none.py", "--at", 3), "none.py is no file"),
        (("verify-resume", PROGRAM, "--at", 0), "--at takes updates"),
        (("replay", PROGRAM, "none", "--step", 3), "none is no directory"),
        (("replay", PROGRAM, ".", "--step", 3), "keeps: none; got 3"),
    ]
    for arguments, message in wrong:
        assert telic(*arguments) == 2
        assert message in capsys.readouterr().err


def test_the_variable_is_the_only_way_in(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that goes elsewhere without being asked, and a variable that is obeyed though it is damaged."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert rehearsal() is None
    assert placed("runs/first") == here / "runs" / "first"
    asked = Rehearsal(here / "r", kill_after=3, end=End(here / "r" / "x", 5, closed=True))
    monkeypatch.setenv(VARIABLE, asked.environment()[VARIABLE])
    assert rehearsal() == asked
    assert placed("a/../runs") == here / "r" / "files" / (here / "runs").resolve().relative_to("/")
    for broken in ("", "[]", "{}", json.dumps({"root": "x", "kill_after": "3", "end": None})):
        monkeypatch.setenv(VARIABLE, broken)
        with pytest.raises(ValueError, match="unset it"):
            rehearsal()
    assert files.listing(here) == ([], [])
