"""Print one table of ratios to what one would write by hand.

python -m benchmarks
python -m benchmarks --only mlp gpt --rounds 21
"""

import argparse

from benchmarks.first_step import first_step
from benchmarks.measures import MEASURES
from benchmarks.memory import memory
from benchmarks.peers import peers
from benchmarks.timing import heading, machine

ALL = {
    **MEASURES,
    "memory": memory,
    "first_mlp": lambda rounds: first_step(rounds, of=("mlp",)),
    "first_gpt": lambda rounds: first_step(rounds, of=("gpt",)),
    "peers": peers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ALL), help="these measures instead of all")
    parser.add_argument("--rounds", type=int, default=11, help="pairs of runs whose median counts")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/performance.md shows it")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    print(f"{machine()}; {args.rounds} rounds; ratios to what one would write by hand, less is faster")
    print(
        "| | ratio | quartiles | aim | times of one unit |\n| --- | --- | --- | --- | --- |"
        if args.markdown
        else heading()
    )
    for name in args.only or ALL:
        for row in ALL[name](args.rounds):
            print(row.markdown() if args.markdown else row, flush=True)


if __name__ == "__main__":
    main()
