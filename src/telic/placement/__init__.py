"""Where batches and states live: on one device, or on a mesh that one process or several hold."""

from typing import Any

import jax
from jax.sharding import Mesh

from telic.placement.mesh import MeshPlacement
from telic.placement.processes import ONE, ManyProcesses, OneProcess, all_processes
from telic.placement.single import SingleDevice
from telic.shard import Layout, MeshSpec, whole_mesh

__all__ = [
    "ONE",
    "ManyProcesses",
    "MeshPlacement",
    "OneProcess",
    "SingleDevice",
    "all_processes",
    "check_mesh",
    "placement_for",
]


def check_mesh(mesh: Any, layout: Any) -> None:
    """Refuse what is no mesh or no layout, before any device is looked for.

    Raises:
      TypeError: One of them is something else.
      ValueError: There is a layout and no mesh.
    """
    if mesh is not None and not isinstance(mesh, MeshSpec | Mesh):
        raise TypeError(f"mesh takes telic.MeshSpec(data=-1, fsdp=...) or a jax.sharding.Mesh, got {mesh!r}")
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout takes telic.Layout({{'params/**': (...)}}), got {layout!r}")
    if layout is not None and mesh is None:
        raise ValueError("layout= says where on a mesh the state lies: give mesh=telic.MeshSpec(...) too")


def placement_for(mesh: Any, layout: Layout | None = None) -> SingleDevice | MeshPlacement:
    """Give the placement of a run.

    Args:
      mesh: A `MeshSpec` or a mesh; None takes one device.
      layout: Where parts of the state lie; None means a `Layout` without rules.
    Raises:
      ValueError: There are several processes and no mesh, or the mesh does not fit the devices.
    """
    if mesh is None:
        if jax.process_count() > 1:
            raise ValueError(
                f"this program runs as {jax.process_count()} processes and was given no mesh, so each would train by "
                "itself: give mesh=telic.MeshSpec()"
            )
        return SingleDevice()
    made = whole_mesh(mesh) if isinstance(mesh, Mesh) else mesh.build()
    if made.size == 1 and jax.process_count() == 1 and made.devices.flat[0] == jax.devices()[0]:
        return SingleDevice()
    return MeshPlacement(made, Layout() if layout is None else layout)
