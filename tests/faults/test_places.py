"""Where checkpoints go and when: paths, moments at which two reasons to save meet, and directories without one."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import telic
from telic.checkpoints import load_variables
from tests.faults.small import batches, bits, stopped, trainer


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.name[0].isdigit()}


def test_a_directory_of_empty_steps_is_a_fresh_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """XS055: an empty folder taken for a checkpoint, so that the run ends with an error or begins without a word."""
    (tmp_path / "5").mkdir()
    state = trainer(tmp_path).fit(batches(2), steps=2, log_every=0)
    assert int(state.updates) == 2
    assert "not checkpoints, left alone: 5" in capsys.readouterr().out
    assert int(trainer(tmp_path).fit(batches(2), steps=3, log_every=0).updates) == 3


def test_a_relative_directory_is_where_it_was_when_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XS058: a relative path that is read anew at each use, so that a program which changes its directory loses its
    checkpoints.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    loop = trainer(Path("runs/a"), every=1, tracker=telic.trackers.JsonLines("told")).loop(log=0)
    loop.handle_event("step_completed", lambda s: os.chdir(tmp_path / "elsewhere"), telic.once(2))
    final = loop.run(batches(4), steps=4).step_state
    assert not list((tmp_path / "elsewhere").iterdir())
    assert bits(load_variables(tmp_path / "runs" / "a")) == bits(final.variables)
    assert json.loads((tmp_path / "runs" / "a" / "run.json").read_text())["status"] == "completed"


@pytest.mark.parametrize(
    "write",
    [
        telic.Checkpoints,
        lambda address: trainer().loop(log=0).record(address),
        lambda address: trainer().loop(log=0).checkpoint(directory=address),
        telic.trackers.JsonLines,
        lambda address: trainer(compile_cache=address).fit(batches(1), log_every=0),
    ],
)
@pytest.mark.parametrize("address", ["gs://bucket/a", Path("s3://bucket/a")])
def test_an_address_is_no_directory(write: Any, address: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XS058: the address of a bucket made into a folder of this machine's own disk, "gs:", and gone with it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="got the address"):
        write(address)
    assert not list(tmp_path.iterdir())


def test_a_signal_at_a_periodic_save_saves_once(tmp_path: Path) -> None:
    """XS137: the save of a cadence and that of a signal at one step: two of one name, the second of which fails."""
    stopped(trainer(tmp_path, every=2).loop(log=0), batches(6), 4, epochs=1)
    assert names(tmp_path) == {"2", "4"}
    assert signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, signal.default_int_handler)
