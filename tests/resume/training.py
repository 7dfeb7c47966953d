"""A training script as people write one, for `telic verify-resume` and `telic replay`: it knows nothing of them."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import telic

seen = 0


def halve(state: telic.LoopState) -> Any:
    """Act at the third call in this process: the fault is that no checkpoint has the count."""
    global seen
    seen += 1
    if seen != 3:
        return None
    step_state = state.step_state
    halved = jax.tree.map(lambda leaf: leaf / 2, step_state.variables)
    return state.replace(step_state=step_state.replace(variables=halved))


def main(*faults: str) -> None:
    """Train, with the faults that were asked for."""
    if "fails" in faults:
        raise RuntimeError("a bug of the program's own")
    x = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
    data = telic.data.columns({"inputs": x, "targets": x.sum(axis=1, keepdims=True)}, batch=4)
    model = (lambda key, x: {"w": jnp.full((2, 1), 0.1)}, lambda params, x: x @ params["w"])
    objective = telic.supervised(model, "mean_squared_error")
    checkpoints = None if "unsaved" in faults else telic.Checkpoints("runs/first", every=2, keep=9)
    trainer = telic.Trainer(objective, "adam", key=0, checkpoints=checkpoints)
    loop = trainer.loop(log=0, resume="never" if "never" in faults else "auto")
    if "counts" in faults:
        loop.handle_event("iteration_completed", halve)
    if "records" in faults:
        loop.record("metrics.jsonl", interval=2)
    loop.run(data, epochs=2)


if __name__ == "__main__":
    main(*sys.argv[1:])
