"""Feeding: batches are read, copied into slabs and placed, by a thread of its own while the device works."""

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import jax

from telic.driver.shapes import Signature, signature_of
from telic.driver.slabs import Run, Slab
from telic.loop.ports import Batches, FillsMemory, Meter, Placement, Position, Source, View
from telic.types import Batch

_SHAPES = 4
"""Shapes of batches whose slabs are kept to be filled again, at most."""

_PATIENCE = 0.0005
"""Seconds of reading after which a slab that somebody waits for is handed over, full or not."""

_AHEAD = 2
"""Slabs that are read, placed and not in use yet, at most: with one in use and one being filled, memory is bounded."""


class Feeder:
    """The batches of a source, in slabs.

    With a thread it reads ahead, and hands over what it has as soon as the loop waits for it. Without one it reads when
    it is asked, as much as it is asked for: for sources that look at the state, and iterators that are somebody else's.

    Args:
      source: Gives batches.
      placement: Where they go.
      room: Batches of a shape that one dispatch may run, at most.
      stacked: Whether the program takes them stacked.
      threaded: Read on a thread of its own.
      epoch: The epoch that has begun.
      ahead: Batches that were read already.
      meter: Counts the time the loop waits.
    """

    def __init__(
        self,
        source: Source,
        placement: Placement,
        room: Callable[[Signature], int],
        *,
        stacked: bool,
        threaded: bool,
        epoch: int = 0,
        ahead: Iterable[tuple[Batch, Position]] = (),
        meter: Meter | None = None,
    ):
        self.waited = 0.0
        self._source = source
        self._placement = placement
        self._room = room
        self._stacked = stacked
        self._threaded = threaded
        self._meter = meter
        self._read: deque[tuple[Batch, Position]] = deque(ahead)
        self._fills = isinstance(source, FillsMemory)
        self._pool: dict[Signature, deque[Slab]] = {}
        self._ended = False
        self._broken: BaseException | None = None
        self._view = View(None, epoch, 0)
        # What the two threads share is below, and changes under the lock.
        self._changed = threading.Condition()
        self._ready: deque[Run] = deque()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._wanted = False
        self._active = True
        self._resting = True
        self._closed = False
        self._given = 0
        self._taken = 0
        self._most: int | None = None
        self._device = getattr(jax.config, "jax_default_device", None)

    # -- what the loop asks --------------------------------------------------------------------------------------

    def begin(self, epoch: int, *, continuous: bool, back_to: Position | None, keep: bool, unused: bool) -> None:
        """Start an epoch; what was read ahead is kept, or dropped, and the source goes back to a position then."""
        self._pause()
        over = bool(unused or self._ready or self._read)
        if not keep:
            while self._ready:
                self._ready.popleft().release()
            self._read.clear()
            if over and back_to is not None:
                self._source.set_state(back_to)
        self._source.begin(epoch, continuous=continuous)
        with self._changed:
            self._ended, self._wanted, self._broken, self._failure = False, False, None, None
            self._given = self._taken = 0
            self._view = View(None, epoch, 0)
            self._active = True

    def next(self, view: View, most: int | None) -> Run | None:
        """Give the next batches, or None at the epoch's end; `most` is how many of it may still be used at all.

        Raises:
          BaseException: Whatever the source raised, after the batches it gave before.
        """
        began = time.perf_counter()
        with nullcontext() if self._meter is None else self._meter.part("data"):
            try:
                return self._await(most) if self._threaded else self._fill(view, 1)
            finally:
                self.waited += time.perf_counter() - began

    def grow(self, batches: Batches, count: int, view: View) -> None:
        """Let the batches given last become up to `count`; what was read ahead does not grow."""
        if self._threaded or len(batches) >= count or not isinstance(batches, Run):
            return
        began = time.perf_counter()
        with nullcontext() if self._meter is None else self._meter.part("data"):
            self._fill_up(batches.slab, batches.start + count, view)
            batches.stop = batches.slab.count
        self.waited += time.perf_counter() - began

    def close(self) -> None:
        """Stop reading: the thread is gone when this returns, and a read that is under way is waited for."""
        with self._changed:
            self._closed = True
            self._active = False
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._ready.clear()
        self._failure = None

    # -- one thread or the other ---------------------------------------------------------------------------------

    def _fill(self, view: View, count: int) -> Run | None:
        """Read up to `count` batches of one shape into a slab; None at the epoch's end."""
        if not self._look(view):
            if self._broken is not None:
                error, self._broken = self._broken, None
                raise error
            return None
        slab = self._slab_for(self._read[0][0])
        slab.put(*self._read.popleft())
        self._fill_up(slab, count, view)
        return Run(slab, 0, slab.count)

    def _fill_up(self, slab: Slab, count: int, view: View) -> None:
        """Read into a slab until it holds `count`, or somebody has waited long enough for what it holds."""
        limit = min(count, slab.room)
        began = time.perf_counter()
        while slab.count < limit and not self._is_hurried(began):
            rest = slab.rest if self._fills and not self._read and not self._ended else None
            if rest is not None and self._write(slab, rest, limit - slab.count):
                continue
            if not self._look(view) or not slab.put(*self._read[0]):
                return
            self._read.popleft()

    def _look(self, view: View) -> bool:
        """Read one batch ahead, unless there is one; say whether the epoch has it. An error waits for its turn."""
        if not self._read and not self._ended and self._broken is None:
            try:
                self._read.append(self._source.next(view))
            except StopIteration:
                self._ended = True
            except BaseException as error:
                self._broken = error
        return bool(self._read)

    def _write(self, slab: Slab, rest: Batch, count: int) -> bool:
        """Let the source write batches by itself; False where it cannot, or has no more."""
        try:
            positions = self._source.fill(rest, count)  # pyright: ignore[reportAttributeAccessIssue] it is FillsMemory
        except StopIteration:
            self._ended = True
            return False
        if positions is None:
            self._fills = False
            return False
        slab.written(positions)
        return True

    def _slab_for(self, batch: Batch) -> Slab:
        signature = signature_of(batch)
        if signature not in self._pool and len(self._pool) == _SHAPES:
            self._pool.clear()
        free = self._pool.setdefault(signature, deque())
        if free:
            slab = free.popleft()
            slab.clear()
            return slab
        room = self._room(signature)
        slab = Slab(batch, room, stacked=self._stacked, keep=self._source.fresh and room == 1)
        slab.free = free
        return slab

    # -- the thread ----------------------------------------------------------------------------------------------

    def _await(self, most: int | None) -> Run | None:
        with self._changed:
            self._most = None if most is None else self._given + max(1, most)
            if self._thread is None and not self._ready:
                # Contexts of the caller, such as a device or a decimal precision, hold for the data too.
                run = contextvars.copy_context().run
                self._thread = threading.Thread(target=run, args=(self._work,), name="telic-feed", daemon=True)
                self._thread.start()
            self._wanted = True
            self._changed.notify_all()
            while not self._ready:
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    self._active = False
                    raise failure
                if self._ended and self._resting and not self._read:
                    return None
                self._changed.wait()
            self._wanted = False
            run = self._ready.popleft()
            self._given += len(run)
            self._changed.notify_all()
            return run

    def _is_hurried(self, began: float) -> bool:
        """Whether the thread should hand over what it has read since a moment."""
        if not self._threaded or (self._active and not (self._wanted and not self._ready)):
            return False
        return not self._active or time.perf_counter() - began > _PATIENCE

    def _may_read(self) -> bool:
        if not self._active or self._failure is not None or (self._ended and not self._read):
            return False
        return len(self._ready) < _AHEAD and (self._most is None or self._taken < self._most)

    def _pause(self) -> None:
        """Let the thread finish the batch it is at, and wait until it rests."""
        with self._changed:
            self._active = False
            self._changed.notify_all()
            while not self._resting:
                self._changed.wait()

    def _work(self) -> None:
        with jax.default_device(self._device):
            while True:
                with self._changed:
                    self._resting = True
                    self._changed.notify_all()
                    while not self._may_read():
                        if self._closed:
                            return
                        self._changed.wait()
                    self._resting = False
                    left = None if self._most is None else self._most - self._taken
                try:
                    run = self._fill(self._view, 1 << 30 if left is None else left)
                    if run is not None:
                        run.slab.place(self._placement)
                except BaseException as error:
                    with self._changed:
                        self._failure = error
                    continue
                if run is not None:
                    with self._changed:
                        self._taken += len(run)
                        self._ready.append(run)
                        self._changed.notify_all()
