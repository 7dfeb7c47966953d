"""What one of two processes does with what the other says; here the other is made to say it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import telic
from telic.checkpoints.directory import Saved
from telic.compose.resume import Session
from telic.compose.saving import Saving
from telic.errors import MismatchError
from tests.faults.small import summing


class Beside:
    """Process 1 of 2: what process 0 says holds, and it is told to stop where it says so."""

    index, count, post = 1, 2, None

    def __init__(self, says: Any = None, stop: bool = False):
        self.says, self.stop = says, stop

    def agree(self, value: Any) -> Any:
        return self.says

    def exchange(self, what: str, value: Any) -> list[Any]:
        return [self.says, value]

    def stops(self) -> bool:
        return self.stop


class Share:
    """Where process 1 stands: it reads share 1 of a number of them."""

    def __init__(self, processes: Beside, shares: int = 2):
        self.processes, self.partition = processes, (1, shares)


def session(directory: Path, beside: Beside, shares: int = 2) -> Session:
    share: Any = Share(beside, shares)  # no whole placement: a session of these tests asks for no more of it
    return Session(Saving(telic.Checkpoints(directory)), placement=share)


def test_each_process_gets_the_position_of_its_own_share(tmp_path: Path) -> None:
    """XS139: one position for all, that of process 0, which the others' loaders refuse or read the wrong share from."""
    mine, theirs = {"batches": 7}, {"batches": 5}
    body = session(tmp_path, Beside([0, theirs]))._shares(mine, {})
    assert body["shares"] == 2
    saved = Saved("3", body, {})
    assert session(tmp_path, Beside())._own_position(theirs, saved) == mine
    with pytest.raises(MismatchError, match=r"read 2 shares of its data.*continue it with 2"):
        session(tmp_path, Beside(), shares=3)._own_position(theirs, saved)


def test_process_0_says_which_checkpoint_is_read(tmp_path: Path) -> None:
    """XS141: the latest checkpoint found by each process for itself, so that two go on from different ones."""
    summing(tmp_path).run([np.float32(1)], epochs=3)
    follower = session(tmp_path, Beside(says="2"))
    follower.open()
    assert follower.saved is not None
    assert follower.saved.name == "2"
    follower.close()
    nothing = session(tmp_path, Beside(says=None))
    nothing.open()
    assert nothing.saved is None
    nothing.close()


def test_a_signal_to_one_process_stops_all(tmp_path: Path) -> None:
    """XS136: one process that saves and leaves alone, while the others wait for it."""
    state = telic.LoopState(max_steps=9)
    assert session(tmp_path, Beside(stop=True)).wants(state, closed=False)
    assert not session(tmp_path, Beside()).wants(state, closed=False)
