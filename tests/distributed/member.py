"""A training program as its author writes it, for `telic launch`, with a fault on request: its argument is JSON."""

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
from telic.placement import ManyProcesses
from tests.distributed.problems import BATCH, PROBLEMS, train, trainer


def digest(state: Any) -> str:
    """Give the SHA-256 of every array of a state."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        whole = leaf if leaf.is_fully_replicated else multihost_utils.process_allgather(leaf, tiled=True)
        found.update(np.ascontiguousarray(np.asarray(whole)).tobytes())
    return found.hexdigest()


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


def run(asked: Any) -> Any:
    """Train with checkpoints; give the digest of the final state and the losses by step."""
    problem = PROBLEMS[asked["problem"]]()
    mesh = None if asked["mesh"] is None else telic.MeshSpec(**asked["mesh"])
    made = trainer(problem, mesh, checkpoints=telic.Checkpoints(asked["directory"], every=asked["every"]))
    losses: dict[int, float] = {}
    loop = made.loop(log=0)
    if "fault" in asked:
        loop.handle_event("step_completed", fault(**asked["fault"]))
    loop.handle_event("step_completed", lambda s: losses.update({s.steps: s.metrics["loss"]}), telic.every(2))
    end = loop.run(columns(problem.data, batch=asked.get("batch", BATCH), seed=3), steps=asked["steps"])
    return {"digest": digest(end.step_state), "losses": losses}


def unequal() -> None:
    """Give the processes batches of other sizes."""
    problem = PROBLEMS["decoder"]()
    rows = 8 if jax.process_index() == 0 else 4
    batches = [{"tokens": problem.data["tokens"][:rows]}]
    trainer(problem, telic.MeshSpec()).fit(lambda epoch: batches, steps=2, log_every=0)


def late() -> None:
    """Come late in one process."""
    if jax.process_index() == 1:
        time.sleep(8)
    ManyProcesses(patience_seconds=2).exchange("a late one", 0)


def main(asked: Any) -> None:
    match asked["what"]:
        case "train":
            result = train(PROBLEMS[asked["problem"]](), telic.MeshSpec(**asked["mesh"]), asked["steps"])
        case "run":
            result = run(asked)
        case "unequal":
            result = unequal()
        case _:
            result = late()
    Path(f"{asked['out']}.{jax.process_index()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
