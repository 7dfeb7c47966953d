"""How much memory of the host does it take to build a state of 1 GB that two processes share?

    python -m benchmarks.initialisation [--layers 32]

Each process holds half of the parameters and of Adam's moments. Printed is what its memory grew by at most while the
state was built, over the bytes of its half: 1.00 is the half itself, 2.00 would be a copy of the whole. What compiling
takes is in it, and what the C library's allocator keeps of what it was given back: with MALLOC_MMAP_THRESHOLD_=1000000
in the environment that of glibc keeps no array.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import telic
from telic.cli.launching import launch

BYTES = 10**9


class Layers(telic.Objective):
    """Square matrices, and a loss that reads none of them."""

    def __init__(self, layers: int):
        self.layers = layers

    def init(self, key: Any, variables: Any = None) -> Any:
        # Three arrays of the state for each parameter, four bytes a number.
        width = int((BYTES / 3 / 4 / self.layers) ** 0.5) // 64 * 64
        keys = jax.random.split(key, self.layers)
        return {"params": {f"layer_{i}": jax.random.normal(keys[i], (width, width)) for i in range(self.layers)}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        return telic.Mean(jnp.sum(batch), jnp.float32(1))


def member(layers: int) -> None:
    """Build the state in one of the processes and say what it took."""
    trainer = telic.Trainer(Layers(layers), "adam", key=0, mesh=telic.MeshSpec(data=1, fsdp=-1))
    small = jax.jit(lambda: jnp.zeros(8))()
    jax.block_until_ready(small)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    began = time.monotonic()
    state = jax.block_until_ready(trainer.place())
    seconds = time.monotonic() - began
    leaves = jax.tree.leaves((state.variables, state.opt_state))
    share = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    figures = {
        "process": jax.process_index(),
        "whole": sum(leaf.nbytes for leaf in leaves),
        "share": share,
        "peak": round((_memory("VmHWM") - before) / share, 2),
        "seconds": round(seconds, 1),
    }
    print(json.dumps(figures), flush=True)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=32, help="matrices of the state (default 32)")
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        member(args.layers)
        return
    sys.exit(
        launch(
            Path(__file__),
            ("--member", "--layers", str(args.layers)),
            processes=args.processes,
            devices=1,
            say=lambda line: print(line, file=sys.stderr),
        )
    )


if __name__ == "__main__":
    main()
