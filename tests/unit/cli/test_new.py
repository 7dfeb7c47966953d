"""`telic new`: the project a newcomer gets trains, and its own tests pass."""

import subprocess
import sys
from pathlib import Path

import pytest

from telic.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_project_trains_and_is_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a first project that does not run as it is, or whose program runs under telic only."""
    assert main(["new", "My wave"]) == 0
    assert "cd My wave" in capsys.readouterr().out
    project = folder / "My wave"
    assert {str(p.relative_to(project)) for p in project.rglob("*") if p.is_file()} == {
        *("train.py", "tests/test_train.py", "pyproject.toml", "README.md", ".gitignore")
    }
    assert 'name = "my-wave"' in (project / "pyproject.toml").read_text()
    assert not any("{" in (project / name).read_text() for name in ("README.md", "pyproject.toml"))
    train = str(project / "train.py")
    assert main(["train", train, "run", "--set", "steps=20"]) == 0
    assert main(["evaluate", train, "run"]) == 0
    assert "mean_absolute_error" in capsys.readouterr().out


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a project written over somebody's files."""
    (folder / "mine").mkdir()
    (folder / "mine" / "train.py").write_text("mine")
    for name in ("mine", "..", "mine/train.py"):
        assert main(["new", name]) == 2
        assert f"{name} is there already" in capsys.readouterr().err
    assert (folder / "mine" / "train.py").read_text() == "mine"
    assert main(["new", "mine/train.py/below"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_projects_own_tests_pass(folder: Path) -> None:
    """Catches a project whose first `python -m pytest` fails."""
    assert main(["new", "wave"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder / "wave",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
