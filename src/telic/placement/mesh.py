"""Where batches and states live on a mesh: rows over its data axes, the state as the layout says."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from telic import tree
from telic.axes import BATCH_AXES, fitting_axes
from telic.errors import ShapeError
from telic.loop.ports import Processes, Source
from telic.placement.joining import JoinedBatches, JoinedSource
from telic.placement.processes import all_processes
from telic.placement.single import copied
from telic.shard import Layout, logical_axes, mesh_sizes
from telic.types import Batch, PyTree


class MeshPlacement:
    """Placement on a mesh.

    Args:
      mesh: The mesh; the same in every process.
      layout: Where the parts of the state lie.
      beside: Processes of the run; by default those of this program.
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        *,
        beside: Processes | None = None,
    ):
        self.mesh = mesh
        self.layout = layout
        self.processes = all_processes() if beside is None else beside
        self._sizes = mesh_sizes(mesh)
        self._logical: Mapping[str, Sequence[str | None]] = {}
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._ways = math.prod(self._sizes[axis] for axis in BATCH_AXES)
        self.partition = _partition(NamedSharding(mesh, PartitionSpec(BATCH_AXES)), self._ways, self.processes)

    def learn(self, objective: Any) -> None:
        """Take note of the names that an objective's model gives the dimensions of its parameters."""
        if self.layout.logical:
            self._logical = logical_axes(objective)

    def on_mesh(self) -> AbstractContextManager[Any]:
        """Give a context in which what is traced knows the mesh: `telic.shard.constrain` works there."""
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which decodes and writes."""
        return self.processes.index == 0

    # -- batches -------------------------------------------------------------------------------------------------

    def put(self, batch: Batch, *, fresh: bool, stacked: bool = False) -> Batch:
        """Place this process's rows of a batch, each device's on it.

        Rows that the devices do not divide are split over fewer of them, and worked on by the rest as well.

        Args:
          batch: Arrays on the host; those that lie on the mesh already stay.
          fresh: Nobody writes to their memory again.
          stacked: There is one dimension in front of the rows.
        Raises:
          ShapeError: There are several processes, and the devices do not divide the rows.
        """
        return jax.tree.map(lambda leaf: self._put(leaf if fresh else copied(leaf), stacked), batch)

    def _put(self, leaf: Any, stacked: bool) -> Any:
        if self._is_placed(leaf):
            return leaf
        at = int(stacked)
        shape = self._whole_shape(np.shape(leaf), at)
        sharding = self.rows_of(shape, at)
        if self.processes.count == 1:
            return jax.device_put(leaf, sharding)
        if len(shape) > at and shape[at] % self._ways:
            raise ShapeError(
                f"a batch of {shape[at]} rows over all processes does not divide over {self._ways} devices; give "
                f"batches of a multiple of {self._ways}, and drop the remainder"
            )
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf), shape)

    def _is_placed(self, leaf: Any) -> bool:
        return isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1

    def rows_of(self, shape: Sequence[int], at: int = 0) -> NamedSharding:
        """Give the sharding of a batch's leaf: its rows over as many devices as divide them."""
        if len(shape) <= at:
            return self._everywhere
        dims: list[Any] = [None] * at + [fitting_axes(BATCH_AXES, shape[at], self._sizes)]
        sequence = self._sizes["sequence"]
        if sequence > 1 and len(shape) > at + 1 and shape[at + 1] % sequence == 0:
            dims.append("sequence")
        return NamedSharding(self.mesh, PartitionSpec(*dims))

    def rows(self, batch: Batch) -> PyTree:
        """Give where the leaves of a batch of all processes lie."""
        return jax.tree.map(lambda leaf: self.rows_of(np.shape(leaf)), batch)

    def _whole_shape(self, shape: Sequence[int], at: int = 0) -> tuple[int, ...]:
        """Give the shape over all processes of what this one has."""
        count = self.partition[1]
        return tuple(n * count if i == at else n for i, n in enumerate(shape))

    def whole(self, batch: Batch) -> Batch:
        """Give a batch of the shapes over all processes, whose values do not matter."""
        if self.partition[1] == 1:
            return batch
        return jax.tree.map(lambda x: x if self._is_placed(x) else _blank(self._whole_shape(np.shape(x)), x), batch)

    def share(self, batch: Batch) -> Batch:
        """Give a batch of this process's shapes for one of all processes, whose values do not matter."""
        count = self.partition[1]
        if count == 1:
            return batch
        return jax.tree.map(
            lambda x: _blank(tuple(n // count if i == 0 else n for i, n in enumerate(np.shape(x))), x), batch
        )

    def joined(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Give batches that every process has the same number of, rows of them that are left over included."""
        return batches if self.processes.count == 1 else JoinedBatches(self, batches)

    def joined_source(self, source: Source) -> Source:
        """Give the batches of a loop that evaluates, as `joined` gives those of a validation."""
        return source if self.processes.count == 1 else JoinedSource(self, source)

    def together(self, batch: Batch | None, like: Batch, rows: Sequence[int]) -> Batch:
        """Place a batch of which the processes hold shares of different sizes.

        Args:
          batch: This process's share; None where it has none.
          like: A batch of the same structure.
          rows: Rows that each process holds.
        """
        most = max(rows)
        first = [owner for owner, _ in _owners(self.processes.exchange("whose rows", self.partition[0]))]
        leaves, structure = jax.tree.flatten(like)
        given = [None] * len(leaves) if batch is None else structure.flatten_up_to(batch)
        placed: list[Any] = []
        for example, leaf in zip(leaves, given, strict=True):
            share = np.zeros((most, *np.shape(example)[1:]), np.asarray(example).dtype)
            if leaf is not None:
                share[: len(leaf)] = leaf
            shares = np.asarray(multihost_utils.process_allgather(share)).reshape(-1, *share.shape)
            value = np.concatenate([shares[owner][: rows[owner]] for owner in first])
            placed.append(self._spread(value, self.rows_of(value.shape, 0)))
        return structure.unflatten(placed)

    @property
    def divides(self) -> int:
        """What the rows of a batch over all processes must be a multiple of to be split over all devices."""
        return self._ways

    # -- values and states ---------------------------------------------------------------------------------------

    def gather(self, values: PyTree) -> PyTree:
        """Give values of all devices, whole, as NumPy arrays. Every process calls it, in the same order."""
        return jax.tree.map(_gathered, values)

    def settle(self, state: PyTree) -> PyTree:
        """Give a state with every leaf where the layout says; what lies there already is not copied."""
        shardings = self.shardings(state)
        return jax.tree.map(self._settled, state, shardings)

    def spread(self, values: PyTree) -> PyTree:
        """Give values that every process has whole on every device."""
        return jax.tree.map(lambda leaf: self._settled(leaf, self._everywhere), values)

    def scatter(self, values: PyTree) -> PyTree:
        """Give arrays that every process has whole in parts, each by its shape alone."""

        def placed(leaf: Any) -> Any:
            if not tree.is_array(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return leaf
            return self._settled(leaf, self._by_shape(np.shape(leaf)))

        return jax.tree.map(placed, values)

    def assembled(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], Any]) -> Any:
        """Give an array in parts by its shape alone, each part read in the process that will have it."""
        part: Any = read  # JAX's own type allows for None, which no array with dimensions gets
        return jax.make_array_from_callback(shape, self._by_shape(shape), part)

    def _by_shape(self, shape: tuple[int, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, self.layout.default(shape, self._sizes))

    def local(self, values: PyTree) -> PyTree:
        """Give values that are whole on every device as they are on one of this process."""
        return jax.tree.map(lambda x: x.addressable_data(0) if self._is_placed(x) else x, values)

    def near(self, value: Any) -> Any:
        """Give an array of which this process has every value; all processes call it, in the same order."""
        if not isinstance(value, jax.Array) or value.is_fully_addressable:
            return value
        if value.is_fully_replicated:
            return value.addressable_data(0)
        return multihost_utils.process_allgather(value, tiled=True)

    def _settled(self, leaf: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, jax.Array):
            if leaf.sharding == sharding:
                return leaf
            if self.processes.count == 1 or leaf.sharding.device_set == sharding.device_set:
                return jax.device_put(leaf, sharding)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                words = self._spread(np.asarray(jax.random.key_data(leaf)), self._everywhere)
                return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        elif not tree.is_array(leaf):
            # A Python number is typed by the step that uses it.
            return leaf
        return self._spread(np.asarray(leaf), sharding)

    def _spread(self, value: Any, sharding: NamedSharding) -> jax.Array:
        """Place a value that every process has whole."""
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def shardings(self, shapes: PyTree) -> PyTree:
        """Give where each leaf of a state lies.

        Args:
          shapes: Arrays or shape structs. In a training state the layout's rules speak of its variables; optimizer
            state, average and sums lie as the parameter whose name theirs end with.
        Raises:
          ValueError: A rule does not fit, or the layout keeps too much whole on every device.
        """
        leaves = tree.named_leaves(shapes)
        variables = {
            name.removeprefix(_VARIABLES): leaf for name, leaf in leaves.items() if name.startswith(_VARIABLES)
        }
        variables = variables or leaves
        specs = self.layout.specs({n: np.shape(x) for n, x in variables.items()}, self._sizes, self._logical)
        if any(hasattr(leaf, "shape") for leaf in variables.values()):
            arrays = {name: leaf for name, leaf in variables.items() if hasattr(leaf, "shape")}
            self.layout.check_replicated(arrays, specs, self._sizes)
        found = [self._of(name, leaf, variables, specs) for name, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    def _of(
        self, name: str, leaf: Any, variables: Mapping[str, Any], specs: Mapping[str, PartitionSpec]
    ) -> NamedSharding:
        shape = np.shape(leaf)
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key) or name.startswith(_RECORD):
            return self._everywhere
        words = name.split("/")
        for start in range(len(words)):
            end = "/".join(words[start:])
            for candidate in (end, f"params/{end}"):
                if candidate in specs and np.shape(variables[candidate]) == shape:
                    return NamedSharding(self.mesh, specs[candidate])
        return self._by_shape(shape)

    def pins(self, values: PyTree) -> PyTree:
        """Give where values lie, so that a program can be told to leave them there; others lie on every device."""
        return jax.tree.map(lambda x: x.sharding if self._is_placed(x) else self._everywhere, values)


_VARIABLES = "variables/"

_RECORD = "learner/rejections/"
"""What each process reads by itself when a run ends; with more than a thousand leaves its flags would be split too."""


def _owners(partitions: Sequence[int]) -> list[tuple[int, int]]:
    """Give (process, partition) of the first process of each share, in the order of the shares."""
    first: dict[int, int] = {}
    for process, share in enumerate(partitions):
        first.setdefault(share, process)
    return [(process, share) for share, process in sorted(first.items())]


def _partition(sharding: NamedSharding, ways: int, beside: Processes) -> tuple[int, int]:
    """Give (index, count) of the share of each batch that this process reads.

    Processes whose devices work on the same rows read the same share.

    Raises:
      ValueError: The mesh gives the processes parts that overlap.
    """
    if beside.count == 1:
        return 0, 1
    rows: dict[int, set[int]] = {}
    for device, (index, *_) in sharding.devices_indices_map((ways,)).items():
        rows.setdefault(device.process_index, set()).add(index.start or 0)
    shares = sorted({tuple(sorted(own)) for own in rows.values()})
    if sum(map(len, shares)) != ways or len({len(share) for share in shares}) != 1:
        raise ValueError(
            f"the mesh {dict(sharding.mesh.shape)} gives the {beside.count} processes rows that overlap in part; "
            "order its axes so that the devices of a process are neighbours, as MeshSpec does"
        )
    return shares.index(tuple(sorted(rows[beside.index]))), len(shares)


def _blank(shape: tuple[int, ...], like: Any) -> Any:
    """Give an array of a shape that takes no memory."""
    return np.broadcast_to(np.zeros((), np.asarray(like).dtype), shape)


def _gathered(value: Any) -> Any:
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return jax.device_get(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))
