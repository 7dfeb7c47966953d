"""Passes that change no state: batches wait until several of one shape can be run in one dispatch."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telic.driver.shapes import signature_of
from telic.driver.slabs import Run, Slab
from telic.driver.stepping import StepDriver
from telic.types import Batch, PyTree

_SLABS = 3
"""Slabs in turn: one is filled while the device reads the others."""


class Gathering:
    """A driver whose batches are copied at once and run later, together: nobody looks between them.

    Args:
      driver: Runs them; its state does not change.
    """

    def __init__(self, driver: StepDriver):
        self._driver = driver
        self._slab: Slab | None = None
        self._free: deque[Slab] = deque()
        self._made = 0
        self._epoch = 0
        self._iteration = 0

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics carried."""
        return self._driver.metric_names

    def start(self, step_state: PyTree, batch: Any) -> None:
        """Trace the step and build empty accumulators."""
        self._driver.start(step_state, batch)

    def restart(self, step_state: PyTree) -> None:
        """Start over with another state of the same shapes; batches that wait are dropped."""
        if self._slab is not None:
            self._slab.clear()
            self._free.append(self._slab)
            self._slab = None
        self._driver.restart(step_state)

    def advance(self, batches: Sequence[Batch], *, epoch: int, iteration: int) -> None:
        """Take batches: run at once if they are the first of their shape, else with those that follow."""
        for i, batch in enumerate(batches):
            self._take(batch, epoch, iteration + i)

    def compute(self, scope: str) -> Callable[[], Mapping[str, Any]]:
        """Run what waits, and give a function that computes and fetches the metrics accumulated in a scope."""
        self._run()
        return self._driver.compute(scope)

    def _take(self, batch: Batch, epoch: int, iteration: int) -> None:
        if not self._driver.stacked:
            self._driver.advance([batch], epoch=epoch, iteration=iteration)
            return
        if self._slab is not None and not self._slab.put(batch, None):
            self._run()
        if self._slab is None:
            self._slab = self._slab_for(batch)
            self._slab.put(batch, None)
            self._epoch, self._iteration = epoch, iteration
        if self._slab.is_full or self._slab.count >= self._driver.width:
            self._run()

    def _slab_for(self, batch: Batch) -> Slab:
        """Give an empty slab of a batch's shape; those of another shape are let go."""
        signature = signature_of(batch)
        if self._free and self._free[0].signature != signature:
            self._free.clear()
            self._made = 0
        if self._made < _SLABS:
            self._made += 1
            return Slab(batch, self._driver.room(signature), stacked=True)
        slab = self._free.popleft()
        slab.clear()
        return slab

    def _run(self) -> None:
        slab, self._slab = self._slab, None
        if slab is None:
            return
        # It is free for later batches also where this raises.
        self._free.append(slab)
        self._driver.advance(Run(slab, 0, slab.count), epoch=self._epoch, iteration=self._iteration)
