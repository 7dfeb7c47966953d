"""Pages in a real browser, at the width of a desk and of a phone.

It needs playwright and Chromium (``apt-get install chromium``), tools of this test alone; where one is missing it says
which and is skipped. ``TELIC_SCREENSHOTS=folder`` keeps what it saw.
"""

import contextlib
import importlib.util
import json
import math
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from telic.cli.serving import Board
from telic.reports import fragment, page, read_run
from tests.unit.reports.test_page import EVIL, evil_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

WIDTHS = {"desk": 1280, "phone": 390}


def missing() -> str | None:
    tools = [name for name in ("playwright",) if importlib.util.find_spec(name) is None]
    if shutil.which("chromium") is None:
        tools.append("chromium")
    return ", ".join(tools) or None


needs_browser = pytest.mark.skipif(missing() is not None, reason=f"not installed: {missing()}")


def a_run(directory: Path, *, rate: float = 0.1, epochs: int = 6, status: str = "completed") -> Path:
    """Write a run whose numbers are a formula."""
    directory.mkdir(parents=True, exist_ok=True)
    record = {"status": status, "settings": {"rate": rate}, "versions": {"jax": "0.10.2"}, "plan": {"epochs": epochs}}
    (directory / "run.json").write_text(json.dumps(record))
    (directory / "metrics.jsonl").write_text("".join(line_of(i, rate) for i in range(1, 10 * epochs + 1)))
    return directory


def line_of(i: int, rate: float) -> str:
    loss = 2 * math.exp(-rate * i) + 0.1
    metrics = {"loss": loss, "accuracy": 1 - loss / 3}
    kind = "interval"
    if i % 10 == 0:
        kind = "epoch"
        metrics |= {f"validation_{name}": value * 1.05 for name, value in metrics.items()}
    return (
        json.dumps(
            {
                "kind": kind,
                "epoch": (i - 1) // 10,
                "total_iterations": 5 * i,
                "seconds": i,
                "metrics": metrics,
                "training": {"learning_rate": rate * math.cos(i / 50), "gradient_norm": 1 + loss},
                "speed": {
                    "examples_per_second": 1000 + 50 * math.sin(i),
                    "seconds": {"device": 0.6, "data": 0.3, "handlers": 0.1, "compile": 0.4 if i == 1 else 0.0},
                    "memory": {"host_bytes": 4e8 + 1e5 * i},
                },
            }
        )
        + "\n"
    )


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        made: Any = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield made
        made.close()


def opened(made: Any, width: int) -> tuple[Any, list[str], list[str]]:
    """Give a page, and what it complains of and asks of others."""
    view = made.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    asked: list[str] = []
    view.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
    view.on("pageerror", lambda error: complaints.append(str(error)))
    view.on("request", lambda request: asked.append(request.url))
    return view, complaints, asked


def check_drawn(view: Any, charts: int) -> None:
    """Look that every chart is there, has marks, and stays inside its card and the page."""
    view.wait_for_selector("body[data-drawn]", timeout=60_000)
    found = view.evaluate(
        """() => [...document.querySelectorAll('.chart')].map((place) => {
             const svg = place.querySelector('svg');
             if (!svg) return { text: place.textContent };
             const box = svg.getBoundingClientRect(), outer = place.getBoundingClientRect();
             const marks = [...svg.querySelectorAll('.mark-line path, .mark-rect path')];
             const texts = [...svg.querySelectorAll('.role-axis text, .role-legend text')]
               .filter((t) => t.textContent && t.getAttribute('opacity') !== '0');
             const out = texts.filter((t) => {
               const at = t.getBoundingClientRect();
               return at.left < box.left - 1 || at.right > box.right + 1 || at.bottom > box.bottom + 1;
             }).map((t) => t.textContent);
             return { marks: marks.filter((m) => (m.getAttribute('d') || '').length > 8).length,
                      inside: box.right <= outer.right + 1, height: box.height, labels: texts.length, out };
           })"""
    )
    assert len(found) == charts
    for chart in found:
        assert chart.get("marks"), chart
        assert chart["inside"], chart
        assert chart["labels"] >= 4, chart
        assert chart["out"] == [], chart
    wide = view.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth + 1")
    assert not wide, "the page is wider than the screen"


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 3])
def test_a_report_is_drawn_without_a_network(count: int, width: str, tmp_path: Path) -> None:
    """Catches charts that are empty, cut off or wider than a phone, and a page that asks others for its scripts."""
    runs = [read_run(a_run(tmp_path / f"with-rate-{i}", rate=0.03 * (i + 1))) for i in range(count)]
    shown = fragment(runs)
    (tmp_path / "report.html").write_text(page(shown))
    kept = Path(os.environ.get("TELIC_SCREENSHOTS", tmp_path))
    with browser() as made:
        view, complaints, asked = opened(made, WIDTHS[width])
        view.goto((tmp_path / "report.html").as_uri())
        check_drawn(view, len(shown.charts))
        view.screenshot(path=str(kept / f"report_{count}_{width}.png"), full_page=True)
        view.check("#logarithmic")
        view.wait_for_selector("body[data-drawn='2']", timeout=60_000)
        check_drawn(view, len(shown.charts))
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


@needs_browser
def test_an_evil_run_hurts_nobody(tmp_path: Path) -> None:
    """Catches a name that runs as a script after all, in a chart's label, a tooltip or a table."""
    runs = [read_run(evil_run(tmp_path / "a")), read_run(evil_run(tmp_path / "b"), EVIL)]
    (tmp_path / "report.html").write_text(page(fragment(runs)))
    kept = Path(os.environ.get("TELIC_SCREENSHOTS", tmp_path))
    with browser() as made:
        view, complaints, _ = opened(made, 1280)
        view.goto((tmp_path / "report.html").as_uri())
        view.wait_for_selector("body[data-drawn]", timeout=60_000)
        view.screenshot(path=str(kept / "report_evil.png"), full_page=True)
        assert view.evaluate("window.hurt") is None
        assert "<script>window.hurt=1</script>\\x1b[2J" in view.inner_text("main")
        assert "could not be drawn" not in view.inner_text("main")
    assert complaints == []


@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_the_board_follows_a_run(width: str, tmp_path: Path) -> None:
    """Catches a board that must be reloaded, one that forgets what is ticked, and one that lets in who has no token."""
    a_run(tmp_path / "first", rate=0.05, epochs=2, status="running")
    a_run(tmp_path / "second")
    kept = Path(os.environ.get("TELIC_SCREENSHOTS", tmp_path))
    board = Board(tmp_path)
    thread = threading.Thread(target=board.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        with browser() as made:
            view, complaints, _ = opened(made, WIDTHS[width])
            view.goto(board.address)
            assert "token" not in view.url
            view.check("input[value=first]")
            view.screenshot(path=str(kept / f"board_{width}.png"), full_page=True)
            a_run(tmp_path / "third")
            view.wait_for_selector("text=third", timeout=30_000)
            assert view.is_checked("input[value=first]")
            view.check("input[value=second]")
            view.click("text=Compare what is ticked")
            view.wait_for_selector("body[data-drawn]", timeout=60_000)
            assert view.inner_text("h1") == "2 runs compared"
            view.goto(view.url.split("/report")[0] + "/report?run=first")
            view.wait_for_selector("body[data-drawn]", timeout=60_000)
            assert "100" in view.inner_text("table >> nth=0")
            with (tmp_path / "first" / "metrics.jsonl").open("a") as file:
                file.writelines(line_of(i, 0.05) for i in range(21, 32))
            view.wait_for_selector("body[data-drawn='2']", timeout=30_000)
            assert "155" in view.inner_text("table >> nth=0")
            view.screenshot(path=str(kept / f"board_run_{width}.png"), full_page=True)
            stranger = made.new_context().new_page()
            stranger.goto(f"http://127.0.0.1:{board.server_port}/report?run=first")
            assert "holds the token" in stranger.inner_text("body")
    finally:
        board.shutdown()
        board.server_close()
        thread.join(10)
    assert [text for text in complaints if "favicon" not in text] == []
