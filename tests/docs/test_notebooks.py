"""The notebooks run from top to bottom in a kernel, with their live charts; they are kept without outputs."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs import ROOT

NOTEBOOKS = {path.name: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
CHART = "application/vnd.vegalite.v5+json"
CHARTS = {"first_training.ipynb": 1, "own_objective.ipynb": 2, "stop_and_go_on.ipynb": 2}
"""Live charts of each notebook."""


def cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def test_there_are_three() -> None:
    """Catches a notebook without a test, and a test without its notebook."""
    assert set(NOTEBOOKS) == set(CHARTS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_kept_without_outputs(name: str) -> None:
    """Catches a notebook saved after it was run: pictures in the history of the repository, or somebody's paths."""
    for cell in cells(NOTEBOOKS[name]):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        compile("".join(cell["source"]), name, "exec")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_with_live_charts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a notebook that no longer runs, and a chart that is drawn once, or again below itself at each update."""
    missing = [tool for tool in ("nbclient", "ipykernel", "altair") if importlib.util.find_spec(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    import nbclient
    import nbformat

    for variable in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    book: Any = nbformat.read(NOTEBOOKS[name], as_version=4)
    updates: list[str] = []

    class Watched(nbclient.NotebookClient):
        """Counts how often charts are put in their place again."""

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if msg["header"]["msg_type"] == "update_display_data":
                updates.append(msg["content"]["transient"]["display_id"])
            return super().process_message(msg, cell, cell_index)

    Watched(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    assert [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"] == []
    live = [out.data[CHART] for out in outputs if "data" in out and CHART in out.data]
    assert len(live) == CHARTS[name]
    assert all(len(chart["data"]["values"]) > 10 for chart in live)
    assert len(set(updates)) == CHARTS[name]
    assert len(updates) > 2 * CHARTS[name]
