"""Loops of a user's own step that save themselves and go on."""

from pathlib import Path

import numpy as np

import telic

BATCHES = [np.full(2, float(k), np.float32) for k in range(4)]


def loop(folder: Path | None) -> telic.Loop:
    made = telic.Loop(
        lambda state, batch: {"total": state["total"] + batch.sum(), "count": state["count"] + 1},
        lambda batch: {"total": 0.0, "count": 0},
    )
    return made if folder is None else made.save(telic.Checkpoints(folder))


def test_start_of_python_numbers_goes_on(tmp_path: Path) -> None:
    """Catches a state that began as 0.0, was saved as float32, and is refused as float64 when the run goes on."""
    loop(tmp_path).run(BATCHES, epochs=1)
    resumed = loop(tmp_path).run(BATCHES, epochs=2)
    whole = loop(None).run(BATCHES, epochs=2)
    assert float(resumed.step_state["total"]) == float(whole.step_state["total"]) == 24.0
    assert int(resumed.step_state["count"]) == 8
    assert resumed.step_state["total"].dtype == whole.step_state["total"].dtype
    assert resumed.step_state["count"].dtype == whole.step_state["count"].dtype
