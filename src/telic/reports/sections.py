"""The parts of a report, as HTML with places for its charts. Every text that is not Telic's own is escaped here."""

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import groupby
from typing import Any

from telic.reports.charts import PARTS, Chart, lines, time_split
from telic.reports.notable import findings
from telic.reports.reading import Line, Run, Shown
from telic.reports.series import Curve, curve, measured_utilisation, metric_panels, split
from telic.reports.text import bytes_text, duration, number, visible

_MAX_PICTURES = 24
"""Pictures of a page; the newest of each name come first."""

_EARLIER = 3
"""Earlier pictures of a name that are shown smaller."""

_ALWAYS_DIFFER = ("started", "ended", "command")

_MOMENTS = ("started", "ended")

_MAX_PANELS = 60
"""Metrics of a page that are drawn."""

_MAX_TABLED = 6
"""Metrics in the table of runs."""


class _Charts:
    """Charts as they are placed."""

    def __init__(self) -> None:
        self.placed: list[Chart] = []

    def card(self, title: str, chart: Chart | None, note: str = "") -> str:
        """Give a chart's place, nothing where there is no chart."""
        if chart is None:
            return ""
        self.placed.append(chart)
        place = f'<div class="chart" id="chart-{len(self.placed) - 1}"></div>'
        return f'<section class="card"><h3>{_shown(title)}</h3>{place}{note}</section>'


def body(runs: Sequence[Run]) -> tuple[str, list[Chart]]:
    """Give the body of a page and its charts."""
    charts = _Charts()
    title = visible(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs compared"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(runs),
        _findings(runs),
        _metrics(runs, charts),
        _training(runs, charts),
    ]
    parts += [_speed(runs, charts), *(_previews(run, several=len(runs) > 1) for run in runs), _facts(runs)]
    return "\n".join(part for part in parts if part), charts.placed


def _shown(text: object, limit: int = 200) -> str:
    return escape(visible(text, limit))


def _table(runs: Sequence[Run]) -> str:
    """Give a line for each run: how it stands, and its last metrics."""
    last = [last_metrics(run) for run in runs]
    names = list(dict.fromkeys(name for metrics in last for name in metrics))[:_MAX_TABLED]
    rated = [_rate(run) for run in runs]
    heads = ["run", "status", "batches", "time", "speed"]
    top = "".join(f'<th class="{"number" if i in (2, 3, 4) else ""}">{head}</th>' for i, head in enumerate(heads))
    top += "".join(f'<th class="number">{_shown(name, 40)}</th>' for name in names)
    rows: list[str] = []
    for run, metrics, rate in zip(runs, last, rated, strict=True):
        cells = [
            f'<td class="name">{_shown(run.name)}</td>',
            f'<td><span class="status {escape(run.status)}">{escape(run.status)}</span></td>',
            f'<td class="number">{max((line.batches for line in run.lines), default=0):,}</td>',
            f'<td class="number">{escape(_seconds(run))}</td>',
            f'<td class="number">{escape(rate)}</td>',
            *(f'<td class="number">{escape(number(metrics[n])) if n in metrics else ""}</td>' for n in names),
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="card scroll"><table><tr>{top}</tr>{"".join(rows)}</table></div>'


def last_metrics(run: Run) -> dict[str, float]:
    """Give the newest value of each metric."""
    found: dict[str, float] = {}
    for line in run.lines[-50:]:
        found |= line.metrics
    return found


def _seconds(run: Run) -> str:
    """Give how long a run's starts took, as far as its lines tell."""
    total, before = 0.0, 0.0
    for line in run.lines:
        # Each start counts from its own beginning.
        if line.seconds < before:
            total += before
        before = line.seconds
    return duration(total + before) if run.lines else ""


def _rate(run: Run) -> str:
    for unit in ("tokens", "examples", "batches"):
        key = f"{unit}_per_second"
        found = [line.speed[key] for line in _at_work(run).lines if key in line.speed]
        if found:
            # The usual rate: the first interval warms up.
            return f"{number(sorted(found)[len(found) // 2])} {unit}/s"
    return ""


def _findings(runs: Sequence[Run]) -> str:
    found = findings(runs)
    if not found:
        return ""
    # What is true of several runs is said once.
    whose: dict[tuple[str, str, str], list[str]] = {}
    for f in found:
        whose.setdefault((f.level, f.title, f.text), []).append(f.run)
    cards: list[str] = []
    for (level, title, text), names in whose.items():
        named = [_shown(name, 60) for name in names if name]
        of = f' <span class="soft">· {", ".join(named)}</span>' if len(runs) > 1 and named else ""
        head = f'<div class="card finding {level}"><h3>{_shown(title)}{of}</h3>'
        cards.append(f"{head}<p>{_shown(text, 2500)}</p></div>")
    return f"<h2>What stands out</h2>{''.join(cards)}"


def _metrics(runs: Sequence[Run], charts: _Charts) -> str:
    panels = metric_panels(runs)
    cards = [charts.card(name, lines(curves)) for name, curves in list(panels.items())[:_MAX_PANELS]]
    if not any(cards):
        return '<p class="soft">There are no metrics yet.</p>'
    box = '<label><input type="checkbox" id="logarithmic"> logarithmic axes where all values are positive</label>'
    note = (
        '<p class="soft">Training values inside an epoch are means over that epoch so far, so a curve may jump where '
        "an epoch begins; validation values stand where they were measured.</p>"
    )
    if len(panels) > _MAX_PANELS:
        note += f'<p class="soft">{len(panels) - _MAX_PANELS} further metrics are in metrics.jsonl and not drawn.</p>'
    return f'<h2>Metrics</h2>{box}<div class="grid">{"".join(cards)}</div>{note}'


def _training(runs: Sequence[Run], charts: _Charts) -> str:
    names = list(dict.fromkeys(name for run in runs for line in run.lines for name in line.training))
    titles = {"learning_rate": "learning rate", "gradient_norm": "norm of the gradient"}
    cards: list[str] = []
    for name in names:
        curves = [curve(run, "", lambda line, name=name: line.training.get(name)) for run in runs]
        cards.append(charts.card(titles.get(name, name), lines(curves)))
    return f'<h2>Training</h2><div class="grid">{"".join(cards)}</div>' if any(cards) else ""


def _speed(runs: Sequence[Run], charts: _Charts) -> str:
    cards: list[str] = []
    runs = [_at_work(run) for run in runs]
    for unit in ("tokens", "examples", "batches"):
        key = f"{unit}_per_second"
        if any(key in line.speed for run in runs for line in run.lines):
            cards.append(
                charts.card(
                    f"{unit} per second",
                    lines(_each(runs, lambda x, key=key: x.speed.get(key)), y_format="~s", zero=True),
                )
            )
            break
    cards += _use(runs, charts)
    gib = 1 / 2**30
    memory: list[Curve] = []
    for run in runs:
        for key, name in (
            ("host_bytes", "the process"),
            ("device_bytes", "the device"),
            ("device_peak_bytes", "its peak"),
        ):
            memory.append(curve(run, name, lambda x, key=key: x.memory[key] * gib if key in x.memory else None))
    cards.append(charts.card("memory in GiB", lines(memory, zero=True)))
    cards.append(charts.card("where the host's time went", time_split(runs), _split_note(runs)))
    if not any(cards):
        return ""
    return f'<h2>Speed</h2><div class="grid">{"".join(cards)}</div>{_costs(runs)}'


def _use(runs: Sequence[Run], charts: _Charts) -> list[str]:
    """Give how much of the devices the runs use; where nobody knows what those can do, what the runs do."""
    published = _each(runs, lambda line: line.speed.get("utilisation"))
    measured = [curve(run, "", measured_utilisation(run)) for run in runs]
    made = [
        charts.card(f"utilisation: share of {of}", lines(curves, y_format=".0%", zero=True))
        for of, curves in (
            ("what the device's data sheet promises", published),
            ("what a large matrix product reaches", measured),
        )
    ]
    if all(not a.is_empty or not b.is_empty for a, b in zip(published, measured, strict=True)):
        return made
    achieved = lines(_each(runs, lambda line: line.speed.get("flops_per_second")), y_format="~s", zero=True)
    note = '<p class="soft">Utilisation is unknown: what such a device can do at most is not known.</p>'
    return [*made, charts.card("floating-point operations per second, on each device", achieved, note)]


def _at_work(run: Run) -> Run:
    """Give a run with the rates of its intervals alone: the line of an epoch's end has few batches and a validation."""
    if all(line.kind == "epoch" for line in run.lines):
        return run
    return replace(run, lines=tuple(line if line.kind != "epoch" else replace(line, speed={}) for line in run.lines))


def _each(runs: Sequence[Run], read: Callable[[Line], float | None]) -> list[Curve]:
    return [curve(run, "", read) for run in runs]


def _split_note(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return ""
    spent = split(runs[0])
    rows = [
        f'<tr><td>{escape(words)}</td><td class="number">{escape(duration(spent[part]))}</td></tr>'
        for part, (words, _) in PARTS.items()
        if spent.get(part)
    ]
    return f'<details id="split"><summary class="soft">in seconds</summary><table>{"".join(rows)}</table></details>'


def _costs(runs: Sequence[Run]) -> str:
    """Say what a step costs, where the compiler told."""
    said: list[str] = []
    for run in runs:
        memory: Any = run.profile.get("memory")
        sizes = memory if isinstance(memory, dict) else {}
        words = {"argument_bytes": "of state and batches", "scratch_bytes": "of scratch", "result_bytes": "of results"}
        found = [
            f"{bytes_text(sizes[key])} {what}" for key, what in words.items() if isinstance(sizes.get(key), int | float)
        ]
        name = f"{_shown(run.name, 60)}: a" if len(runs) > 1 else "A"
        if found:
            said.append(f"{name} step's program needs {escape(', '.join(found))}")
        used = run.profile.get("utilisation")
        if isinstance(used, int | float) and math.isfinite(used):
            said.append(f"{name} step reached {used:.1%} of what a large matrix product does there, in the last start")
    return "".join(f'<p class="soft">{text}.</p>' for text in said)


def _previews(run: Run, *, several: bool) -> str:
    """Give the newest picture and text of each name, and some earlier ones smaller."""
    blocks: list[str] = []
    left = _MAX_PICTURES
    for (name, kind), made in groupby(run.previews, key=lambda shown: (shown.name, shown.kind)):
        newest = list(made)
        if kind == "txt":
            blocks.append(_texts(newest, name))
            continue
        chosen = [newest[-1], *_spread(newest[:-1])][: max(0, left)]
        left -= len(chosen)
        figures = [_figure(shown, is_small=i > 0) for i, shown in enumerate(chosen)]
        if any(figures):
            blocks.append(f'<div class="card"><h3>{_shown(name)}</h3><div class="shown">{"".join(figures)}</div></div>')
    curves = Shown("curves", 0, "png", run.directory / "curves.png").read() if not run.lines else None
    if curves is not None:
        blocks.append(f'<div class="card"><img alt="curves" src="{_data_uri(curves)}"></div>')
    blocks = [block for block in blocks if block]
    whose = f" of {_shown(run.name, 60)}" if several else ""
    return f'<h2>Samples{whose}</h2><div class="shown">{"".join(blocks)}</div>' if blocks else ""


def _spread(earlier: Sequence[Shown]) -> list[Shown]:
    """Give a few of the earlier ones, evenly, the first among them."""
    if len(earlier) <= _EARLIER:
        return list(earlier)
    return [earlier[round(i * (len(earlier) - 1) / (_EARLIER - 1))] for i in range(_EARLIER)]


def _figure(shown: Shown, *, is_small: bool) -> str:
    picture = shown.read()
    if picture is None:
        return ""
    label = f"after {shown.step:,} updates"
    alt = escape(f"{visible(shown.name)}, {label}", quote=True)
    small = ' class="small"' if is_small else ""
    return f'<figure{small}><figcaption>{label}</figcaption><img alt="{alt}" src="{_data_uri(picture)}"></figure>'


def _texts(made: Sequence[Shown], name: str) -> str:
    text = made[-1].read()
    if text is None:
        return ""
    lines_of_it = text.decode("utf-8", errors="replace").splitlines()
    shown = "\n".join(visible(line, 2000) for line in lines_of_it)
    return (
        f'<div class="card"><h3>{_shown(name)}</h3><figcaption>after {made[-1].step:,} updates</figcaption>'
        f"<pre>{escape(shown)}</pre></div>"
    )


def _facts(runs: Sequence[Run]) -> str:
    """Give what was run: of several runs a table in which what differs is marked."""
    facts = [dict(_flat(_known(run))) for run in runs]
    names = list(dict.fromkeys(name for of_run in facts for name in of_run))
    if not names:
        return ""
    heads = "".join(f"<th>{_shown(run.name, 60)}</th>" for run in runs) if len(runs) > 1 else ""
    rows: list[str] = []
    for name in names:
        values = [of_run.get(name, "") for of_run in facts]
        marked = ' class="differs"' if len(set(values)) > 1 and name not in _ALWAYS_DIFFER else ""
        cells = "".join(f"<td>{_shown(value, 400)}</td>" for value in values)
        rows.append(f"<tr{marked}><th>{_shown(name, 80)}</th>{cells}</tr>")
    top = f"<tr><th></th>{heads}</tr>" if heads else ""
    return f'<h2>What was run</h2><div class="card scroll"><table class="facts">{top}{"".join(rows)}</table></div>'


def _known(run: Run) -> dict[str, Any]:
    shown = ("started", "ended", "plan", "settings", "configuration", "command", "device", "git", "versions")
    return {name: run.record[name] for name in shown if run.record.get(name) not in (None, {}, [])}


def _flat(value: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for name, item in value.items():
        called = f"{before}{name}".replace("_", " ")
        if isinstance(item, Mapping):
            yield from _flat(item, f"{called}: ")  # pyright: ignore[reportUnknownArgumentType] JSON
        elif isinstance(item, list):
            yield called, (" " if name == "command" else ", ").join(str(x) for x in item) or "none"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        elif item is not None:
            # A seed or a batch size is copied from here: no thousands between its digits.
            yield called, str(item) if isinstance(item, int) else _moment(item) if name in _MOMENTS else number(item)


def _moment(text: Any) -> str:
    """Give a time of the record as people write it; what is none stays as it is."""
    return str(text).replace("T", " ", 1).replace("+00:00", " UTC") if isinstance(text, str) else number(text)


def _data_uri(picture: bytes) -> str:
    """Give a PNG picture as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(picture).decode("ascii")
