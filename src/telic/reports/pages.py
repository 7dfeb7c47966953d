"""One or several runs as one HTML page that needs nothing but itself."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from html import escape
from importlib import resources

from telic.reports.charts import Chart
from telic.reports.reading import Run
from telic.reports.sections import body
from telic.reports.text import visible


@dataclass(frozen=True)
class Fragment:
    """The part of a page that changes with its runs.

    Attributes:
      title: What the page is called.
      html: Its body, every foreign text escaped; the place of chart i is the element with the id ``chart-i``.
      charts: Vega-Lite charts.
    """

    title: str
    html: str
    charts: tuple[Chart, ...]

    def as_json(self) -> str:
        """Give it as JSON that may stand inside a script element: no text in it ends that element."""
        return _harmless({"title": self.title, "html": self.html, "charts": self.charts})


def fragment(runs: Sequence[Run]) -> Fragment:
    """Give what a page shows of runs; of several it compares them."""
    html, charts = body(runs)
    names = ", ".join(visible(run.name, 40) for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    return Fragment(f"{names} · Telic", html, tuple(charts))


def page(shown: Fragment, *, live: str | None = None, back: str | None = None) -> str:
    """Give a page as HTML. It has its scripts, styles and pictures in itself and asks no network for anything.

    Only scripts that bear the page's own random mark run, whatever stands in the names, texts and numbers of a run.

    Args:
      shown: What it shows.
      live: Address that gives the fragment anew, which the page asks for every two seconds; None for a page that stays.
      back: Address of the list of runs, linked at its top.
    """
    nonce = secrets.token_urlsafe(16)
    connect = "'self'" if live is not None else "'none'"
    policy = (
        # Vega makes functions of its charts' expressions, all of which are written by Telic.
        f"default-src 'none'; script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    link = "" if back is None else f'<nav><a href="{escape(back)}">All runs</a></nav>'
    note = "Live: new values appear by themselves." if live is not None else f"Written {written}."
    settings = _harmless({"live": live})
    scripts = "".join(f'<script nonce="{nonce}">{asset(name)}</script>\n' for name in SCRIPTS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="referrer" content="no-referrer">
<title>{escape(shown.title)}</title>
<style>{asset("page.css")}</style>
</head>
<body>
{link}
<main id="shown">{shown.html}</main>
<footer><span id="note">{note}</span> Made by Telic.</footer>
<script type="application/json" id="charts">{_harmless(shown.charts)}</script>
<script type="application/json" id="settings">{settings}</script>
{scripts}</body>
</html>
"""


SCRIPTS = ("vega.min.js", "vega-lite.min.js", "page.js")
"""Scripts of a page, in the order they run."""


@cache
def asset(name: str) -> str:
    """Give a file of this package."""
    return resources.files("telic.reports").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _harmless(value: object) -> str:
    """Give a value as JSON in which nothing can end the script element that it stands in."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
