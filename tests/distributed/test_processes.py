"""Two real processes on the loopback: one run, one record, and an end that both of them get to."""

import re
from pathlib import Path
from typing import Any

import pytest

from telic.checkpoints import verify
from tests.distributed.running import Ended, launch
from tests.distributed.test_equality import found

EIGHT = {"data": 2, "fsdp": 4}
RUN: dict[str, Any] = {
    "what": "run",
    "problem": "decoder",
    "devices": 1,
    "mesh": {"data": 1, "fsdp": 2},
    "every": 4,
    "steps": 12,
}
ALONE: dict[str, Any] = {**RUN, "mesh": None}
KILLED = 9
"""When a run is killed: its save at 8 has begun, so that at 4 is over."""

SAVED = re.compile(r"continuing b at [48] of 12 updates")


def fine(ended: Ended) -> dict[int, Any]:
    assert ended.code == 0, ended.said[-6000:]
    return ended.results


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a run gives that nobody interrupts."""
    place = tmp_path_factory.mktemp("straight")
    results = fine(launch(place / "out", **RUN, directory=str(place / "a")))
    assert results[0] == results[1]
    return results[0]


def test_two_processes_train_like_one_device(tmp_path: Path) -> None:
    """Catches each process training by itself, and rows of a remainder lost or counted twice in an evaluation."""
    results = fine(launch(tmp_path / "out", what="train", problem="decoder", mesh=EIGHT, steps=50))
    one = found("decoder", 50, ("one", "data x fsdp"))["results"]["one"]
    assert sorted(results) == [0, 1]
    for many in results.values():
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["scores"] == pytest.approx(one["scores"], rel=1e-5)
        assert [many[n] for n in ("updates", "attempts", "rejected")] == [
            one[n] for n in ("updates", "attempts", "rejected")
        ]


@pytest.mark.slow
def test_two_processes_reject_and_normalise_like_one_device(tmp_path: Path) -> None:
    """Catches a batch rejected in one process and accepted in the other, and BatchNorm by process."""
    results = fine(launch(tmp_path / "out", what="train", problem="digits", mesh=EIGHT, steps=50))
    one = found("digits", 50)["results"]["one"]
    for many in results.values():
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["scores"] == pytest.approx(one["scores"], rel=1e-5)
        assert many["rejected"] == one["rejected"] > 0


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, straight: Any) -> None:
    """Catches a state, a position or a window that one of the processes does not take up again."""
    killed = launch(
        tmp_path / "killed", **RUN, directory=str(tmp_path / "b"), fault={"kind": "kill", "rank": 1, "step": KILLED}
    )
    assert killed.code == 128 + 9, killed.said[-6000:]
    assert "process 1 of 2 was ended by SIGKILL" in killed.said
    again = launch(tmp_path / "again", **RUN, directory=str(tmp_path / "b"))
    assert SAVED.search(again.said), again.said[-6000:]
    assert fine(again)[0]["digest"] == straight["digest"]
    report = verify(tmp_path / "b")
    assert report.is_fine, str(report)
    parts = sorted(path.name for path in (tmp_path / "b" / "12" / "parts").iterdir())
    assert parts == ["0.arrays", "1.arrays"], "each process saves what it has"


@pytest.mark.slow
def test_sigterm_to_one_process_saves_the_same_step_in_all(tmp_path: Path, straight: Any) -> None:
    """Catches a signal that ends one process and leaves the others waiting in the middle of a step."""
    ended = launch(
        tmp_path / "ended", **RUN, directory=str(tmp_path / "b"), fault={"kind": "term", "rank": 1, "step": 5}
    )
    assert ended.code == 143, ended.said[-6000:]
    assert "saved at" in ended.said
    assert not ended.results
    again = launch(tmp_path / "again", **RUN, directory=str(tmp_path / "b"))
    assert "continuing b at" in again.said
    assert fine(again)[0]["digest"] == straight["digest"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, straight: Any) -> None:
    """Catches data read from the beginning, or a share of it twice, when there are fewer processes."""
    # Killed, so that it goes on in the middle of an epoch, with the metrics of its first part.
    fault = {"kind": "kill", "rank": 0, "step": KILLED}
    launch(tmp_path / "two", **RUN, directory=str(tmp_path / "b"), fault=fault)
    one = launch(tmp_path / "one", **ALONE, directory=str(tmp_path / "b"), processes=1)
    losses, expected = fine(one)[0]["losses"], straight["losses"]
    assert sorted(losses, key=int) in (["6", "8", "10", "12"], ["10", "12"])
    assert [losses[n] for n in losses] == pytest.approx([expected[n] for n in losses], rel=1e-6)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_two(tmp_path: Path, straight: Any) -> None:
    """Catches a whole leaf that the processes do not take up in parts, and both reading the same share."""
    fault = {"kind": "kill", "rank": 0, "step": KILLED}
    alone = launch(tmp_path / "one", **ALONE, directory=str(tmp_path / "b"), processes=1, fault=fault)
    assert alone.code == 128 + 9, alone.said[-6000:]
    two = launch(tmp_path / "two", **RUN, directory=str(tmp_path / "b"))
    assert SAVED.search(two.said), two.said[-6000:]
    losses, expected = fine(two)[0]["losses"], straight["losses"]
    assert [losses[n] for n in losses] == pytest.approx([expected[n] for n in losses], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raise", "process 1 of 2: it failed"),
        ("stop", "process 1 of 2 has not answered"),
    ],
)
def test_a_process_that_fails_or_stops_ends_all(tmp_path: Path, kind: str, says: str) -> None:
    """Catches a run that hangs because one of its processes is gone or asleep, and an end that does not say which."""
    fault = {"kind": kind, "rank": 1, "step": 5}
    ended = launch(tmp_path / "out", **RUN, directory=str(tmp_path / "run"), fault=fault)
    assert ended.code not in (0, 143), ended.said[-6000:]
    assert says in ended.said, ended.said[-6000:]
    if kind == "raise":
        assert "this handler fails in one process" in ended.said
    assert verify(tmp_path / "run").is_fine


@pytest.mark.slow
def test_unequal_batches_are_refused_at_the_start(tmp_path: Path) -> None:
    """Catches a hang in the first collective where the processes read shares of other sizes."""
    ended = launch(tmp_path / "out", what="unequal", devices=1)
    assert ended.code == 1
    assert "the first batch is" in ended.said, ended.said[-6000:]


@pytest.mark.slow
def test_a_late_process_is_named(tmp_path: Path) -> None:
    """Catches a wait without an end, or one that ends without saying for whom."""
    ended = launch(tmp_path / "out", what="late", devices=1)
    assert ended.code == 1
    assert "process 1 of 2 did not come to 'a late one' within 2 s" in ended.said, ended.said[-6000:]
