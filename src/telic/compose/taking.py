"""What a save takes of a run that goes on: arrays that the next step cannot take away, and what the host keeps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic.checkpoints.parts import Held
from telic.loop.state import LoopState


def hold(leaf: Any) -> Any:
    """Give a leaf that the next step cannot take away: its buffer is donated to it.

    On the CPU it is a view, which waits for the step and copies nothing: the runtime copies a donated buffer that is
    still looked at. Elsewhere it is a copy on the device, which waits for nothing.
    """
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or not leaf.is_fully_addressable:
        return jnp.array(leaf, copy=True)
    if all(device.platform == "cpu" for device in leaf.devices()) and len(leaf.devices()) == 1:
        return np.asarray(leaf)
    return jnp.array(leaf, copy=True)


def is_in_parts(leaf: Any) -> bool:
    """Say whether no process has all of a leaf."""
    return isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def held_parts(leaf: jax.Array) -> Held:
    """Give those parts of a leaf that this process is to save: each is saved by one."""
    return Held(
        leaf.shape,
        leaf.dtype.name,
        [
            (
                tuple(one.indices(length)[0] for one, length in zip(shard.index, leaf.shape, strict=True)),
                hold(shard.data),
            )
            for shard in leaf.addressable_shards
            if shard.replica_id == 0
        ],
    )


def taken(state: LoopState) -> dict[str, Any]:
    """Give the host's part of a run, from a state between two events."""
    open_epoch = state.iteration > 0 and state.status is None
    accumulators = state.read_accumulators() if open_epoch and state.read_accumulators is not None else None
    return {
        "epoch": state.epoch,
        "max_epoch": state.max_epoch,
        "iteration": state.iteration,
        "max_iteration": state.max_iteration,
        "total_iterations": state.total_iterations,
        "max_steps": state.max_steps,
        "metrics": {n: v for n, v in state.metrics.added.items()} if open_epoch else {},
        "history": state.history,
        "times": state.times,
        "counts": state.counts.total,
        "epoch_counts": state.counts.epoch,
        "handler_state": state.handler_state,
        "status": state.status,
        "position": state.position,
        "accumulators": accumulators,
    }
