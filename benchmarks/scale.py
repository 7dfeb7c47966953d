"""Memory and communication of a decoder's train step on many devices, read from the compiled program: nothing is run.

    python -m benchmarks.scale --devices 64
    python -m benchmarks.scale --devices 8 --sizes 1B 8B --markdown

The program is compiled for that many simulated CPU devices, partitioned as it would be for accelerators. State and
temporaries are XLA's own count for one device. Communication is the bytes that collectives give one device, those in
the loop over layers once for each layer. What the CPU's compiler does otherwise than an accelerator's: it keeps more
temporaries, and it may exchange float32 where an accelerator exchanges bfloat16.
"""

import argparse
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

GIB = 2**30

SIZES: dict[str, dict[str, Any]] = {
    "1B": {"d_model": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "d_ff": 8192, "tied": True},
    "8B": {"d_model": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "d_ff": 14336},
    "70B": {"d_model": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "d_ff": 28672},
}
"""Shapes of decoders that are in use."""

VOCAB = 128256
LENGTH = 4096
FSDP = 64
"""Devices that share one copy of the state, at most; more of them are copies."""

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


@dataclass(frozen=True)
class Cost:
    """What one device holds and hears.

    Attributes:
      parameters: Parameters of the model.
      state_bytes: Parameters, optimizer state and batch on one device.
      scratch_bytes: Temporaries on one device.
      flops: Operations of one step on one device, by the rule of 6 per parameter and token.
      traffic: Bytes that one device is given in a step, by kind of collective.
    """

    parameters: int
    state_bytes: int
    scratch_bytes: int
    flops: float
    traffic: dict[str, int]


def compiled_cost(size: str, devices: int, tensor: int) -> Cost:
    """Compile one step and ask the program."""
    import jax

    import telic
    from telic import tree
    from telic.contract import as_result
    from telic.models import Decoder, DecoderConfig
    from telic.objectives import LMObjective
    from telic.placement import MeshPlacement

    config = DecoderConfig(vocab_size=VOCAB, max_length=LENGTH, scan=True, remat="full", **SIZES[size])
    fsdp = min(FSDP, devices // tensor)
    mesh = telic.MeshSpec(data=-1, fsdp=fsdp, tensor=tensor)
    rules: dict[str, Any] = {}
    if tensor > 1:
        rules = {
            "params/**/output/kernel": (None, "tensor", "fsdp"),
            "params/**/down/kernel": (None, "tensor", "fsdp"),
            "params/blocks/**/kernel": (None, "fsdp", "tensor"),
        }
    trainer = telic.Trainer(
        LMObjective(Decoder(config)),
        telic.optimizers.adamw(1e-3),
        key=0,
        precision="bfloat16",
        mesh=mesh,
        layout=telic.Layout(rules),
        keep_previous=False,
    )
    rows = devices // tensor
    batch = {"tokens": np.broadcast_to(np.int32(0), (rows, LENGTH + 1))}
    step = trainer.train_step().bind(batch)
    placement = MeshPlacement(mesh.build(), telic.Layout(rules))
    shapes = jax.eval_shape(step.initial_state, step.objective.initializer, trainer.key)
    where = placement.shardings(shapes)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)
    given = {"tokens": jax.ShapeDtypeStruct(batch["tokens"].shape, np.int32, sharding=placement.rows_of((rows, 1)))}
    program = jax.jit(lambda s, b: as_result(step.step(s, b)).state, donate_argnums=0, out_shardings=where).lower(
        state, given
    )
    compiled = program.compile()
    memory = compiled.memory_analysis()
    parameters = sum(math.prod(x.shape) for x in tree.named_leaves(shapes.variables).values())
    return Cost(
        parameters=parameters,
        state_bytes=memory.argument_size_in_bytes,
        scratch_bytes=memory.temp_size_in_bytes,
        flops=6.0 * parameters * rows * LENGTH / devices,
        traffic=traffic_of(compiled.as_text()),
    )


def traffic_of(text: str) -> dict[str, int]:
    """Count the bytes that a program's collectives give one device; the body of a loop as often as it runs."""
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)

    def count(body: str, times: int, total: dict[str, int]) -> None:
        for line in bodies.get(body, ()):
            kind = re.search(r" = (.*?) (" + "|".join(_COLLECTIVES) + r")(?:-start)?\(", line)
            if kind:
                total[kind[2]] = total.get(kind[2], 0) + times * _result_bytes(kind[1])
            trips = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
            for called in re.findall(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line):
                count(called, times * (int(trips[1]) if trips and " while(" in line else 1), total)

    found: dict[str, int] = {}
    count(entry, 1, found)
    return found


def _result_bytes(shape: str) -> int:
    found = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(_WIDTHS.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--tensor", type=int, default=1, help="devices that share the work of a layer")
    args = parser.parse_args()
    # What LLVM makes of it is not looked at.
    quickly = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flag = f"--xla_force_host_platform_device_count={args.devices} {quickly}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        # JAX counts its devices when it starts.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.scale", *sys.argv[1:]],
            {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
        )
    print("| model | devices | mesh | state | scratch | received in a step | TFLOP in a step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in args.sizes:
        cost = compiled_cost(size, args.devices, args.tensor)
        fsdp = min(FSDP, args.devices // args.tensor)
        mesh = f"data={args.devices // fsdp // args.tensor}, fsdp={fsdp}, tensor={args.tensor}"
        parts = ", ".join(f"{kind} {n / GIB:.1f}" for kind, n in sorted(cost.traffic.items(), key=lambda x: -x[1]))
        print(
            f"| {size} ({cost.parameters / 1e9:.2f} B) | {args.devices} | {mesh} | {cost.state_bytes / GIB:.1f} GiB | "
            f"{cost.scratch_bytes / GIB:.1f} GiB | {sum(cost.traffic.values()) / GIB:.1f} GiB ({parts}) | "
            f"{cost.flops / 1e12:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
