"""Train a problem on every mesh of eight simulated devices and print the results: ``python -m`` with its name."""

import json
import sys
from typing import Any

import jax

from tests.distributed.problems import MESHES, PROBLEMS, train, trainer


def parts(name: str, labels: list[str]) -> dict[str, Any]:
    """Give how many bytes of a problem's state lie on a device, by mesh, and which leaves are in parts."""
    problem = PROBLEMS[name]()
    example = {field: value[:16] for field, value in problem.data.items()}
    found: dict[str, Any] = {}
    for label in labels:
        leaves = jax.tree.leaves(trainer(problem, MESHES[label], accumulate=1).place(example).variables)
        found[label] = [
            sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
            sum(leaf.nbytes for leaf in leaves),
        ]
    return found


def main(name: str, steps: int, labels: list[str]) -> None:
    results = {label: train(PROBLEMS[name](), MESHES[label], steps) for label in labels}
    print(json.dumps({"results": results, "parts": parts(name, labels)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
