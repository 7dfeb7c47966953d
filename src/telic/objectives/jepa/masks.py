"""Multi-block masks: which patches are seen and which are predicted, drawn inside the compiled step.

Shapes are static, so every target block has one area and every context one number of patches. What varies is where
blocks lie, which of the shapes of that area they have, and which patches of what is left become context.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic.errors import ShapeError
from telic.types import Array, Key


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masks:
    """Patches by index, in raster order and ascending.

    Attributes:
      context: Seen patches, int32 [batch, context].
      targets: Patches of each block to predict, int32 [batch, blocks, patches].
    """

    context: Any
    targets: Any


@dataclass(frozen=True)
class MultiBlockMask:
    """Blocks to predict, and a context in none of them. Make one with `for_grid`.

    Attributes:
      grid: Patches along each axis: (rows, columns), or (frames, rows, columns) of a video.
      num_targets: Blocks to predict.
      target_shapes: Shapes a block may have, one area all.
      context_shapes: Shapes of the block that the context is drawn from first.
      context_size: Patches of the context: as many as are left when no two blocks overlap.
    """

    grid: tuple[int, ...]
    num_targets: int
    target_shapes: tuple[tuple[int, ...], ...]
    context_shapes: tuple[tuple[int, ...], ...]
    context_size: int

    @staticmethod
    def for_grid(
        grid: tuple[int, ...],
        *,
        num_targets: int = 4,
        target_scale: tuple[float, float] = (0.15, 0.2),
        aspect_ratio: tuple[float, float] = (0.75, 1.5),
        context_scale: tuple[float, float] = (0.85, 1.0),
        temporal_scale: tuple[float, float] = (1.0, 1.0),
        min_context: int = 1,
    ) -> "MultiBlockMask":
        """Give the masks of a grid: of the areas in the target scale the one that most shapes have.

        Args:
          grid: (rows, columns) of patches, or (frames, rows, columns) of tubelets.
          num_targets: Blocks to predict, which may overlap.
          target_scale: Part of the rows × columns that a block covers.
          aspect_ratio: Rows over columns of a block.
          context_scale: Part of the rows × columns that the context's block covers.
          temporal_scale: Part of the frames that a block spans.
          min_context: Fewest patches of a context.
        Raises:
          ShapeError: No block fits, or the blocks leave too little context.
        Source: Assran et al. 2023 section 3; Bardes et al. 2024 for videos.
        """
        if len(grid) not in (2, 3) or min(grid) < 1:
            raise ShapeError(f"a grid is (rows, columns) or (frames, rows, columns) of patches, got {grid}")
        if num_targets < 1:
            raise ValueError(f"num_targets must be at least 1, got {num_targets}")
        spans = [n for n in range(1, grid[0] + 1) if _within(n / grid[0], temporal_scale)] if len(grid) == 3 else [None]
        flat = _blocks(grid[-2:], target_scale, aspect_ratio)
        shapes = [block if n is None else (n, *block) for n in spans for block in flat]
        if not shapes:
            raise ShapeError(
                f"no block of {target_scale[0]:g} to {target_scale[1]:g} of a grid of {grid} patches has rows over "
                f"columns in {aspect_ratio}; take smaller patches, or a wider target_scale or aspect_ratio"
            )
        areas = Counter(math.prod(shape) for shape in shapes)
        area = max(areas, key=lambda a: (areas[a], a))
        left = math.prod(grid) - num_targets * area
        if left < min_context:
            raise ShapeError(
                f"{num_targets} blocks of {area} patches leave {max(left, 0)} of the {math.prod(grid)} patches of a "
                f"grid of {grid} as context, and at least {max(min_context, 1)} are needed; take fewer or "
                "smaller targets"
            )
        whole = (grid[0],) if len(grid) == 3 else ()
        rows = [(*whole, *block) for block in _blocks(grid[-2:], context_scale, (0.0, math.inf))]
        chosen = tuple(shape for shape in shapes if math.prod(shape) == area)
        return MultiBlockMask(tuple(grid), num_targets, chosen, tuple(rows) or (tuple(grid),), left)

    @property
    def num_patches(self) -> int:
        """Patches of the grid."""
        return math.prod(self.grid)

    @property
    def target_size(self) -> int:
        """Patches of one target block."""
        return math.prod(self.target_shapes[0])

    def draw(self, key: Key, rows: int) -> Masks:
        """Draw masks for each of some examples, independent of each other.

        Targets lie anywhere. The context is drawn at random from the patches of its block that are in no target, and
        from those beside the block where too few are left: no patch is favoured by its place.
        """
        target_key, context_key, order_key = jax.random.split(key, 3)
        start, dims = self._place(target_key, (rows, self.num_targets), self.target_shapes)
        offsets = jnp.arange(self.target_size)
        places = [start[..., -1:] + offsets % dims[..., -1:]]
        stride = dims[..., -1:]
        for axis in range(len(self.grid) - 2, -1, -1):
            places.insert(0, start[..., axis, None] + (offsets // stride) % dims[..., axis, None])
            stride = stride * dims[..., axis, None]
        targets = jnp.ravel_multi_index(tuple(places), self.grid, mode="clip").astype(jnp.int32)
        covered = jnp.zeros((rows, self.num_patches), bool)
        covered = covered.at[jnp.arange(rows)[:, None], targets.reshape(rows, -1)].set(True)
        start, dims = self._place(context_key, (rows,), self.context_shapes)
        where = np.stack(np.unravel_index(np.arange(self.num_patches), self.grid), axis=-1)
        inside = ((where >= start[:, None]) & (where < (start + dims)[:, None])).all(axis=-1)
        # Uniform in [0, 1): the block's patches come first, covered ones last.
        order = jax.random.uniform(order_key, covered.shape) + inside - 2.0 * covered
        _, context = jax.lax.top_k(order, self.context_size)
        return Masks(jnp.sort(context, axis=-1).astype(jnp.int32), targets)

    def _place(self, key: Key, shape: tuple[int, ...], shapes: tuple[tuple[int, ...], ...]) -> tuple[Array, Array]:
        """Draw (first corner, extent) of blocks, int [*shape, axes]."""
        which, where = jax.random.split(key)
        dims = jnp.asarray(shapes)[jax.random.randint(which, shape, 0, len(shapes))]
        room = jnp.asarray(self.grid) - dims + 1
        start = jnp.floor(jax.random.uniform(where, dims.shape) * room).astype(dims.dtype)
        # The product can round up to the room itself.
        return jnp.minimum(start, room - 1), dims


def _blocks(grid: tuple[int, ...], scale: tuple[float, float], aspect: tuple[float, float]) -> list[tuple[int, int]]:
    area = math.prod(grid)
    return [
        (h, w)
        for h in range(1, grid[0] + 1)
        for w in range(1, grid[1] + 1)
        if _within(h * w / area, scale) and _within(h / w, aspect)
    ]


def _within(value: float, ends: tuple[float, float]) -> bool:
    return ends[0] - 1e-9 <= value <= ends[1] + 1e-9
