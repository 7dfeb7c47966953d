"""Ending a run whose metric no longer improves, with the best state on request."""

import logging
from dataclasses import dataclass
from typing import Any

import jax

from telic import tree
from telic.loop.ports import State

_log = logging.getLogger("telic.handlers")


@dataclass(frozen=True, eq=False)
class EarlyStop:
    """Action of a monitor that ends the run, with what goes with it at the run's start and end.

    That the run was stopped stands in the monitor's record until the run has ended. So a run that is killed in between
    and continued from its last checkpoint ends at once, as the unbroken run did, while the state that a stopped run
    returned can be continued.

    Args:
      record: Name of the monitor's record.
      halt: The status that ends a loop.
      restore_best: Keep a copy of the step state where the metric is best, and give it back at the end of the run,
        whoever ended it. The copy stands in the record, as a list of arrays, so that it is saved and resumed.
    """

    record: str
    halt: Any
    restore_best: bool = False

    def __call__(self, state: State) -> Any:
        """Halt the loop."""
        state.handler_state[self.record] = {**state.handler_state[self.record], "stopped": True}
        return self.halt

    def on_best(self, state: State) -> dict[str, Any]:
        """Give the entry of the record that holds a copy of the present step state."""
        return {"best_state": jax.tree.leaves(tree.copy_leaves(state.step_state))} if self.restore_best else {}

    def on_started(self, state: State) -> Any:
        """Halt a run that goes on from a state in which it was stopped already."""
        if not state.handler_state.get(self.record, {}).get("stopped"):
            return None
        _log.info("%s: the run was stopped already, at epoch %d", self.record, state.epoch)
        return self.halt

    def on_end(self, state: State) -> None:
        """Give the best state back; the record keeps its own copy for a run that goes on."""
        record = state.handler_state.get(self.record)
        if record is None:
            return
        state.handler_state[self.record] = {name: value for name, value in record.items() if name != "stopped"}
        if self.restore_best and "best_state" in record:
            leaves: list[Any] = tree.copy_leaves(record["best_state"])
            state.step_state = jax.tree.unflatten(jax.tree.structure(state.step_state), leaves)
