"""Time to the first step, in fresh processes: from the imports' end to the end of one step.

python -m benchmarks.first_step telic|hand mlp|gpt [cache directory]
"""

import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import optax

import telic
from benchmarks import models, sides
from benchmarks.timing import Ratio

_AIMS = {"cold": 2.0, "warm": 1.3}


def first_step(rounds: int, *, of: tuple[str, ...] = ("mlp", "gpt")) -> list[Ratio]:
    """Measure the first step, cold and with the compilation cache, in three pairs of fresh processes or more."""
    made: list[Ratio] = []
    for what in of:
        ratios: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
        for _ in range(max(3, rounds // 4)):
            with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
                for pairs in ratios.values():
                    # The second run finds what the first left.
                    pairs.append((_fresh("telic", what, ours), _fresh("hand", what, theirs)))
        for kind, pairs in ratios.items():
            each = sorted(a / b for a, b in pairs)
            ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
            name = f"first step of the {what.upper()}, {'cold' if kind == 'cold' else 'with the cache'}"
            note = f"{ours:.2f} s, {theirs:.2f} s"
            made.append(Ratio(name, statistics.median(each), each[0], each[-1], _AIMS[kind], note))
    return made


def _fresh(side: str, what: str, cache: str) -> float:
    command = [sys.executable, "-m", "benchmarks.first_step", side, what, cache]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _telic(what: str, cache: str | None) -> None:
    if what == "mlp":
        loop = telic.trainer(models.MLP(), "softmax_cross_entropy", optax.adam(1e-3), log=0, compile_cache=cache)
        loop.metric("accuracy").run(models.rows(1))
    else:
        sides.trainer(models.GPT(), compile_cache=cache).loop(log=0).run(models.sentences(1))


def _hand(what: str, cache: str | None) -> None:
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if what == "mlp":
        batches: Any = models.rows(1)
        params = sides.params_of(models.MLP(), batches[0][0])
        sides.by_hand(sides.cross_entropy(models.MLP()), params, batches)()
    else:
        gpt = models.GPT()
        params = gpt.init(jax.random.key(0))["params"]
        sides.by_hand(sides.next_token(gpt), params, models.sentences(1))()


def main() -> None:
    side, what, *rest = sys.argv[1:]
    began = time.perf_counter()
    {"telic": _telic, "hand": _hand}[side](what, rest[0] if rest else None)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
