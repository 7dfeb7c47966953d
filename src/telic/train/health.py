"""What the record of rejections means to the one who trains, in words."""

import math
import warnings
from collections.abc import Sequence

import jax

from telic import tree
from telic.errors import NonFiniteError, RejectedWarning
from telic.train.state import TrainState


def stopped(state: TrainState, names: Sequence[str], *, budget: int, raises: bool = False) -> NonFiniteError:
    """Give the error of a run whose budget of rejected attempts is used up.

    It names the leaves that were not finite, the attempt and the last finite loss.

    Args:
      state: The state that the run stopped in.
      names: What each flag of `Rejections.finite` is of.
      budget: Rejected attempts in a row that end a run.
      raises: The run was to end at the first of them, whatever the budget.
    """
    record = state.rejections
    bad = _not_finite(state, names)
    attempt, last = int(record.last), float(record.last_loss)
    attempts, lost = int(record.consecutive), int(record.windows)
    count = f"{attempts} rejected attempt(s)" if attempts >= budget else f"{lost} lost window(s)"
    cause = ""
    if not bool(tree.all_finite(state.variables)):
        cause = " The variables themselves are not finite: the optimizer produced them in an earlier commit."
    if "mass ≥ 0" in bad:
        cause += " A mass is negative: masses count data, so they are 0 or more."
    if "plan" in bad:
        cause += " The window's masses are not those it was planned with: give window_of exactly its batches."
    seen = f"The last finite loss was {last:.6g}." if math.isfinite(last) else "No loss was finite before it."
    instead = "skip such attempts with nonfinite='reject'" if raises else "raise max_rejected"
    shown = ", ".join(bad[:6]) + (f", ... ({len(bad)} in all)" if len(bad) > 6 else "")
    return NonFiniteError(
        f"training stopped after {count} in a row: not finite in attempt {attempt}: {shown}. "
        f"{seen}{cause} The state holds what was committed before. "
        f"Look at that batch (error.batch), lower the learning rate, clip the gradient, or {instead}.",
        leaves=bad,
        attempt=attempt,
        state=state,
    )


def warn_if_idle(state: TrainState, names: Sequence[str]) -> None:
    """Warn at the end of a run that made attempts and accepted none of them."""
    record = state.rejections
    if int(state.microbatches) or not int(record.total):
        return
    warnings.warn(
        f"all {int(record.total)} attempts of this run were rejected, so nothing was trained: not finite in the "
        f"last: {', '.join(_not_finite(state, names)[:6])}. Look at the data (NaN? class ids out of range?) and at the "
        "loss",
        RejectedWarning,
        stacklevel=3,
    )


def _not_finite(state: TrainState, names: Sequence[str]) -> tuple[str, ...]:
    flags = jax.device_get(state.rejections.finite).tolist()
    return tuple(name for name, is_finite in zip(names, flags, strict=True) if not is_finite)
