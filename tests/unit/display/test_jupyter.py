"""The live chart in a real JupyterLab, seen through a real browser.

It needs JupyterLab, altair, playwright and Chromium (``apt-get install chromium``), which are tools of this test alone;
where one is missing the test says which and is skipped. ``TELIC_SCREENSHOTS=folder`` keeps what it saw.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

CELL = """
import time
import jax.numpy as jnp
import numpy as np
import telic

step = lambda total, batch: telic.Result(total + 1, {"value": 10.0 / (total + 1)})
loop = telic.Loop(step, lambda batch: jnp.zeros(()))
loop.metric(lambda value: value, "value", reads="value", reduce="last")
loop.plot("value", filter=telic.every(5), log_y=True, title="live")
loop.handle_event("iteration_completed", lambda state: time.sleep(0.4), telic.every(5))
loop.run([np.zeros(2)] * 60, epochs=2)
print("the run is over")
"""

CHART, OVER, MOST = ".jp-OutputArea .jp-RenderedVegaCommon5", "the run is over", 400_000


def missing() -> str | None:
    tools = [name for name in ("jupyterlab", "altair", "playwright") if importlib.util.find_spec(name) is None]
    if shutil.which("chromium") is None:
        tools.append("chromium")
    return ", ".join(tools) or None


@contextlib.contextmanager
def jupyter(folder: Path) -> Iterator[str]:
    """Run JupyterLab on a notebook with one cell, on the loopback address; give its address."""
    cell = {"cell_type": "code", "id": "a", "execution_count": None, "metadata": {}, "outputs": [], "source": CELL}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / "live.ipynb").write_text(json.dumps(notebook))
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    environment = {**os.environ, **own, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JAX_PLATFORMS": "cpu"}
    log = (folder / "jupyter.log").open("w")
    options = ["--no-browser", "--ip=127.0.0.1", "--port=0", "--IdentityProvider.token=test", "--allow-root"]
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={folder}"],
        env=environment,
        stdout=log,
        stderr=log,
    )
    try:
        runtime = folder / "jupyter_runtime_dir"
        deadline = time.monotonic() + 300
        while not (found := list(runtime.glob("jpserver-*.json"))):
            assert server.poll() is None, (folder / "jupyter.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "JupyterLab did not start"
            time.sleep(0.2)
        time.sleep(0.5)
        yield json.loads(found[0].read_text())["url"]
    finally:
        server.terminate()
        server.wait(30)
        log.close()


@pytest.mark.skipif(missing() is not None, reason=f"not installed: {missing()}")
def test_one_chart_is_updated_in_its_place(tmp_path: Path) -> None:
    """Catches a chart that appears only when the run is over, one more chart for each update, and one that needs the
    network to be drawn.
    """
    from playwright.sync_api import sync_playwright

    kept = Path(os.environ.get("TELIC_SCREENSHOTS", tmp_path))
    seen: list[bytes] = []
    with jupyter(tmp_path) as url, sync_playwright() as tools:
        browser: Any = tools.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        page.set_default_timeout(MOST)
        page.set_default_navigation_timeout(MOST)
        # Nothing outside this machine answers.
        page.route("**/*", lambda r: r.continue_() if "127.0.0.1" in r.request.url else r.abort())
        page.goto(f"{url}lab/tree/live.ipynb?token=test&reset")
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=MOST)
        page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=MOST)
        page.click(".jp-Notebook .jp-CodeCell .cm-content")
        page.keyboard.press("Shift+Enter")
        page.wait_for_selector(CHART, timeout=MOST)
        deadline = time.monotonic() + MOST / 1000
        while OVER not in page.inner_text(".jp-OutputArea"):
            assert page.locator(CHART).count() == 1, "there is more than one chart"
            seen.append(page.locator(CHART).screenshot())
            page.screenshot(path=str(kept / f"live_{min(len(set(seen)), 4)}.png"))
            assert time.monotonic() < deadline, page.inner_text(".jp-OutputArea")[-2000:]
            page.wait_for_timeout(250)
        page.wait_for_timeout(1500)
        page.screenshot(path=str(kept / "live_after.png"))
        assert page.locator(CHART).count() == 1
        browser.close()
    assert len(set(seen)) >= 4, "the chart did not grow while the run went on"
