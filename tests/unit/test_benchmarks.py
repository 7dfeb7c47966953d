"""The benchmarks: what counts as a regression, and that each of them runs."""

import json
from collections.abc import Callable

import pytest

from benchmarks import check, measures, scaling
from benchmarks.memory import memory
from benchmarks.timing import Ratio, exact, ratio, take_turns


def row(value: float, low: float | None = None, high: float | None = None) -> Ratio:
    return Ratio("step", value, 0.9 * value if low is None else low, 1.1 * value if high is None else high)


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    """Catches a side that always comes first, and compilation in the median."""
    order: list[str] = []

    def side(name: str, *seconds: float) -> Callable[[], float]:
        left = iter(seconds)

        def run() -> float:
            order.append(name)
            return next(left)

        return run

    found = take_turns({"a": side("a", 9, 1, 2, 3), "b": side("b", 9, 2, 2, 2)}, 3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert found == {"a": [1, 2, 3], "b": [2, 2, 2]}
    made = ratio("step", found["a"], found["b"], units=2)
    assert (made.value, made.note) == (1.0, "1,000,000.0 µs, 1,000,000.0 µs")


@pytest.mark.parametrize(
    ("now", "worse"),
    [
        (row(1.0), False),
        (row(1.24), False),
        (row(1.3, low=1.1), True),
        # Noise: the median is high, but a quarter of the pairs is as good as ever.
        (row(1.3, low=0.9), False),
        (row(0.5), False),
        (exact("step", 1.01), False),
        (exact("step", 1.03), True),
    ],
)
def test_what_is_a_regression(now: Ratio, worse: bool) -> None:
    """Catches a report that cries at noise, and one that overlooks bytes that do not vary."""
    found = check.regressions([now], {"step": 1.0})
    assert bool(found) is worse
    assert check.regressions([now], {}) == []
    if worse:
        assert "step: 1." in found[0]
        assert "recorded 1.000" in found[0]


def test_the_recorded_ratios_are_those_of_the_report() -> None:
    """Catches a row that was renamed, and is compared with nothing since."""
    recorded = json.loads(check.REFERENCE.read_text())["ratios"]
    names = {
        *("memory of the GPT step, guard", "memory of the GPT step, nonfinite='allow'"),
        *("memory of the 24 MB step, guard", "memory of the 24 MB step, allow"),
    }
    assert names <= set(recorded)
    assert all(value > 0 for value in recorded.values())


@pytest.mark.endurance
@pytest.mark.parametrize("name", [*measures.MEASURES, "memory", *scaling.GROWTH])
def test_each_measure_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a benchmark that broke with a change of the library, long before somebody wants its number."""
    monkeypatch.setattr(scaling, "STEPS", 20)
    monkeypatch.setattr(scaling, "LEAF_COUNTS", (10, 40))
    short = {
        "mlp": lambda: measures.mlp(1, steps=40),
        "gpt": lambda: measures.gpt(1, steps=1),
        "windows": lambda: measures.windows(1, count=2),
        "heavy": lambda: measures.heavy(1, steps=2),
        "convolution": lambda: measures.convolution(1, steps=1),
        "evaluation": lambda: measures.evaluation(1, count=4),
        "feeding": lambda: measures.feeding(1, steps=20),
        "memory": memory,
        **{name: lambda grow=grow: grow(1) for name, grow in scaling.GROWTH.items()},
    }
    rows = short[name]()
    assert rows
    assert all(r.value > 0 for r in rows if "waiting" not in r.name)
    assert len({r.name for r in rows}) == len(rows)
