"""One device and eight give the same losses, metrics and evaluations, however the eight are used."""

from typing import Any

import pytest

from tests.distributed.problems import FIFTY, MESHES, SHOWN

ALL = tuple(MESHES)
QUICK = ("one", "fsdp x tensor")
"""What the quick tests compare: the mesh where most can go wrong."""


def check(results: Any, mesh: str, steps: int) -> None:
    one, many = results["one"], results[mesh]
    for count in ("updates", "attempts", "rejected"):
        assert many[count] == one[count], count
    assert len(many["losses"]) == steps // SHOWN
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert many["scores"] == pytest.approx(one["scores"], rel=1e-5)
    assert many["metrics"] == pytest.approx(one["metrics"], rel=1e-5)


def test_a_decoder_trains_the_same_on_eight_devices(equal: Any) -> None:
    """Catches a mean over each device's own rows, an update of a part of a leaf, and a remainder counted twice."""
    check(equal("decoder", 20, QUICK), QUICK[1], 20)


def test_a_sharded_state_is_in_parts(equal: Any) -> None:
    """Catches a layout that is looked at and not followed: every device would hold everything."""
    results = equal("decoder", 20, QUICK)
    here, whole = results["one"]["bytes"]
    assert here == whole
    assert results["fsdp x tensor"]["bytes"][0] < whole / 1.8


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ALL[1:])
@pytest.mark.parametrize("problem", ["digits", "decoder", "dit"])
def test_fifty_steps_are_the_same_on_every_mesh(problem: str, mesh: str, equal: Any) -> None:
    """Catches BatchNorm over a device's own rows, dropout that differs by device, and one bad shard kept elsewhere."""
    results = equal(problem, FIFTY, ALL)
    check(results, mesh, FIFTY)
    # No row of tokens can be spoilt.
    assert (results[mesh]["rejected"] > 0) == (problem != "decoder")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "share"), [("data", 1), ("fsdp", 6), ("data x fsdp", 3), ("fsdp x tensor", 1.8)])
def test_each_mesh_splits_the_state_as_it_says(mesh: str, share: float, equal: Any) -> None:
    """Catches copies where there should be parts, and parts where there should be copies."""
    here, whole = equal("dit", FIFTY, ALL)[mesh]["bytes"]
    assert here <= whole / share
    assert (here == whole) == (mesh == "data")
