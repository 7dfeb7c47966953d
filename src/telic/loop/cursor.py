"""Where a run goes on from: a state as it is after an event, ready to be continued."""

import dataclasses

from telic.loop import events as ev
from telic.loop.events import Counts
from telic.loop.state import LoopState, Metrics, scalars


def is_closed(counts: Counts) -> bool:
    """Say whether the epoch is over, or closing: its last event has fired."""
    return bool(counts.epoch[ev.EPOCH_COMPLETED] or counts.epoch[ev.EPOCH_HALTED])


def settled(state: LoopState) -> LoopState:
    """Give the state that a run continues from after the moment a state belongs to.

    A handler sees the cursor of what just happened: at ``iteration_completed`` the index of the batch that is done, at
    ``epoch_completed`` the epoch that is over. Continuing from those would repeat a batch or an epoch. The counts say
    what is done. Arrays are shared, not copied; a settled state settles to itself.
    """
    counts = Counts(dict(state.counts.total), dict(state.counts.epoch))
    new = dataclasses.replace(state, counts=counts, read_accumulators=None, metrics=Metrics(), probes={}, firer=None)
    if not is_closed(counts) or state.status is not None:
        # Values of this moment; those of an epoch that closed are in the history.
        new.metrics.add(dict(state.metrics))
    if is_closed(counts):
        new.history = {**state.history}
        new.history.setdefault(state.epoch, scalars(state.metrics))
        new.accumulators = None
        if state.max_steps is None:
            new.epoch, new.iteration = state.epoch + 1, 0
            counts.start_epoch()
        else:
            # The steps of a run are one epoch, which goes on.
            new.iteration = counts.epoch[ev.ITERATION_COMPLETED]
            counts.epoch[ev.EPOCH_COMPLETED] = counts.epoch[ev.EPOCH_HALTED] = 0
        return new
    new.iteration = counts.epoch[ev.ITERATION_COMPLETED]
    # Events whose batch or epoch did not follow yet will fire again.
    unused = {ev.ITERATION_STARTED: counts.epoch[ev.ITERATION_STARTED] - new.iteration}
    if new.iteration == 0:
        unused[ev.EPOCH_STARTED] = counts.epoch[ev.EPOCH_STARTED]
    for event, number in unused.items():
        counts.total[event] -= number
        counts.epoch[event] -= number
    if new.iteration == 0:
        new.accumulators = None
    elif state.read_accumulators is not None:
        new.accumulators = state.read_accumulators()
    return new


def open_slot(counts: Counts, period: int) -> int:
    """Give how many attempts of the open window are done in this epoch; 0 where it was closed early."""
    windows, slot = divmod(counts.epoch[ev.ITERATION_COMPLETED], period)
    return 0 if counts.epoch[ev.STEP_COMPLETED] > windows else slot


def owes_step(counts: Counts, period: int) -> bool:
    """Say whether a window is closed whose ``step_completed`` did not fire yet: it follows ``iteration_completed``."""
    windows, slot = divmod(counts.epoch[ev.ITERATION_COMPLETED], period)
    return slot == 0 and counts.epoch[ev.STEP_COMPLETED] < windows
