"""Remainders, other meshes in the middle of a run, layouts by names, and what is refused, on eight devices."""

from typing import Any

import pytest

from tests.distributed.running import once, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return once(tmp_path_factory, "meshes", lambda place: run("meshes", place))


def test_every_record_is_evaluated_once_whatever_the_remainder(said: Any) -> None:
    """Catches padding that is counted, rows that are dropped, and a mean of the devices' means."""
    assert said["remainder"] == {"seventy": [34.5, 5], "five": [2.0, 1]}


def test_a_run_goes_on_from_one_mesh_to_another(said: Any) -> None:
    """Catches parts of a leaf put back in another order, and data that begins anew."""
    turns, one = said["resharded"]
    assert list(turns) == list(one) == [str(n) for n in range(1, 13)]
    assert list(turns.values()) == pytest.approx(list(one.values()), rel=1e-6)


def test_a_model_that_names_its_dimensions_is_laid_out_by_them(said: Any) -> None:
    """Catches names that are lost when a model is initialised, and optimizer state that lies elsewhere."""
    specs = said["logical"]["specs"]
    kernels = {name: spec for name, spec in specs.items() if name.endswith("kernel")}
    assert len(kernels) == 3, "the parameter and two moments"
    assert all("('fsdp', 'tensor')" in spec for spec in kernels.values())
    assert "params/Dense_0/kernel" in said["logical"]["table"]
    assert "fsdp, tensor" in said["logical"]["table"]


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("replicated", "100.0% of the state's bytes whole on every device"),
        ("indivisible", "splits dimension 0 of params/kernel, [63, 65], over fsdp = 8 devices"),
        ("no leaf", "'params/kernal' names no leaf. Did you mean 'params/kernel'?"),
        ("devices", "data=3 uses 3 devices and there are 8"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(said: Any, case: str, says: str) -> None:
    """Catches a layout that quietly keeps everything everywhere, or fails inside XLA."""
    assert says in said["refused"][case]


def test_rows_are_split_over_as_many_devices_as_divide_them(said: Any) -> None:
    """Catches a batch that is whole on every device, and a change of the path that one device takes."""
    placements = {name: value for name, value in said["placements"].items() if name != "flags"}
    assert placements == {"full": [8, 8], "rest": 2, "single": True, "none": True}


def test_the_record_of_rejections_is_whole_on_every_device(said: Any) -> None:
    """Catches an error of a large model that no process can write, since each has a part of the flags it tells of."""
    assert said["placements"]["flags"] == ["P()", "P('fsdp',)"]


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return once(tmp_path_factory, "alike", lambda place: run("meshes", "alike"))


def test_odd_sizes_frozen_and_narrow_leaves_and_a_spoilt_row_are_as_on_one_device(alike: Any) -> None:
    """Catches rows of a remainder lost, a leaf smaller than the mesh, a cast, and a rejection in one shard alone."""
    one, eight = alike["one"], alike["eight"]
    assert [eight[n] for n in ("updates", "rejected", "scale")] == [one[n] for n in ("updates", "rejected", "scale")]
    assert one["rejected"] == 2
    for name, (value, dtype) in one["weights"].items():
        assert eight["weights"][name][1] == dtype
        assert eight["weights"][name][0] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert eight["scores"] == pytest.approx(one["scores"], rel=1e-5)


def test_a_step_of_ones_own_runs_on_a_mesh(alike: Any) -> None:
    """Catches a raw loop that sees its own device's rows alone."""
    assert alike["eight"]["total"] == pytest.approx(alike["one"]["total"], rel=1e-5)


def test_a_metric_on_the_host_sees_every_row_once(said: Any) -> None:
    """Catches outputs gathered from one device alone."""
    assert said["host metric"] == 22.0


def test_a_step_gathers_weights_and_not_activations(said: Any) -> None:
    """Catches hidden states that are gathered in every layer, and a head that gathers its table for every block.

    Over four devices two passes gather each weight, 3/4 of it, and a sum of gradients brings twice as much; over the
    two copies a quarter of them is summed: 3.25 times the parameters. The rest is the embedding's few activations.
    """
    assert said["exchanged"] < 4.5


def test_slices_of_a_batch_are_spread_over_the_devices(said: Any) -> None:
    """Catches slices that each lie on one device, which all devices compute, and a limit for a step of one device."""
    one, eight = said["sliced"]["one"], said["sliced"]["eight"]
    assert eight["weights"] == pytest.approx(one["weights"], rel=1e-5)
    assert eight["flops"] < one["flops"] / 4
    whole, half, quarter = eight["bytes"]
    assert whole > half > quarter
    assert (one["chosen"], eight["chosen"]) == (512, 512)
    assert "512 of 2048 rows at once fit" in eight["said"]
