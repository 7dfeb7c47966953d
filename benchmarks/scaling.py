"""How cost grows: with metrics, handlers, parameter leaves and epochs.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --only leaves --rounds 5

Each row is the time of a step (of an epoch, for epochs) at a size, and its ratio to the smallest size; for leaves also
the ratio to a hand-written loop over the same leaves.
"""

import argparse
import contextlib
import io
from collections.abc import Callable, Iterable, Iterator

import jax
import optax

import telic
from benchmarks import models, sides
from benchmarks.timing import Ratio, heading, machine, ratio, take_turns

STEPS = 200
LEAF_COUNTS = (10, 100, 1000, 5000)
"""The last takes XLA ten minutes and more to compile, on either side."""


def metrics(rounds: int) -> list[Ratio]:
    """Grow the number of metrics of the small step."""

    def loop(count: int) -> telic.Loop:
        made = _mlp()
        for i in range(count):
            made.metric(lambda targets, prediction, i=i: (prediction.argmax(-1) == targets) * (i + 1.0), f"metric_{i}")
        return made

    return _grown("metrics", loop, (0, 5, 20, 50), rounds)


def handlers(rounds: int) -> list[Ratio]:
    """Grow the number of handlers that seldom fire."""

    def loop(count: int) -> telic.Loop:
        made = _mlp()
        for _ in range(count):
            made.handle_event("iteration_completed", lambda state: None, telic.every(STEPS))
        return made

    return _grown("handlers, every 200", loop, (0, 10, 100), rounds)


def leaves(rounds: int) -> Iterator[Ratio]:
    """Grow the number of parameter leaves, against a hand-written loop over as many; eight numbers a leaf."""
    steps = 20
    data = [(x, x) for x, _ in models.rows(steps, width=8, batch=8)]
    for count in LEAF_COUNTS:
        model = models.Leaves(count)
        params = sides.params_of(model, data[0][0])
        loop = telic.trainer(model, "mean_squared_error", optax.adam(models.LEARNING_RATE), log=0)
        seconds = _quietly(
            {
                "hand": sides.by_hand(sides.squared_error(model), params, data),
                "telic": sides.of_loop(loop, data),
                "apart": sides.of_loop(loop.copy().drive(fuse=False), data),
            },
            rounds,
        )
        yield ratio(f"{count:,} leaves, to hand-written", seconds["telic"], seconds["hand"], aim=1.1, units=steps)
        yield ratio(f"{count:,} leaves, one dispatch each", seconds["apart"], seconds["hand"], units=steps)


def epochs(rounds: int) -> list[Ratio]:
    """Grow the number of epochs behind: an epoch of a run that has had many costs what its first ones did."""
    data = models.rows(20)
    shown = _mlp().run(data, epochs=1)
    long = shown.keep()
    # A run that looks back on twenty thousand epochs, without the time to make them.
    values = shown.history[0]
    long.history = {epoch: dict(values) for epoch in range(20_000)}
    long.times = dict.fromkeys(range(20_000), 0.01)
    long.epoch = 20_000
    seconds = _quietly(
        {
            "few": sides.of_loop(_mlp().from_state(shown), data),
            "many": sides.of_loop(_mlp().from_state(long), data),
        },
        rounds,
    )
    return [ratio("an epoch after 20,000 others, to one after 1", seconds["many"], seconds["few"])]


def _mlp() -> telic.Loop:
    return telic.trainer(models.MLP(), "softmax_cross_entropy", optax.adam(models.LEARNING_RATE), log=0)


def _grown(what: str, loop: Callable[[int], telic.Loop], counts: tuple[int, ...], rounds: int) -> list[Ratio]:
    data = models.rows(STEPS)
    seconds = _quietly({str(count): sides.of_loop(loop(count), data) for count in counts}, rounds)
    base = seconds[str(counts[0])]
    return [ratio(f"{count} {what}, to {counts[0]}", seconds[str(count)], base, units=STEPS) for count in counts[1:]]


def _quietly(forms: dict[str, sides.Side], rounds: int) -> dict[str, list[float]]:
    with contextlib.redirect_stdout(io.StringIO()):
        return take_turns(forms, rounds)


GROWTH: dict[str, Callable[[int], Iterable[Ratio]]] = {
    "metrics": metrics,
    "handlers": handlers,
    "epochs": epochs,
    "leaves": leaves,
}


def _rows(names: list[str], rounds: int) -> Iterator[Ratio]:
    for name in names:
        yield from GROWTH[name](rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(GROWTH), default=list(GROWTH))
    parser.add_argument("--rounds", type=int, default=9, help="pairs of runs whose median counts")
    args = parser.parse_args()
    print(f"{machine()}; {args.rounds} rounds, {jax.default_backend()}")
    print(heading())
    for row in _rows(args.only, args.rounds):
        print(row, flush=True)


if __name__ == "__main__":
    main()
