"""The curve of a learning-rate range test as a picture."""

import os
from collections.abc import Sequence
from typing import Any

from telic.display.figures import new_figure, save_figure


def draw_rates(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    path: str | os.PathLike[str],
    *,
    suggestion: float | None = None,
) -> None:
    """Draw loss against learning rate, and save the picture; the format is that of the path's suffix.

    Args:
      rates: Learning rate of each step.
      losses: Loss of each step.
      smoothed: The losses, smoothed.
      path: Where to; the file appears complete or not at all.
      suggestion: Rate to mark.
    Raises:
      ValueError: There is no step to draw.
    """
    if not rates:
        raise ValueError("there is no step to draw: the loss was not finite from the first step on")
    figure = new_figure(5.6, 3.6)
    axes: Any = figure.add_subplot(1, 1, 1)
    axes.plot(rates, losses, color="#1f77b4", alpha=0.35, linewidth=1, label="loss of each step")
    axes.plot(rates, smoothed, color="#1f77b4", label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion, color="#d95f02", linestyle="--", label=f"suggestion {suggestion:.3g}")
    axes.set_xscale("log")
    # The last losses of a run that ran away would flatten all the others.
    spread = max(smoothed) - min(smoothed)
    axes.set_ylim(min(smoothed) - 0.1 * spread - 1e-12, max(smoothed) + 0.1 * spread + 1e-12)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)
