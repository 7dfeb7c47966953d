"""Meshes and layouts as values: no device is needed for any of this."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import telic
from telic.models import Decoder, DecoderConfig
from telic.shard import AXES, Layout, MeshSpec, whole_mesh

SIZES = {"data": 1, "fsdp": 4, "expert": 1, "sequence": 1, "tensor": 2}


@pytest.mark.parametrize(
    ("spec", "devices", "sizes"),
    [
        (MeshSpec(), 8, {"data": 8}),
        (MeshSpec(fsdp=4), 8, {"data": 2, "fsdp": 4}),
        (MeshSpec(data=1, fsdp=-1, tensor=2), 8, {"fsdp": 4, "tensor": 2}),
        (MeshSpec(data=2, sequence=2, expert=2), 8, {"data": 2, "sequence": 2, "expert": 2}),
    ],
)
def test_the_axis_that_is_left_open_takes_the_rest(spec: MeshSpec, devices: int, sizes: Any) -> None:
    """Catches a mesh that leaves devices idle."""
    found = spec.sizes(devices)
    assert found == {axis: sizes.get(axis, 1) for axis in AXES}
    assert np.prod(list(found.values())) == devices


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: MeshSpec(data=0), "MeshSpec data is a number of devices"),
        (lambda: MeshSpec(fsdp=True), "MeshSpec fsdp is a number of devices"),
        (lambda: MeshSpec(data=-1, fsdp=-1), "one axis of a MeshSpec may be -1"),
        (lambda: MeshSpec(data=3).sizes(8), "uses 3 devices and there are 8"),
        (lambda: MeshSpec(fsdp=3).sizes(8), "needs a multiple of 3 devices"),
        (lambda: Layout({"**": ("fspd",)}), "Did you mean 'fsdp'?"),
        (lambda: Layout({"**": ("fsdp", "fsdp")}), "uses an axis twice"),
        (lambda: Layout({"**": "fsdp"}), "Layout rules give a tuple"),  # pyright: ignore[reportArgumentType]
        (lambda: Layout(logical={"embed": "model"}), "logical 'embed' names the axis 'model'"),
        (lambda: Layout(allow_replicated=2.0), "allow_replicated is a share"),
        (lambda: Layout({"a": ("fsdp",)}).spec("a", (6,), SIZES), "does not divide 6"),
        (lambda: Layout({"a": (None, "fsdp")}).spec("a", (8,), SIZES), "gives axes for 2 dimensions"),
        (lambda: Layout({"bais": ("fsdp",)}).specs({"bias": (8,)}, SIZES), "Did you mean 'bias'?"),
        (
            lambda: Layout(logical={"embed": "fsdp"}).spec("a", (8,), SIZES, ("embd",)),
            "says nothing of embd. Did you mean 'embed'?",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, says: str) -> None:
    """Catches a typing error that would be a run on fewer devices, or whole everywhere."""
    with pytest.raises(ValueError, match=r".") as caught:
        make()
    assert says in str(caught.value)


@given(st.lists(st.integers(1, 300), max_size=4), st.sampled_from([1, 2, 3, 4, 8]))
def test_the_default_splits_the_largest_dimension_that_divides(shape: list[int], ways: int) -> None:
    """Catches a part that does not exist, and a smaller dimension split where a larger could be."""
    spec = Layout(smallest=1).spec("x", shape, {"fsdp": ways})
    chosen = [i for i, axis in enumerate(spec) if axis == "fsdp"]
    fitting = [n for n in shape if n % ways == 0]
    if ways == 1 or not fitting:
        assert not chosen
    else:
        assert [shape[i] for i in chosen] == [max(fitting)]


def test_the_first_rule_that_matches_holds() -> None:
    """Catches a later rule that overrides, and a default that adds axes to a rule."""
    layout = Layout({"params/head/**": (), "params/**/kernel": ("fsdp", "tensor")})
    assert layout.spec("params/head/kernel", (4096, 8), SIZES) == P()
    assert layout.spec("params/body/kernel", (4096, 8), SIZES) == P("fsdp", "tensor")
    assert layout.spec("params/body/bias", (4096,), SIZES) == P("fsdp")
    assert layout.spec("params/body/scale", (8,), SIZES) == P(), "smaller than `smallest`"


def test_a_table_says_what_lies_where() -> None:
    """Catches bytes counted whole where a part lies on each device."""
    objective = telic.supervised(nn.Dense(4096), "mean_squared_error")
    example = {"inputs": np.zeros((2, 16), np.float32), "targets": np.zeros((2, 4096), np.float32)}
    table = Layout().explain(objective, mesh=MeshSpec(data=2, fsdp=4), devices=8, example=example)
    by_name = {line.name: line for line in table.lines}
    assert by_name["params/kernel"].spec == P(None, "fsdp")
    assert by_name["params/kernel"].device_bytes == 16 * 4096 * 4 // 4
    assert table.total_bytes == 17 * 4096 * 4
    assert table.device_bytes == table.total_bytes // 4
    assert not table.replicated
    assert "data 2, fsdp 4" in str(table)


def test_a_table_warns_of_what_a_run_would_refuse() -> None:
    """Catches a table that looks well while most of the model is whole on every device."""
    decoder = Decoder(DecoderConfig(vocab_size=64, d_model=32, num_layers=2, num_heads=2, max_length=8))
    asked = {"mesh": MeshSpec(data=1, fsdp=8), "devices": 8, "example": {"tokens": np.zeros((2, 9), np.int32)}}
    objective = telic.objectives.LMObjective(decoder)
    assert not Layout().explain(objective, **asked).refusal
    table = Layout({"params/**/mlp/**": ()}).explain(objective, **asked)
    assert "bytes whole on every device, and 2% are allowed: params/layers_0/mlp" in table.refusal
    assert str(table).endswith(f"a run would refuse it: {table.refusal}")


def test_a_layout_that_keeps_too_much_whole_is_refused() -> None:
    """Catches a model that silently does not fit: nothing of it divides, so all of it is everywhere."""
    shapes = {"a": jax.ShapeDtypeStruct((63, 65), np.float32), "b": jax.ShapeDtypeStruct((64, 640), np.float32)}
    layout = Layout()
    specs = layout.specs({name: x.shape for name, x in shapes.items()}, SIZES)
    with pytest.raises(ValueError, match=r"keeps 9.1% of the state's bytes whole .* a \[63, 65\]"):
        layout.check_replicated(shapes, specs, SIZES)
    Layout(allow_replicated=0.1).check_replicated(shapes, specs, SIZES)
    layout.check_replicated(shapes, specs, {"data": 8, "fsdp": 1})


def test_a_trainer_takes_a_mesh_and_a_layout_for_it() -> None:
    """Catches a layout without a mesh, which would do nothing."""
    objective = telic.supervised(nn.Dense(2), "mean_squared_error")
    with pytest.raises(ValueError, match=r"give mesh=telic\.MeshSpec"):
        telic.Trainer(objective, "sgd", key=0, layout=Layout())
    with pytest.raises(TypeError, match="mesh takes"):
        telic.Trainer(objective, "sgd", key=0, mesh={"data": 8})  # pyright: ignore[reportArgumentType]


def test_a_state_can_take_the_arrays_that_its_objective_holds() -> None:
    """Catches weights that are there twice for the whole run, and a copy that is taken away without being asked."""
    weights = {"params": {"kernel": jax.numpy.ones((3, 2)), "bias": jax.numpy.zeros(2)}}
    example = {"inputs": np.zeros((2, 3), np.float32), "targets": np.zeros((2, 2), np.float32)}

    def trainer() -> Any:
        return telic.Trainer(telic.supervised(nn.Dense(2), "mean_squared_error", variables=weights), "sgd", key=0)

    state = trainer().place(example)
    assert not weights["params"]["kernel"].is_deleted()
    taken = trainer().place(example, consume=True)
    assert weights["params"]["kernel"].is_deleted()
    for made in (state, taken):
        assert np.array_equal(made.variables["params"]["kernel"], np.ones((3, 2)))


def test_a_mesh_of_ones_own_gets_the_axes_that_it_lacks() -> None:
    """Catches a mesh with a data axis alone, taken, and failing in JAX's words on an axis that it lacks."""
    mesh = whole_mesh(Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("tensor", "data")))
    assert tuple(mesh.axis_names) == AXES
    assert whole_mesh(mesh) is mesh
    with pytest.raises(ValueError, match=r"a mesh has the axes data.*, got x"):
        whole_mesh(Mesh(np.array(jax.devices()[:1]), ("x",)))
