"""Every kind of training data comes back to its position: stopped inside an epoch, and again, with the same bits.

The records differ from each other, so a batch that comes twice, or never, changes the weights; the negative controls
show that it does. torch, torchdata and datasets are no test dependencies: where one is missing its kinds are skipped.
"""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telic.errors import DataError, MismatchError
from tests.resume import program
from tests.resume.test_every_place import differing, run
from tests.resume.test_killed import finished, uninterrupted
from tests.resume.test_killed import run as run_process

NEEDS = {
    "hf": ("datasets", "pyarrow"),
    "torch": ("torch",),
    "torch2": ("torch",),
    "stateful": ("torch", "torchdata"),
    "stateful2": ("torch", "torchdata"),
}
# torchdata calls a function that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")

KINDS = [
    *("columns", "generator", "stateful"),
    # Also in order, or also through a function of the epoch, or in test_every_place.py.
    *(pytest.param(kind, marks=pytest.mark.endurance) for kind in ("list", "grain", "hf", "torch")),
]
WITH_WORKERS = ["grain2", "torch2", "stateful2"]


def needs(kind: str) -> None:
    for module in NEEDS.get(kind, ()):
        pytest.importorskip(module, reason=f"{kind} needs {module}, which is no test dependency")


# The smallest model: what is under test are the batches it is given.
OPTIONS: dict[str, Any] = {"model": "linear", "records": 10, "accumulate": 1, "epochs": 3, "ema": False}


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_in_the_middle(kind: str, tmp_path: Path) -> None:
    """Catches a position that is lost, off by one, or that of the first epoch, in each kind of data (XS022)."""
    needs(kind)
    options = {**OPTIONS, "data": kind, "directory": str(tmp_path / "run")}
    whole = run(**{**options, "directory": None})
    # At the end of the first epoch of five batches, and inside the second.
    assert run(stop_at=5, **options) is None
    assert run(stop_at=8, **options) is None
    assert differing(whole, run(**options)) == []


@pytest.mark.parametrize("kind", ["generator", "stateful"])
def test_a_lost_position_shows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches these tests passing wherever the data stands."""
    needs(kind)
    from telic.compose.resume import Session

    for method in ("cursor", "check_batch"):
        monkeypatch.setattr(Session, method, getattr(Session, method))
    options = {**OPTIONS, "data": kind, "directory": str(tmp_path / "run")}
    whole = run(**{**options, "directory": None})
    assert run(stop_at=2, **options) is None
    program.forget("position")
    assert differing(whole, run(**options)) != []


@pytest.mark.endurance
@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_killed_with_workers(kind: str, tmp_path: Path) -> None:
    """Catches batches that workers had read ahead and a killed process took with it."""
    needs(kind)
    directory = tmp_path / "run"
    options = {**OPTIONS, "data": kind}
    whole = uninterrupted(tmp_path, **options)
    again: dict[str, Any] = {**options, "directory": str(directory)}
    code, text = run_process(**again, kill_at="committed", kill_number=3)
    assert code == -signal.SIGKILL, text
    code, text = run_process(**again, signal_at=8)
    assert code == 143, text
    assert finished(directory, **options) == whole


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("generator", "seed"), ("grain", "batch")),
        *(pytest.param(k, "seed", marks=pytest.mark.endurance) for k in ("list", "grain", "hf", "torch", "stateful")),
    ],
)
def test_other_data_is_refused(kind: str, change: str, tmp_path: Path) -> None:
    """Catches a run continued on other data: another seed or batch of the same source, which Grain takes silently."""
    needs(kind)
    options = {**OPTIONS, "data": kind, "directory": str(tmp_path / "run")}
    assert run(stop_at=2, **options) is None
    with pytest.raises((MismatchError, DataError)):
        run(**{**options, change: 3})


@pytest.mark.parametrize("kind", ["DataLoader", "StatefulDataLoader"])
def test_a_shuffling_loader_is_refused(kind: str, tmp_path: Path) -> None:
    """Catches a loader that draws its order from a state no checkpoint has, and is said to resume."""
    needs("torch" if kind == "DataLoader" else "stateful")
    import torch

    if kind == "DataLoader":
        from torch.utils.data import DataLoader as loader
    else:
        from torchdata.stateful_dataloader import StatefulDataLoader as loader
    stored = torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1))
    shuffled = loader(stored, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
    o = {**program.DEFAULTS, **OPTIONS, "directory": str(tmp_path)}
    with pytest.raises(DataError, match=rf"lambda epoch: {kind}\(dataset, shuffle=True"):
        program.make_loop(o).run(shuffled, steps=2)


def test_a_loaders_position_is_json() -> None:
    """Catches a state of a loader that comes back as another kind, or that takes pickle to keep."""
    from telic.data.loaders import _as_json, _from_json

    state = {"a": [1, (2.5, None)], "b": b"\x00\xff", 3: np.arange(3, dtype=np.uint8), "s": np.float32(1.5), "t": True}
    back = _from_json(json.loads(json.dumps(_as_json(state, "state"))))
    assert back["a"] == [1, (2.5, None)]
    assert (back["b"], back["t"], back["s"]) == (b"\x00\xff", True, 1.5)
    assert back[3].tobytes() == state[3].tobytes()
    with pytest.raises(DataError, match=r"state\['x'\] holds a object"):
        _as_json({"x": object()}, "state")
    for hostile in ({"array": ["O", [1], "AAAA"]}, {"dict": 3}, {"call": "os.system"}, [1]):
        with pytest.raises(DataError, match="damaged"):
            _from_json(hostile)
