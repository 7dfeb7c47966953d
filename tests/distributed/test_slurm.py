"""A dry run of the recipe for Slurm: the script as it stands, and two real processes that train."""

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed import slurm
from tests.distributed.running import ROOT, ended


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_is_queued_again_and_ends(tmp_path: Path) -> None:
    """Catches a script that hides how srun ended, a signal that ends a run unsaved, and a job that is never done."""
    environment = slurm.install(tmp_path / "bin")
    here = tmp_path / "job"
    here.mkdir()
    shutil.copy(ROOT / "tests/distributed/slurm_train.py", here / "train.py")
    shutil.copy(ROOT / "recipes/cluster/slurm.sh", here)
    job = ended(["sbatch", "slurm.sh"], environment, here, timeout=400)
    assert job.code == 0, job.said[-6000:]
    assert (here / "requeued").exists(), "the first life ended in time"
    assert "SIGTERM: saved at" in job.said, job.said[-6000:]
    assert "continuing first at" in job.said, job.said[-6000:]
    first, second = (json.loads((here / f"done.{index}").read_text()) for index in (0, 1))
    assert first == second
    assert first["updates"] == 30
    assert first["shard"] == [4, 4], "each process has a half of the weights"
    assert first["losses"][-1] < 0.6 * first["losses"][0]


@pytest.mark.slow
def test_a_job_that_fails_is_not_queued_again(tmp_path: Path) -> None:
    """Catches a program with an error that is run over and over, and a job that Slurm takes for done."""
    environment = slurm.install(tmp_path / "bin")
    here = tmp_path / "job"
    here.mkdir()
    (here / "train.py").write_text("raise ValueError('a typing error')\n")
    job = ended(["sbatch", str(ROOT / "recipes/cluster/slurm.sh")], environment, here, timeout=400)
    assert job.code not in (0, 143), job.said[-6000:]
    assert "a typing error" in job.said
    assert not (here / "requeued").exists()
    assert not (here / "requeue").exists()
