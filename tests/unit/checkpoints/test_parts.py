"""Leaves that no process has whole: each saves its parts, here two directories of one process that act as two."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from telic.checkpoints import Checkpoints, inspect, load_variables, parts, plain, store, verify
from telic.checkpoints.comparison import compare
from telic.checkpoints.directory import RunDirectory
from telic.checkpoints.following import FollowedDirectory
from telic.checkpoints.leaves import Leaf, to_host
from telic.checkpoints.manifest import SCHEMA, Manifest, decode, encode
from telic.checkpoints.parts import Held, Parted
from telic.errors import CheckpointError

NAME = "state/variables/params/w"
FROZEN = "state/variables/params/base"
WHOLE = np.arange(48, dtype=np.float32).reshape(6, 8)


class Board:
    """What two processes have told each other."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.changed = threading.Condition()


class Post:
    """One of two processes that share a board."""

    count = 2

    def __init__(self, board: Board, index: int):
        self.index = index
        self._board = board

    def tell(self, key: str, value: Any) -> None:
        with self._board.changed:
            assert f"{key}/{self.index}" not in self._board.told, "told twice"
            self._board.told[f"{key}/{self.index}"] = value
            self._board.changed.notify_all()

    def hear(self, key: str, teller: int) -> Any:
        with self._board.changed:
            at = f"{key}/{teller}"
            assert self._board.changed.wait_for(lambda: at in self._board.told, timeout=60), at
            return self._board.told[at]

    def forget(self, prefix: str) -> None:
        with self._board.changed:
            for key in [key for key in self._board.told if key.startswith(f"{prefix}/")]:
                del self._board.told[key]


class Pair:
    """Two processes of a run, of which the second has columns 4 to 8 of each leaf and the first the others."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.board = Board()
        self.lead = RunDirectory(Checkpoints(root), Post(self.board, 0))
        self.follower = FollowedDirectory(Checkpoints(root), Post(self.board, 1))
        # Each process counts its own saves; these two are in one.
        self._saves = 0
        for module in ("directory", "following"):
            monkeypatch.setattr(f"telic.checkpoints.{module}.next_number", lambda: self._saves)
        self.lead.open()

    def save(self, updates: int, leaves: dict[str, np.ndarray[Any, Any]], frozen: tuple[str, ...] = ()) -> None:
        self._saves += 1
        shares = [
            {
                name: Held(leaf.shape, leaf.dtype.name, [((0, 4 * i), leaf[:, 4 * i : 4 * i + 4])])
                for name, leaf in leaves.items()
            }
            for i in (0, 1)
        ]
        arrays = {"state/step": np.int32(updates)}
        self.lead.save(updates, {"note": updates}, arrays, None, frozen=frozen, parts=shares[0])
        self.follower.save(updates, {}, {}, None, frozen=frozen, parts=shares[1])
        self.follower.finish()


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(tmp_path, monkeypatch)
    yield made
    made.follower.close()
    made.lead.close()


def read(root: Path, name: str) -> dict[str, Leaf]:
    return store.read(root, name)[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_parts_of_two_processes_are_read_as_one_leaf(pair: Pair, tmp_path: Path, dtype: str) -> None:
    """Catches parts put together in another order, a process's values that are missing, bytes of another dtype."""
    whole = WHOLE.astype(parts.dtype_of(dtype))
    pair.save(4, {NAME: whole})
    pair.lead.finish()
    files = {path.name: path.stat().st_size for path in (tmp_path / "4" / "parts").iterdir()}
    assert files == {"0.arrays": whole.nbytes // 2, "1.arrays": whole.nbytes // 2}
    leaf = read(tmp_path, "4")[NAME].data
    np.testing.assert_array_equal(np.asarray(leaf), whole)
    np.testing.assert_array_equal(leaf[1:5, 2:7], whole[1:5, 2:7])
    np.testing.assert_array_equal(load_variables(tmp_path)["params"]["w"], whole)
    assert inspect(tmp_path).leaves[NAME].bytes == whole.nbytes
    assert compare(tmp_path / "4", tmp_path / "4").is_same
    assert not pair.board.told, "what was told is forgotten"


def test_a_process_reads_only_the_parts_it_needs(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a leaf that every host reads whole to take up its share of it."""
    pair.save(4, {NAME: WHOLE})
    pair.lead.finish()
    leaf = read(tmp_path, "4")[NAME].data
    assert isinstance(leaf, Parted)
    seen: list[int] = []
    real = parts.read

    def noted(folder: Path, name: str, dtype: Any, piece: Any, *, frozen: bool) -> Any:
        seen.append(piece.process)
        return real(folder, name, dtype, piece, frozen=frozen)

    monkeypatch.setattr(parts, "read", noted)
    np.testing.assert_array_equal(leaf[0:6, 4:8], WHOLE[:, 4:])
    assert seen == [1]


def test_a_damaged_part_is_named_and_the_one_before_is_taken(pair: Pair, tmp_path: Path) -> None:
    """Catches a flipped bit in one process's part that comes back as another number."""
    for updates in (4, 8):
        pair.save(updates, {NAME: WHOLE + updates})
    pair.lead.finish()
    path = tmp_path / "8" / "parts" / "1.arrays"
    content = bytearray(path.read_bytes())
    content[17] ^= 4
    path.write_bytes(content)
    assert "the checksum of its part in 1.arrays differs" in verify(tmp_path).damaged["8"]
    path.write_bytes(content[:-1])
    assert "cut short in 1.arrays" in verify(tmp_path).damaged["8"]
    path.unlink()
    assert "parts/1.arrays" in verify(tmp_path).damaged["8"]
    found = pair.lead.find()
    assert found.saved is not None
    assert found.saved.name == "4"
    np.testing.assert_array_equal(np.asarray(found.saved.arrays[NAME].data), WHOLE + 4)


def test_frozen_parts_are_on_the_disk_once_and_written_anew_when_damaged(pair: Pair, tmp_path: Path) -> None:
    """Catches a pretrained model that each checkpoint writes again, and damage that is linked to for ever."""
    pair.save(4, {NAME: WHOLE, FROZEN: WHOLE}, frozen=(FROZEN,))
    pair.save(8, {NAME: WHOLE + 1, FROZEN: WHOLE}, frozen=(FROZEN,))
    pair.lead.finish()
    first, second = (tmp_path / name / "parts" / "1.frozen" for name in ("4", "8"))
    assert first.samefile(second)
    first.write_bytes(b"\0" * first.stat().st_size)
    pair.save(12, {NAME: WHOLE + 2, FROZEN: WHOLE}, frozen=(FROZEN,))
    pair.lead.finish()
    assert "8" in verify(tmp_path).damaged
    np.testing.assert_array_equal(np.asarray(read(tmp_path, "12")[FROZEN].data), WHOLE)


@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_cannot_write_is_named_and_nothing_stays(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    """Catches a checkpoint without one process's parts, a wait for it without end, and half of it left on the disk."""
    pair.save(4, {NAME: WHOLE})
    pair.lead.finish()
    real = parts.write

    def full(path: Path, process: int, leaves: Any) -> Any:
        if process == index:
            raise OSError(28, "No space left on device")
        return real(path, process, leaves)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "write", full)
        pair.save(8, {NAME: WHOLE})
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            pair.lead.finish()
    assert ("process 1 could not save its parts" in str(caught.value)) == (index == 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == ["4"]
    pair.save(8, {NAME: WHOLE})
    pair.lead.finish()
    assert verify(tmp_path).whole == ("4", "8")


def test_what_process_0_cannot_save_leaves_nobody_waiting(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches processes that wait for a folder that process 0 never makes."""
    with monkeypatch.context() as patch:
        patch.setattr(store, "pack", lambda *_: (_ for _ in ()).throw(OSError("no")))
        pair.save(4, {NAME: WHOLE})
        with pytest.raises(CheckpointError, match="no"):
            pair.lead.finish()
    pair.save(4, {NAME: WHOLE})
    pair.lead.finish()
    assert verify(tmp_path).whole == ("4",)


def test_only_checkpoints_with_parts_are_of_the_newer_format(pair: Pair, tmp_path: Path) -> None:
    """Catches checkpoints of one process that an earlier release could read and now cannot."""
    pair.save(4, {NAME: WHOLE})
    pair.lead.finish()
    manifest, _ = store.read(tmp_path, "4")
    assert f'"schema":{SCHEMA}' in encode(manifest)["body"]
    alone = {name: entry for name, entry in manifest.leaves.items() if not entry.pieces}
    assert '"schema":1' in encode(Manifest("r", alone, {}))["body"]


@pytest.mark.parametrize(
    "change",
    [
        lambda pieces: pieces[:1],
        lambda pieces: [pieces[0], pieces[0]],
        lambda pieces: [pieces[0], [1, [0, 3], [6, 5], 0, "0"]],
        lambda pieces: [pieces[0], [1, [0, 4], [6, 5], 0, "0"]],
        lambda pieces: [pieces[0], [1, [4], [4], 0, "0"]],
        lambda pieces: [pieces[0], [-1, [0, 4], [6, 4], 0, "0"]],
        lambda pieces: [pieces[0], ["../1", [0, 4], [6, 4], 0, "0"]],
        lambda pieces: {"0": pieces[0]},
        lambda pieces: [],
    ],
)
def test_parts_that_do_not_make_up_their_leaf_are_refused(pair: Pair, tmp_path: Path, change: Any) -> None:
    """Catches memory that nobody has written taken for weights, and a path in the place of a process."""
    pair.save(4, {NAME: WHOLE})
    pair.lead.finish()
    body = json.loads(encode(store.read(tmp_path, "4")[0])["body"])
    body["leaves"][NAME][6] = change(body["leaves"][NAME][6])
    text = json.dumps(body)
    envelope = {"telic": "checkpoint", "sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}
    with pytest.raises(CheckpointError, match="manifest is damaged"):
        decode(json.dumps(envelope).encode())


def test_what_a_handler_keeps_comes_back_from_parts_and_as_keys(pair: Pair, tmp_path: Path) -> None:
    """Catches a best state that is read whole by every host, and a key in it that comes back as its words."""
    pair.save(4, {NAME: WHOLE})
    pair.lead.finish()
    arrays: dict[str, Any] = {}
    key = jax.random.key(3)
    written = plain.dump({"best": [WHOLE, key, np.float32(2)]}, "loop", arrays)
    stored = {**to_host({"loop/best/1": key, "loop/best/2": np.float32(2)}), "loop/best/0": read(tmp_path, "4")[NAME]}
    whole, again, number = plain.load(written, stored)["best"]
    np.testing.assert_array_equal(whole, WHOLE)
    assert type(whole) is np.ndarray
    assert jax.random.key_impl(again) == jax.random.key_impl(key)
    assert (jax.random.key_data(again) == jax.random.key_data(key)).all()
    assert number == 2.0
    seen: list[Any] = []
    plain.load(written, stored, apart=lambda leaf: seen.append((leaf.shape, leaf[0:1, 2:4])))
    assert seen[0][0] == (6, 8)
    np.testing.assert_array_equal(seen[0][1], WHOLE[0:1, 2:4])
