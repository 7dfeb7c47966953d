"""What training carries from one attempt to the next."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from telic import ema
from telic.errors import TelicError
from telic.types import Array, Key, PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rejections:
    """Record of attempts that changed nothing because something was not finite.

    Attributes:
      total: Rejected attempts of the run, int32.
      consecutive: Rejected attempts in a row, int32.
      last: Attempt index of the last rejected one, int32; -1 when there is none.
      finite: Flags of that attempt in the order of `TrainStep.checked_names`, bool [checks].
      last_loss: Loss of the last accepted microbatch, float32; NaN before the first.
      windows: Windows in a row that were lost: a rejected attempt spoilt them, or their commit was undone; int32.
      stopped: True once `max_rejected` attempts or windows in a row were lost: every step is a no-op from then on.
    """

    total: Array
    consecutive: Array
    last: Array
    finite: Array
    last_loss: Array
    windows: Array
    stopped: Array

    @staticmethod
    def none(checks: int) -> "Rejections":
        """Give the empty record for a number of checked values."""
        return Rejections(
            total=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            last=jnp.full((), -1, jnp.int32),
            finite=jnp.ones((checks,), bool),
            last_loss=jnp.full((), jnp.nan, jnp.float32),
            windows=jnp.zeros((), jnp.int32),
            stopped=jnp.zeros((), bool),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Window:
    """The sums of the open window. Every field but `slot` is None where the step does not need it.

    Attributes:
      slot: Attempts made in this window, int32.
      gradient: Sum of mass · gradient over accepted microbatches, at least float32, trainable leaves only.
      statistics: Sum of the accepted microbatches' statistics.
      planned: Masses of the whole window by term, known before its first attempt (one-pass `Terms`).
      effects: Sum of the accepted microbatches' effects.
      qk_stats: Maxima over the accepted microbatches.
      stored: Batches, read snapshots and acceptance flags, to be replayed when the window closes.
    """

    slot: Array
    gradient: PyTree = None
    statistics: PyTree = None
    planned: PyTree = None
    effects: PyTree = None
    qk_stats: PyTree = None
    stored: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Learner:
    """One optimizer's view of the variables: what it has learned so far and the window it is filling.

    Attributes:
      opt_state: Optimizer state of the trainable leaves.
      ema: Selected leaves' moving average, None elsewhere; None without an `EMASpec`.
      window: The open window.
      loss_scale: Loss scale of `telic.precision`.
      rate_factor: Factor on every update, float32: the plateau handler's hand on optimizers without a named rate.
      microbatches: Accepted attempts, int32.
      updates: Commits, int32.
      rejections: Record of rejected attempts.
    """

    opt_state: PyTree
    ema: PyTree
    window: Window
    loss_scale: Any
    rate_factor: Array
    microbatches: Array
    updates: Array
    rejections: Rejections


def _count(value: Any) -> str:
    """Give a counter for people: its value where there is one, and what it is otherwise."""
    if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.ndim == 0:
        return "deleted" if value.is_deleted() else str(int(value))
    if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0:
        return str(int(value))
    return str(value) if isinstance(value, int) else f"<{type(value).__name__} {getattr(value, 'shape', '')}>"


def _size(held: PyTree) -> str:
    leaves = [leaf for leaf in jax.tree.leaves(held) if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    dtypes = "/".join(dict.fromkeys(str(leaf.dtype) for leaf in leaves))
    arrays = "1 array" if len(leaves) == 1 else f"{len(leaves)} arrays"
    return f"{total:,} values in {arrays}" + (f" of {dtypes}" if dtypes else "")


_LEARNER_FIELDS = frozenset(f.name for f in dataclasses.fields(Learner))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything training carries: variables, one learner over them, the run's key and its clock.

    The state is a pytree: it crosses jit, scan, vmap and checkpoints whole. The learner's fields can be read and
    replaced through the state.

    Attributes:
      variables: Collections by name; the trained ones under ``params``.
      learner: Optimizer state, moving average, window, loss scale and counters.
      key: The run's PRNG key; it never changes.
      attempts: Microbatches given to the step so far, int32: the data's position.
    """

    variables: Any
    learner: Learner
    key: Key
    attempts: Array

    def __repr__(self) -> str:
        counts = {"updates": self.updates, "attempts": self.attempts, "rejected": self.rejections.total}
        said = [f"{name}={_count(value)}" for name, value in counts.items()]
        collections = self.variables.items() if isinstance(self.variables, Mapping) else (("", self.variables),)
        said += [f"{name or 'variables'}: {_size(value)}" for name, value in collections]
        said.append(f"optimizer: {_size(self.opt_state)}")
        return f"TrainState({', '.join(said + ([] if self.ema is None else [f'average: {_size(self.ema)}']))})"

    @property
    def params(self) -> Any:
        """The whole variables tree, under the name that seed programs use."""
        return self.variables

    @property
    def opt_state(self) -> PyTree:
        """Optimizer state of the trainable leaves."""
        return self.learner.opt_state

    @property
    def ema(self) -> PyTree:
        """The moving average's own copy of the selected leaves, or None."""
        return self.learner.ema

    @property
    def averaged(self) -> Any:
        """The variables with the moving average laid over.

        Raises:
          TelicError: The objective keeps no average.
        """
        if self.learner.ema is None:
            raise TelicError(
                "this state keeps no moving average: set objective.ema = telic.EMASpec(decay=0.999) before training"
            )
        return ema.averaged(self.variables, self.learner.ema)

    @property
    def window(self) -> Window:
        """The open accumulation window."""
        return self.learner.window

    @property
    def loss_scale(self) -> Any:
        """The loss scale."""
        return self.learner.loss_scale

    @property
    def rate_factor(self) -> Array:
        """Factor on every update."""
        return self.learner.rate_factor

    @property
    def microbatches(self) -> Array:
        """Accepted attempts so far."""
        return self.learner.microbatches

    @property
    def updates(self) -> Array:
        """Committed optimizer updates so far."""
        return self.learner.updates

    @property
    def rejections(self) -> Rejections:
        """Record of rejected attempts."""
        return self.learner.rejections

    def replace(self, **changes: Any) -> "TrainState":
        """Give a state with some fields changed; the learner's fields may be named directly."""
        inner = {name: changes.pop(name) for name in list(changes) if name in _LEARNER_FIELDS}
        if inner:
            changes["learner"] = dataclasses.replace(changes.get("learner", self.learner), **inner)
        return dataclasses.replace(self, **changes)
