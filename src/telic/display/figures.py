"""Pictures of what an evaluation gave: image grids, confusion matrices, feature maps. Drawn without pyplot."""

import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telic.artifacts import ImageGrid, Representations
from telic.loop.ports import State
from telic.places import local

_MOST_IMAGES = 256
"""Pictures of one grid that are drawn; more cannot be made out."""

_CELL_TEXT = 20
"""Classes of a confusion matrix up to which its counts are written into the cells."""


_FORMATS = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")


def new_figure(width: float, height: float) -> Any:
    """Give an empty figure of its own, in inches: no window, no global state, nothing to close."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_format(path: str | os.PathLike[str]) -> None:
    """Refuse a path whose suffix is no format of pictures, before there is one to save.

    Raises:
      ValueError: It is none.
    """
    if Path(path).suffix.lower() not in _FORMATS:
        raise ValueError(f"a picture is saved as one of {', '.join(_FORMATS)}, by its suffix; got {Path(path).name!r}")


def save_figure(figure: Any, path: str | os.PathLike[str], *, dpi: int = 120) -> None:
    """Save a figure; the file appears complete or not at all, and its suffix says the format."""
    target = local(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.stem}.unfinished{target.suffix}")
    figure.savefig(unfinished, dpi=dpi)
    os.replace(unfinished, target)


def draw_images(grid: ImageGrid, *, captions: Sequence[str] | None = None, title: str = "") -> Any:
    """Draw pictures side by side, each with its caption; a video is one row of frames.

    Args:
      grid: The pictures, [n, height, width, channels] in [0, 1]; values outside are clipped, NaN is drawn magenta.
      captions: Text above each picture.
      title: Text above all.
    Returns:
      A matplotlib figure, for `save_figure`.
    Raises:
      ValueError: There is no picture.
    """
    images = np.asarray(grid.images, np.float32)
    if images.ndim == 5:
        columns: int = images.shape[1]
        if captions is not None:
            captions = [text if frame == 0 else "" for text in captions for frame in range(columns)]
        images = images.reshape(-1, *images.shape[2:])
    else:
        columns = grid.columns or math.ceil(math.sqrt(len(images)))
    if not len(images):
        raise ValueError("there is no picture to draw: ImageGrid.images has no rows")
    images = images[:_MOST_IMAGES]
    rows = math.ceil(len(images) / columns)
    # Cells keep the pictures' own shape: the longer side is an inch at most.
    tall = images.shape[1] / images.shape[2]
    wide, high = (1.0, tall) if tall <= 1 else (1 / tall, 1.0)
    texts = [_wrapped(text, wide) for text in captions or ()]
    room = 0.12 * max((text.count("\n") + 2 for text in texts), default=0)
    figure = new_figure(max(1.5, columns * (wide + 0.06)), max(1.0, rows * (high + 0.06 + room)) + 0.3 * bool(title))
    for i, image in enumerate(images):
        axes: Any = figure.add_subplot(rows, columns, i + 1)
        axes.imshow(_rgb(image), interpolation="nearest", vmin=0, vmax=1)
        axes.set_axis_off()
        if captions is not None:
            axes.set_title(texts[i], fontsize=7, pad=2, parse_math=False)
    if title:
        figure.suptitle(title, fontsize=9, parse_math=False)
    return figure


def draw_confusion(matrix: Any, *, names: Sequence[str] | None = None, title: str = "") -> Any:
    """Draw a confusion matrix: rows are the true classes, columns what was predicted.

    Colours show the share of each true class, so that rare classes are seen as well; cells hold the counts, up to 20
    classes.

    Args:
      matrix: Counts, [classes, classes], rows the true classes.
      names: Name of each class; by default its number.
      title: Text above.
    Returns:
      A matplotlib figure, for `save_figure`.
    Raises:
      ValueError: It is not square, or the names are not one per class.
    """
    counts = np.asarray(matrix, np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1] or not counts.size:
        raise ValueError(f"a confusion matrix is [classes, classes], got shape {counts.shape}")
    classes = counts.shape[0]
    if names is not None and len(names) != classes:
        raise ValueError(f"names must be one per class, {classes}, got {len(names)}")
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    size = min(12.0, 2.2 + 0.42 * classes)
    figure = new_figure(size + 0.6, size)
    axes: Any = figure.add_subplot(1, 1, 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if classes <= 40:
        labels = [str(i) for i in range(classes)] if names is None else [_short(str(n)) for n in names]
        long = max(map(len, labels)) > 3
        axes.set_xticks(range(classes), labels, rotation=90 if long else 0, fontsize=8, parse_math=False)
        axes.set_yticks(range(classes), labels, fontsize=8, parse_math=False)
    if classes <= _CELL_TEXT:
        for row, column in np.argwhere(counts > 0):
            value = counts[row, column]
            color = "white" if shares[row, column] > 0.6 else "black"
            axes.text(column, row, f"{value:.4g}", ha="center", va="center", fontsize=7, color=color)
    if title:
        axes.set_title(title, fontsize=9, parse_math=False)
    return figure


def draw_features(value: Representations, *, title: str = "") -> Any:
    """Draw features in the plane of their two largest principal components, coloured by class.

    Args:
      value: Features [n, dim], and labels where there are some.
      title: Text above.
    Returns:
      A matplotlib figure, for `save_figure`.
    Raises:
      ValueError: There is no row.
    """
    features = np.asarray(value.features, np.float64)
    if not features.size:
        raise ValueError(f"there are no features to draw: they have shape {features.shape}")
    centred = features - features.mean(axis=0)
    _, _, axes_of = np.linalg.svd(np.nan_to_num(centred), full_matrices=False)
    plane = centred @ axes_of[:2].T
    if plane.shape[1] < 2:
        plane = np.pad(plane, ((0, 0), (0, 2 - plane.shape[1])))
    figure = new_figure(4.6, 4.0)
    axes: Any = figure.add_subplot(1, 1, 1)
    if value.labels is None:
        axes.scatter(plane[:, 0], plane[:, 1], s=8, alpha=0.7)
    else:
        points = axes.scatter(plane[:, 0], plane[:, 1], c=np.asarray(value.labels), cmap="tab10", s=8, alpha=0.8)
        figure.colorbar(points, ax=axes, label="class")
    axes.set_xlabel("first principal component")
    axes.set_ylabel("second")
    if title:
        axes.set_title(title, fontsize=9, parse_math=False)
    return figure


def _rgb(image: np.ndarray) -> np.ndarray:
    """Give a picture in RGB or RGBA, clipped to [0, 1], what is not finite in magenta."""
    shown = np.repeat(image, 3, axis=-1) if image.shape[-1] == 1 else image
    bad = ~np.isfinite(shown).all(axis=-1)
    shown = np.clip(np.nan_to_num(shown), 0, 1)
    shown[bad, :3] = (1.0, 0.0, 1.0)
    return shown


def _wrapped(text: str, inches: float) -> str:
    """Give a caption in at most two lines that fit above a picture; what is longer ends in dots."""
    return textwrap.fill(text, max(6, int(inches / 0.065)), max_lines=2, placeholder=" …")


def _short(text: str, limit: int = 24) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


class Confusion:
    """Draws a confusion matrix of a run anew at each epoch's end: attach it with ``loop.confusion("confusion.png")``.

    Args:
      path: The picture; its suffix says the format.
      metric: Name in `LoopState.metrics` of a matrix [classes, classes].
      record: How errors call it.
      names: Name of each class.
    """

    def __init__(self, path: str | os.PathLike[str], metric: str, record: str, *, names: Sequence[str] | None = None):
        check_format(path)
        self._path = path
        self.metric = metric
        self.record = record
        self._names = names

    def __call__(self, state: State) -> None:
        """Draw the matrix of this epoch, where it was measured."""
        if self.metric in state.metrics:
            title = f"{self.metric}, epoch {state.epoch + 1}"
            save_figure(draw_confusion(state.metrics[self.metric], names=self._names, title=title), self._path)
