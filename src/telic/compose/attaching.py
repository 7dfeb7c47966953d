"""What a loop holds, and the ways in: metrics, handlers, events, probes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from telic import losses
from telic import metrics as metric_table
from telic.compose.programs import as_program, has_loss
from telic.compose.recording import RunFile
from telic.compose.saving import Saving
from telic.display import Recorder
from telic.display.figures import Confusion
from telic.display.plots import Plot
from telic.driver import Listener
from telic.errors import TelicError
from telic.handlers import Checkpoint, Monitor, record_name
from telic.loop import events as ev
from telic.loop.attachments import Attachment, Handler
from telic.loop.filters import Filter, always, as_filter
from telic.loop.ports import Placement
from telic.loop.reducers import RESERVED, Reducer
from telic.loop.state import LoopState
from telic.metrics.base import Metric
from telic.placement import SingleDevice
from telic.types import PyTree


class Attaching:
    """A step with what is attached to it; `telic.Loop` is the whole.

    Args:
      step: A step function, or a step with an initialiser.
      init: ``batch -> state`` for a bare step function.
      output_transform: What a run makes of the final LoopState; None returns it.
    """

    def __init__(
        self,
        step: Any,
        init: Callable[[Any], Any] | None = None,
        *,
        output_transform: Callable[[LoopState], Any] | None = None,
    ):
        self._program = as_program(step, init)
        self._output_transform = output_transform
        self._metrics: dict[str, Reducer] = {}
        self._attachments: list[Attachment] = []
        self._resume: LoopState | None = None
        self._running = False
        self._placement: Placement = SingleDevice()
        self._listener: Listener | None = None
        self._closers: list[Callable[[], None]] = []
        self._driver_options: dict[str, Any] = {}
        self._saving: Saving | None = None
        self._flushers: list[Callable[[], None]] = []
        self._folder: Path | None = None
        self._events: tuple[str, ...] = ()
        self._probes: dict[str, Callable[[Any], PyTree]] = {}
        self._recorders: dict[Path, Recorder] = {}
        self._run_files: dict[Path, RunFile] = {}

    def metric(
        self,
        metric: str | Metric | Callable[..., Any],
        name: str | None = None,
        *,
        reduce: Any = "mean",
        reads: Any = None,
    ) -> Self:
        """Compute a metric over each epoch.

        Args:
          metric: A name from `telic.metrics` or `telic.losses`, a `Metric`, a function of what it reads that gives
            per-example values, a scalar or a Mean, or a metric of clu, metrax or ``flax.nnx``.
          name: Name in results; by default the metric's own.
          reduce: "mean" by mass, "running_average" over batches, "running_sum", "last", or ``(fold, initial)``.
          reads: Names of outputs (``"prediction"``), batch fields (``"batch.mask"``), or a function of the outputs
            that returns the arguments as a tuple. By default targets and prediction.
        Raises:
          ValueError: The name is unknown, or already attached.
        """
        self._check_idle()
        made = as_reduced(metric, name, reduce=reduce, reads=reads)
        if made.name in self._metrics:
            raise ValueError(f"this loop has a metric named {made.name!r} already; give another name=")
        if made.name == "loss" and has_loss(self._program):
            raise ValueError("this loop reports its objective's loss as 'loss'; give your metric another name=")
        if made.name in RESERVED:
            raise ValueError(f"a metric may not be named {made.name!r}: log lines use that name themselves")
        self._metrics[made.name] = Reducer(made.name, made)
        return self

    def handle_event(
        self, event: str | Sequence[str], handler: Handler, filter: Filter = always, *, name: str | None = None
    ) -> Self:
        """Run a handler at an event.

        Args:
          event: One event, a list of them, or "all": those of the loop and those registered so far.
          handler: ``(LoopState) -> None | status | LoopState | (status, LoopState)``.
          filter: Which firings it answers to, such as ``telic.every(100)``.
          name: How errors call it; by default the function's own name.
        Raises:
          ValueError: An event is unknown.
          TypeError: The handler is not callable, or the filter is no filter.
        """
        self._check_idle()
        if not callable(handler):
            raise TypeError(f"a handler is a function of the LoopState, got {handler!r}")
        if not isinstance(name, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"the name of a handler is text, got {name!r}")
        label = name or getattr(handler, "__qualname__", type(handler).__name__)
        chosen = as_filter(filter)
        for one in self._resolve(event):
            if chosen.uses_last and one in self._events:
                raise ValueError(f"{one!r} is fired by handlers, so nobody knows its last firing: leave telic.last out")
            self._attachments.append(Attachment(one, handler, chosen, label))
        return self

    def register_event(self, name: str) -> Self:
        """Add an event of your own: handlers attach to it by name, and a handler fires it with ``state.fire(name)``.

        Firing runs its handlers at once, counted and filtered like those of every event. A halt among their answers
        holds as if the handler that fired had given it.

        Args:
          name: Any text that is no event yet.
        """
        self._check_idle()
        self._events = (*self._events, ev.check_event_name(name, self._events))
        return self

    def probe(
        self,
        fn: Callable[[Any], PyTree],
        filter: Filter,
        name: str | None = None,
        *,
        to: Callable[[Any, LoopState], Any] | None = None,
    ) -> Self:
        """Look inside the step now and then: histograms, norms of gradients by layer, activations.

        `fn` is compiled, and runs only at the iterations that the filter names; what it gives stands in
        ``state.probes[name]`` at ``iteration_completed`` and until the next iteration, on the device. The step runs
        once more for it, so a firing costs about a step; iterations at which it does not fire cost nothing, and the
        run has the bits of one without probes.

        Args:
          fn: Function of the step's outputs (``outputs["prediction"]``, ``["targets"]``, ``["loss"]``,
            ``["gradients"]``, a tree like ``params``, ...; the new state of a bare step) that gives a tree of arrays.
          filter: A filter of counts alone, such as ``telic.every(100)``.
          name: Name in `LoopState.probes`; by default the function's own.
          to: ``(values, state)``, called at each firing with NumPy arrays; its answer is that of a handler.
        Raises:
          ValueError: The name is taken, or the filter reads the clock or the state.
        """
        self._check_idle()
        if not callable(fn):
            raise TypeError(f"a probe is a function of the step's outputs, got {fn!r}")
        label = name or getattr(fn, "__name__", "<lambda>")
        if label == "<lambda>":
            raise ValueError("a probe made from a lambda has no name of its own: give name=")
        if label in self._probes:
            raise ValueError(f"this loop has a probe named {label!r} already; give another name=")
        chosen = as_filter(filter)
        if not chosen.is_static:
            raise ValueError(
                f"probe {label!r} needs a filter of counts alone (every, once, before, after, first, last, always): it "
                "is chosen before the iteration runs, and every_seconds and when are asked after it"
            )
        if to is not None and not callable(to):
            raise TypeError(f"to must be a function (values, state), got {to!r}")
        self._probes[label] = fn
        handler = _Delivery(label, to)
        self._attachments.append(Attachment(ev.ITERATION_COMPLETED, handler, chosen, f"probe {label}", probe=label))
        return self

    def _resolve(self, event: str | Sequence[str]) -> tuple[str, ...]:
        return ev.resolve_events(event, (*ev.EVENTS, *self._events))

    def _at_epoch_end(self, handler: Handler, name: str) -> None:
        """Attach a handler late, so that it sees what the epoch's other handlers recorded."""
        for end in (ev.EPOCH_COMPLETED, ev.EPOCH_HALTED):
            self._attachments.append(Attachment(end, handler, always, name, late=True))

    def _record_name(self, kind: str, metric: str | None, name: str | None) -> str:
        if not isinstance(metric, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"{kind} reads a metric by its name, such as 'loss' or 'validation_loss', got {metric!r}")
        return record_name(kind, metric, name, filter(None, map(record_of, self._attachments)))

    @property
    def reducers(self) -> Mapping[str, Reducer]:
        """The metrics attached, by name."""
        return dict(self._metrics)

    def _check_idle(self) -> None:
        if self._running:
            raise TelicError("this loop is running: attach before run, or attach to loop.copy() and run that")


@dataclass(frozen=True)
class _Delivery:
    """Handler that hands a probe's values to whoever asked for them."""

    probe: str
    to: Callable[[Any, LoopState], Any] | None

    def __call__(self, state: LoopState) -> Any:
        if self.to is None or self.probe not in state.probes:
            return None
        return self.to(jax.device_get(state.probes[self.probe]), state)


def listed(metrics: Sequence[Any]) -> Sequence[Any]:
    """Give what a user passed as metrics; a name alone, whose letters would be taken one by one, is refused."""
    if isinstance(metrics, str):
        raise TypeError(f"metrics is a list, such as [{metrics!r}], got {metrics!r}")
    return metrics


def as_reduced(metric: Any, name: str | None, *, reduce: Any, reads: Any) -> Metric:
    """Turn what a user gave into a Metric; a loss by name is a metric too."""
    is_loss = isinstance(metric, str) and (metric in losses.NAMES or metric in losses.ALIASES)
    if is_loss and metric not in metric_table.NAMES:
        return metric_table.as_metric(losses.get(metric), name or metric, reduce=reduce, reads=reads)
    return metric_table.as_metric(metric, name, reduce=reduce, reads=reads)


def record_of(attachment: Attachment) -> str | None:
    """Give the name of the record that an attached handler keeps, if it watches a metric or writes checkpoints."""
    handler = attachment.handler
    owner = getattr(handler, "__self__", handler)
    return owner.record if isinstance(owner, Monitor | Checkpoint | Confusion | Plot) else None
