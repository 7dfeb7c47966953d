"""What a run carries between events, and what handlers read."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from telic.errors import TelicError, closest
from telic.loop.events import Counts
from telic.loop.status import Status

REJECTED = "rejected"
"""The metric that counts rejected attempts: listed among the others only where there are some."""


class Metrics(Mapping[str, Any]):
    """The metrics of the epoch so far, by name: computed and fetched from the device when read.

    Handlers may add values of their own; those stay until the epoch ends and are recorded with it. Of a step that may
    reject attempts, ``metrics["rejected"]`` counts them; it is listed with the others where there are some.
    """

    def __init__(self, compute: Callable[[], Mapping[str, Any]] | None = None, names: tuple[str, ...] = ()):
        self._compute = compute
        self._names = names
        self._values: dict[str, Any] | None = None
        self.added: dict[str, Any] = {}

    def _read(self) -> Mapping[str, Any]:
        if self._values is None:
            self._values = {} if self._compute is None else dict(self._compute())
        return self._values

    def _listed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name != REJECTED or value}

    def later(self) -> Callable[[], dict[str, Any]]:
        """Start computing now and give a function that reads the values, so that nothing waits for the device."""
        added = dict(self.added)
        if self._values is not None or self._compute is None:
            values = self._listed(self._read())
            return lambda: values | added
        pending = getattr(self._compute, "later", None)
        if pending is None:
            values = self._listed(self._read())
            return lambda: values | added
        read = pending()
        return lambda: self._listed(read()) | added

    def add(self, values: Mapping[str, Any]) -> None:
        """Record values of a handler's own beside the metrics; a newer value of a name wins."""
        self.added.update(values)

    def __getitem__(self, name: str) -> Any:
        if name in self.added:
            return self.added[name]
        if name in self._names or self._values is not None:
            values = self._read()
            if name in values:
                return values[name]
        raise KeyError(f"no metric {name!r}.{closest(name, self)} This loop has: {', '.join(self) or 'none'}")

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._known() if name != REJECTED or self[name])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self.added

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self._known())})"

    def _known(self) -> list[str]:
        return list(dict.fromkeys((*self._names, *self.added)))

    def read(self) -> dict[str, Any]:
        """Give every value, a count of no rejected attempts among them."""
        return {name: self[name] for name in self._known()}


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Give the metrics that are one number, as floats: what a history keeps, whatever size the others have."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        number = np.asarray(value) if isinstance(value, bool | int | float) or hasattr(value, "dtype") else None
        if number is not None and number.ndim == 0 and number.dtype.kind in "biuf":
            found[name] = float(number)
    return found


@dataclass(eq=False)
class LoopState:
    """The state of a run. Borrowed by handlers: its arrays are donated to the next step; `keep` copies it.

    On the device: `step_state`. On the host: the cursor (`epoch`, `iteration`, ...), `history`, `times`,
    `event_counts`, `handler_state`, `status`. Transient, made anew when a run starts: `metrics`, `model`.

    Attributes:
      step_state: Whatever the step carries, for example a `TrainState`.
      epoch: Epoch running, from 0; after a run, epochs done.
      max_epoch: Epochs planned in all. Live: a handler may change it. None means no limit.
      iteration: Batches done in this epoch; while an iteration's events fire, the index of its batch.
      max_iteration: Batches per epoch at most. Live. None means no limit.
      total_iterations: Batches done over the run.
      max_steps: Planned updates (windows) in all. Live. None means no limit.
      metrics: Metrics of this epoch so far, read lazily.
      history: Metrics by epoch: ``{epoch: {name: float}}``. Only epochs that ran appear, and only metrics that are one
        number; `metrics` has the others.
      times: Seconds by epoch.
      counts: Firings by event, over the run and in this epoch.
      handler_state: What handlers remember, by their unique names.
      status: None while running, then "completed", "halted" or "interrupted".
      position: Where the data stands after the last batch that was used.
      accumulators: What the metrics of an open epoch hold, by name: in states that were kept or read back.
      probes: What the probes that fired at this iteration gave, by name, until the next one runs.
      waited: Seconds that this run has waited for data so far; the device may have worked meanwhile.
    """

    step_state: Any = None
    epoch: int = 0
    max_epoch: int | None = 1
    iteration: int = 0
    max_iteration: int | None = None
    total_iterations: int = 0
    max_steps: int | None = None
    metrics: Metrics = field(default_factory=Metrics)
    history: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    times: dict[int, float] = field(default_factory=dict[int, float])
    counts: Counts = field(default_factory=Counts)
    handler_state: dict[str, Any] = field(default_factory=dict[str, Any])
    status: str | None = None
    position: Any = None
    accumulators: dict[str, list[Any]] | None = field(default=None, repr=False)
    read_accumulators: Callable[[], dict[str, list[Any]]] | None = field(default=None, repr=False)
    bind_model: Callable[[Any], Any] | None = field(default=None, repr=False)
    copier: Callable[[Any], Any] | None = field(default=None, repr=False)
    probes: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    waited: float = field(default=0.0, repr=False)
    firer: Callable[[str], Status] | None = field(default=None, repr=False)

    def fire(self, event: str) -> Status:
        """Fire an event that was registered with `Loop.register_event`: its handlers run now.

        Their severest answer is given back, and holds also when the handler that fired does not pass it on.

        Raises:
          TelicError: No handler of a running loop is at work, or the event's handlers fire it again.
          ValueError: The event is not registered, or one that the loop fires itself.
        """
        if self.firer is None:
            raise TelicError(f"nobody runs: fire({event!r}) is for handlers of a loop, while they run")
        return self.firer(event)

    @property
    def event_counts(self) -> dict[str, int]:
        """Firings by event over the run."""
        return self.counts.total

    @property
    def steps(self) -> int:
        """Windows closed over the run: planned updates done."""
        return self.counts.total["step_completed"]

    @property
    def model(self) -> Any:
        """The usable model with the present weights: a bound Linen module, an NNX or Equinox module, or a function.

        Raises:
          TelicError: The step was not built from a model.
        """
        model = None if self.bind_model is None else self.bind_model(self.step_state)
        if model is None:
            raise TelicError("this loop's step was not built from a model: read state.step_state instead")
        return model

    def replace(self, **changes: Any) -> "LoopState":
        """Give a state with some fields changed, for a handler to return."""
        return dataclasses.replace(self, **changes)

    def keep(self) -> "LoopState":
        """Give a copy that stays valid: its arrays are its own, its metrics are read."""
        copy = self.copier or (lambda value: value)
        metrics = Metrics()
        metrics.add(self.metrics.read())
        return dataclasses.replace(
            self,
            step_state=copy(self.step_state),
            metrics=metrics,
            history={epoch: dict(values) for epoch, values in self.history.items()},
            times=dict(self.times),
            counts=Counts(dict(self.counts.total), dict(self.counts.epoch)),
            handler_state=dict(self.handler_state),
            accumulators=self.accumulators if self.read_accumulators is None else self.read_accumulators(),
            read_accumulators=None,
            probes=copy(dict(self.probes)),
            firer=None,
        )
