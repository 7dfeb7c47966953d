"""A training program as its author writes it, for `telic launch`, in which one process goes wrong: what, is JSON."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import telic
from telic.data import columns
from tests.distributed.problems import BATCH, decoder, trainer

EVERY, STEPS = 4, 12
"""Updates between the saves of the run, and updates in all."""

PAIR = telic.MeshSpec(data=1, fsdp=2)
"""The mesh of two processes with one device each."""


def digest(state: Any) -> str:
    """Give the SHA-256 of every array of a state."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        whole = leaf if leaf.is_fully_replicated else multihost_utils.process_allgather(leaf, tiled=True)
        found.update(np.ascontiguousarray(np.asarray(whole)).tobytes())
    return found.hexdigest()


def run(directory: Path, mesh: telic.MeshSpec | None, handler: Any = None, *, saves: bool = True) -> Any:
    """Train a decoder, with checkpoints as a rule; give the digest of the final state and the losses by step."""
    problem = decoder()
    made = trainer(problem, mesh, checkpoints=telic.Checkpoints(directory, every=EVERY) if saves else None)
    losses: dict[int, float] = {}
    loop = made.loop(log=0)
    if handler is not None:
        loop.handle_event("step_completed", handler)
    loop.handle_event("step_completed", lambda s: losses.update({s.steps: s.metrics["loss"]}), telic.every(2))
    end = loop.run(columns(problem.data, batch=BATCH, seed=3), steps=STEPS)
    return {"digest": digest(end.step_state), "losses": losses}


def fault(kind: str, rank: int, step: int) -> Any:
    """Give the handler that goes wrong in one process after a step."""

    def act(state: Any) -> None:
        if jax.process_index() != rank or state.steps != step:
            return
        if kind == "raise":
            raise RuntimeError("this handler fails in one process")
        numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
        os.kill(os.getpid(), numbers[kind])
        if kind == "term":
            # JAX looks for the signal once a second; these steps would all be done by then.
            time.sleep(4)

    return act


def main(asked: Any) -> None:
    directory = Path(asked.pop("directory"))
    saves = asked.pop("saves", True)
    run(directory, PAIR, fault(**asked), saves=saves)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
