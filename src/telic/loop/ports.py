"""The ports of the loop: what it asks of data, steps, placement and processes, and nothing more.

The loop knows when things happen; whatever does them stands behind one of these protocols.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from telic.contract import Result
from telic.types import Batch, PyTree

Position: TypeAlias = Any
"""Where a source stands after a consumed batch: a small JSON-like value that `Source.set_state` takes back."""


@dataclass(frozen=True)
class View:
    """What a source may look at when it makes the next batch, such as the parameters to sample with.

    Attributes:
      step_state: The training state before the batch is used. Borrowed: read it before `Source.next` returns.
      epoch: Epoch the batch belongs to, from 0.
      iteration: Batches done in that epoch.
    """

    step_state: PyTree
    epoch: int
    iteration: int


class Source(Protocol):
    """Batches in order, epoch by epoch, each with the position after it.

    Attributes:
      read_ahead: Whether batches may be read before the ones in front of them are used.
      fresh: Whether each batch lies in memory that is never written again; others are copied before use.
    """

    read_ahead: bool
    fresh: bool

    def begin(self, epoch: int, *, continuous: bool = False) -> None:
        """Start an epoch. With `continuous` the data is one stream and only exhausted data ends it."""
        ...

    def next(self, view: View) -> tuple[Batch, Position]:
        """Give the next batch of the epoch and the position after it; raise StopIteration at the epoch's end.

        Raises:
          DataError: The epoch is empty, or the data cannot be read a second time.
        """
        ...

    def get_state(self) -> Position:
        """Give the position of the next batch."""
        ...

    def set_state(self, position: Position) -> None:
        """Go to a position that `get_state` or `next` gave."""
        ...

    def close(self) -> None:
        """Release files, threads and workers."""
        ...


@runtime_checkable
class Draws(Protocol):
    """A source that makes each batch with the training state, so that there is none before there is a state.

    It is a `Source` besides, with `read_ahead` False. The first state is built from its example.
    """

    def example(self) -> Batch:
        """Give a batch of the shapes and dtypes to come; its values do not matter."""
        ...

    def skip(self, count: int) -> None:
        """Go past the next batches of the epoch without making them."""
        ...


@runtime_checkable
class FillsMemory(Protocol):
    """A source that can write many batches at once where they are wanted, instead of giving one after the other."""

    def fill(self, memory: Batch, count: int) -> Sequence[Position] | None:
        """Write the next batches of the epoch into the first rows of `memory`, `count` of them at most.

        Gives the position after each, so as many as were written, at least 1; None where this data cannot do it, and
        raises StopIteration at the epoch's end.
        """
        ...


class Batches(Protocol):
    """Consecutive batches of one shape, which one dispatch may run."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...

    @property
    def position(self) -> Position:
        """Where the source stands after the last of them."""
        ...

    def split(self, count: int) -> "tuple[Any, Any | None]":
        """Give the first `count`, and the rest where there is one. What was split is used up."""
        ...

    def join(self, other: Any) -> bool:
        """Take the batches that follow, and say whether they can be one with these. `other` is used up then."""
        ...

    def release(self) -> None:
        """Let go of batches that are not used."""
        ...


class Feed(Protocol):
    """Gives the batches of a source in order, several at a time; it may read ahead of their use.

    Attributes:
      waited: Seconds that the loop has waited for batches.
    """

    waited: float

    def begin(self, epoch: int, *, continuous: bool, back_to: Position | None, keep: bool, unused: bool) -> None:
        """Start an epoch.

        Args:
          epoch: Its number.
          continuous: The data is one stream.
          back_to: Where the source goes back to if batches were read and not used, and `keep` is False.
          keep: Batches that were read ahead are the next ones; otherwise they are dropped.
          unused: The loop itself has batches that it did not use.
        """
        ...

    def next(self, view: View, most: int | None) -> Batches | None:
        """Give the next batches, or None at the epoch's end; `most` is how many of it may still be used at all."""
        ...

    def grow(self, batches: Batches, count: int, view: View) -> None:
        """Let the batches given last become up to `count`, where nothing was read ahead."""
        ...

    def close(self) -> None:
        """Stop reading."""
        ...


class StepProgram(Protocol):
    """A pure step over batches, with how many of them make one committed window.

    Attributes:
      period: Attempts per window, K ≥ 1: the host knows from it when a window closes.
    """

    @property
    def period(self) -> int: ...

    def bind(self, example: Batch) -> "StepProgram":
        """Give this step with the shapes it learns from a first batch."""
        ...

    def init(self, batch: Batch) -> PyTree:
        """Give the state before the first step."""
        ...

    def adopt(self, batch: Batch, given: PyTree) -> PyTree:
        """Give a starting state from what a caller handed to `run(state=...)`."""
        ...

    def step(self, state: PyTree, batch: Batch, window: Any = None, /) -> Any:
        """Give the new state, or a `Result` with outputs."""
        ...

    def flush(self, state: PyTree) -> PyTree:
        """Commit a window that is not full."""
        ...

    def health(self, state: PyTree) -> PyTree:
        """Give a few device scalars that say whether the run may go on; None when there is nothing to watch."""
        ...

    def check_health(self, health: PyTree, state: PyTree) -> None:
        """Raise when fetched health says the run must end."""
        ...

    def model(self, state: PyTree) -> Any:
        """Give the usable trained model of a state, or None."""
        ...


@runtime_checkable
class CountsAttempts(Protocol):
    """A step that numbers its attempts over the whole run, so that the batch of one can be found again."""

    def attempts_made(self, state: PyTree) -> Any:
        """Give the index of a state's next attempt."""
        ...

    def num_attempts(self, batch: Batch) -> int:
        """Give how many attempts a batch makes."""
        ...

    def attempt_batch(self, batch: Batch, index: int) -> Batch:
        """Give the microbatch of one of a batch's attempts."""
        ...


class Processes(Protocol):
    """The processes of a run, and plain values told among them."""

    @property
    def index(self) -> int:
        """This process, from 0."""
        ...

    @property
    def count(self) -> int:
        """Number of processes."""
        ...

    def agree(self, value: Any) -> Any:
        """Give process 0's value: numbers, text, arrays, and lists and mappings of them."""
        ...

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Give every process's value, in their order; all call it, in the same order."""
        ...

    def stops(self) -> bool:
        """Say whether a process was told to end, the same in all of them, which ask equally often."""
        ...

    @property
    def post(self) -> "Post | None":
        """What takes values among them on any thread; None where there is one process."""
        ...


class Post(Protocol):
    """Values told by one process and heard by others, on any thread and in any order."""

    @property
    def index(self) -> int:
        """This process, from 0."""
        ...

    @property
    def count(self) -> int:
        """Number of processes."""
        ...

    def tell(self, key: str, value: Any) -> None:
        """Tell a value, once."""
        ...

    def hear(self, key: str, teller: int) -> Any:
        """Give a value that a process tells, as soon as it does."""
        ...

    def forget(self, prefix: str) -> None:
        """Forget what was told under a prefix."""
        ...


class Placement(Protocol):
    """Where batches and states live."""

    @property
    def processes(self) -> Processes:
        """The processes that hold the devices."""
        ...

    @property
    def partition(self) -> tuple[int, int]:
        """Which share of each batch this process reads, of how many: (index, count)."""
        ...

    def learn(self, objective: Any) -> None:
        """Take note of the objective of a run, bound to its shapes: its model may name dimensions."""
        ...

    def on_mesh(self) -> AbstractContextManager[Any]:
        """Give a context in which what is traced knows the mesh that it is compiled for."""
        ...

    def put(self, batch: Batch, *, fresh: bool, stacked: bool = False) -> Batch:
        """Place a host batch on the devices; copies it first unless it is fresh. `stacked`: several, one by one."""
        ...

    def whole(self, batch: Batch) -> Batch:
        """Give a batch of the shapes over all processes for this process's share; its values do not matter."""
        ...

    def share(self, batch: Batch) -> Batch:
        """Give a batch of this process's shapes for one of all processes; its values do not matter."""
        ...

    def joined(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Give validation batches, as many in every process, with the rows that do not divide over the devices."""
        ...

    def joined_source(self, source: Source) -> Source:
        """Give the batches of a loop that evaluates, in the same way."""
        ...

    def settle(self, state: PyTree) -> PyTree:
        """Give a state with every leaf where it belongs; what lies there already is not copied."""
        ...

    def spread(self, values: PyTree) -> PyTree:
        """Give values that every process has whole on every device."""
        ...

    def scatter(self, values: PyTree) -> PyTree:
        """Give arrays that an objective holds where a state can be built of them, in parts where they are large."""
        ...

    def assembled(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], Any]) -> Any:
        """Give an array in parts where it is large, by its shape alone; each part is read where it will lie."""
        ...

    def local(self, values: PyTree) -> PyTree:
        """Give values that are whole on every device as they are on one of this process."""
        ...

    def near(self, value: Any) -> Any:
        """Give an array of which this process has every value; all processes call it, in the same order."""
        ...

    def shardings(self, shapes: PyTree) -> PyTree | None:
        """Give where the leaves of a state belong; None leaves it to XLA."""
        ...

    def rows(self, batch: Batch) -> PyTree | None:
        """Give where the leaves of a batch of all processes belong; None leaves it to XLA."""
        ...

    @property
    def divides(self) -> int:
        """What the rows of a batch over all processes must be a multiple of to be split over all devices."""
        ...

    def pins(self, values: PyTree) -> PyTree | None:
        """Give where values lie, for a program that is to leave them there; None leaves it to XLA."""
        ...

    def gather(self, values: PyTree) -> PyTree:
        """Give values of all devices, whole, as NumPy arrays. Every process calls it, in the same order."""
        ...

    @property
    def leads(self) -> bool:
        """Whether this process is the one that decodes and writes: process 0."""
        ...


class Meter(Protocol):
    """Counts where the host's time goes: each moment belongs to the innermost part that is open."""

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Count the time inside as that part's: "data", "dispatch", "device", "handlers", "checkpoint", ..."""
        ...


class Agree(Protocol):
    """One value for all processes: process 0's. The identity on one process."""

    def __call__(self, value: Any) -> Any: ...


class Reducer(Protocol):
    """A metric under its name in one loop: pure, and traced into the step's program.

    Attributes:
      always: Whether attempts that were rejected are in it too.
    """

    @property
    def always(self) -> bool: ...

    def init(self, result: Result, batch: Batch) -> PyTree:
        """Give the empty accumulator for results and batches of these shapes."""
        ...

    def update(self, accumulator: PyTree, result: Result, batch: Batch) -> PyTree:
        """Fold one batch's result into the accumulator."""
        ...

    def compute(self, accumulator: PyTree) -> Any:
        """Give the metric's value."""
        ...


class Reported(Protocol):
    """Gives reducers for the metrics a step reports by itself."""

    def __call__(self, result: Result, taken: Mapping[str, Any]) -> Mapping[str, Reducer]: ...


class State(Protocol):
    """What a handler sees of a run: the part of `LoopState` that handlers of this package rely on."""

    step_state: Any
    epoch: int
    max_epoch: int | None
    iteration: int
    max_iteration: int | None
    total_iterations: int
    max_steps: int | None
    metrics: Any
    history: dict[int, dict[str, float]]
    times: dict[int, float]
    handler_state: dict[str, Any]
    status: str | None
    probes: dict[str, Any]

    @property
    def event_counts(self) -> dict[str, int]:
        """Firings by event over the run."""
        ...

    @property
    def steps(self) -> int:
        """Windows closed over the run."""
        ...


class Keeper(Protocol):
    """Saves a run where nothing of it is under way."""

    def wants(self, state: Any, *, closed: bool) -> bool:
        """Say whether to save here: between two iterations or, with `closed`, between two epochs."""
        ...

    def keep(self, state: Any, upcoming: Batch | None) -> None:
        """Save; `upcoming` is the next batch, where it is known. May raise to end the run."""
        ...


class Driver(Protocol):
    """Runs the compiled step over batches and keeps what it carries. The loop decides when, the driver how.

    Attributes:
      step_state: The state after the last batch; assigning it replaces what the next batch starts from.
    """

    step_state: PyTree

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics carried."""
        ...

    @property
    def width(self) -> int:
        """Iterations the next dispatch may run, at most."""
        ...

    def advance(self, batches: Batches | Sequence[Batch], *, epoch: int, iteration: int, window: Any = None) -> None:
        """Run batches of one shape; epoch and iteration name the first of them in errors.

        `window` is what the step plans for the whole window they belong to.
        """
        ...

    def probe(
        self, names: Sequence[str], batch: Batch, *, epoch: int, iteration: int, window: Any = None
    ) -> dict[str, Any]:
        """Give what probes see of the step on a batch, from the state it will start from; the state stays as it is."""
        ...

    def plan(self, batches: Sequence[Batch]) -> Any:
        """Give what the step plans for a window of these batches, for `advance(..., window=...)`."""
        ...

    def flush(self) -> None:
        """Close a window that is not full."""
        ...

    def compute(self, scope: str) -> Callable[[], Mapping[str, Any]]:
        """Give a function that computes and fetches the metrics accumulated in a scope."""
        ...

    def reset(self, scope: str) -> None:
        """Empty a scope's accumulators."""
        ...

    def check(self, *, wait: bool) -> None:
        """Raise when the step says the run must end; with `wait`, as of the last batch."""
        ...
