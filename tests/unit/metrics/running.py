"""How the tests of metrics run one over batches."""

from typing import Any, NamedTuple

import jax


class Weighted(NamedTuple):
    """A batch with weights."""

    args: tuple[Any, ...]
    weights: Any


def measure(metric, *batches):
    """Give a metric's value over batches: tuples of arguments, or Weighted."""
    pairs = [b if isinstance(b, Weighted) else Weighted(b, None) for b in batches]
    update = jax.jit(lambda acc, args, weights: metric.update(acc, *args, weights=weights))
    acc = metric.init(*pairs[0].args)
    for args, weights in pairs:
        acc = update(acc, args, weights)
    return jax.jit(metric.compute)(acc)


def in_pieces(targets, prediction, weights=None):
    """Split an even number of rows into batches of 2 and two halves of the rest, so that batch means would differ."""
    rows = len(targets)
    for a, b in [(0, 2), (2, 1 + rows // 2), (1 + rows // 2, rows)]:
        yield Weighted((targets[a:b], prediction[a:b]), None if weights is None else weights[a:b])
