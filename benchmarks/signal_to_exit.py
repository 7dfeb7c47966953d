"""How long a run takes from SIGTERM to its exit, with its state saved: ``python benchmarks/signal_to_exit.py``.

A run whose state has 40 or 100 MB is started as a process of its own, trains without saving, and gets SIGTERM; the
clock runs until the process is gone. One step, the time the signal may have to wait, is measured in the run itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import telic
from telic.checkpoints import points, verify

ROUNDS = 3


def train(directory: str, megabytes: int) -> None:
    # Sgd, so that the state is the weights: ten arrays.
    rows = megabytes * 10**6 // 10 // 4 // 500
    shapes = {f"w{i}": (500, rows) for i in range(10)}

    def init(key, x):
        return {name: jax.random.normal(jax.random.fold_in(key, i), s) for i, (name, s) in enumerate(shapes.items())}

    def apply(params, x):
        return sum((x @ params[name]).mean(axis=1, keepdims=True) for name in shapes)

    batch = (np.ones((1, 500), np.float32), np.ones((1, 1), np.float32))
    objective = telic.supervised((init, apply), "mean_squared_error")
    loop = telic.Trainer(objective, "sgd", key=0, checkpoints=telic.Checkpoints(directory)).loop(log=0)
    times = []

    def tick(state):
        jax.block_until_ready(state.step_state)
        times.append(time.time())
        if len(times) == 10:
            print(json.dumps({"step": (times[-1] - times[1]) / 8}), flush=True)

    def told(point):
        os.write(1, f"{json.dumps({point: time.time()})}\n".encode())

    points.listen(told)
    loop.handle_event("iteration_completed", tick)
    try:
        loop.run([batch] * 10**6, epochs=1)
    finally:
        told("run left")


def measure(megabytes: int) -> None:
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = [sys.executable, __file__, str(run), str(megabytes)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
            seen = {}
            while "step" not in seen:
                seen |= json.loads(process.stdout.readline())
            time.sleep(0.3)
            sent = time.time()
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate()
            ended = time.time()
            for line in out.splitlines():
                if line.startswith("{"):
                    seen |= json.loads(line)
            if process.returncode != 143 or not verify(run).is_fine or len(verify(run).whole) != 1:
                raise SystemExit(f"it ended with {process.returncode} and left {verify(run)}")
            phases = ", ".join(f"{n} {t - sent:.2f}" for n, t in seen.items() if n != "step" and t > sent)
            text = f"{megabytes} MB, step {seen['step']:.3f} s: exit {ended - sent:.2f} s after SIGTERM ({phases})"
            print(text, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(sys.argv[1], int(sys.argv[2]))
    else:
        for size in (40, 100):
            measure(size)
