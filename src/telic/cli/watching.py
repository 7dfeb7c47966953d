"""``telic watch``: a run in the terminal, from its files alone."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from telic.reports.log import Line, Log
from telic.reports.notable import findings
from telic.reports.reading import METRICS, Run, read_run, stamp_of
from telic.reports.series import Curve, metric_panels
from telic.reports.text import bytes_text, duration, number, scaled, visible

_OVER = ("completed", "halted", "interrupted", "failed", "gone")
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 48
_STYLES = {"running": "bold blue", "completed": "bold green", "failed": "bold red", "gone": "bold red"}


def watch(
    directory: Path,
    *,
    every_seconds: float = 2.0,
    plain: bool | None = None,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show a run until it ends.

    Args:
      directory: The run's directory; it may be made later.
      every_seconds: Between looks.
      plain: True writes lines, False draws; None looks whether this is a terminal.
      console: Where to; standard output by default.
      sleep: Waits.
    """
    screen = console or Console(file=sys.stdout, highlight=False)
    is_plain = not (screen.is_terminal and not screen.is_dumb_terminal) if plain is None else plain
    if is_plain:
        _write(directory, screen, every_seconds, sleep)
        return
    with Live(_waiting(directory), console=screen, refresh_per_second=4, transient=False) as live:
        seen = ""
        log = Log(directory / METRICS)
        while True:
            stamp = stamp_of(directory)
            run = read_run(directory, log=log)
            if stamp != seen or run.status == "gone":
                seen = stamp
                live.update(drawn(run, screen.width) if run.record or run.lines else _waiting(directory), refresh=True)
            if run.status in _OVER:
                return
            sleep(every_seconds)


def _write(directory: Path, screen: Console, every_seconds: float, sleep: Callable[[float], None]) -> None:
    """Write a line for each new line of metrics, and one for the end."""
    shown = 0
    waited = False
    log = Log(directory / METRICS)

    def write(*lines: str) -> None:
        # Not by rich, which takes half a millisecond a line.
        screen.file.write("".join(f"{line}\n" for line in lines))
        screen.file.flush()

    while True:
        # The status first: what was written before the run ended is then read as well.
        status = read_run(directory, log=log).status
        run = read_run(directory, log=log)
        if len(run.lines) < shown:
            write("the run began anew")
            shown = 0
        write(*map(as_line, run.lines[shown:]))
        shown = len(run.lines)
        if status in _OVER:
            write(f"{visible(run.name)}: {status}")
            return
        if not run.record and not run.lines and not waited:
            write(f"waiting for {visible(directory)}")
            waited = True
        if status == "unknown" and run.lines and not run.record:
            # A record without run.json does not say whether it goes on.
            return
        sleep(every_seconds)


def as_line(line: Line) -> str:
    """Give one line of metrics as text, with the rate."""
    values = [f"{visible(name, 40)} {number(value)}" for name, value in {**line.metrics, **line.training}.items()]
    rate = _rate(line)
    where = f"epoch {line.epoch + 1}, batch {line.batches:,}" + (" (end of epoch)" if line.kind == "epoch" else "")
    return f"{where}: {'  '.join(values)}" + (f"  {rate}" if rate else "")


def drawn(run: Run, width: int = 100) -> Any:
    """Give a run as something that rich draws: head, metrics with their curves, findings.

    Args:
      run: The run.
      width: Characters in a line.
    """
    head = Text.assemble(
        (visible(run.name), "bold"), "  ", (run.status, _STYLES.get(run.status, "bold yellow")), "  ", _progress(run)
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    panels = metric_panels([run])
    names = {
        (metric, curve.name): (visible(metric, 32), visible(curve.name, 24))
        for metric, curves in panels.items()
        for curve in curves
    }
    widths = [max((len(pair[i]) for pair in names.values()), default=6) for i in (0, 1)]
    # What names and numbers leave over is for the curve.
    room = max(8, min(_WIDTH, width - sum(widths) - 20))
    for name, least in (("metric", widths[0]), ("", widths[1]), ("now", 8), ("curve", room)):
        table.add_column(name, no_wrap=True, min_width=least, justify="right" if name == "now" else "left")
    for metric, curves in panels.items():
        for curve in curves:
            values = [value for _, value in curve.points]
            now = next((value for value in reversed(values) if value is not None), None)
            shown = "" if now is None else number(now)
            called, of = names[metric, curve.name]
            table.add_row(Text(called), Text(of, "dim"), shown, spark(curve, room))
    parts: list[Any] = [head, "", table]
    if facts := _facts(run):
        parts += ["", Columns([Text(fact, "cyan") for fact in facts], padding=(0, 3))]
    for finding in findings([run])[:4]:
        style = {"bad": "bold red", "warning": "yellow"}.get(finding.level, "dim")
        parts += ["", Text.assemble((finding.title, style), f"  {visible(finding.text, 400)}")]
    return Group(*parts)


def spark(curve: Curve, width: int = _WIDTH) -> str:
    """Give a curve as a row of bars, each the mean of its stretch; a stretch without a finite value is empty."""
    points = curve.points
    numbers = [value for _, value in points if value is not None]
    if not numbers:
        return ""
    low, high = min(numbers), max(numbers)
    width = min(width, len(points))
    made: list[str] = []
    for i in range(width):
        stretch = [v for _, v in points[i * len(points) // width : (i + 1) * len(points) // width] if v is not None]
        if not stretch:
            made.append(" ")
            continue
        share = (sum(stretch) / len(stretch) - low) / (high - low) if high > low else 0.5
        made.append(_BARS[min(len(_BARS) - 1, max(0, int(share * len(_BARS))))])
    return "".join(made)


def _progress(run: Run) -> str:
    if not run.lines:
        return "no metrics yet"
    last = run.lines[-1]
    plan = run.part("plan")
    epochs, updates = plan.get("epochs"), plan.get("updates")
    said = f"batch {last.batches:,}"
    period = run.part("configuration").get("accumulate")
    if isinstance(updates, int):
        done = last.batches // period if isinstance(period, int) and period > 0 else last.batches
        said = f"{done:,} of {updates:,} updates"
    elif isinstance(epochs, int):
        said = f"epoch {min(last.epoch + 1, epochs)} of {epochs}, {said}"
    return f"{said}, {duration(last.seconds)}"


def _facts(run: Run) -> list[str]:
    made: list[str] = []
    if run.lines:
        last = run.lines[-1]
        made += [rate] if (rate := _rate(last)) else []
        made += [use] if (use := _use(last)) else []
        made += [f"{visible(name.replace('_', ' '), 40)} {number(value)}" for name, value in last.training.items()]
        for key, name in (("device_bytes", "device"), ("host_bytes", "host")):
            made += [f"{name} {bytes_text(last.memory[key])}"] if key in last.memory else []
    return made


def _rate(line: Line) -> str:
    for unit in ("tokens", "examples", "batches"):
        if f"{unit}_per_second" in line.speed:
            return f"{number(line.speed[f'{unit}_per_second'])} {unit}/s"
    return ""


def _use(line: Line) -> str:
    """Give the share of the device that is used; the operations per second where nobody knows what it can do."""
    if "utilisation" in line.speed:
        return f"utilisation {line.speed['utilisation']:.1%}"
    return scaled(line.speed["flops_per_second"], "FLOP/s") if "flops_per_second" in line.speed else ""


def _waiting(directory: Path) -> Text:
    return Text(f"waiting for {visible(directory)}: it has no record yet", "dim")
