"""Train on one device and on eight: the rate of each update, and what was compiled after the first one."""

import json
import logging
from typing import Any

import jax
import numpy as np

import telic
from tests.faults.small import MODEL

UPDATES, WARMUP = 16, 8


def trained(mesh: telic.MeshSpec | None) -> dict[str, Any]:
    """Give the rate of each update and the programs that were compiled after the first batch."""
    x = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
    schedule = telic.optimizers.warmup_cosine(0.1, warmup=WARMUP, steps=UPDATES)
    loop = telic.Trainer(
        telic.supervised(MODEL, "mean_squared_error"), telic.optimizers.adam(schedule), key=0, accumulate=2, mesh=mesh
    ).loop(log=0, fuse=False)
    compiled: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: compiled.append(record.getMessage())
    rates: list[float] = []

    def look(state: telic.LoopState) -> None:
        rates.append(float(state.step_state.opt_state.hyperparams["learning_rate"]))
        if len(rates) == 1:
            compiled.clear()

    logging.getLogger("jax").addHandler(handler)
    with jax.log_compiles(True):
        final = loop.handle_event("step_completed", look).run([(x, x)] * 8, steps=UPDATES)
    logging.getLogger("jax").removeHandler(handler)
    later = [text.split()[1] for text in compiled if text.startswith("Compiling")]
    return {"rates": rates, "later": later, "updates": int(final.step_state.updates)}


if __name__ == "__main__":
    print(json.dumps({"one": trained(None), "eight": trained(telic.MeshSpec()), "devices": jax.device_count()}))
