"""A layout as a table: leaves, specs, bytes on a device, and what is whole on each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from telic import tree
from telic.shard.meshes import MeshSpec, mesh_sizes
from telic.shard.parts import axes_of, num_bytes, num_parts


@dataclass(frozen=True)
class Line:
    """One leaf of a table.

    Attributes:
      name: Its name below the variables.
      shape: Its shape.
      dtype: Its dtype.
      spec: The axes that each dimension lies over.
      total_bytes: Bytes of all of it.
      device_bytes: Bytes of it on one device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    total_bytes: int
    device_bytes: int

    @property
    def is_replicated(self) -> bool:
        """Whether it is whole on every device."""
        return self.total_bytes == self.device_bytes


@dataclass(frozen=True)
class Table:
    """Where an objective's variables lie, by leaf; its text is the table.

    Attributes:
      lines: Leaves in the order of the tree.
      sizes: Size of each axis of the mesh.
      refusal: Why a run would refuse the layout; empty where it would not.
    """

    lines: tuple[Line, ...]
    sizes: Mapping[str, int]
    refusal: str = ""

    @property
    def device_bytes(self) -> int:
        """Bytes on one device."""
        return sum(line.device_bytes for line in self.lines)

    @property
    def total_bytes(self) -> int:
        """Bytes of all variables."""
        return sum(line.total_bytes for line in self.lines)

    @property
    def replicated(self) -> tuple[Line, ...]:
        """Leaves that are whole on every device."""
        return tuple(line for line in self.lines if line.is_replicated)

    def __str__(self) -> str:
        mesh = ", ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"
        rows = [("leaf", "shape", "spec", "bytes on a device")]
        rows += [(x.name, f"{x.dtype}{list(x.shape)}", _shown(x.spec), f"{x.device_bytes:,}") for x in self.lines]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)) for row in rows]
        kept = sum(line.device_bytes for line in self.replicated)
        return "\n".join(
            [
                f"mesh: {mesh}",
                *(line.rstrip() for line in text),
                f"{self.device_bytes:,} of {self.total_bytes:,} bytes on each device; {kept:,} of them in "
                f"{len(self.replicated)} leaves that are whole everywhere",
                *([f"a run would refuse it: {self.refusal}"] if self.refusal else []),
            ]
        )


class Rules(Protocol):
    """The part of a layout that a table needs."""

    def specs(
        self,
        shapes: Mapping[str, Sequence[int]],
        sizes: Mapping[str, int],
        logical: Mapping[str, Sequence[str | None]] | None = None,
    ) -> dict[str, PartitionSpec]: ...

    def check_replicated(
        self, shapes: Mapping[str, Any], specs: Mapping[str, PartitionSpec], sizes: Mapping[str, int]
    ) -> None: ...


def tabulate(layout: Rules, objective: Any, *, mesh: Any, devices: int | None, example: Any) -> Table:
    """Give the table of a layout; see `Layout.explain`."""
    if isinstance(mesh, Mesh):
        sizes = mesh_sizes(mesh)
    else:
        spec = MeshSpec(data=1, fsdp=-1) if mesh is None else mesh
        sizes = spec.sizes(jax.device_count() if devices is None else devices)
    bound = objective if example is None else objective.bind(example)
    shapes = tree.named_leaves(jax.eval_shape(bound.initializer, jax.random.key(0)))
    specs = layout.specs({name: leaf.shape for name, leaf in shapes.items()}, sizes, logical_axes(bound))
    lines = [
        Line(name, tuple(leaf.shape), str(leaf.dtype), specs[name], num_bytes(leaf), num_bytes(leaf) // parts)
        for name, leaf in shapes.items()
        for parts in [num_parts(specs[name], sizes)]
    ]
    try:
        layout.check_replicated(shapes, specs, sizes)
    except ValueError as error:
        return Table(tuple(lines), sizes, str(error))
    return Table(tuple(lines), sizes)


def logical_axes(objective: Any) -> Mapping[str, tuple[str | None, ...]]:
    """Give the names that an objective's model gives the dimensions of its parameters, by leaf."""
    found = getattr(objective, "logical_axes", None)
    return {} if found is None else found()


def _shown(spec: PartitionSpec) -> str:
    return ", ".join("·".join(axes) or "-" for axes in axes_of(spec)) or "whole"
