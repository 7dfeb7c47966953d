"""What a run of several processes asks for beside one of a single process: one start, one voice."""

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from telic import tree
from telic.compose.recording import RunFile
from telic.errors import ContractError, ProcessError
from telic.handlers import Checkpoint
from telic.loop.attachments import Attachment
from telic.loop.ports import Placement
from telic.types import Batch

_VOICES = ("telic.display", "telic.trackers", RunFile.__module__)
"""Modules whose handlers write: only process 0's do."""


class Shared(Protocol):
    """The part of what a loop was given that processes must share."""

    @property
    def placement(self) -> Placement: ...

    @property
    def attachments(self) -> tuple[Attachment, ...]: ...


class Asked(Protocol):
    """The part of what a call of `run` asks for that processes must share."""

    @property
    def epochs(self) -> int | None: ...

    @property
    def steps(self) -> int | None: ...

    @property
    def iterations(self) -> int | None: ...


_Parts = TypeVar("_Parts", bound=Shared)


def together(parts: _Parts) -> _Parts:
    """Give what a loop was given as this process of several runs it: all but process 0 say and record nothing.

    Raises:
      ContractError: There are several processes and no mesh, or a handler writes what only one process has.
    """
    count = parts.placement.processes.count
    if count == 1:
        if jax.process_count() > 1:
            raise ContractError(
                f"this program runs as {jax.process_count()} processes, and this loop as one: give the trainer or "
                "evaluator mesh=telic.MeshSpec(), or a loop of your own step .drive(mesh=telic.MeshSpec())"
            )
        return parts
    if any(isinstance(_owner(a), Checkpoint) for a in parts.attachments):
        raise ContractError(
            f"loop.checkpoint writes a file of one process, and there are {count}: give checkpoints="
            "telic.Checkpoints('runs/name') to the trainer"
        )
    if parts.placement.processes.index == 0:
        return parts
    return replace(parts, listener=None, profile=None, recorders=())  # pyright: ignore[reportArgumentType, reportCallIssue, reportUnknownVariableType] a dataclass


def heard(parts: Shared) -> tuple[Attachment, ...]:
    """Give a loop's handlers; those that write are still in all processes but the first.

    They stay attached, so that iterations are grouped alike everywhere.
    """
    if parts.placement.processes.index == 0:
        return parts.attachments
    return tuple(
        replace(a, handler=_silent) if type(_owner(a)).__module__.startswith(_VOICES) else a for a in parts.attachments
    )


def check_same_start(parts: Shared, first: Batch, request: Asked) -> None:
    """Raise where processes begin with batches of other shapes, or were asked for other runs.

    Raises:
      ProcessError: They do; the field and the processes are named.
    """
    beside = parts.placement.processes
    if beside.count == 1:
        return
    names = tree.leaf_names(first) or ["batch"]
    shapes = [
        f"{n or 'batch'} {x.dtype}{list(np.shape(x))}" for n, x in zip(names, jax.tree.leaves(first), strict=True)
    ]
    mine: dict[str, Any] = {
        "the first batch": ", ".join(shapes),
        "epochs": request.epochs,
        "steps": request.steps,
        "iterations": request.iterations,
        "handlers": ", ".join(f"{a.event}:{a.name}" for a in parts.attachments),
        "share of the data": f"of {parts.placement.partition[1]}",
    }
    told = beside.exchange("the start of a run", mine)
    for field, value in told[0].items():
        others = {index: other[field] for index, other in enumerate(told) if other[field] != value}
        if others:
            index, other = next(iter(others.items()))
            raise ProcessError(
                f"the processes do not begin the same run: {field} is {value!r} in process 0 and {other!r} in process "
                f"{index}. Every process must run the same program with the same settings, and read an equal share of "
                "each batch"
            )


def _owner(attachment: Attachment) -> Any:
    return getattr(attachment.handler, "__self__", attachment.handler)


def _silent(state: Any) -> None:
    """Say nothing: process 0 does."""
    del state
