"""What is found of an attempt or a commit, and the record of those that were rejected."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from telic import tree
from telic.train.attempt import CHECKS, Attempt, has_masses
from telic.train.state import Rejections
from telic.types import Array, PyTree


@dataclass(frozen=True)
class Verdict:
    """What an attempt or a commit is judged by. It lives inside one trace.

    Attributes:
      values: Everything that must be finite.
      conditions: What must hold beside.
      flags: Gives what is good of each thing, in the order of `checked_names`. It is computed for rejections alone.
    """

    values: PyTree
    conditions: tuple[Array, ...]
    flags: Callable[[], Array]

    @staticmethod
    def of(attempt: Attempt, trained: PyTree) -> "Verdict":
        """Judge an attempt by itself."""
        return Verdict(attempt.checked, (has_masses(attempt.statistics),), lambda: attempt.flags(trained))

    @property
    def good(self) -> Array:
        """Whether everything is: bool scalar."""
        return jnp.stack([tree.all_finite(self.values), *self.conditions]).all()

    def also_finite(self, check: str, values: PyTree) -> "Verdict":
        """Let values count too, as one of `CHECKS`. It is named only where nothing was wrong before it."""

        def flags() -> Array:
            before = self.flags()
            return before.at[CHECKS.index(check)].set(tree.all_finite(values) | ~before.all())

        return Verdict((self.values, values), self.conditions, flags)

    def also(self, check: str, condition: Array) -> "Verdict":
        """Let a condition count too, as one of `CHECKS`."""
        index = CHECKS.index(check)
        return Verdict(self.values, (*self.conditions, condition), lambda: self.flags().at[index].set(condition))


def select_in_turn(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Give what `tree.select` gives, leaf after leaf, for a condition that says that `new` is finite.

    XLA's CPU runtime hands operations to other threads once more than eight could run, and all leaves could at once: a
    small step loses a third of its time to that. So each leaf's condition reads a number of the leaf before it, which
    is not NaN where the condition holds.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        # On a mesh a number of a leaf is with one device, and all would wait for it, leaf after leaf.
        return tree.select(condition, new, old)
    leaves, structure = jax.tree.flatten(new)
    kept: list[Array] = []
    turn = condition
    for leaf, before in zip(leaves, jax.tree.leaves(old), strict=True):
        chosen = tree.select(turn, leaf, before)
        kept.append(chosen)
        if chosen is not before and tree.is_float(chosen) and chosen.size:
            some = jax.lax.squeeze(jax.lax.slice(chosen, [0] * chosen.ndim, [1] * chosen.ndim), range(chosen.ndim))
            turn = jax.lax.bitwise_and(condition, jax.lax.eq(some, some))
    return structure.unflatten(kept)


def record(
    old: Rejections,
    verdict: Verdict,
    *,
    accepted: Array,
    counted: Array,
    attempt: Array,
    value: Array,
    has_data: Array,
    budget: int,
) -> Rejections:
    """Give the record after an attempt; nothing changes where `counted` is False.

    Args:
      old: The record before.
      verdict: What was found.
      accepted: Whether the attempt was accepted.
      counted: Whether it counts at all.
      attempt: Its index.
      value: Its loss.
      has_data: Whether it had mass.
      budget: Rejections in a row that end the run.
    """
    good, bad = counted & accepted, counted & ~accepted
    consecutive = jnp.where(good, 0, old.consecutive + bad.astype(jnp.int32))
    return Rejections(
        total=old.total + bad.astype(jnp.int32),
        consecutive=consecutive,
        last=jnp.where(bad, attempt, old.last),
        finite=_flags(bad, verdict, old),
        last_loss=jnp.where(good & has_data, value.astype(jnp.float32), old.last_loss),
        windows=old.windows,
        stopped=old.stopped | (counted & (consecutive >= budget)),
    )


def record_window(
    old: Rejections, verdict: Verdict, *, has_data: Array, undone: Array, lost: Array, attempt: Array, budget: int
) -> Rejections:
    """Give the record after a window closed: lost windows in a row end the run as rejected attempts do.

    Args:
      old: The record before.
      verdict: What was found of the commit.
      has_data: Whether the window had mass.
      undone: Whether its commit was undone.
      lost: Whether it changed nothing, for whatever reason.
      attempt: Index of its last attempt.
      budget: Lost windows in a row that end the run.
    """
    in_a_row = jnp.where(lost, old.windows + 1, jnp.where(has_data, 0, old.windows))
    return dataclasses.replace(
        old,
        total=old.total + undone.astype(jnp.int32),
        last=jnp.where(undone, attempt, old.last),
        finite=_flags(undone, verdict, old),
        windows=in_a_row,
        stopped=old.stopped | (in_a_row >= budget),
    )


def _flags(rejected: Array, verdict: Verdict, old: Rejections) -> Array:
    return jax.lax.cond(rejected, verdict.flags, lambda: old.finite)
