"""Memory and communication of a decoder's train step on many devices, read from the compiled program: nothing is run.

    python -m benchmarks.scale --devices 8 64 512
    python -m benchmarks.scale --topology v5p:4x4x4 --sizes 8B

The program is compiled for that many simulated CPU devices, partitioned as it would be for accelerators, or, where
`libtpu` is installed, by the compiler of TPUs for a slice that need not be there. State and temporaries are XLA's own
count for one device. Communication is what collectives bring to one device, those in a loop as often as it runs, by the
algorithm that moves least: ``(n - 1) / n`` of what a gather gives, twice that of an all-reduce. What the CPU's compiler
does otherwise than an accelerator's: it exchanges float32 where an accelerator exchanges bfloat16, and it reduces
gradients whole (all-reduce) where an accelerator reduces each device's part (reduce-scatter).
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Sequence
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

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}


@dataclass(frozen=True)
class Chip:
    """What one device can do, as its maker says.

    Attributes:
      flops: bfloat16 operations a second.
      memory_bytes: Its memory.
      link_bytes: Bytes a second that its links bring to it, all together: half of what is given for both directions.
    """

    flops: float
    memory_bytes: float
    link_bytes: float


V5P = Chip(459e12, 95 * GIB, 600e9)
"""Source: Google Cloud, "TPU v5p": 459 TFLOP/s, 95 GiB, 1200 GB/s in both directions."""


@dataclass(frozen=True)
class Cost:
    """What one device holds and hears.

    Attributes:
      parameters: Parameters of the model.
      state_bytes: Parameters, optimizer state and batch on one device.
      scratch_bytes: Temporaries on one device.
      flops: Operations of one step on one device, by the rule of 6 per parameter and token, and 2 that ``remat="full"``
        does again.
      traffic: Bytes that one device is given in a step, by kind of collective.
    """

    parameters: int
    state_bytes: int
    scratch_bytes: int
    flops: float
    traffic: dict[str, float]


def compiled_cost(size: str, devices: Sequence[Any], tensor: int) -> Cost:
    """Compile one step and ask the program."""
    import jax

    import telic
    from telic import tree
    from telic.contract import as_result
    from telic.models import Decoder, DecoderConfig
    from telic.objectives import LMObjective
    from telic.placement import MeshPlacement

    config = DecoderConfig(vocab_size=VOCAB, max_length=LENGTH, scan=True, remat="full", **SIZES[size])
    mesh = telic.MeshSpec(data=-1, fsdp=min(FSDP, len(devices) // tensor), tensor=tensor)
    rules: dict[str, Any] = {}
    if tensor > 1:
        rules = {
            "params/**/output/kernel": (None, "tensor", "fsdp"),
            "params/**/down/kernel": (None, "tensor", "fsdp"),
            "params/layers/**/kernel": (None, "fsdp", "tensor"),
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
    rows = len(devices) // tensor
    batch = {"tokens": np.broadcast_to(np.int32(0), (rows, LENGTH + 1))}
    step = trainer.train_step().bind(batch)
    placement = MeshPlacement(mesh.build(devices), telic.Layout(rules))
    shapes = jax.eval_shape(step.initial_state, step.objective.initializer, trainer.key)
    where = placement.shardings(shapes)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)
    given = {"tokens": jax.ShapeDtypeStruct(batch["tokens"].shape, np.int32, sharding=placement.rows_of((rows, 1)))}

    def run(state: Any, batch: Any) -> Any:
        with placement.on_mesh():
            return as_result(step.step(state, batch)).state

    compiled = jax.jit(run, donate_argnums=0, out_shardings=where).lower(state, given).compile()
    memory = compiled.memory_analysis()
    parameters = sum(math.prod(x.shape) for x in tree.named_leaves(shapes.variables).values())
    return Cost(
        parameters=parameters,
        state_bytes=memory.argument_size_in_bytes,
        scratch_bytes=memory.temp_size_in_bytes,
        flops=8.0 * parameters * rows * LENGTH / len(devices),
        traffic=traffic_of(compiled.as_text(), len(devices)),
    )


def traffic_of(text: str, devices: int) -> dict[str, float]:
    """Count the bytes that a program's collectives bring to one device, by kind; a loop's as often as it runs.

    Args:
      text: A compiled program, as XLA writes it.
      devices: How many it is for.
    """
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
    found: dict[str, float] = {}

    def count(body: str, times: int) -> None:
        for line in bodies.get(body, ()):
            kind = re.search(r" = (.*?) (" + "|".join(_KINDS) + r")(?:-start)?\(", line)
            if kind:
                found[kind[2]] = found.get(kind[2], 0) + times * _received(kind[2], kind[1], line, devices)
            if "-done(" in line or "-update(" in line:
                continue
            trips = _trips(line, bodies) if " while(" in line else 1
            for called in re.findall(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)", line):
                count(called, times * trips)

    count(entry, 1)
    return found


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    """Give how often a loop runs: as the compiler noted it, or as its condition says of a count from zero."""
    noted = re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)
    if noted:
        return int(noted[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line)
    body = "\n".join(bodies.get(condition[1], ())) if condition else ""
    limits = re.findall(r"[su]32\[\][^ ]* constant\((\d+)\)", body)
    # TPUs pass weights around in rings, two steps at a time.
    stride = 2 if "windowed_dot_general" in line else 1
    return math.ceil(int(limits[0]) / stride) if len(limits) == 1 and "direction=LT" in body else 1


def _received(kind: str, shape: str, line: str, devices: int) -> float:
    """Give the bytes that one collective brings to a device."""
    sizes = [
        _WIDTHS.get(dtype, 4) * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)
    ]
    # What is started names its operands too; all-reduce alone does not.
    size = max(sizes) if f"{kind}-start" in line and kind != "all-reduce" else sum(sizes)
    ways = _group_size(line, devices)
    if kind == "reduce-scatter":
        return size * (ways - 1)
    if kind == "collective-permute":
        return size
    return size * (ways - 1) / ways * (2 if kind == "all-reduce" else 1)


def _group_size(line: str, devices: int) -> int:
    """Give how many devices exchange with each other, in any of the forms that XLA writes groups in."""
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line)
    if named:
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes[axis] for axis in re.findall(r"'(\w+)'", named[2]))
    counted = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line)
    if counted:
        return int(counted[2])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else devices


def _row(size: str, count: int, tensor: int, cost: Cost, chip: Chip) -> str:
    fsdp = min(FSDP, count // tensor)
    mesh = f"data={count // fsdp // tensor}, fsdp={fsdp}, tensor={tensor}"
    parts = ", ".join(f"{kind} {n / GIB:.1f}" for kind, n in sorted(cost.traffic.items(), key=lambda x: -x[1]))
    total = sum(cost.traffic.values())
    compute, links = cost.flops / chip.flops, total / chip.link_bytes
    fits = cost.state_bytes + cost.scratch_bytes <= chip.memory_bytes
    bottleneck = "memory: does not fit" if not fits else "compute" if compute >= links else "links"
    return (
        f"| {size} ({cost.parameters / 1e9:.2f} B) | {count} | {mesh} | {cost.state_bytes / GIB:.1f} GiB | "
        f"{cost.scratch_bytes / GIB:.1f} GiB | {total / GIB:.1f} GiB ({parts}) | {compute * 1e3:.0f} ms | "
        f"{links * 1e3:.0f} ms | {bottleneck} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[8], help="simulated CPU devices")
    parser.add_argument("--topology", help="a slice of TPUs, such as v5p:2x2x2, in place of simulated devices")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--tensor", type=int, default=1, help="devices that share the work of a layer")
    args = parser.parse_args()
    # What LLVM makes of it is not looked at.
    quickly = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flag = f"--xla_force_host_platform_device_count={max(args.devices)} {quickly}"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        # JAX counts its devices when it starts.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.scale", *sys.argv[1:]],
            {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
        )
    import jax
    from jax.experimental import topologies

    if args.topology:
        meshes = [topologies.get_topology_desc(args.topology, "tpu").devices]
    else:
        meshes = [jax.devices()[:count] for count in args.devices]
    print("| model | devices | mesh | state | scratch | received in a step | compute | links | bottleneck |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for devices in meshes:
        for size in args.sizes:
            cost = compiled_cost(size, devices, args.tensor)
            print(_row(size, len(devices), args.tensor, cost, V5P), flush=True)


if __name__ == "__main__":
    main()
