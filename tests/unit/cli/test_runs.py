"""`telic runs`: run directories in all their states, one line each."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import telic
from telic.checkpoints import files
from telic.cli import main
from telic.cli.run_table import table


def trained(directory: Path, steps: int = 3) -> None:
    pair = (lambda key, x: {"w": jnp.zeros((2, 1))}, lambda params, x: x @ params["w"])
    objective = telic.supervised(pair, "mean_squared_error")
    batch = (np.ones((4, 2), np.float32), np.ones((4, 1), np.float32))
    trainer = telic.Trainer(objective, "sgd", key=0, checkpoints=telic.Checkpoints(directory))
    trainer.fit([batch] * steps, epochs=1, log_every=0)


def cells(lines: list[str]) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in (line.split() for line in lines[1:])}


def test_every_state_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run shown as finished while it runs, a damaged one that ends the table, and a demo's run left out."""
    trained(tmp_path / "done")
    trained(tmp_path / "deep" / "damaged")
    for manifest in (tmp_path / "deep").rglob("metadata"):
        manifest.write_text("{}")
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "run.json").write_text(json.dumps({"status": "interrupted"}))
    log = '{"metrics": {"loss": 0.25, "bad\\u001b[2J": 1.0}}\n{"metrics": {"lo'
    (tmp_path / "demo" / "metrics.jsonl").write_text(log)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "done" / "999").mkdir()
    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    rows = cells(shown)
    assert set(rows) == {"done", "deep/damaged", "demo"}
    assert rows["done"][:2] == ["completed", "3"]
    assert rows["done"][-2:] == ["loss", "0.92365"]
    assert rows["deep/damaged"][0] == "damaged"
    assert rows["demo"][0] == "interrupted"
    assert "loss 0.25" in "".join(shown)
    # A name in a file must not move the reader's cursor.
    assert "\x1b" not in "".join(shown)
    with files.locked(tmp_path / "done"):
        assert cells(table(tmp_path))["done"][0] == "running"
    assert cells(table(tmp_path))["done"][0] == "completed"


def test_a_killed_run_without_checkpoints_is_not_running(tmp_path: Path) -> None:
    """Catches a list that calls a run running for ever because its record was never finished."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    process = {"pid": done.pid, "host": socket.gethostname()}
    for name, one in (("killed", process), ("going", {**process, "pid": os.getpid()})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"status": "running", "process": one}))
    assert {name: row[0] for name, row in cells(table(tmp_path)).items()} == {"killed": "gone", "going": "running"}


@pytest.mark.parametrize("content", ["[]", "{", '{"metrics": []}', "\x00" * 100, '{"status": 3}'])
def test_odd_files_are_no_traceback(content: str, tmp_path: Path) -> None:
    """Catches a table that one broken file takes away."""
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / name).write_text(content)
    rows: Any = cells(table(tmp_path))
    assert rows["."][0] == "unfinished"


def test_no_runs_and_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an empty table, and a traceback for a slip of the finger."""
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
