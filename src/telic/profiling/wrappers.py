"""Parts of a run with a meter around them; what they do is what the part inside does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from telic.loop.ports import Meter, Position, Source, View
from telic.types import Batch, PyTree


class MeteredSource:
    """A source whose batches are waited for on the clock of "data"."""

    def __init__(self, source: Source, meter: Meter):
        self._source = source
        self._meter = meter

    def next(self, view: View) -> tuple[Batch, Position]:
        """Give the next batch of the epoch and the position after it."""
        with self._meter.part("data"):
            return self._source.next(view)

    def begin(self, epoch: int, *, continuous: bool = False) -> None:
        """Start an epoch."""
        with self._meter.part("data"):
            self._source.begin(epoch, continuous=continuous)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class MeteredDriver:
    """A driver whose dispatches and waits are on the clock.

    Args:
      driver: The driver, which takes the batches its own feed gives.
      meter: What counts.
      ran: Called before each dispatch with its batches.
    """

    def __init__(self, driver: Any, meter: Meter, ran: Callable[[Sequence[Batch]], None]):
        self._driver = driver
        self._meter = meter
        self._ran = ran

    @property
    def step_state(self) -> PyTree:
        """The state after the last batch."""
        return self._driver.step_state

    @step_state.setter
    def step_state(self, value: PyTree) -> None:
        self._driver.step_state = value

    def advance(self, batches: Sequence[Batch], **options: Any) -> None:
        """Run batches of one shape in one dispatch."""
        # They are used up afterwards.
        self._ran(batches)
        with self._meter.part("dispatch"):
            self._driver.advance(batches, **options)

    def probe(self, names: Sequence[str], batch: Batch, **options: Any) -> dict[str, Any]:
        """Give what probes see of the step on a batch."""
        with self._meter.part("dispatch"):
            return self._driver.probe(names, batch, **options)

    def plan(self, batches: Sequence[Batch]) -> Any:
        """Give what the step plans for a window of these batches."""
        with self._meter.part("dispatch"):
            return self._driver.plan(batches)

    def flush(self) -> None:
        """Close a window that is not full."""
        with self._meter.part("dispatch"):
            self._driver.flush()

    def compute(self, scope: str) -> "MeteredReading":
        """Give a function that computes and fetches the metrics accumulated in a scope."""
        return MeteredReading(self._driver.compute(scope), self._meter)

    def check(self, *, wait: bool) -> None:
        """Raise when the step says that the run must end."""
        if not wait:
            self._driver.check(wait=False)
            return
        with self._meter.part("device"):
            self._driver.check(wait=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


class MeteredReading:
    """Metrics of a moment; whoever reads them waits for the device."""

    def __init__(self, reading: Any, meter: Meter):
        self._reading = reading
        self._meter = meter

    def __call__(self) -> Mapping[str, Any]:
        """Compute now and wait for the values."""
        with self._meter.part("device"):
            return self._reading()

    def later(self) -> Callable[[], Mapping[str, Any]]:
        """Start computing now; the function given waits for the values when it is called."""
        with self._meter.part("dispatch"):
            values = self._reading.later()

        def wait() -> Mapping[str, Any]:
            with self._meter.part("device"):
                return values()

        return wait


class MeteredListener:
    """Puts compilations on the clock of "compile", and tells whoever else listens."""

    def __init__(self, meter: Meter, other: Any = None):
        self._meter = meter
        self._other = other
        self._open: Any = None

    def compiling(self, what: str) -> None:
        """Begin to count."""
        self._open = self._meter.part("compile")
        self._open.__enter__()
        if self._other is not None:
            self._other.compiling(what)

    def compiled(self, what: str, seconds: float) -> None:
        """Count no longer."""
        if self._other is not None:
            self._other.compiled(what, seconds)
        self._open.__exit__(None, None, None)


class MeteredKeeper:
    """A keeper whose saves are on the clock of "checkpoint".

    Args:
      keeper: The keeper.
      meter: What counts.
      saved: Called after each save.
    """

    def __init__(self, keeper: Any, meter: Meter, saved: Callable[[Any], None]):
        self._keeper = keeper
        self._meter = meter
        self._saved = saved

    def keep(self, state: Any, upcoming: Batch | None) -> None:
        """Save."""
        try:
            with self._meter.part("checkpoint"):
                self._keeper.keep(state, upcoming)
        finally:
            self._saved(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keeper, name)


def metered_handler(handler: Callable[[Any], Any], name: str, meter: Meter) -> Callable[[Any], Any]:
    """Give a handler whose time is counted as that of "handlers", under its name."""

    def run(state: Any) -> Any:
        with meter.part(f"handlers/{name}"):
            return handler(state)

    return run
