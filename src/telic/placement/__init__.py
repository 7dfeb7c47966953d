"""Where batches and states live: on one device, or on a mesh that one process or several hold."""

from typing import Any

import jax
from jax.sharding import Mesh

from telic.placement.mesh import MeshPlacement
from telic.placement.processes import ONE, ManyProcesses, OneProcess, Processes, all_processes
from telic.placement.single import SingleDevice
from telic.shard import Layout

__all__ = [
    "ONE",
    "ManyProcesses",
    "MeshPlacement",
    "OneProcess",
    "Processes",
    "SingleDevice",
    "all_processes",
    "placement_for",
]


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
    made = mesh if isinstance(mesh, Mesh) else mesh.build()
    if made.size == 1 and jax.process_count() == 1 and made.devices.flat[0] == jax.devices()[0]:
        return SingleDevice()
    return MeshPlacement(made, Layout() if layout is None else layout)
