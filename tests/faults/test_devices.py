"""Eight simulated devices, in a process of their own."""

import json
import subprocess
import sys

import pytest

from tests.distributed.running import ROOT, environment
from tests.faults.devices import UPDATES, WARMUP

pytestmark = pytest.mark.slow


def test_a_schedule_and_its_program_do_not_know_how_many_devices_there_are() -> None:
    """XS075: a schedule that advances once per device and ends eight times too early; XS093: a step that is compiled
    again because what it gives lies otherwise than what it began with.
    """
    command = [sys.executable, "-m", "tests.faults.devices"]
    done = subprocess.run(command, env=environment(8), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["devices"] == 8
    assert said["eight"]["updates"] == len(said["eight"]["rates"]) == UPDATES
    assert said["eight"]["rates"] == pytest.approx(said["one"]["rates"], rel=1e-6)
    assert max(said["eight"]["rates"]) == pytest.approx(said["eight"]["rates"][WARMUP], rel=1e-6)
    # At the end of the epoch its metrics are read.
    assert said["one"]["later"] == said["eight"]["later"] == ["jit(_values)"]
