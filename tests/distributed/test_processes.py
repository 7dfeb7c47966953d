"""Two real processes on the loopback: one run, one record, and an end that both of them get to.

What they give comes from a few launches (`conftest`), each of which makes many checks.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telic.checkpoints import inspect, load_variables, verify
from telic.checkpoints.comparison import compare
from tests.distributed import checks
from tests.distributed.problems import FIFTY, MESHES
from tests.distributed.running import replayed

pytestmark = pytest.mark.slow


def gave(found: Any, name: str) -> list[Any]:
    """Give what a check gave in each process; what failed there fails here."""
    told = found[1][name]
    for index, one in enumerate(told):
        assert "failed" not in one, f"in process {index}:\n{one['failed']}"
    return [one["gave"] for one in told]


def numbers(value: Any, at: str = "") -> dict[str, Any]:
    """Give the leaves of what a check gave, by name."""
    if isinstance(value, dict):
        return {n: x for name, item in value.items() for n, x in numbers(item, f"{at}/{name}").items()}
    if isinstance(value, list):
        return {n: x for i, item in enumerate(value) for n, x in numbers(item, f"{at}/{i}").items()}
    return {at: value}


def same(many: Any, one: Any, rel: float = 1e-5) -> None:
    """Hold what two processes gave to what one gave: numbers to rounding, all else exactly."""
    found, expected = numbers(many), numbers(one)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value, rel=rel) if isinstance(value, float) else value), name


@pytest.mark.parametrize("problem", checks.LONG)
def test_two_processes_train_like_one_device(problem: str, eight: Any, equal: Any) -> None:
    """Catches each process training by itself, a batch rejected in one and accepted in the other, BatchNorm by process,
    and rows of a remainder lost or counted twice in an evaluation.
    """
    one = equal(problem, FIFTY, tuple(MESHES))["one"]
    for many in gave(eight, problem):
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
        assert many["scores"] == pytest.approx(one["scores"], rel=1e-5)
        counts = ("updates", "attempts", "rejected")
        assert [many[n] for n in counts] == [one[n] for n in counts]
        # No row of tokens can be spoilt.
        assert (many["rejected"] > 0) == (problem != "decoder")


@pytest.mark.parametrize("check", list(checks.ALIKE))
def test_two_processes_give_what_one_gives(check: str, pair: Any, alone: Any) -> None:
    """Catches what two processes do differently: see the check of this name in `checks`."""
    (one,) = gave(alone, check)
    for many in gave(pair, check):
        same(many, one)


def test_windows_of_another_size_begin_where_they_lie(pair: Any) -> None:
    """Catches a continued run that fetches the empty sums of its new windows, of which no process has all."""
    first, second = gave(pair, "windows")
    assert first == second
    assert first["updates"] == 8 + 4 + 8
    assert len(first["losses"]) == first["updates"]


def test_an_evaluation_covers_every_record_once(pair: Any) -> None:
    """Catches a record counted twice, and a row of zeros that stands for the record another process has alone (S37)."""
    weights = checks.Net().init(checks.jax.random.key(3), checks.INPUTS[:1])
    for result in gave(pair, "evaluated"):
        for name, (loss, *_, again) in ((n, v) for n, v in result.items() if " by " in n):
            count = int(name.split()[0])
            errors = (checks.Net().apply(weights, checks.INPUTS[:count]) - checks.TARGETS[:count]) ** 2
            assert loss == pytest.approx(float(errors.mean()), rel=1e-5), name
            assert again == pytest.approx(loss, rel=1e-6), name


def test_a_best_state_is_kept_in_parts(pair: Any) -> None:
    """Catches a record of a handler that holds the state whole on every host, and one that loses its keys."""
    for history, loss, longer, again in gave(pair, "best"):
        assert loss == again == pytest.approx(min(history), rel=1e-6)
        assert min(longer[3:]) > again, "the best state is one from before the run was continued"
    place = Path(pair[0]) / "best"
    entries = inspect(place).leaves
    kept = {name: entry for name, entry in entries.items() if "/best_state/" in name}
    assert any(entry.pieces for entry in kept.values())
    assert any(entry.key is not None for entry in kept.values())


def test_a_save_gathers_nothing_over_the_devices(pair: Any) -> None:
    """Catches a save that makes every process wait for the others' devices, as gathering metrics or a state would."""
    assert gave(pair, "quiet")[0]


def test_what_a_probe_gives_is_whole_in_every_process(pair: Any) -> None:
    """Catches a handler that cannot read its probe, since each process has a part of it."""
    for seen in gave(pair, "probed"):
        assert seen == [{"gradient": [32, 8], "prediction": [8, 8]}]


def test_batches_that_lie_on_all_devices_are_taken_as_they_are(pair: Any) -> None:
    """Catches a save that reads the next batch whole, and rows that are taken for one process's share."""
    first, second = gave(pair, "placed")
    assert first == second
    assert len(first["losses"]) == 8
    assert first["losses"][-1] < first["losses"][0]


REFUSED = {
    "unequal": "the first batch is",
    "no mesh": "was given no mesh",
    "no mesh of an evaluator": "give the trainer or evaluator mesh=telic.MeshSpec()",
    "not finite": "not finite in attempt",
    "a file of one process": "loop.checkpoint writes a file of one process",
    "a state as text": "lies on the devices of several processes",
    "other shapes": "2 shapes",
    "tensor": "whole on every device",
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_is_refused_in_every_process(case: str, pair: Any) -> None:
    """Catches a hang in a collective where the processes read unequal shares, and errors that do not say what to do."""
    for said in gave(pair, "refused"):
        assert REFUSED[case] in said[case]


def test_rows_that_the_devices_do_not_divide_are_refused(eight: Any) -> None:
    """Catches a batch of which some devices train on nothing, or on a row of the next one."""
    for said in gave(eight, "indivisible"):
        assert "a batch of 6 rows over all processes does not divide over 8 devices" in said


def test_a_late_process_is_named(pair: Any) -> None:
    """Catches a wait without an end, or one that ends without saying for whom (XS142)."""
    first, second = gave(pair, "late")
    assert "process 1 of 2 did not come to 'a late one' within 1 s" in first
    assert second == "nothing was raised"


# -- what one launch leaves and another takes up -----------------------------------------------------------------


@pytest.fixture
def straight(pair: Any) -> Any:
    """What a run gives that nobody interrupts."""
    first, second = gave(pair, "straight")
    assert first == second
    return first


def test_a_killed_run_goes_on_to_the_same_bits(faults: Any, pair: Any, straight: Any) -> None:
    """Catches a state, a position or a window that one of the processes does not take up again."""
    ended, _ = faults("killed")
    assert ended.code == 128 + 9, ended.said[-6000:]
    assert "process 1 of 2 was ended by SIGKILL" in ended.said
    assert re.search(r"continuing killed at [48] of 12 updates", pair[1]["said"][0])
    assert [one["digest"] for one in gave(pair, "killed")] == [straight["digest"]] * 2
    report = verify(Path(pair[0]) / "killed")
    assert report.is_fine, str(report)
    parts = sorted(path.name for path in (Path(pair[0]) / "killed" / "12" / "parts").iterdir())
    assert parts == ["0.arrays", "1.arrays"], "each process saves what it has"


def test_sigterm_to_one_process_saves_the_same_step_in_all(faults: Any, pair: Any, straight: Any) -> None:
    """Catches a signal that ends one process and leaves the others waiting in the middle of a step."""
    ended, _ = faults("ended")
    assert ended.code == 143, ended.said[-6000:]
    assert "saved at" in ended.said
    assert "continuing ended at" in pair[1]["said"][0]
    assert [one["digest"] for one in gave(pair, "ended")] == [straight["digest"]] * 2


def test_sigterm_ends_all_where_nothing_is_saved(faults: Any) -> None:
    """Catches a signal that is lost in JAX, so that only the second one ends a run without checkpoints."""
    ended, directory = faults("unsaved")
    assert ended.code == 143, ended.said[-6000:]
    assert re.search(r"SIGTERM: ended at ([5-9]|1[01]) updates; the run has no checkpoints", ended.said)
    assert not directory.exists()


def test_a_run_goes_on_with_another_number_of_processes(faults: Any, alone: Any, straight: Any) -> None:
    """Catches data read from the beginning, or a share of it twice, when there are fewer processes."""
    # Killed, so that it goes on in the middle of an epoch, with the metrics of its first part.
    ended, _ = faults("killed_first")
    assert ended.code == 128 + 9, ended.said[-6000:]
    losses, expected = gave(alone, "killed_first")[0]["losses"], straight["losses"]
    assert sorted(losses, key=int) in (["6", "8", "10", "12"], ["10", "12"])
    assert [losses[n] for n in losses] == pytest.approx([expected[n] for n in losses], rel=1e-6)


def test_a_run_of_one_process_goes_on_in_two(pair: Any, alone: Any, straight: Any) -> None:
    """Catches a whole leaf that the processes do not take up in parts, and both reading the same share."""
    assert "continuing begun_alone at 8 of 12 updates" in pair[1]["said"][0]
    for result in gave(pair, "begun_alone"):
        assert list(result["losses"]) == ["10", "12"]
        assert result["losses"] == pytest.approx({n: straight["losses"][n] for n in ("10", "12")}, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("raises", "process 1 of 2: it failed"),
        ("stops", "process 1 of 2 has not answered"),
    ],
)
def test_a_process_that_fails_or_stops_ends_all(faults: Any, kind: str, says: str) -> None:
    """Catches a run that hangs because one of its processes is gone or asleep, and an end that does not say which."""
    ended, directory = faults(kind)
    assert ended.code not in (0, 143), ended.said[-6000:]
    assert says in ended.said, ended.said[-6000:]
    if kind == "raises":
        assert "this handler fails in one process" in ended.said
    assert verify(directory).is_fine


# -- a checkpoint of two processes, opened by one ----------------------------------------------------------------


@pytest.fixture
def saved(pair: Any, tmp_path: Path) -> Path:
    """A copy of a run's directory that two processes wrote."""
    return Path(shutil.copytree(Path(pair[0]) / "straight", tmp_path / "run"))


def test_a_shared_checkpoint_is_read_by_one_process(saved: Path, pair: Any) -> None:
    """Catches weights that only the processes which saved them can read."""
    weights = load_variables(saved)
    averaged = load_variables(saved, averaged=True, select="params/**/kernel")
    assert all(np.isfinite(x).all() for x in checks.jax.tree.leaves((weights, averaged)))
    newest, other = saved / "12", Path(pair[0]) / "killed" / "12"
    assert compare(newest, other).is_same, compare(newest, other).lines()
    assert "12" in str(inspect(saved))


def test_one_process_computes_a_shared_checkpoint_again(saved: Path) -> None:
    """Catches a replay that takes process 0's share of the next batch for the batch, or another mesh."""
    found = replayed(saved, 8)
    assert found.code == 0, found.said[-6000:]
    assert "2 processes computed it, and one computes it again" in found.said
    assert "checkpoint 8 is computed again with the same bits" in found.said


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.unlink(), "parts/1.arrays"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), "1.arrays"),
        (lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "1.arrays"),
        (lambda path: path.write_bytes(b""), "1.arrays"),
    ],
    ids=["missing", "cut short", "a flipped bit", "empty"],
)
def test_a_damaged_part_is_named_and_the_checkpoint_before_is_taken(saved: Path, spoil: Any, says: str) -> None:
    """Catches a part of a leaf that is taken as it is, and a message that does not say which file to bring back."""
    spoil(saved / "12" / "parts" / "1.arrays")
    report = verify(saved)
    assert list(report.damaged) == ["12"]
    assert says in report.damaged["12"]
    assert report.whole
    with pytest.raises(checks.telic.errors.CheckpointError, match=r"1\.arrays"):
        load_variables(saved / "12")
    load_variables(saved)
