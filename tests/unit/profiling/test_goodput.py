"""The record of where a run's wall time went, over kills and starts."""

import itertools
import json
from pathlib import Path

import pytest

from telic.errors import DataError
from telic.profiling import Account, GoodputFile, read_goodput


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def start(directory: Path, clock: Clock, iterations: int) -> tuple[Account, GoodputFile]:
    account = Account(clock)
    file = GoodputFile(directory, account, clock=clock, wall=clock)
    clock.now += 2
    account.rest("loop")
    file.open(iterations)
    return account, file


def steps(account: Account, file: GoodputFile, clock: Clock, first: int, last: int) -> None:
    for done in range(first, last):
        with account.part("data"):
            clock.now += 0.25
        with account.part("dispatch"):
            clock.now += 0.75
        file.tick(done + 1)


def test_a_run_that_was_never_killed(tmp_path: Path) -> None:
    """Catches waiting and starting counted as training, and a sum that is not the wall time."""
    clock = Clock()
    account, file = start(tmp_path, clock, 0)
    steps(account, file, clock, 0, 10)
    file.write(10, "end")
    file.close()
    goodput = read_goodput(tmp_path)
    assert goodput.seconds["training"] == 7.5
    assert goodput.seconds["data"] == 2.5
    assert goodput.seconds["start"] == 2
    assert goodput.wall_seconds == 12
    assert goodput.fraction == 0.625
    assert (goodput.starts, goodput.down_seconds) == (1, 0)
    assert "goodput 62.5% of 12.0 s in 1 start" in str(goodput)


def test_training_that_a_kill_undid_is_lost(tmp_path: Path) -> None:
    """Catches steps that are made twice and counted twice as progress."""
    clock = Clock()
    account, file = start(tmp_path, clock, 0)
    steps(account, file, clock, 0, 6)
    file.write(6, "saved")
    steps(account, file, clock, 6, 10)
    # Killed: no line for the end, and the last one is cut short.
    file.close()
    with (tmp_path / "goodput.jsonl").open("a") as torn:
        torn.write('{"kind": "running", "at": 12')
    clock.now += 30
    account, file = start(tmp_path, clock, 6)
    steps(account, file, clock, 6, 12)
    file.write(12, "end")
    file.close()
    goodput = read_goodput(tmp_path)
    assert goodput.seconds["lost"] == 4
    assert goodput.seconds["training"] == 12 * 0.75
    assert goodput.seconds["data"] == 12 * 0.25
    assert goodput.seconds["start"] == 4
    assert goodput.wall_seconds == 2 + 10 + 2 + 6
    assert (goodput.starts, goodput.down_seconds) == (2, 30)
    assert "2 starts" in str(goodput)


def test_between_two_lines_the_loss_is_shared_out(tmp_path: Path) -> None:
    """Catches a loss that is off by all steps between two lines of a long run."""
    lines = [
        {"kind": "start", "at": 0, "iterations": 0, "seconds": {}},
        {"kind": "running", "at": 100, "iterations": 100, "seconds": {"device": 100}},
        {"kind": "start", "at": 150, "iterations": 40, "seconds": {"start": 5}},
    ]
    (tmp_path / "goodput.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    goodput = read_goodput(tmp_path)
    assert goodput.seconds["lost"] == 60
    assert goodput.seconds["training"] == 40
    assert goodput.down_seconds == 45


def test_lines_become_rarer(tmp_path: Path) -> None:
    """Catches a record that grows with every step of a run of weeks, or is too rare for a short one."""
    clock = Clock()
    _, file = start(tmp_path, clock, 0)
    for second in range(20_000):
        clock.now += 1
        file.tick(second)
    file.close()
    written = [json.loads(line) for line in (tmp_path / "goodput.jsonl").read_text().splitlines()]
    assert 500 < len(written) < 800
    gaps = [(b["at"] - a["at"], b["at"] - 100) for a, b in itertools.pairwise(written)]
    assert all(gap <= max(1, 0.011 * since) + 1 for gap, since in gaps)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json\n",
        '{"kind": "end"}\n',
        "[1, 2]\n",
        '{"kind": "start", "at": "x", "iterations": 0, "seconds": {}}\n',
    ],
)
def test_a_file_without_a_whole_line_says_so(tmp_path: Path, text: str) -> None:
    """Catches a damaged record that ends in a traceback from the parser."""
    (tmp_path / "goodput.jsonl").write_text(text)
    with pytest.raises(DataError, match="no whole line"):
        read_goodput(tmp_path)


def test_no_record_says_how_to_get_one(tmp_path: Path) -> None:
    """Catches a bare FileNotFoundError for a run without a profile."""
    with pytest.raises(DataError, match="profile=True"):
        read_goodput(tmp_path)


def test_a_full_disk_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a training run of days that ends because its time could not be noted."""

    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    clock = Clock()
    account, file = start(tmp_path, clock, 0)
    file.close()
    file._file = Full()  # pyright: ignore[reportAttributeAccessIssue] a disk that is full
    steps(account, file, clock, 0, 5)
    assert caplog.text.count("No space left on device") == 1
    assert "training goes on" in caplog.text
