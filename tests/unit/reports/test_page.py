"""Pages: nothing of a run is executed, nothing outside is asked for, and what is there is shown."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telic.reports import fragment, page, read_run
from telic.reports.charts import lines as drawn_lines
from telic.reports.pages import asset
from telic.reports.series import Curve

EVIL = "<script>window.hurt=1</script>\x1b[2J</td>\"'&"


def evil_run(directory: Path) -> Path:
    """Write a run in which everything that can be named is named like an attack."""
    from matplotlib.image import imsave

    (directory / "previews").mkdir(parents=True)
    record = {
        "status": "completed",
        "settings": {EVIL: EVIL, "nested": {EVIL: [EVIL, 1]}},
        "versions": {EVIL: EVIL},
        "git": {"commit": EVIL, "changed": [EVIL]},
        "command": [EVIL],
    }
    (directory / "run.json").write_text(json.dumps(record))
    made = [
        {
            "kind": "interval",
            "epoch": 0,
            "total_iterations": i,
            "seconds": i,
            "metrics": {EVIL: 1.0 / i, f"validation_{EVIL}": 1.0, "a.b[0]": 1.0, "__proto__": 2.0},
            "training": {EVIL: 1.0},
            "speed": {"batches_per_second": 3.0, EVIL: 1.0, "seconds": {"device": 1.0, EVIL: 1.0}},
        }
        for i in range(1, 5)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    (directory / "previews" / "<img src=x onerror=hurt>_000004.txt").write_text(f"{EVIL}\n{EVIL}")
    imsave(directory / "previews" / "grid<b>_000004.png", np.zeros((4, 4, 3)))
    (directory / "previews" / "fake_000004.png").write_bytes(b"<svg onload=hurt()>")
    return directory


class Elements(HTMLParser):
    """Collects elements, attributes and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def elements(html: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(html)
    return parser.elements


def test_names_are_shown_and_not_executed(tmp_path: Path) -> None:
    """Catches a name that becomes an element, an attribute, or the end of the data it stands in."""
    shown = fragment([read_run(evil_run(tmp_path / "a")), read_run(evil_run(tmp_path / "b"), EVIL)])
    html = page(shown)
    found = elements(html)
    scripts = [attributes for tag, attributes in found if tag == "script"]
    assert len(scripts) == 5
    assert {s.get("type") for s in scripts} == {None, "application/json"}
    nonces = {s["nonce"] for s in scripts if s.get("type") is None}
    assert len(nonces) == 1
    assert all(not name.startswith("on") for _, attributes in found for name in attributes)
    assert "\x1b" not in html
    assert EVIL not in html
    assert "&lt;script&gt;window.hurt=1&lt;/script&gt;\\x1b[2J" in html
    inside = elements(shown.html)
    assert {tag for tag, _ in inside} <= set(
        "h1 h2 h3 div section table tr th td span p label input details summary figure figcaption img pre".split()
    )
    # The picture that is none is left out; the other is there.
    assert all(str(a["src"]).startswith("data:image/png;base64,iVBOR") for tag, a in inside if tag == "img")
    assert sum(tag == "img" for tag, _ in inside) == 2


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    """Catches a page that is empty on a machine without a network, or that tells somebody that it was opened."""
    html = page(fragment([read_run(evil_run(tmp_path / "a"))]))
    for tag, attributes in elements(html):
        for name in ("src", "href", "action", "data", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("data:image/png"), (tag, name, value)
    (policy,) = [a["content"] for tag, a in elements(html) if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "script-src 'nonce-" in policy
    assert "script-src 'unsafe-inline'" not in policy
    assert "url(" not in asset("page.css")


def test_data_survives_the_way_into_the_page(tmp_path: Path) -> None:
    """Catches numbers that are lost or changed between the file and the chart, and NaN that ends the script."""
    lines = [
        {"kind": "epoch", "epoch": i, "total_iterations": 10 * i, "seconds": i, "metrics": {"loss": x}}
        for i, x in enumerate([3.5, "NaN", 1.25], start=1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = page(fragment([read_run(tmp_path)]))
    (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', html, re.S)
    chart = json.loads(data)[0]
    assert [(row["x"], row["y"]) for row in chart["data"]["values"]] == [(10, 3.5), (20, None), (30, 1.25)]
    assert 'id="chart-0"' in html


@pytest.mark.parametrize("record", [None, {"status": "running"}])
def test_a_run_without_numbers_has_a_page(record: Any, tmp_path: Path) -> None:
    """Catches a page that cannot be made in the first minute of a run."""
    if record is not None:
        (tmp_path / "run.json").write_text(json.dumps(record))
    shown = fragment([read_run(tmp_path)])
    assert "There are no metrics yet" in shown.html
    assert shown.charts == ()


def test_an_empty_curve_is_no_chart() -> None:
    """Catches a panel with two axes and nothing in it."""
    assert drawn_lines([Curve("a", "b", ((1, None),))]) is None
    assert drawn_lines([]) is None


def test_what_differs_between_runs_is_marked(tmp_path: Path) -> None:
    """Catches a comparison in which the one setting that was changed has to be looked for."""
    for name, rate in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(
            json.dumps({"status": "completed", "settings": {"rate": rate, "width": 8}})
        )
    html = fragment([read_run(tmp_path / "a"), read_run(tmp_path / "b")]).html
    assert '<tr class="differs"><th>settings: rate</th><td>0.1</td><td>0.2</td></tr>' in html
    assert "<tr><th>settings: width</th><td>8</td><td>8</td></tr>" in html


def test_the_scripts_are_the_ones_whose_licences_are_there() -> None:
    """Catches a script exchanged without its licence, or one that has an address to load from."""
    licence = asset("LICENSE")
    assert "vega 6.4.0" in licence
    assert "vega-lite 6.4.3" in licence
    assert '"6.4.3"' in asset("vega-lite.min.js")
    for name in ("vega.min.js", "vega-lite.min.js", "page.js", "board.js"):
        assert "</script" not in asset(name).lower()
        assert "sourceMappingURL" not in asset(name)


def used(directory: Path, *, speed: dict[str, float], profile: dict[str, float] | None = None) -> Path:
    """Write a run of three lines, whose speeds are all the same, and its profile."""
    directory.mkdir(parents=True)
    made = [{"kind": "interval", "epoch": 0, "total_iterations": i, "seconds": i, "speed": speed} for i in (1, 2, 3)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    if profile is not None:
        (directory / "profile.json").write_text(json.dumps(profile))
    return directory


SHEET = "utilisation: share of what the device&#x27;s data sheet promises"
PRODUCT = "utilisation: share of what a large matrix product reaches"
FLOPS = "floating-point operations per second, on each device"


def test_how_much_of_a_device_is_used_is_shown_where_it_is_known(tmp_path: Path) -> None:
    """Catches a utilisation that is drawn for a device nobody knows, or left out for one that is known."""
    sheet = used(tmp_path / "sheet", speed={"batches_per_second": 4.0, "flops_per_second": 8e12, "utilisation": 0.25})
    product = used(
        tmp_path / "product",
        speed={"batches_per_second": 4.0, "flops_per_second": 8e9},
        profile={"flops": 2e9, "peak_flops": 16e9},
    )
    neither = used(tmp_path / "neither", speed={"batches_per_second": 4.0, "flops_per_second": 3e9})
    cases = {
        (sheet,): {SHEET: 0.25},
        # Four batches a second of 2e9 operations are half of 16e9.
        (product,): {PRODUCT: 0.5},
        (neither,): {FLOPS: 3e9},
        (sheet, product): {SHEET: 0.25, PRODUCT: 0.5},
        (sheet, neither): {SHEET: 0.25, FLOPS: 8e12},
    }
    for runs, expected in cases.items():
        shown = fragment([read_run(place) for place in runs])
        cards = re.findall(r'<h3>([^<]*)</h3><div class="chart" id="chart-(\d+)">', shown.html)
        found = {title: shown.charts[int(i)] for title, i in cards}
        assert {title for title in found if title in (SHEET, PRODUCT, FLOPS)} == set(expected), runs
        for title, value in expected.items():
            values = [row["y"] for row in found[title]["data"]["values"]]
            assert values[0] == value, title
        assert ("Utilisation is unknown" in shown.html) == (FLOPS in expected)


@pytest.mark.parametrize("profile", [{"flops": "x", "peak_flops": 1e9}, {"flops": 1e9, "peak_flops": 0}, {"flops": 1}])
def test_a_profile_that_makes_no_sense_gives_no_utilisation(profile: Any, tmp_path: Path) -> None:
    """Catches a division by nothing, and a text taken for a number, that end the page."""
    shown = fragment([read_run(used(tmp_path / "run", speed={"batches_per_second": 4.0}, profile=profile))])
    assert "utilisation:" not in shown.html
