"""How much memory of the host does it take to build a state of 1 GB that two processes share?

    python -m benchmarks.initialisation

Each process holds half of the parameters and of Adam's moments. Printed is what its memory grew by at most while the
state was built, over the bytes of its half: 1.00 is the half itself, 2.00 would be a copy of the whole.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import telic
from telic.cli.launching import launch

LAYERS = 32
BYTES = 10**9


class Layers(telic.Objective):
    """Square matrices, and a loss that reads none of them."""

    def init(self, key: Any, variables: Any = None) -> Any:
        # Three arrays of the state for each parameter, four bytes a number.
        width = int((BYTES / 3 / 4 / LAYERS) ** 0.5) // 64 * 64
        keys = jax.random.split(key, LAYERS)
        return {"params": {f"layer_{i}": jax.random.normal(keys[i], (width, width)) for i in range(LAYERS)}}

    def loss(self, variables: Any, batch: Any, step: Any) -> Any:
        return telic.Mean(jnp.sum(batch), jnp.float32(1))


def member() -> None:
    """Build the state in one of the processes and say what it took."""
    trainer = telic.Trainer(Layers(), "adam", key=0, mesh=telic.MeshSpec(data=1, fsdp=-1))
    small = jax.jit(lambda: jnp.zeros(8))()
    jax.block_until_ready(small)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    state = jax.block_until_ready(trainer.place())
    grown = _memory("VmHWM") - before
    leaves = jax.tree.leaves((state.variables, state.opt_state))
    share = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    whole = sum(leaf.nbytes for leaf in leaves)
    print(json.dumps({"process": jax.process_index(), "whole": whole, "share": share, "peak": grown}), flush=True)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        member()
        return
    sys.exit(
        launch(
            Path(__file__),
            ("--member",),
            processes=args.processes,
            devices=1,
            say=lambda line: print(line, file=sys.stderr),
        )
    )


if __name__ == "__main__":
    main()
