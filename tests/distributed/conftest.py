"""What several tests look at is run once: each launch of processes costs more than most of what is tried in it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import checks as program
from tests.distributed.running import Ended, checks, common, compiled, launch, once, run

KILLED = 9
"""When a run is killed: its save at 8 has begun, so that at 4 is over."""

FAULTS: dict[str, dict[str, Any]] = {
    "killed": {"kind": "kill", "rank": 1, "step": KILLED},
    "killed_first": {"kind": "kill", "rank": 0, "step": KILLED},
    "ended": {"kind": "term", "rank": 1, "step": 5},
    "unsaved": {"kind": "term", "rank": 1, "step": 5, "saves": False},
    "raises": {"kind": "raise", "rank": 1, "step": 5},
    "stops": {"kind": "stop", "rank": 1, "step": 5},
}


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let the programs of these tests find what others have compiled."""
    compiled[:] = [common(tmp_path_factory) / "compiled"]


@pytest.fixture(scope="session")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives the results of a problem on meshes of eight devices, by mesh."""

    def found(problem: str, steps: int, labels: tuple[str, ...]) -> Any:
        name = "-".join((problem, str(steps), *(label.replace(" ", "") for label in labels)))
        return once(tmp_path_factory, name, lambda place: run("equality", problem, steps, *labels))

    return found


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives how a run of two processes ended in which one went wrong, and its directory."""

    def found(name: str) -> tuple[Ended, Path]:
        def make(place: Path) -> Any:
            ended = launch("member.py", json.dumps({"directory": str(place / "run"), **FAULTS[name]}))
            return [str(place / "run"), ended.code, ended.said, ended.seconds]

        directory, *rest = once(tmp_path_factory, name, make)
        return Ended(*rest), Path(directory)

    return found


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, faults: Any) -> Any:
    """What one process gives: of what must be alike, and of runs that two began."""

    def make(place: Path) -> Any:
        shutil.copytree(faults("killed_first")[1], place / "killed_first")
        return [str(place), checks(place, [*program.ALIKE, *program.ALONE], processes=1)]

    return once(tmp_path_factory, "alone", make)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, faults: Any, alone: Any) -> Any:
    """What two processes of one device give."""

    def make(place: Path) -> Any:
        for name in ("killed", "ended"):
            shutil.copytree(faults(name)[1], place / name)
        # What a run of one process leaves that is killed after its save at 8.
        shutil.copytree(Path(alone[0]) / "begun_alone", place / "begun_alone")
        shutil.rmtree(place / "begun_alone" / "12")
        return [str(place), checks(place, [*program.ALIKE, *program.PAIR], processes=2)]

    return once(tmp_path_factory, "pair", make)


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes of four devices give."""
    return once(
        tmp_path_factory,
        "eight",
        lambda place: [str(place), checks(place, list(program.EIGHT), processes=2, devices=4)],
    )
