"""A run with a meter around its parts: what `profile=` turns on."""

import json
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.compose.fitting import explain
from telic.compose.recording import memory
from telic.compose.resume import Session
from telic.driver import Listener, StepDriver
from telic.jsonable import as_json
from telic.loop.attachments import Attachment
from telic.loop.ports import Meter, Source, StepProgram
from telic.profiling import (
    STEP_PARTS,
    Account,
    GoodputFile,
    MeteredDriver,
    MeteredKeeper,
    MeteredListener,
    MeteredSource,
    Report,
    flops_of,
    measured_peak,
    memory_of,
    metered_handler,
    published_peak,
    repeated_flops,
)
from telic.types import Batch

Reporter = Callable[[Report], Any]
"""Takes the report of a run when it ends."""

_log = logging.getLogger("telic.compose")

_default: ContextVar[Reporter | None] = ContextVar("profile", default=None)

MEASURED_FROM_SECONDS = 20.0
"""Steps that took less are not worth the tenth of a second that measuring the device takes, unless it is asked for."""

_TOKENS = ("tokens", "input_ids", "inputs", "0")
"""Names of batch leaves that hold token ids when they are whole numbers, [batch, time]."""


@contextmanager
def profiled(reporter: Reporter) -> Generator[None]:
    """Profile each run inside that does not say otherwise: for those who run a program which is not theirs."""
    token = _default.set(reporter)
    try:
        yield
    finally:
        _default.reset(token)


def as_reporter(profile: Any) -> Reporter | None:
    """Give who takes the report, from what a user gave as ``profile=``.

    Raises:
      TypeError: It is neither a bool nor a function.
    """
    if profile is None:
        return _default.get()
    if isinstance(profile, bool):
        return print if profile else None
    if not callable(profile):
        raise TypeError(f"profile is True, which prints a report, or a function that takes it, got {profile!r}")
    return profile


def unreported(report: Report) -> None:
    """Take a report that nobody asked for: it is in the run's directory."""


class Unmetered:
    """A run with nothing on the clock: every part as it is. It knows what the run is made of, for those who ask."""

    meter: Meter | None = None
    _driver: StepDriver | None = None
    _program: StepProgram | None = None
    _first: Batch = None

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Count nothing."""
        del name
        return nullcontext()

    def source(self, source: Source) -> Source:
        """Give the source as it is."""
        return source

    def listener(self, listener: Listener | None) -> Listener | None:
        """Give the listener as it is."""
        return listener

    def attachments(self, attachments: Sequence[Attachment]) -> tuple[Attachment, ...]:
        """Give the handlers as they are."""
        return tuple(attachments)

    def keeper(self, session: Session | None) -> Any:
        """Give the session as it is."""
        return session

    def driver(self, driver: StepDriver, program: StepProgram, first: Batch, iterations: int) -> Any:
        """Give the driver as it is; the run begins its steps here.

        Args:
          driver: The driver.
          program: Its step.
          first: A batch.
          iterations: Batches the run has behind it.
        """
        del iterations
        self._driver, self._program, self._first = driver, program, tree.shape_structs(first)
        return driver

    def explain(self, error: BaseException) -> None:
        """Add to an error what there is to say of the run's memory, where it is used up."""
        compiled = None if self._driver is None else self._driver.compiled
        explain(error, self._program, self._first, None if compiled is None else memory_of(compiled))

    def close(self) -> None:
        """Do nothing."""


class Metering(Unmetered):
    """One run with its time on the clock.

    Args:
      reporter: Takes the report when the run ends, however it ends; `unreported` where nobody asked for one, which then
        has no measured peak for a run so short that measuring the device would be felt.
      directory: Where ``profile.json`` goes, the report once more; None writes none.
      is_saved: The run has checkpoints there and may be started more than once: ``goodput.jsonl`` goes there too.
    """

    def __init__(self, reporter: Reporter, directory: Path | None, *, is_saved: bool):
        self._reporter = reporter
        self._directory = directory
        self._account = Account()
        self.meter = self._account
        self._goodput = GoodputFile(directory, self._account) if directory is not None and is_saved else None
        self._before = 0
        self._counts = np.zeros(3, np.int64)

    def part(self, name: str) -> AbstractContextManager[Any]:
        """Count the time inside as a part's."""
        return self._account.part(name)

    def source(self, source: Source) -> Source:
        """Give a source that is waited for on the clock."""
        return MeteredSource(source, self._account)  # pyright: ignore[reportReturnType] the rest is the source's own

    def listener(self, listener: Listener | None) -> Listener:
        """Give a listener that counts compilations."""
        return MeteredListener(self._account, listener)

    def attachments(self, attachments: Sequence[Attachment]) -> tuple[Attachment, ...]:
        """Give handlers that are counted by name."""
        return tuple(replace(a, handler=metered_handler(a.handler, a.name, self._account)) for a in attachments)

    def keeper(self, session: Session | None) -> Any:
        """Give a session whose saves are counted."""
        return None if session is None else MeteredKeeper(session, self._account, lambda state: self._write("saved"))

    def driver(self, driver: StepDriver, program: StepProgram, first: Batch, iterations: int) -> Any:
        """Give a driver that is on the clock."""
        super().driver(driver, program, first, iterations)
        self._before = iterations
        self._account.rest("loop")
        if self._goodput is not None:
            self._goodput.open(iterations)
        return MeteredDriver(driver, self._account, self._ran)

    def _ran(self, batches: Sequence[Batch]) -> None:
        rows, tokens = _sizes(batches[0])
        self._counts += np.asarray([1, rows, tokens]) * len(batches)
        if self._goodput is not None:
            self._goodput.tick(self._before + int(self._counts[0]))

    def _write(self, kind: str) -> None:
        if self._goodput is not None:
            self._goodput.write(self._before + int(self._counts[0]), kind)

    def totals(self) -> dict[str, Any]:
        """Give what the run has done so far: batches, examples, tokens, seconds by part; and its memory now.

        Also the operations of a batch on one device, and how many of them that device is said to do in a second.
        """
        seconds = self._account.seconds
        counts = zip(("iterations", "examples", "tokens"), map(int, self._counts), strict=True)
        step = sum(seconds[part] for part in STEP_PARTS)
        made = {**dict(counts), "step_seconds": step, "seconds": seconds, "memory": memory()}
        # Before the first step is compiled nobody knows what it costs.
        return made if not self._counts[0] else made | {"flops": self._flops, "peak_flops": self._published}

    def close(self) -> None:
        """Write what is known and hand the report over; a run that did not get to its first step has none."""
        if self._goodput is not None:
            self._write("end")
            self._goodput.close()
        if self._driver is None:
            return
        report = self._report(self._driver)
        if self._directory is not None:
            text = json.dumps(as_json(report.as_json()), indent=2) + "\n"
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                (self._directory / "profile.json").write_text(text, encoding="utf-8")
            except OSError as error:
                _log.warning("%s/profile.json could not be written: %s", self._directory, error)
        self._driver = None
        self._reporter(report)

    def _report(self, driver: StepDriver) -> Report:
        seconds = self._account.seconds
        found = {n.split("/", 1)[1]: s for n, s in self._account.details.items() if n.startswith("handlers/")}
        iterations, examples, tokens = (int(count) for count in self._counts)
        compiled = driver.compiled
        flops = self._flops if iterations else None
        peak, dtype = None, self._dtype
        is_felt = self._reporter is unreported and sum(seconds[part] for part in STEP_PARTS) < MEASURED_FROM_SECONDS
        if flops is not None and not is_felt:
            # The memory may be used up: that is why the run ended, and its error is not to be hidden by another.
            with suppress(jax.errors.JaxRuntimeError):
                peak = measured_peak(dtype)
        return Report(
            seconds=seconds,
            handlers=dict(sorted(found.items(), key=lambda item: -item[1])),
            iterations=iterations,
            examples=examples,
            tokens=tokens,
            flops=flops,
            peak_flops=peak,
            dtype=dtype,
            memory=None if compiled is None else memory_of(compiled),
        )

    @cached_property
    def _flops(self) -> float | None:
        """The operations of a batch on one device; None where the backend does not say."""
        compiled = None if self._driver is None else self._driver.compiled
        flops = None if compiled is None else flops_of(compiled)
        if flops is None or self._driver is None:
            return None
        leaves = jax.tree.leaves(self._driver.step_state)
        devices = max((len(x.sharding.device_set) for x in leaves if isinstance(x, jax.Array)), default=1)
        # The compiler counts what one device does, the trace what all of them do.
        return flops + repeated_flops(self._driver.traced) / devices

    @cached_property
    def _published(self) -> float | None:
        return published_peak(jax.local_devices()[0].device_kind, self._dtype)

    @cached_property
    def _dtype(self) -> str:
        """The dtype the step computes in: that of its policy, else that of most of its parameters."""
        chosen = getattr(getattr(self._program, "policy", None), "compute", None)
        if chosen is not None:
            return jnp.dtype(chosen).name
        sizes: dict[str, int] = {}
        state = None if self._driver is None else self._driver.step_state
        for leaf in jax.tree.leaves(state):
            if tree.is_float(leaf):
                sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.size
        return max(sizes, key=lambda name: sizes[name], default="float32")


def _sizes(batch: Batch) -> tuple[int, int]:
    """Give the rows of a batch and the entries of its token array; 0 where there are none."""
    tokens = 0
    for name, leaf in tree.named_leaves(batch).items():
        shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None)
        if name in _TOKENS and dtype is not None and jnp.issubdtype(dtype, jnp.integer) and len(shape) == 2:
            tokens = int(np.prod(shape))
            break
    return tree.leading_dimension(batch) or 0, tokens
