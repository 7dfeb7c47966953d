"""Where arrays lie on a mesh of devices: the mesh as a value, and rules from names of leaves to its axes."""

from telic.axes import AXES, BATCH_AXES, constrain
from telic.shard.layout import Layout
from telic.shard.meshes import MeshSpec, mesh_sizes, whole_mesh
from telic.shard.table import Table, logical_axes

__all__ = ["AXES", "BATCH_AXES", "Layout", "MeshSpec", "Table", "constrain", "logical_axes", "mesh_sizes", "whole_mesh"]
