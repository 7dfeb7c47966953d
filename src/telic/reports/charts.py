"""Vega-Lite charts of runs, as plain mappings. Names from files are values of the data, never part of an expression."""

from collections.abc import Sequence
from typing import Any

from telic.reports.reading import Run
from telic.reports.series import Curve, split
from telic.reports.text import duration, visible

Chart = dict[str, Any]
"""A Vega-Lite specification."""

PARTS: dict[str, tuple[str, str]] = {
    "device": ("waiting for the device", "#2a9d8f"),
    "dispatch": ("giving work to the device", "#4c78a8"),
    "data": ("waiting for batches", "#e9a03b"),
    "handlers": ("handlers on the host", "#b279a2"),
    "checkpoint": ("saving", "#9d755d"),
    "loop": ("the loop itself", "#bab0ac"),
    "compile": ("compiling", "#e45756"),
    "start": ("starting", "#72757d"),
    "restore": ("reading a checkpoint", "#eeca3b"),
}
"""What each part of the host's time is called, and its colour."""

_COLOURS = [
    "#4c78a8",
    "#e4572e",
    "#2a9d8f",
    "#b279a2",
    "#e9a03b",
    "#72757d",
    "#9d755d",
    "#d67195",
    "#1b6ca8",
    "#79a32d",
]
_FEW = 30
"""A curve of so few points has its points drawn."""

_CONFIG: dict[str, Any] = {
    "font": "system-ui, sans-serif",
    "background": "transparent",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "#4a4f57",
        "titleColor": "#4a4f57",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "titleFontWeight": "normal",
        "gridColor": "#e6e8ec",
        "domainColor": "#b6bac2",
        "tickColor": "#b6bac2",
        "labelOverlap": True,
    },
    "legend": {
        "orient": "bottom",
        "title": None,
        "offset": 8,
        "labelColor": "#30343a",
        "labelFontSize": 11,
        "labelLimit": 230,
        "symbolType": "stroke",
        "symbolStrokeWidth": 2.5,
        # One below the other: beside each other they are wider than a phone.
        "layout": {"bottom": {"anchor": "start", "direction": "vertical"}},
    },
}


def lines(curves: Sequence[Curve], *, y_format: str = ".5~g", zero: bool = False) -> Chart | None:
    """Give a chart of curves against the batches done; None when there is nothing to draw.

    Args:
      curves: Curves of one or several runs.
      y_format: How the numbers of the vertical axis are written, in the notation of d3.
      zero: The vertical axis begins at 0.
    """
    drawn = [curve for curve in curves if not curve.is_empty]
    if not drawn:
        return None
    runs = list(dict.fromkeys(visible(curve.run, 60) for curve in drawn))
    names = list(dict.fromkeys(visible(curve.name, 60) for curve in drawn))
    values = [
        {"x": x, "y": y, "run": visible(curve.run, 60), "curve": visible(curve.name, 60)}
        for curve in drawn
        for x, y in curve.points
    ]
    is_sparse = max(len(curve.points) for curve in drawn) <= _FEW
    is_short = max(x for curve in drawn for x, _ in curve.points) < 10_000
    colour = "run" if len(runs) > 1 else "curve"
    domain = runs if len(runs) > 1 else names
    columns = 2 if max(map(len, domain)) < 24 else 1
    shown = [
        {"field": "x", "type": "quantitative", "title": "batches", "format": ","},
        {"field": "y", "type": "quantitative", "title": "value", "format": ".5~g"},
        {"field": "run", "type": "nominal", "title": "run"},
        {"field": "curve", "type": "nominal", "title": "curve"},
    ]
    encoding: dict[str, Any] = {
        "x": {
            "field": "x",
            "type": "quantitative",
            "title": "batches",
            "scale": {"nice": False, "zero": False},
            "axis": {"format": ",d" if is_short else "~s", "tickMinStep": 1, "tickCount": 5, "grid": False},
        },
        "y": {
            "field": "y",
            "type": "quantitative",
            "title": None,
            "scale": {"zero": zero, "nice": True},
            "axis": {"format": y_format, "tickCount": 5},
        },
        "color": {
            "field": colour,
            "type": "nominal",
            "scale": {"domain": domain, "range": [_COLOURS[i % len(_COLOURS)] for i in range(len(domain))]},
            "legend": {"columns": columns} if len(domain) > 1 else None,
        },
        "tooltip": shown,
    }
    if len(runs) > 1 and len(names) > 1:
        legend = {"columns": columns, "symbolSize": 400}
        encoding["strokeDash"] = {"field": "curve", "type": "nominal", "sort": names, "legend": legend}
    else:
        encoding["detail"] = {"field": "curve", "type": "nominal"}
    point: Any = {"filled": True, "size": 28} if is_sparse else "transparent"
    mark = {"type": "line", "strokeWidth": 1.8, "point": point, "strokeJoin": "round", "clip": True}
    return _sized({"data": {"values": values}, "mark": mark, "encoding": encoding}, 220)


def time_split(runs: Sequence[Run]) -> Chart | None:
    """Give a chart of where the time of each run went, as shares; None when no run knows."""
    values: list[dict[str, Any]] = []
    for run in runs:
        spent = {part: seconds for part, seconds in split(run).items() if part in PARTS}
        total = sum(spent.values())
        if total <= 0:
            continue
        for order, part in enumerate(PARTS):
            if seconds := spent.get(part, 0.0):
                words = {"part": PARTS[part][0], "time": duration(seconds), "share": seconds / total}
                values.append({"run": visible(run.name, 60), "order": order, **words})
    if not values:
        return None
    there = {value["part"] for value in values}
    known = [(words, colour) for words, colour in PARTS.values() if words in there]
    count = len({value["run"] for value in values})
    # Beside the names of runs a phone has room for one.
    columns = 2 if count == 1 else 1
    spec: Chart = {
        "data": {"values": values},
        "mark": {"type": "bar", "cornerRadius": 1},
        "encoding": {
            "y": {
                "field": "run",
                "type": "nominal",
                "sort": None,
                "title": None,
                "axis": {"labelLimit": 110} if count > 1 else None,
            },
            "x": {
                "field": "share",
                "type": "quantitative",
                "stack": "zero",
                "title": "share of the run's time",
                "scale": {"domain": [0, 1], "nice": False},
                "axis": {"format": ".0%", "tickCount": 5},
            },
            "color": {
                "field": "part",
                "type": "nominal",
                "scale": {"domain": [words for words, _ in known], "range": [colour for _, colour in known]},
                "legend": {"columns": columns, "symbolType": "square"},
            },
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "run", "type": "nominal", "title": "run"},
                {"field": "part", "type": "nominal", "title": "part"},
                {"field": "time", "type": "nominal", "title": "time"},
                {"field": "share", "type": "quantitative", "title": "share", "format": ".1%"},
            ],
        },
    }
    # The height is that of the bars and of a legend below them.
    return _sized(spec, 90 + 26 * count + 18 * -(-len(known) // columns))


def _sized(spec: Chart, height: int) -> Chart:
    """Give a chart as wide as what it stands in."""
    legend = spec["encoding"].get("color", {}).get("legend")
    rows = 0
    if legend is not None and spec["mark"]["type"] == "line":
        rows = -(-len(spec["encoding"]["color"]["scale"]["domain"]) // legend["columns"])
        rows += 1 if "strokeDash" in spec["encoding"] else 0
    autosize = {"type": "fit", "contains": "padding"}
    return {"width": "container", "height": height + 18 * rows, "autosize": autosize, "config": _CONFIG, **spec}
