"""Memory: microbatches that fit it, found from the compiled step and not by trial; what to do when it is used up."""

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from telic import tree
from telic.driver import compile_step
from telic.errors import ShapeError
from telic.loop.ports import Placement
from telic.loop.state import LoopState
from telic.profiling import Memory, byte_text, memory_of
from telic.train.step import TrainStep
from telic.types import Batch, PyTree

RECORD = "microbatch"
"""Name in `LoopState.handler_state` of the rows chosen, so that a continued run slices as the first one did."""

DEVICE_SHARE = 0.9
"""Share of a device's memory that a step may take: the rest is for evaluation, and for what falls between blocks."""

HOST_SHARE = 0.5
"""Share of the machine's memory where the device is the machine."""

_WAITING = 3
"""Further batches that wait for the device while a step runs."""


@dataclass(frozen=True)
class Budget:
    """Device memory that a step may use.

    Attributes:
      limit_bytes: State, batches and scratch together; None asks the device.
    """

    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        limit: Any = self.limit_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise TypeError(f"memory_limit_bytes must be a whole number of bytes, got {limit!r}")
        if limit is not None and limit < 1:
            raise ValueError(f"memory_limit_bytes must be at least 1, got {limit}")

    def limit(self, placement: Placement) -> int:
        """Give the bytes there are for a step on each device: those given, or most of what it has.

        Where the device is the machine, all devices of a mesh share what it has. Of several processes the least counts.
        """
        return min(placement.processes.exchange("the memory of a device", self._own_limit(placement)))

    def _own_limit(self, placement: Placement) -> int:
        if self.limit_bytes is not None:
            return self.limit_bytes
        found = _device_bytes()
        if found is not None:
            return int(DEVICE_SHARE * found)
        sharing = 1 if placement.shardings(()) is None else jax.local_device_count()
        return int(HOST_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / sharing)


def _device_bytes() -> int | None:
    """Give the memory of the default device, where it is one that says."""
    stats: Any = jax.local_devices()[0].memory_stats()
    limit = None if stats is None else stats.get("bytes_limit")
    return None if not limit else int(limit)


def fitted(program: TrainStep, batch: Batch, budget: Budget, state: LoopState, placement: Placement) -> TrainStep:
    """Give a step that slices its batches into the largest microbatches whose step fits a budget.

    The gradient of a batch is the same for any slicing, to float32 rounding. The rows chosen are noted in the state,
    and a state that has them noted is obeyed: each slice has its own key, so others would draw other random numbers.

    Args:
      program: The step, bound to its shapes.
      batch: A batch of all processes, of which the shapes are looked at.
      budget: What there is.
      state: Where the rows are noted.
      placement: Where state and batch lie: memory is that of one device. Its devices divide the slices.
    Raises:
      ShapeError: The batch has no rows to slice.
      ValueError: Not even one row at a time fits.
    """
    noted = state.handler_state.get(RECORD)
    rows = _rows(batch)
    if noted is None:
        shapes = tree.shape_structs(batch)
        start = jax.eval_shape(program.initial_state, program.objective.initializer, program.key)

        def need_of(size: int) -> int:
            return step_bytes(_sliced(program, size, rows), start, shapes, placement)

        chosen, _ = largest_fit(rows, need_of, budget.limit(placement), multiple=placement.divides)
        noted = state.handler_state[RECORD] = {"rows": chosen, "of": rows}
    return _sliced(program, int(noted["rows"]), int(noted["of"]))


def _sliced(program: TrainStep, size: int, rows: int) -> TrainStep:
    return replace(program, microbatch=None if size >= rows else size)


def _rows(batch: Batch) -> int:
    sizes = {jnp.shape(leaf)[0] if jnp.ndim(leaf) else None for leaf in jax.tree.leaves(batch)}
    (rows,) = sizes if len(sizes) == 1 else (None,)
    if not rows:
        shown = {name or "batch": jnp.shape(leaf) for name, leaf in tree.named_leaves(batch).items()}
        raise ShapeError(
            f"microbatch='auto' slices batches along the first dimension of every leaf, so all must have the same; got "
            f"{shown}"
        )
    return int(rows)


def step_bytes(program: TrainStep, state: PyTree, batch: Batch, placement: Placement) -> int:
    """Compile a step on shapes and give the bytes it needs on one device: state, batches and scratch.

    Raises:
      NotImplementedError: The backend does not say what a program needs.
    """
    memory = memory_of(compile_step(program, state, batch, placement))
    if memory is None:
        raise NotImplementedError(
            "this backend does not say what memory a program needs, so microbatch='auto' cannot choose: give a number"
        )
    return memory.peak_bytes + _WAITING * _num_bytes(batch) // placement.divides


def largest_fit(rows: int, need_of: Callable[[int], int], limit: int, *, multiple: int = 1) -> tuple[int, int]:
    """Give the largest divisor of `rows` whose need is within a limit, and that need in bytes.

    Divisors alone are tried, since a smaller last slice would be a second program inside the first; of these the
    multiples of a number, where it divides the rows. Need grows with the size, so that about log2 of their number are
    asked.

    Raises:
      ValueError: One row needs more than there is.
    """
    need = need_of(rows)
    if need <= limit:
        return rows, need
    least = multiple if rows % multiple == 0 else 1
    sizes = [d for d in range(least, rows, least) if rows % d == 0]
    found: tuple[int, int] | None = None
    low, high = 0, len(sizes) - 1
    while low <= high:
        middle = (low + high) // 2
        need = need_of(sizes[middle])
        if need <= limit:
            found, low = (sizes[middle], need), middle + 1
        else:
            high = middle - 1
    if found is None:
        raise ValueError(
            f"microbatch='auto': a step on {'one row' if least == 1 else f'{least} rows'} at a time needs "
            f"{byte_text(need)} on a device, and there are "
            f"{byte_text(limit)}: raise memory_limit_bytes, train fewer parameters (trainable=), or hold them in a "
            "narrower dtype (precision=)"
        )
    return found


def explain(error: BaseException, program: Any, batch: Any, memory: Memory | None) -> None:
    """Add to an error what to change, and by how much, where it says that the device's memory is used up.

    Args:
      error: What was raised.
      program: The run's step, where it was known already.
      batch: Shapes of a batch of it.
      memory: Memory of its program, once that was compiled.
    """
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        error.add_note(advice(str(error), program, batch, memory))


def advice(text: str, program: Any, batch: Any, memory: Memory | None) -> str:
    """Say what a run whose memory is used up needs, what there is, and what would fit; arguments as for `explain`."""
    limit = _device_bytes()
    asked = re.search(r"allocat\w*\s+(?:of\s+)?(\d+)", text)
    lines = ["The device's memory is used up"]
    if asked is not None:
        lines[0] += f": {byte_text(int(asked[1]))} more were asked for"
    if limit is not None:
        lines[0] += f", of {byte_text(limit)} that it has"
    if memory is not None:
        lines.append(
            f"A step needs {byte_text(memory.peak_bytes)}: {byte_text(memory.argument_bytes)} of state and batch, "
            f"{byte_text(memory.scratch_bytes)} of scratch, {byte_text(memory.result_bytes)} of results"
        )
    if isinstance(program, TrainStep):
        lines.append(_remedy(program, batch, memory, limit))
    return ". ".join(lines)


def _remedy(program: TrainStep, batch: Any, memory: Memory | None, limit: int | None) -> str:
    rows = tree.leading_dimension(batch) if batch is not None else None
    if not rows:
        return "Give smaller batches, or train fewer parameters (trainable=)"
    if program.accumulate > 1:
        return (
            f"Give batches of {max(1, rows // 2)} rows instead of {rows}, and accumulate={2 * program.accumulate} "
            f"instead of {program.accumulate}: half the scratch, the same update"
        )
    size = program.microbatch or rows
    least = "memory_limit_bytes=... and microbatch='auto' find the largest that fits"
    if memory is None or limit is None:
        return f"Give Trainer(microbatch={max(1, size // 2)}): the same update in half the scratch; {least}"
    # Sums of the slices' gradients are as large as what is trained; the rest of the scratch grows with the rows.
    start = jax.eval_shape(program.initial_state, program.objective.initializer, program.key)
    sums = _num_bytes(program.trained(start.variables))
    room = DEVICE_SHARE * limit - memory.argument_bytes - memory.result_bytes - 2 * sums
    growing = max(1, memory.scratch_bytes - sums)
    fits = int(size * room / growing)
    if fits < 1:
        return (
            f"State and gradients alone take {byte_text(memory.argument_bytes + 2 * sums)}, so smaller microbatches do "
            "not help: train fewer parameters (trainable=), hold them in a narrower dtype (precision=), take an "
            "optimizer with less state, or set keep_previous=False"
        )
    fits = min(fits, size - 1)
    best = next(d for d in range(max(1, fits), 0, -1) if rows % d == 0)
    return (
        f"Give Trainer(microbatch={best}) instead of {size} rows at once: the same update with about "
        f"{byte_text(int(growing * best / size) + sums)} of scratch; {least}"
    )


def _num_bytes(shapes: PyTree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes) if hasattr(x, "dtype"))
