"""A loop whose metric follows a script: one value an epoch, recorded before the other handlers look."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import telic

DATA = [np.ones(1, np.float32)]
"""One batch an epoch."""


def scripted(**series: Sequence[float]) -> telic.Loop:
    """Give a loop that counts its batches and reports each series as a metric of that name."""
    loop = telic.Loop(lambda state, batch: state + batch.sum(), lambda batch: np.float32(0))

    def report(state: telic.LoopState) -> None:
        state.metrics.add({name: float(values[state.epoch]) for name, values in series.items()})

    return loop.handle_event("epoch_completed", report)


def run(loop: telic.Loop, epochs: int, **options: Any) -> telic.LoopState:
    """Run a scripted loop."""
    return loop.run(DATA, epochs=epochs, **options)
