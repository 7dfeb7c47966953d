"""How a run saves itself and goes on: what is taken from a run between two steps, and how it is put back.

A run is taken only where nothing is under way: after an iteration with all its handlers, after an epoch, at the end.
So what is saved is exactly what an uninterrupted run holds at that place.
"""

import contextlib
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from telic import tree
from telic.checkpoints import plain
from telic.checkpoints.directory import Found, RunDirectory, Saved, versions
from telic.checkpoints.following import FollowedDirectory
from telic.checkpoints.leaves import Leaf, fill, named
from telic.checkpoints.parts import Held, Parted
from telic.checkpoints.points import reach
from telic.compose.identity import configuration, options, said
from telic.compose.rehearsal import Rehearsal, rehearsal
from telic.compose.saving import Saving
from telic.compose.signals import Signals
from telic.compose.taking import held_parts, hold, is_in_parts, taken
from telic.display import Recorder
from telic.errors import CheckpointError, DataError, Interrupted, MismatchError, Preempted, ProcessError
from telic.loop import events as ev
from telic.loop.attachments import Attachment
from telic.loop.events import EVENTS, Counts
from telic.loop.filters import always, every
from telic.loop.ports import Placement, Source, StepProgram
from telic.loop.state import LoopState, Metrics, scalars
from telic.optimizers import set_hyperparams
from telic.placement import SingleDevice
from telic.train.state import TrainState
from telic.types import Batch, PyTree

_WINDOW = "state/learner/window"


@dataclass
class Session:
    """One run with checkpoints, from the lock on its directory to its last save.

    Attributes:
      saving: What the loop was told.
      flushers: Called before each save: what was noted of the run so far is written, as a continued run will not.
      say: Takes lines for the person who watches.
      saved: The checkpoint that the run goes on from.
      placement: Where the run's arrays lie. Of several processes the first writes; all of them read.
    """

    saving: Saving
    flushers: tuple[Callable[[], None], ...] = ()
    say: Callable[[str], None] = print
    saved: Saved | None = None
    placement: Placement = field(default_factory=SingleDevice)
    _directory: RunDirectory | FollowedDirectory = field(init=False)
    _configuration: dict[str, Any] = field(default_factory=dict[str, Any])
    _options: dict[str, Any] = field(default_factory=dict[str, Any])
    _batch: Any = None
    _due: bool = False
    _latest: tuple[int, int] | None = None
    _signals: Signals = field(init=False)
    _rehearsal: Rehearsal | None = None
    _frozen: frozenset[str] = frozenset()
    _closers: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self._rehearsal = rehearsal()
        if self._rehearsal is not None:
            self.saving = replace(self.saving, config=self._rehearsal.checkpoints(self.saving.config))
        if not self._leads:
            self.say = _unsaid
        post = self.placement.processes.post
        self._directory = (RunDirectory if self._leads else FollowedDirectory)(self.saving.config, post)
        self._signals = Signals(self.say)

    @property
    def _leads(self) -> bool:
        return self.placement.processes.index == 0

    @property
    def name(self) -> str:
        """The run's name: that of its directory."""
        return self.saving.config.directory.resolve().name

    # -- opening -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the directory and read the newest whole checkpoint in it.

        Raises:
          BusyError: Another run holds the directory.
          CheckpointError: None of its checkpoints is whole, or there is none and there must be.
        """
        gone = self._directory.open()
        if gone:
            self.say(f"{self.name}: removed what an interrupted save left: {', '.join(gone)}")
        if self.saving.resume == "never":
            aside = self._directory.set_aside()
            if aside is not None:
                self.say(f"{self.name}: begins anew; earlier checkpoints are in {aside}")
            found = Found()
        else:
            found = self._directory.find()
        for name, why in found.rejected.items():
            self.say(f"{self.name}: checkpoint {name} was not taken: {why}")
        if found.strays:
            self.say(f"{self.name}: not checkpoints, left alone: {', '.join(found.strays)}")
        if found.saved is None and self.saving.resume == "must" and self._leads:
            raise CheckpointError(
                f"resume='must', and {self._directory.root} has no checkpoint; give the directory of the run, or "
                "resume='auto'"
            )
        self.saved = found.saved
        if self.placement.processes.count == 1:
            self._signals.install()
            return
        # The signals of several processes are JAX's: it finds the step at which all of them end.
        name = self.placement.processes.agree(None if found.saved is None else found.saved.name)
        if name is not None and isinstance(self._directory, FollowedDirectory):
            self.saved = self._directory.read(name)

    def close(self) -> None:
        """Wait for the save under way, give the lock back and the signals too."""
        self._signals.restore()
        self._closers.close()
        self._directory.close()

    def check_source(self, source: Source) -> None:
        """Refuse data that cannot come back to a position.

        Raises:
          DataError: It cannot; the text says what to pass.
        """
        why = getattr(source, "not_resumable", None)
        if why is not None:
            raise DataError(f"checkpoints need data that can come back to a position: {why}")

    # -- continuing ----------------------------------------------------------------------------------------------

    def cursor(self) -> LoopState:
        """Give the loop's state of the checkpoint, without the step's state.

        Raises:
          CheckpointError: It lacks something that every checkpoint has.
        """
        saved = self._found()
        try:
            loop = plain.load(saved.body["loop"], saved.arrays, apart=self._assembled)
            metrics = Metrics()
            metrics.add(loop["metrics"])
            counts = Counts(_counts(loop["counts"]), _counts(loop["epoch_counts"]))
            return LoopState(
                epoch=loop["epoch"],
                max_epoch=loop["max_epoch"],
                iteration=loop["iteration"],
                max_iteration=loop["max_iteration"],
                total_iterations=loop["total_iterations"],
                max_steps=loop["max_steps"],
                metrics=metrics,
                history=loop["history"],
                times=loop["times"],
                counts=counts,
                handler_state=loop["handler_state"],
                status=loop["status"],
                position=self._own_position(loop["position"], saved),
                accumulators=loop["accumulators"],
            )
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {saved.name} of {self.name} lacks a part: {error}") from error

    def _assembled(self, leaf: Parted) -> Any:
        """Give an array of a handler's that no process had whole: each reads its parts of it."""
        return self.placement.assembled(leaf.shape, leaf.__getitem__)

    def _own_position(self, position: Any, saved: Saved) -> Any:
        """Give where this process's share of the data stands.

        Raises:
          MismatchError: The shares stood at positions of their own, and there are other shares now.
        """
        shares = saved.body.get("positions")
        if shares is None:
            return position
        index, count = self.placement.partition
        if len(shares) != count:
            raise MismatchError(
                f"the run {self.name} read {len(shares)} shares of its data, each at a position of its own, and this "
                f"one reads {count}: continue it with {len(shares)}. Data whose position is a count of batches, such "
                "as telic.data.columns, may be read in any number of shares"
            )
        return plain.load(shares[index], saved.arrays)

    def going_on(self, state: LoopState) -> LoopState:
        """Give a checkpoint's state as one that a run goes on from: not a second start, and its end is to come."""
        counts = Counts(dict(state.counts.total), dict(state.counts.epoch))
        for event in {ev.STARTED, state.status or ev.STARTED}:
            counts.total[event] -= 1
            # In a later epoch than the first this is -1 until the start is fired once more.
            counts.epoch[event] -= 1
        return state.replace(counts=counts)

    def example(self) -> Batch | None:
        """Give a batch of the run's first shapes, or None when the checkpoint cannot say."""
        described = self._found().body.get("batch")
        return None if described is None else plain.example(described)

    def is_over(self, epochs: int | None, steps: int | None) -> bool:
        """Say whether the checkpoint's run reached these totals, or was halted short of the same ones."""
        state = self.cursor()
        if state.status == ev.HALTED and (epochs, steps) == (state.max_epoch, state.max_steps):
            return True
        if state.status is None:
            return False
        if steps is not None:
            return state.max_steps is not None and state.steps >= steps
        return epochs is not None and state.max_steps is None and state.epoch >= epochs

    def check_kind(self, cursor: LoopState, epochs: int | None, steps: int | None) -> None:
        """Refuse totals of another kind than the run's, in the middle of its work.

        Raises:
          MismatchError: The run counts epochs and is continued by steps, or the reverse.
        """
        if cursor.iteration and (steps is None) != (cursor.max_steps is None):
            began, asked = ("epochs=", "steps=") if cursor.max_steps is None else ("steps=", "epochs=")
            raise MismatchError(
                f"the run {self.name} was begun with {began} and stands inside an epoch: continue it with {began}, "
                f"not {asked}"
            )

    def fill(self, like: PyTree, program: StepProgram, *, over: bool = False) -> PyTree:
        """Give the step's state of the checkpoint, with the rates of the optimizer that were changed since.

        Args:
          like: The state a fresh run would start from.
          program: The step.
          over: The run does not go on: its state is given as it is.
        Raises:
          MismatchError: Model, optimizer, objective or window are others; the differences are listed.
        """
        saved = self._found()
        stored = {name: leaf for name, leaf in saved.arrays.items() if _below(name, "state")}
        self._check_configuration(configuration(program, like), saved)
        self._options = options(program, like)
        window = None
        if isinstance(like, TrainState) and not self._fits(like, stored):
            # Sums of an empty window hold nothing, so a window of another kind or size takes their place. It stays
            # where it lies: of several processes none may have it whole.
            window, like = like.window, like.replace(window=None)
            stored = {name: leaf for name, leaf in stored.items() if not _below(name, _WINDOW)}
        like = _in_saved_dtypes(like, stored)
        state = fill("state", like, stored, what=f"the state of checkpoint {saved.name} of {self.name}")
        state = state if window is None else state.replace(window=window)
        return state if over else self._with_changes(state, saved)

    def _with_changes(self, state: PyTree, saved: Saved) -> PyTree:
        """Say which options are others than the run had, and put changed rates where the optimizer reads them."""
        here, there = self._options, saved.body.get("options", {})
        for name, value in here.items():
            if name != "rates" and there.get(name, value) != value:
                self.say(f"{self.name}: {name} was {there[name]}, is {value} from here on")
        before: dict[str, float] = there.get("rates", {})
        # What a plateau made of a rate stays while the program says what it said.
        changed = {name: rate for name, rate in here.get("rates", {}).items() if before.get(name, rate) != rate}
        for name, rate in changed.items():
            self.say(f"{self.name}: the optimizer goes on with {name} {rate:.7g}, not {before[name]:.7g}")
        return state.replace(opt_state=set_hyperparams(state.opt_state, **changed)) if changed else state

    def _fits(self, like: TrainState, stored: Mapping[str, Leaf]) -> bool:
        """Say whether the window's leaves are this run's, or the window is open, so that they must be."""
        slot = stored.get(f"{_WINDOW}/slot")
        wanted = {name for name in named("state", like) if _below(name, _WINDOW)}
        same = wanted == {name for name in stored if _below(name, _WINDOW)}
        return same or slot is None or int(slot.data) != 0

    def _check_configuration(self, here: dict[str, Any], saved: Saved) -> None:
        there: dict[str, Any] = saved.body.get("configuration", {})
        inside = self.cursor().iteration > 0
        lines = [
            f"  {name}: {said(there.get(name))} in the checkpoint, {said(value)} in this run"
            for name, value in here.items()
            if there.get(name) != value and (name != "accumulate" or inside)
        ]
        if lines:
            raise MismatchError(
                f"this run is not the one of {self.name}:\n"
                + "\n".join(lines)
                + ("\naccumulate= can change between two epochs only" if "accumulate" in lines[-1] else "")
                + "\nContinue it with what it was begun with, or give another directory",
                lines=tuple(lines),
            )
        for name, value in here.items():
            if there.get(name) != value:
                self.say(f"{self.name}: {name} was {there.get(name)}, is {value} from here on")
        before: dict[str, Any] = saved.body.get("versions", {})
        changed = [f"{n} {before[n]} -> {v}" for n, v in versions().items() if n in before and before[n] != v]
        if changed:
            self.say(f"{self.name}: other versions compute other bits: {', '.join(changed)}")

    def check_batch(self, first: Batch, *, read: bool) -> None:
        """Refuse a next batch that is not the one the checkpoint's run would have read.

        Args:
          first: The batch at the checkpoint's position.
          read: It will be used; False when it only showed its shapes.
        Raises:
          MismatchError: The data is another, or in another order.
        """
        saved = self._found()
        expected = saved.body.get("next_batch")
        if expected is None or not read or not self.saving.config.check_data:
            return
        if saved.body.get("shares", 1) != self.placement.partition[1] or not self._leads:
            # What is compared is process 0's share.
            return
        if plain.batch_digest(first) != expected:
            here = plain.describe(first)
            before = saved.body.get("batch")
            detail = f"; its shapes are {here}, those of the run's first batch {before}" if here != before else ""
            raise MismatchError(
                f"the data is not that of the run {self.name}: the next batch differs from the one that would have "
                f"come{detail}. Give the same source, seed, batch and order; for data that is random by itself, "
                "telic.Checkpoints(..., check_data=False)"
            )

    def begin(self, program: StepProgram, start: PyTree, example: Batch) -> None:
        """Note what every checkpoint of this run records."""
        self._configuration = configuration(program, start)
        self._options = self._options or options(program, start)
        self._batch = plain.describe(example)

    def note_frozen(self, state: PyTree, unwritten: tuple[bool, ...] | None) -> None:
        """Note which leaves no step can write: they are stored once.

        A handler that writes one all the same costs nothing but disk: what is stored is compared first.

        Args:
          state: The state a run starts from.
          unwritten: For each of its leaves whether the step hands it on; None where that is not known.
        """
        if unwritten is not None:
            names = named("state", state)
            self._frozen = frozenset(name for name, still in zip(names, unwritten, strict=True) if still)

    def announce(self, state: LoopState, epochs: int | None, steps: int | None, *, over: bool) -> None:
        """Say where the run stands."""
        verb = "already at" if over else "continuing at"
        if steps is not None:
            where = f"{state.steps:,} of {steps:,} updates"
        else:
            total = "" if epochs is None else f" of {epochs:,}"
            where = f"epoch {state.epoch:,}{total}, {state.steps:,} updates"
        if over and state.status == ev.HALTED:
            self.say(f"{self.name}: already halted at {where}")
        elif over:
            self.say(f"{self.name}: {verb} {where}")
        else:
            self.say(f"continuing {self.name} at {where}")

    def _found(self) -> Saved:
        if self.saved is None:
            raise CheckpointError("there is no checkpoint to continue from")
        return self.saved

    # -- saving: what the engine calls ---------------------------------------------------------------------------

    def attachments(self) -> tuple[Attachment, ...]:
        """Give the handler that marks the updates after which to save: it ends a group of iterations there."""
        made: list[Attachment] = []
        if self.saving.config.every is not None:
            due = every(self.saving.config.every)
            made.append(Attachment(ev.STEP_COMPLETED, self._mark, due, "checkpoints", late=True))
        if self._rehearsal is not None:
            made += self._rehearsal.attachments(self._directory.root, self._directory.finish)
            if not self.flushers:
                made += self._recorded(Recorder(self._directory.root / "metrics.jsonl"))
        return tuple(made)

    def _recorded(self, recorder: Recorder) -> list[Attachment]:
        """Give the handlers that record the metrics of a run under rehearsal that records none itself."""
        self.flushers = (recorder.flush,)
        self._closers.callback(recorder.close)
        return [
            Attachment(ev.STARTED, recorder.on_start, always, "rehearsal"),
            Attachment(ev.ITERATION_COMPLETED, recorder.on_iteration, every(10, per_epoch=True), "rehearsal"),
            Attachment(ev.EPOCH_COMPLETED, recorder.on_epoch_end, always, "rehearsal", late=True),
            Attachment(ev.EPOCH_HALTED, recorder.on_epoch_end, always, "rehearsal", late=True),
        ]

    def _mark(self, state: LoopState) -> None:
        del state
        self._due = True

    def wants(self, state: LoopState, *, closed: bool) -> bool:
        """Say whether to save here, between two iterations, or with `closed` between two epochs."""
        error = self._directory.poll()
        if error is not None:
            self.say(f"{self.name}: a checkpoint could not be saved, training goes on: {error}")
        if closed:
            self._due = self._due or self.saving.config.every is None
            is_end = state.max_epoch is not None and state.epoch >= state.max_epoch
        else:
            is_end = state.max_steps is not None and state.steps >= state.max_steps
        if self._rehearsal is not None and self._rehearsal.ends(self._directory.root, state, closed=closed):
            self._signals.received = signal.SIGTERM
        if self.placement.processes.stops():
            self._signals.received = signal.SIGTERM
        # The end of the run has a save of its own.
        return (self._due or self._signals.received is not None) and not is_end

    def keep(self, state: LoopState, upcoming: Batch | None) -> None:
        """Save here.

        Raises:
          Interrupted: SIGINT asked for the end of the run; it is saved.
          Preempted: SIGTERM did.
        """
        self._save(state, upcoming)
        self._stop(state)

    def finish(self, state: LoopState) -> None:
        """Save the end of the run and wait until it is on the disk.

        Raises:
          CheckpointError: It could not be saved.
          Preempted: A signal came while the run was ending; it is saved.
        """
        self._save(state, None)
        self._directory.finish()
        self._stop(state)

    def _stop(self, state: LoopState) -> None:
        received = self._signals.received
        if received is None:
            return
        self._directory.finish()
        self.say(f"{self.name}: {received.name}: saved at {state.steps:,} updates; start it again to continue")
        raise Interrupted(state) if received == signal.SIGINT else Preempted(state)

    def _save(self, state: LoopState, upcoming: Batch | None) -> None:
        self._due = False
        for flush in self.flushers:
            flush()
        arrays: dict[str, Any] = {}
        score = self._score(state)
        loop = plain.dump(taken(state), "loop", arrays)
        arrays |= named("state", state.step_state)
        body: dict[str, Any] = {
            "loop": loop,
            "configuration": self._configuration,
            "options": self._options,
            "batch": self._batch,
            "next_batch": None if upcoming is None else plain.batch_digest(upcoming),
        }
        body |= self._shares(state.position, arrays)
        held: dict[str, Any] = {}
        parts: dict[str, Held] = {}
        for name, leaf in arrays.items():
            if is_in_parts(leaf):
                parts[name] = held_parts(leaf)
                continue
            value = self.placement.near(leaf)
            if self._leads:
                held[name] = hold(value)
        haste = self._signals.received is not None
        self._directory.save(state.steps, body, held, score, frozen=self._frozen, parts=parts, in_haste=haste)
        reach("run_taken")

    def _shares(self, position: Any, arrays: dict[str, Any]) -> dict[str, Any]:
        """Give what a checkpoint says of the shares that processes read; nothing where there is one.

        Raises:
          ProcessError: They have not read the same number of batches.
        """
        index, count = self.placement.partition
        beside = self.placement.processes
        if beside.count == 1:
            return {}
        told = beside.exchange("positions in the data", [index, plain.dump(position, "position", arrays)])
        shares = [next(given for share, given in told if share == i) for i in range(count)]
        if any(given != shares[share] for share, given in told):
            raise ProcessError(f"processes that read the same share of the data stand at other positions in it: {told}")
        same = all(share == shares[0] for share in shares)
        return {"shares": count} | ({} if same else {"positions": shares})

    def _score(self, state: LoopState) -> float | None:
        metric = self.saving.config.metric
        if metric is None:
            return None
        values: Mapping[str, Any] = {}
        if state.history and (state.iteration == 0 or state.status is not None):
            values = state.history[max(state.history)]
        values = {**scalars({n: v for n, v in state.metrics.items() if n == metric}), **values}
        return values.get(metric)


def _unsaid(line: str) -> None:
    """Say nothing: process 0 does."""
    del line


def _in_saved_dtypes(like: PyTree, stored: Mapping[str, Leaf]) -> PyTree:
    """Give a start whose Python numbers have the dtypes that the saved run settled on."""
    leaves, structure = jax.tree.flatten(like)
    names = list(named("state", like))
    return structure.unflatten(
        [
            np.asarray(leaf, stored[name].data.dtype) if not tree.is_array(leaf) and name in stored else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
    )


def _counts(found: Mapping[str, int]) -> dict[str, int]:
    return {event: found.get(event, 0) for event in EVENTS}


def _below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + "/")
