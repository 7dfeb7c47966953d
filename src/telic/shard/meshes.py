"""A mesh as plain numbers: how many devices along each axis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from telic.axes import AXES


@dataclass(frozen=True)
class MeshSpec:
    """How many devices lie along each axis of a mesh.

    Rows of a batch are split over `data`, `fsdp` and `expert`. The state is split over `fsdp` and, where a `Layout`
    says so, over `tensor`, `expert` and `sequence`. What is computed does not depend on the numbers, up to rounding.

    Attributes:
      data: Copies of the model; -1 takes the devices that the other axes leave.
      fsdp: Devices that share one copy of the parameters and optimizer state, and put a layer together when they use
        it.
      tensor: Devices that share the work of one layer.
      sequence: Devices that share the positions of one sequence.
      expert: Devices that share the experts of a mixture.
    Raises:
      ValueError: A number is neither positive nor -1, or two are -1.
    Example:
      >>> MeshSpec(data=-1, fsdp=4).sizes(8)
      {'data': 2, 'fsdp': 4, 'expert': 1, 'sequence': 1, 'tensor': 1}
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
                raise ValueError(
                    f"MeshSpec {field.name} is a number of devices, or -1 for those the other axes leave, got {value!r}"
                )
        if sum(getattr(self, f.name) == -1 for f in fields(self)) > 1:
            raise ValueError(f"one axis of a MeshSpec may be -1, got {self}: give the size of all but one")

    def sizes(self, devices: int) -> dict[str, int]:
        """Give the size of each axis on a number of devices.

        Raises:
          ValueError: The axes do not use exactly that many.
        """
        sizes: dict[str, int] = {axis: getattr(self, axis) for axis in AXES}
        rest = math.prod(size for size in sizes.values() if size != -1)
        shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
        if -1 not in sizes.values():
            if rest != devices:
                raise ValueError(f"{shown} uses {rest} devices and there are {devices}; make one axis -1, or change it")
            return sizes
        if devices % rest:
            raise ValueError(f"{shown} needs a multiple of {rest} devices and there are {devices}")
        return {axis: devices // rest if size == -1 else size for axis, size in sizes.items()}

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Give the mesh of these devices, by default of all there are, in every process.

        Raises:
          ValueError: The axes do not use exactly these devices.
        """
        found = jax.devices() if devices is None else list(devices)
        sizes = self.sizes(len(found))
        shape = tuple(sizes[axis] for axis in AXES)
        if all(device.platform == "tpu" for device in found):
            # The links of a TPU are a grid: neighbours on the mesh should be neighbours there.
            placed = mesh_utils.create_device_mesh(shape, found)
        else:
            placed = np.array(found, dtype=object).reshape(shape)
        return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def whole_mesh(mesh: Mesh) -> Mesh:
    """Give a mesh with all axes: those that it lacks are 1.

    Raises:
      ValueError: It has an axis of another name.
    """
    sizes = mesh_sizes(mesh)
    if tuple(mesh.axis_names) == AXES:
        return mesh
    order = sorted(range(mesh.devices.ndim), key=lambda i: AXES.index(str(mesh.axis_names[i])))
    devices = np.transpose(mesh.devices, order).reshape(tuple(sizes.values()))
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Give the size of each axis of a mesh.

    Raises:
      ValueError: It has an axis of another name.
    """
    sizes: Mapping[str, int] = dict(mesh.shape)
    unknown = [axis for axis in sizes if axis not in AXES]
    if unknown:
        raise ValueError(f"a mesh has the axes {', '.join(AXES)}, got {', '.join(map(str, sizes))}; use MeshSpec.build")
    return {axis: sizes.get(axis, 1) for axis in AXES}
