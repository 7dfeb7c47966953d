"""What must be the same for a run to be the same run, and what may change when it goes on."""

from typing import Any, cast

import jax

from telic.loop.ports import StepProgram
from telic.optimizers import hyperparams
from telic.train.state import TrainState
from telic.train.step import TrainStep
from telic.types import PyTree


def configuration(program: StepProgram, state: PyTree) -> dict[str, Any]:
    """Give what must be the same for a run to be the same run, beside the arrays' shapes."""
    objective = getattr(program, "objective", None)
    learner = state.opt_state if isinstance(state, TrainState) else state
    return {
        "objective": None if objective is None else type(objective).__name__,
        # What has the same leaves under the same names is told apart by the names of its nodes.
        "optimizer" if isinstance(state, TrainState) else "state": _node_names(jax.tree.structure(learner)),
        "accumulate": program.period,
    }


def options(program: StepProgram, fresh: PyTree) -> dict[str, Any]:
    """Give what may change when a run goes on: options by name, and under "rates" those that its optimizer begins with.

    Args:
      program: The step.
      fresh: The state that a run begins with. A rate that follows a schedule is no part of it.
    """
    if not isinstance(program, TrainStep) or not isinstance(fresh, TrainState):
        return {}
    rates = hyperparams(fresh.opt_state)
    return {
        "microbatch": program.microbatch,
        "nonfinite": program.nonfinite,
        "max_rejected": program.max_rejected,
        "precision": ", ".join(f"{name} {value}" for name, value in vars(program.policy).items()),
        "rates": {n: float(rate) for n, rate in rates.items() if not _is_scale(n) and _scale_of(n) not in rates},
    }


def _scale_of(name: str) -> str:
    word, bracket, where = name.partition("[")
    return f"{word}_scale{bracket}{where}"


def _is_scale(name: str) -> bool:
    return name.partition("[")[0].endswith("_scale")


def _node_names(structure: Any) -> list[str]:
    """Give the names of the classes in a tree, such as ScaleByAdamState, in order."""
    node = structure.node_data()
    kind = None if node is None else node[0]
    is_plain = kind in (None, type(None), dict, list, tuple)
    below = [name for child in structure.children() for name in _node_names(child)]
    return below if is_plain or kind is None else [kind.__name__, *below]


def said(value: Any) -> str:
    """Give a field of a configuration for a message."""
    if isinstance(value, list):
        return ", ".join(map(str, cast(list[Any], value))) or "nothing of its own"
    return repr(value)
