"""A layout: which dimension of which leaf lies over which axes of a mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from telic.axes import AXES, Axes
from telic.errors import closest
from telic.shard.parts import axes_of, num_bytes, num_parts
from telic.shard.table import Table, tabulate
from telic.tree import as_filter, paths

Dims: TypeAlias = tuple[Axes, ...]
"""Axes by dimension; those after the last are whole."""

STATE_AXES = ("fsdp", "tensor", "expert", "sequence")
"""Axes that parts of a state may lie over."""


@dataclass(frozen=True)
class Layout:
    """Rules for where the parts of a state lie.

    A leaf is laid out by the first of these that knows it: a rule whose glob matches its name, the names that the model
    gives its dimensions, or the default, its largest dimension that `fsdp` divides. Optimizer state, moving average and
    gradient sums lie as the parameter that they belong to.

    Attributes:
      rules: Axes by dimension, by globs over names such as ``params/**/kernel``: ``{"params/mlp/**": ("fsdp",
        "tensor")}``. The first that matches holds, and it is the whole truth for its leaves.
      logical: Axes by the names that a model gives the dimensions of its parameters (``nn.with_logical_partitioning``),
        such as ``{"embed": "fsdp", "mlp": "tensor"}``; None as value leaves a dimension whole.
      smallest: Leaves with fewer elements stay whole by default: to gather them costs more than to keep them.
      allow_replicated: Share of the bytes of larger leaves that may be whole on every device.
    Raises:
      ValueError: An axis is unknown, or used for two dimensions of one leaf.
    Example:
      >>> layout = Layout({"params/**/kernel": ("fsdp", "tensor")})
      >>> tuple(layout.spec("params/dense/kernel", (8, 16), {"fsdp": 4, "tensor": 2}))
      ('fsdp', 'tensor')
      >>> tuple(layout.spec("params/dense/bias", (4096,), {"fsdp": 4, "tensor": 2}))
      ('fsdp',)
    """

    rules: Mapping[str, Dims] = field(default_factory=dict[str, Dims])
    logical: Mapping[str, Axes] = field(default_factory=dict[str, Axes])
    smallest: int = 1024
    allow_replicated: float = 0.02

    def __post_init__(self) -> None:
        for what in ("rules", "logical"):
            if not isinstance(getattr(self, what), Mapping):
                raise TypeError(
                    f"Layout {what} is a mapping, such as {{'params/**/kernel': ('fsdp', 'tensor')}} for rules or "
                    f"{{'embed': 'fsdp'}} for logical, got {getattr(self, what)!r}"
                )
        for pattern, dims in self.rules.items():
            paths(pattern)
            if not isinstance(dims, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
                raise ValueError(
                    f"Layout rules give a tuple with the axes of each dimension, such as (None, 'tensor'); "
                    f"{pattern!r} has {dims!r}"
                )
            _check_axes(f"the rule {pattern!r}", dims)
        for name, axes in self.logical.items():
            _check_axes(f"logical {name!r}", (axes,))
        if not 0 <= self.allow_replicated <= 1:
            raise ValueError(f"allow_replicated is a share from 0 to 1, got {self.allow_replicated!r}")
        if isinstance(self.smallest, bool) or self.smallest < 1:
            raise ValueError(f"smallest is a number of elements, at least 1, got {self.smallest!r}")

    def spec(
        self, name: str, shape: Sequence[int], sizes: Mapping[str, int], logical: Sequence[str | None] | None = None
    ) -> PartitionSpec:
        """Give the axes that each dimension of one leaf lies over.

        Args:
          name: The leaf's name, below the variables.
          shape: Its shape.
          sizes: Size of each axis.
          logical: Names of its dimensions, where its model gives them.
        Raises:
          ValueError: A rule does not fit the shape; the leaf, dimension and axes are named.
        """
        for pattern, dims in self.rules.items():
            if as_filter(pattern)(name):
                return _fitted(name, shape, dims, sizes, f"the rule {pattern!r}")
        if logical is not None and self.logical:
            unknown = sorted({n for n in logical if n is not None and n not in self.logical})
            if unknown:
                raise ValueError(
                    f"{name} has the dimensions {tuple(logical)}, and Layout(logical=) says nothing of "
                    f"{', '.join(unknown)}.{closest(unknown[0], self.logical)} Give each an axis, or None to leave it "
                    "whole"
                )
            dims = tuple(None if n is None else self.logical[n] for n in logical)
            return _fitted(name, shape, dims, sizes, f"its dimensions {tuple(logical)}")
        return self.default(shape, sizes)

    def default(self, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
        """Give the spec of a leaf that no rule knows."""
        ways = sizes.get("fsdp", 1)
        fitting = [i for i, n in enumerate(shape) if n and n % ways == 0]
        if ways == 1 or math.prod(shape) < self.smallest or not fitting:
            return PartitionSpec()
        # The last of equals: it lies together in memory.
        chosen = max(fitting, key=lambda i: (shape[i], i))
        return PartitionSpec(*[None] * chosen, "fsdp")

    def specs(
        self,
        shapes: Mapping[str, Sequence[int]],
        sizes: Mapping[str, int],
        logical: Mapping[str, Sequence[str | None]] | None = None,
    ) -> dict[str, PartitionSpec]:
        """Give the specs of a tree of variables, by name.

        Raises:
          ValueError: A glob names no leaf, or a rule does not fit.
        """
        for pattern in self.rules:
            keep = as_filter(pattern)
            if not any(map(keep, shapes)):
                stem = pattern.replace("/**", "").replace("**/", "").replace("*", "")
                raise ValueError(
                    f"the Layout rule {pattern!r} names no leaf.{closest(stem, shapes)} Leaves: "
                    f"{', '.join(list(shapes)[:12])}{', ...' if len(shapes) > 12 else ''}"
                )
        named = logical or {}
        return {name: self.spec(name, shape, sizes, named.get(name)) for name, shape in shapes.items()}

    def check_replicated(
        self, shapes: Mapping[str, Any], specs: Mapping[str, PartitionSpec], sizes: Mapping[str, int]
    ) -> None:
        """Refuse a layout that leaves more of the larger leaves whole than is allowed.

        Args:
          shapes: Shape structs by name.
          specs: Their specs.
          sizes: Size of each axis.
        Raises:
          ValueError: It does; the largest of them are named.
        """
        if all(sizes.get(axis, 1) == 1 for axis in STATE_AXES):
            return
        large = {name: leaf for name, leaf in shapes.items() if math.prod(leaf.shape) >= self.smallest}
        whole = {name: leaf for name, leaf in large.items() if num_parts(specs[name], sizes) == 1}
        total, kept = (sum(map(num_bytes, leaves.values())) for leaves in (large, whole))
        if total and kept > self.allow_replicated * total:
            worst = sorted(whole, key=lambda name: -num_bytes(whole[name]))[:4]
            shown = ", ".join(f"{name} {list(whole[name].shape)}" for name in worst)
            raise ValueError(
                f"this layout keeps {kept / total:.1%} of the state's bytes whole on every device, and "
                f"{self.allow_replicated:.0%} are allowed: {shown}{', ...' if len(whole) > 4 else ''}. Give rules for "
                "them, sizes that the axes divide, or Layout(allow_replicated=...)"
            )

    def explain(self, objective: Any, *, mesh: Any = None, devices: int | None = None, example: Any = None) -> Table:
        """Give a table of an objective's variables: their specs, their bytes on a device, and what is whole on each.

        Nothing is computed and no device is needed. Print it, or read its `lines`; its last line says why a run would
        refuse the layout, where it would.

        Args:
          objective: The objective.
          mesh: A `MeshSpec` or a mesh; by default all devices along `fsdp`.
          devices: Number of devices the mesh would have; by default those there are.
          example: A batch whose shapes the objective learns; not needed when it knows them.
        """
        return tabulate(self, objective, mesh=mesh, devices=devices, example=example)


def _check_axes(what: str, dims: Dims) -> None:
    used: list[str] = []
    for axes in dims:
        for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
            if axis not in AXES:
                raise ValueError(f"{what} names the axis {axis!r}.{closest(str(axis), AXES)} Axes: {', '.join(AXES)}")
            used.append(axis)
    if len(set(used)) < len(used):
        raise ValueError(f"{what} uses an axis twice, got {dims}: each dimension needs axes of its own")


def _fitted(name: str, shape: Sequence[int], dims: Dims, sizes: Mapping[str, int], why: str) -> PartitionSpec:
    """Give a rule as the spec of one leaf, checked against its shape."""
    if len(dims) > len(shape):
        raise ValueError(f"{name} has the shape {list(shape)}, and {why} gives axes for {len(dims)} dimensions: {dims}")
    _check_axes(f"{why} of {name}", dims)
    for i, axes in enumerate(axes_of(PartitionSpec(*dims))):
        ways = math.prod(sizes.get(axis, 1) for axis in axes)
        if shape[i] % ways:
            raise ValueError(
                f"{why} splits dimension {i} of {name}, {list(shape)}, over {' x '.join(axes)} = {ways} devices, which "
                f"does not divide {shape[i]}; give another rule for this leaf, or another mesh"
            )
    return PartitionSpec(*dims)
