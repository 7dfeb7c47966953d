"""Where arrays lie inside a program: what is said without a mesh, to a mesh that does not divide, and what is refused.

`tests/distributed/test_meshes.py` looks at what eight devices make of it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from telic.axes import AXES, BATCH_AXES, constrain, fitting_axes
from telic.errors import ShapeError


def mesh(**sizes: int) -> AbstractMesh:
    found = tuple(sizes.get(axis, 1) for axis in AXES)
    return AbstractMesh(found, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def constraints(x: jax.Array, *dims: object, **sizes: int) -> list[tuple[object, ...]]:
    def run(x: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh(**sizes)):
            return constrain(x, *dims)  # pyright: ignore[reportArgumentType]

    return [tuple(e.params["sharding"].spec) for e in jax.make_jaxpr(run)(x).eqns]


def test_without_a_mesh_the_program_stays_as_it_was() -> None:
    """Catches an operation that costs something, or changes bits, on one device."""
    x = jnp.ones((4, 2))
    assert constrain(x, BATCH_AXES, "tensor") is x
    assert not jax.make_jaxpr(lambda x: constrain(x, BATCH_AXES))(x).eqns
    assert not constraints(x, BATCH_AXES)


def test_rows_lie_over_the_axes_that_divide_them() -> None:
    """Catches a remainder that fails in XLA, or is padded."""
    dims = (BATCH_AXES, None, "tensor")
    assert constraints(jnp.ones((8, 3, 4)), *dims, data=2, fsdp=4, tensor=2) == [
        (("data", "fsdp", "expert"), None, "tensor")
    ]
    assert constraints(jnp.ones((6, 3, 3)), *dims, data=2, fsdp=4, tensor=2) == [(("data", "expert"), None, None)]


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8, 12, 64])
def test_the_parts_are_as_many_as_there_can_be(size: int) -> None:
    """Catches the first subset that fits in place of the best."""
    sizes = {"data": 2, "fsdp": 3, "expert": 4}
    chosen = fitting_axes(BATCH_AXES, size, sizes)
    products = [a * b * c for a in (1, 2) for b in (1, 3) for c in (1, 4) if size % (a * b * c) == 0]
    made = 1
    for axis in chosen:
        made *= sizes[axis]
    assert made == max(products)


def test_inside_of_shard_map_nothing_is_said() -> None:
    """Catches a constraint on an array that is one device's own, which JAX refuses."""
    manual = AbstractMesh((2,), ("data",), axis_types=(AxisType.Manual,))

    def run(x: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(manual):
            return constrain(x, "data")

    assert not jax.make_jaxpr(run)(jnp.ones(4)).eqns


def test_an_axis_that_no_mesh_has_is_refused() -> None:
    """Catches a name misspelt, which would leave the array anywhere, on one device too."""
    with pytest.raises(ValueError, match="unknown axis 'tensr'"):
        constrain(jnp.ones(4), "tensr")
    with pytest.raises(ShapeError, match="2 dimensions"):
        constrain(jnp.ones(4), "data", "tensor")
