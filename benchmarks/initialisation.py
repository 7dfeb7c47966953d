"""How much memory of the host does it take to build a state of 1 GB that two processes share?

    python -m benchmarks.initialisation [--layers 32]

Each process holds half of the parameters and of Adam's moments. Printed is what its memory grew by at most while the
state was built, over the bytes of its half: 1.00 is the half itself, 2.00 would be a copy of the whole. `all` includes
what compiling the program takes, which depends on the number of leaves that are drawn and not on their bytes, and which
the allocator keeps; `state` is counted from the end of the compilation, and `compiler_bytes` is what there was before.
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

BYTES = 10**9
COMPILED = "/jax/core/compile/backend_compile_duration"
"""What JAX says when it has compiled a program."""


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
    marks: list[tuple[int, int]] = []

    def mark(event: str = COMPILED, duration_secs: float = 0.0, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        if event == COMPILED:
            marks.append((_memory("VmRSS"), _memory("VmHWM")))
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here

    mark()
    jax.monitoring.register_event_duration_secs_listener(mark)
    state = jax.block_until_ready(trainer.place())
    mark()
    leaves = jax.tree.leaves((state.variables, state.opt_state))
    share = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    before, compiled = marks[0][0], marks[-2][0]
    figures = {
        "process": jax.process_index(),
        "whole": sum(leaf.nbytes for leaf in leaves),
        "share": share,
        "compiler_bytes": compiled - before,
        "all": round((max(peak for _, peak in marks[1:]) - before) / share, 2),
        "state": round((marks[-1][1] - compiled) / share, 2),
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
