"""How long a save keeps a run waiting, beside bare Orbax: ``python benchmarks/checkpoint_blocking.py``.

A state of 100 MB in ten arrays, on the CPU; the median of eight saves each, and the time until each is on the disk.
"""

import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from telic import Checkpoints
from telic.checkpoints import store
from telic.checkpoints.directory import RunDirectory
from telic.checkpoints.leaves import named
from telic.compose.resume import hold

ROUNDS = 8


def main() -> None:
    state = {f"layer_{i}": jax.random.normal(jax.random.key(i), (2500, 1000)) for i in range(10)}
    jax.block_until_ready(state)
    root = Path(tempfile.mkdtemp())
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 1.0001, s), donate_argnums=0)

    bare, bare_whole = [], []
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        for i in range(ROUNDS):
            began = time.perf_counter()
            checkpointer.save(root / f"bare{i}", args=ocp.args.StandardSave(state))
            bare.append(time.perf_counter() - began)
            checkpointer.wait_until_finished()
            bare_whole.append(time.perf_counter() - began)

    digest_threads = set()
    pack = store.pack

    def watched(leaves, frozen=()):
        digest_threads.add(threading.current_thread().name)
        return pack(leaves, frozen)

    store.pack = watched
    ours, whole = [], []
    directory = RunDirectory(Checkpoints(root / "run"))
    directory.open()
    for i in range(ROUNDS):
        state = jax.block_until_ready(step(state))
        began = time.perf_counter()
        directory.save(i, {}, {name: hold(x) for name, x in named("state", state).items()}, None)
        ours.append(time.perf_counter() - began)
        # The next step gives its buffers away while the save is under way.
        state = step(state)
        directory.finish()
        whole.append(time.perf_counter() - began)
    directory.close()

    def shown(times: list[float]) -> str:
        return f"{1e3 * statistics.median(times):.1f} ms (longest {1e3 * max(times):.1f})"

    print(f"bare Orbax, asynchronous: blocks {shown(bare)}, on the disk after {shown(bare_whole)}")
    print(f"telic: blocks {shown(ours)}, on the disk, checked and read back after {shown(whole)}")
    print(f"digests made in: {', '.join(sorted(digest_threads))}")
    # What a step costs while its old buffers are still being written.
    held = [hold(x) for x in jax.tree.leaves(state)]
    slower, free = [], []
    for times, views in ((slower, True), (free, False)):
        for _ in range(ROUNDS):
            held = [hold(x) for x in jax.tree.leaves(state)] if views else []
            began = time.perf_counter()
            state = jax.block_until_ready(step(state))
            times.append(time.perf_counter() - began)
    del held
    print(f"the step after a save {shown(slower)}, any other {shown(free)}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
