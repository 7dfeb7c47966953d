"""Curves of a run as a picture: one panel per metric, training and validation together."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from telic.display.figures import check_format, new_figure, save_figure
from telic.loop.ports import State

_VALIDATION = "validation_"
_COLORS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")


def draw_curves(history: Mapping[int, Mapping[str, Any]], path: str | os.PathLike[str], *, title: str = "") -> None:
    """Draw the scalar metrics of each epoch and save the picture; the format is that of the path's suffix.

    Args:
      history: Metrics by epoch, as `LoopState.history` holds them.
      path: Where to; the file appears complete or not at all.
      title: Text above the panels.
    Raises:
      ValueError: There is no scalar metric to draw.
    """
    from matplotlib.ticker import MaxNLocator

    panels = _panels(history)
    if not panels:
        raise ValueError("there is no scalar metric to draw: attach one with loop.metric(...), and run an epoch")
    figure = new_figure(4.6 * len(panels) + 0.4, 3.6)
    for position, (name, series) in enumerate(panels.items(), start=1):
        axes: Any = figure.add_subplot(1, len(panels), position)
        for label, color in zip(series, _COLORS * len(series), strict=False):
            epochs, values = zip(*series[label], strict=True)
            style = "-" if label == "training" else "--"
            axes.plot([e + 1 for e in epochs], values, style, color=color, marker="o", markersize=3.5, label=label)
        axes.set_xlabel("epoch")
        axes.set_title(name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if title:
        figure.suptitle(title)
    save_figure(figure, path)


def _panels(history: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Give points by metric, and in it by training or validation set."""
    names = {name for values in history.values() for name in values}
    panels: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for epoch in sorted(history):
        for name, value in history[epoch].items():
            if isinstance(value, str) or np.ndim(value) != 0 or np.iscomplexobj(value):
                continue
            metric, label = _split(name, names)
            panels.setdefault(metric, {}).setdefault(label, []).append((epoch, float(value)))
    return panels


def _split(name: str, names: set[str]) -> tuple[str, str]:
    """Give (metric, "training" or the validation set's name)."""
    if not name.startswith(_VALIDATION):
        return name, "training"
    rest = name.removeprefix(_VALIDATION)
    if rest in names:
        return rest, "validation"
    # Of a named set: validation_<set>_<metric>.
    for metric in sorted(names, key=len, reverse=True):
        if rest.endswith(f"_{metric}"):
            return metric, f"validation: {rest.removesuffix(f'_{metric}')}"
    return rest, "validation"


class Curves:
    """Draws the curves of a run anew at each epoch's end: attach it with ``loop.curves("curves.png")``.

    Args:
      path: Where to; the suffix says the format.
      title: Text above the panels.
    """

    def __init__(self, path: str | os.PathLike[str], *, title: str = ""):
        check_format(path)
        self._path = path
        self._title = title

    def __call__(self, state: State) -> None:
        """Draw the epochs so far."""
        history = {**state.history, state.epoch: dict(state.metrics)}
        if _panels(history):
            draw_curves(history, self._path, title=self._title)
