"""What is written comes back; what is damaged is named; what is not ours is left alone."""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from telic import Checkpoints
from telic.checkpoints import files, inspect, store, verify
from telic.checkpoints.directory import RunDirectory, Saved
from telic.checkpoints.leaves import Leaf, fill, named
from telic.errors import BusyError, CheckpointError, MismatchError

# When one array of a damaged checkpoint cannot be read, Orbax closes its event loop while the store still reads others.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def tree_of(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(step)
    return {
        "kernel": jnp.asarray(draw.normal(size=(200, 200)), jnp.float32),
        "bias": jnp.asarray(draw.normal(size=(7,)), jnp.bfloat16),
        "count": jnp.int32(step),
        "flags": jnp.asarray([True, False]),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(step),
    }


def save(directory: RunDirectory, step: int, score: float | None = None) -> None:
    directory.save(step, {"note": step}, named("state", tree_of(step)), score)
    directory.finish()


def opened(config: Checkpoints) -> RunDirectory:
    directory = RunDirectory(config)
    directory.open()
    return directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints 1, 2 and 3."""
    directory = opened(Checkpoints(tmp_path / "run", keep=3))
    for step in (1, 2, 3):
        save(directory, step)
    directory.close()
    return tmp_path / "run"


def find(root: Path) -> tuple[Saved | None, dict[str, str]]:
    directory = opened(Checkpoints(root))
    try:
        found = directory.find()
        return found.saved, found.rejected
    finally:
        directory.close()


def bits(saved: Saved) -> dict[str, bytes]:
    return {name: leaf.data.tobytes() for name, leaf in saved.arrays.items()}


def expected_bits(step: int) -> dict[str, bytes]:
    words = {
        name: jax.random.key_data(x) if name == "state/key" else x for name, x in named("state", tree_of(step)).items()
    }
    return {name: np.asarray(x).tobytes() for name, x in words.items()}


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != files.LOCK)


def test_round_trip(run: Path) -> None:
    """Catches a leaf that comes back with other bits, another dtype or shape, keys and empty arrays included."""
    saved, rejected = find(run)
    assert saved is not None
    assert (saved.name, rejected, saved.body["note"]) == ("3", {}, 3)
    assert bits(saved) == expected_bits(3)
    back = fill("state", tree_of(0), saved.arrays, what="it")
    for name, leaf in named("state", tree_of(3)).items():
        other = named("state", back)[name]
        assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape)
    assert jax.random.uniform(back["key"]) == jax.random.uniform(jax.random.key(3))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4", "uint8", "float16", "complex64", "bool", "uint32"])
@pytest.mark.parametrize("size", [5, 70_000])
def test_every_dtype(dtype: str, size: int, tmp_path: Path) -> None:
    """Catches a dtype the store does not know, alone in its array or among the small ones."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = (np.arange(size) % 2).astype(kind)
    directory = opened(Checkpoints(tmp_path))
    directory.save(1, {}, {"state/x": values}, None)
    directory.finish()
    directory.close()
    saved, _ = find(tmp_path)
    assert saved is not None
    assert saved.arrays["state/x"].data.dtype == kind
    assert saved.arrays["state/x"].data.tobytes() == values.tobytes()


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    at = draw.randrange(len(content))
    content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def damage(root: Path, draw: random.Random) -> str:
    """Damage the newest checkpoint in one of the ways that disks and people have; say how."""
    newest, older = root / "3", root / "2"
    candidates = sorted(p for p in newest.rglob("*") if p.is_file() and p.stat().st_size)
    path = draw.choice(candidates)
    how = draw.choice(["flip", "flip", "flip", "truncate", "zero", "delete", "swap", "stray", "folder"])
    match how:
        case "flip":
            _flip(path, draw)
        case "truncate":
            path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
        case "zero":
            content = bytearray(path.read_bytes())
            at = draw.randrange(len(content))
            content[at : at + 512] = bytes(len(content[at : at + 512]))
            path.write_bytes(content)
        case "delete":
            path.unlink()
        case "swap":
            others = [p for p in sorted(older.rglob("*")) if p.is_file()]
            shutil.copy(draw.choice(others), path)
        case "stray":
            (root / "999").mkdir()
        case _:
            shutil.rmtree(draw.choice(sorted(p for p in newest.rglob("*") if p.is_dir())))
    return f"{how} {path.relative_to(root)}"


def corruption(run: Path, work: Path, seed: int) -> str:
    """Damage a copy and look what is found: "exact", "older", or "silent", which must never be."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(run, work)
    how = damage(work, random.Random(seed))
    saved, rejected = find(work)
    assert saved is not None, how
    step = saved.body["note"]
    silent = bits(saved) != expected_bits(step)
    assert not silent, f"seed {seed}: {how} came back as other numbers"
    assert step == 3 or (step == 2 and "3" in rejected), f"seed {seed}: {how}: {saved.name}, {rejected}"
    return "exact" if step == 3 else "older"


def test_sixty_corruptions(run: Path, tmp_path: Path) -> None:
    """Catches a damaged checkpoint taken for a whole one: 60 flips, cuts, gaps, swaps, stray directories (S13)."""
    outcomes = [corruption(run, tmp_path / "work", seed) for seed in range(60)]
    # The damage must be real for the test to say anything.
    assert outcomes.count("older") >= 20


@pytest.mark.exhaustive
def test_two_thousand_corruptions(run: Path, tmp_path: Path) -> None:
    """As the sixty."""
    outcomes = [corruption(run, tmp_path / "work", seed) for seed in range(60, 2060)]
    assert outcomes.count("older") >= 600


def test_reason_names_the_leaf(run: Path) -> None:
    """Catches a rejection that does not say what is damaged."""
    data = max((p for p in (run / "3" / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    saved, rejected = find(run)
    assert saved is not None
    assert saved.name == "2"
    assert "state/kernel" in rejected["3"] or "cannot be read" in rejected["3"]


def test_each_byte_of_the_manifest(run: Path, tmp_path: Path) -> None:
    """Catches a flipped bit of the manifest believed, or taken for another model or a later release."""
    path = run / "3" / store.MANIFEST
    whole = path.read_bytes()
    for at in range(0, len(whole), 37):
        damaged = bytearray(whole)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        report = verify(run)
        assert "manifest is damaged" in report.damaged["3"], f"byte {at}: {report.damaged}"
    path.write_bytes(whole)
    assert verify(run).is_fine


def test_nothing_whole_is_an_error(run: Path) -> None:
    """Catches a fresh start over a run whose checkpoints are all damaged (XS055)."""
    for step in ("1", "2", "3"):
        (run / step / store.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="none of them is whole") as caught:
        find(run)
    for step in ("1", "2", "3"):
        assert f"{step}: its manifest is missing" in str(caught.value)
    assert names(run) == ["1", "2", "3"]


def test_strays_are_left_alone(run: Path) -> None:
    """Catches a directory by name alone taken for the newest checkpoint, or deleted (S13)."""
    (run / "999").mkdir()
    (run / "5 (copy)").mkdir()
    (run / "0012").mkdir()
    (run / "notes.txt").write_text("mine")
    shutil.copytree(run / "3" / "arrays", run / "40" / "arrays")
    saved, rejected = find(run)
    assert saved is not None
    assert saved.name == "3"
    # Half a copy is a checkpoint that is not whole.
    assert set(rejected) == {"40"}
    assert verify(run).strays == ("0012", "5 (copy)", "999")
    assert "notes.txt" in names(run)


def test_leftovers_are_cleaned_and_links_not_followed(run: Path, tmp_path: Path) -> None:
    """Catches a disk filled by killed saves, and a clean-up that deletes what a link points to."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (run / "4.writing.orbax-checkpoint-tmp").mkdir()
    (run / "4.writing").mkdir()
    (run / "1.trash").mkdir()
    (run / "7.trash").symlink_to(outside, target_is_directory=True)
    directory = opened(Checkpoints(run))
    directory.close()
    assert names(run) == ["1", "2", "3", "7.trash"]
    assert (outside / "deep").is_dir()


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    """Catches a NaN that ranks as best, and one pool for the newest and the best."""
    directory = opened(Checkpoints(tmp_path, keep=2, keep_best=1, metric="loss", mode="min"))
    for step, score in enumerate([0.9, 0.3, float("nan"), 0.7, float("inf"), 0.5], start=1):
        save(directory, step, score)
    directory.close()
    assert names(tmp_path) == ["2", "5", "6"]
    # The ranks are read back: a worse one after a restart does not take the best one's place.
    directory = opened(Checkpoints(tmp_path, keep=2, keep_best=1, metric="loss", mode="min"))
    directory.find()
    for step, score in ((7, 0.4), (8, None), (9, 0.31)):
        save(directory, step, score)
    directory.close()
    assert names(tmp_path) == ["2", "8", "9"]


def test_an_archive_beside_the_newest(tmp_path: Path) -> None:
    """Catches an archive that keeps nothing where no save falls on a multiple, keeps all, or is thinned after a
    restart.
    """
    config = Checkpoints(tmp_path, keep=1, keep_every=10)
    directory = opened(config)
    for step in (0, 4, 9, 13, 17, 20, 25):
        save(directory, step)
    directory.close()
    assert names(tmp_path) == ["13", "20", "25"]
    directory = opened(config)
    directory.find()
    for step in (29, 42, 43):
        save(directory, step)
    directory.close()
    assert names(tmp_path) == ["13", "20", "42", "43"]


def test_the_archive_goes_by_what_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the newest whole one deleted for an archive's member that does not read back."""
    directory = opened(Checkpoints(tmp_path, keep=1, keep_every=10))
    save(directory, 9)
    with monkeypatch.context() as patch:
        patch.setattr(
            store, "read", lambda root, name, **_: (_ for _ in ()).throw(CheckpointError("leaf x is damaged"))
        )
        directory.save(10, {"note": 10}, named("state", tree_of(10)), None)
        with pytest.raises(CheckpointError, match="damaged"):
            directory.finish()
    assert names(tmp_path) == ["9"]
    save(directory, 11)
    save(directory, 12)
    directory.close()
    assert names(tmp_path) == ["11", "12"]


def test_a_failed_save_leaves_the_older_ones(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error of the disk that is reported late or never, and a half-written checkpoint left behind."""
    directory = opened(Checkpoints(run, keep=2))
    directory.find()
    commit = files.commit

    def full(root: Path, name: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "commit", full)
    directory.save(4, {"note": 4}, named("state", tree_of(4)), None)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        directory.finish()
    assert "1, 2, 3" in str(caught.value)
    assert names(run) == ["1", "2", "3"]
    monkeypatch.setattr(files, "commit", commit)
    save(directory, 4)
    directory.close()
    assert names(run) == ["3", "4"]


def test_two_failures_in_a_row_stop(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that trains on for days while none of its checkpoints is written."""
    directory = opened(Checkpoints(run))

    def broken(*arguments: Any, **named: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "write", broken)
    directory.save(4, {}, named("state", tree_of(4)), None)
    directory._join()
    assert isinstance(directory.poll(), OSError)
    assert directory.poll() is None
    directory.save(5, {}, named("state", tree_of(5)), None)
    directory._join()
    with pytest.raises(CheckpointError, match="2 checkpoints in a row"):
        directory.poll()
    directory.close()


def test_a_checkpoint_that_does_not_read_back_replaces_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches older checkpoints deleted before the newer one is known to be whole."""
    directory = opened(Checkpoints(run, keep=1))
    directory.find()

    def unreadable(root: Path, name: str, *, check_parts: bool = True) -> None:
        raise CheckpointError("leaf x is damaged")

    monkeypatch.setattr(store, "read", unreadable)
    directory.save(4, {}, named("state", tree_of(4)), None)
    with pytest.raises(CheckpointError, match="damaged"):
        directory.finish()
    directory.close()
    assert names(run) == ["1", "2", "3"]


def test_second_writer_is_told_who(run: Path) -> None:
    """Catches two runs that delete each other's checkpoints."""
    first = opened(Checkpoints(run))
    with pytest.raises(BusyError, match=f"process {os.getpid()} on "):
        opened(Checkpoints(run))
    first.close()
    opened(Checkpoints(run)).close()


def test_lock_left_by_a_dead_process(run: Path) -> None:
    """Catches a run that can never start again because the last one was killed."""
    (run / files.LOCK).write_text(json.dumps({"pid": 1, "host": "elsewhere", "started": "long ago"}))
    opened(Checkpoints(run)).close()


def test_same_updates_twice(run: Path) -> None:
    """Catches a checkpoint overwritten by a later one with as many updates: that cannot be done at once."""
    directory = opened(Checkpoints(run, keep=2))
    directory.find()
    save(directory, 3)
    assert names(run) == ["3", "3.1"]
    save(directory, 10)
    assert names(run) == ["10", "3.1"]
    directory.close()


def test_setting_aside_deletes_nothing(run: Path) -> None:
    """Catches a new beginning that costs the old run."""
    directory = opened(Checkpoints(run))
    aside = directory.set_aside()
    directory.close()
    assert aside is not None
    assert sorted(p.name for p in aside.iterdir()) == ["1", "2", "3"]
    assert find(run) == (None, {})


def test_strict_fill() -> None:
    """Catches a cast or a partial restore: every difference is named with both shapes."""
    stored = {"state/a": Leaf(np.zeros((2,), np.float32)), "state/b": Leaf(np.zeros((3,), np.int32))}
    with pytest.raises(MismatchError) as caught:
        fill("state", {"a": jnp.zeros((2,), jnp.bfloat16), "c": jnp.zeros(())}, stored, what="it")
    assert caught.value.lines == (
        "  a: float32[2] in the checkpoint, bfloat16[2] in this run",
        "  b: int32[3] in the checkpoint, not in this run",
        "  c: float32[] in this run, not in the checkpoint",
    )


def test_colliding_names() -> None:
    """Catches two leaves of one name, of which the store would keep one twice."""
    with pytest.raises(CheckpointError, match=r"state/a/b"):
        named("state", {"a/b": 1, "a": {"b": 2}})


def test_inspect_reads_no_array(run: Path) -> None:
    """Catches an inspection that needs the arrays, and one that leaves sizes or versions out (XS052)."""
    shutil.rmtree(run / "3" / "arrays")
    shown = inspect(run)
    assert shown.name == "3"
    assert "state/kernel  float32[200, 200]" in str(shown)
    assert "jax " in str(shown)
    with pytest.raises(FileNotFoundError):
        inspect(run / "nowhere")
    with pytest.raises(CheckpointError):
        inspect(run / "3" / "manifest")


@pytest.mark.parametrize("name", ["../x", "a", "1/../2", "", "01", "1.0", "-1", "9" * 30, "1\n", "٣"])
def test_names_stay_inside(name: str, tmp_path: Path) -> None:
    """Catches a name that leads out of the run's directory, or is spelled in digits of another script."""
    with pytest.raises(CheckpointError):
        files.inside(tmp_path, name)


def test_configuration_is_checked() -> None:
    """Catches a count that is no count, noticed only at the first save."""
    for wrong in (
        {"keep": 0},
        {"every": 0},
        {"keep": True},
        {"keep_every": 0},
        {"keep_best": 1},
        {"keep_best": 1, "metric": "loss"},
    ):
        with pytest.raises(ValueError, match=r"keep|every"):
            Checkpoints("x", **wrong)
    with pytest.raises(ValueError, match="keep_best"):
        Checkpoints("x", metric="loss")


def test_constructing_opens_nothing(tmp_path: Path) -> None:
    """Catches a directory made by a value."""
    Checkpoints(tmp_path / "run")
    assert not (tmp_path / "run").exists()
