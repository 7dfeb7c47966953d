"""Train a problem on every mesh of eight simulated devices and print the results: ``python -m`` with its name."""

import json
import sys

from tests.distributed.problems import MESHES, PROBLEMS, train


def main(name: str, steps: int, labels: list[str]) -> None:
    print(json.dumps({label: train(PROBLEMS[name](), MESHES[label], steps) for label in labels}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
