"""What does a save cost that processes share, beside one process alone? ``python -m benchmarks.shared_saves``.

A state of 100 MB in ten arrays, split over the processes of one machine, saved eight times. Printed for each number of
processes: how long a save keeps the run waiting, how long until it is on the disk, checked and read back (the slowest
process's median, and the longest of all), and the bytes that each process writes.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

import telic
from telic.checkpoints.directory import RunDirectory
from telic.checkpoints.following import FollowedDirectory
from telic.checkpoints.leaves import named
from telic.cli.launching import launch
from telic.compose.resume import held_parts, hold
from telic.placement import all_processes

ROUNDS = 8
ROWS, COLUMNS, ARRAYS = 2500, 1000, 10


def member(root: Path) -> None:
    """Save in one of the processes and write down how long it took."""
    processes = all_processes()
    mesh = telic.MeshSpec(data=1, fsdp=-1).build()
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    make = jax.jit(
        lambda: {f"layer_{i}": jax.random.normal(jax.random.key(i), (ROWS, COLUMNS)) for i in range(ARRAYS)},
        out_shardings=where,
    )
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 1.0001, s), donate_argnums=0, out_shardings=where)
    state = make()
    leads = processes.index == 0
    directory = (RunDirectory if leads else FollowedDirectory)(telic.Checkpoints(root / "run"), processes.post)
    directory.open()
    blocked: list[float] = []
    whole: list[float] = []
    for i in range(ROUNDS):
        state = jax.block_until_ready(step(state))
        processes.exchange("a save", i)
        began = time.perf_counter()
        leaves = named("state", state)
        if processes.count == 1:
            directory.save(i, {}, {name: hold(x) for name, x in leaves.items()}, None)
        else:
            directory.save(i, {}, {}, None, parts={name: held_parts(x) for name, x in leaves.items()})
        blocked.append(time.perf_counter() - began)
        directory.finish()
        whole.append(time.perf_counter() - began)
    directory.close()
    (root / f"{processes.index}.json").write_text(json.dumps({"blocked": blocked, "whole": whole}))


def written(root: Path, processes: int) -> list[int]:
    """Give the bytes on the disk of the last checkpoint, by the process that wrote them."""
    newest = root / "run" / str(ROUNDS - 1)
    parts = [sum(p.stat().st_size for p in newest.glob(f"parts/{i}.*")) for i in range(processes)]
    rest = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file()) - sum(parts)
    return [parts[0] + rest, *parts[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--member", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member is not None:
        member(args.member)
        return
    for count in args.processes:
        root = Path(tempfile.mkdtemp())
        code = launch(
            Path(__file__),
            ("--member", str(root)),
            processes=count,
            devices=1,
            say=lambda line: print(line, file=sys.stderr),
        )
        if code:
            sys.exit(code)
        told: list[Any] = [json.loads((root / f"{index}.json").read_text()) for index in range(count)]

        def shown(what: str, told: list[Any] = told) -> str:
            median = max(statistics.median(one[what]) for one in told)
            return f"{1e3 * median:.1f} ms (longest {1e3 * max(max(one[what]) for one in told):.1f})"

        size = ", ".join(f"{number / 1e6:.1f} MB" for number in written(root, count))
        print(f"{count} process(es): blocks {shown('blocked')}, on the disk after {shown('whole')}, writes {size}")
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
