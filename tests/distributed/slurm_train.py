"""The program that the dry run of Slurm trains, as its author writes it: nothing in it speaks of processes.

But for one handler, which ends the job's time after its sixth update, in the first of its lives.
"""

import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

import telic
from telic.data import columns


def end_the_time(state: Any) -> None:
    if jax.process_index() == 0 and not Path("time_is_up").exists():
        Path("time_is_up").touch()
    if state.steps == 6 and not Path("requeued").exists():
        # JAX looks for a signal once a second; these steps would all be done by then.
        time.sleep(4)


def main() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 8)).astype(np.float32)
    data = columns({"inputs": inputs, "targets": inputs @ rng.normal(size=(8, 4)).astype(np.float32)}, batch=16, seed=1)
    trainer = telic.Trainer(
        telic.supervised(nn.Dense(4), "mean_squared_error"),
        telic.optimizers.adam(0.05),
        key=0,
        mesh=telic.MeshSpec(data=1, fsdp=-1),
        layout=telic.Layout(smallest=8, allow_replicated=1.0),
        checkpoints=telic.Checkpoints("runs/first", every=4),
    )
    losses: list[float] = []
    loop = trainer.loop(log=0)
    loop.handle_event("step_completed", lambda state: losses.append(state.metrics["loss"]))
    loop.handle_event("step_completed", end_the_time, telic.once(6))
    state = loop.run(data, steps=30).step_state
    kernel = state.variables["params"]["kernel"]
    result = {"updates": int(state.updates), "losses": losses, "shard": list(kernel.addressable_shards[0].data.shape)}
    Path(f"done.{jax.process_index()}").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
