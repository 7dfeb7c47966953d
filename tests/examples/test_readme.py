"""The programs of README.md run, in order, as one reader would type them."""

import re
from pathlib import Path
from typing import Any

import numpy as np

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_programs_run() -> None:
    """Catches a README whose code has gone stale."""
    names: dict[str, Any] = {"__name__": "readme"}
    programs = blocks("python")
    assert len(programs) >= 5
    for number, program in enumerate(programs):
        exec(compile(program, f"README.md, program {number}", "exec"), names)
    assert names["final"].history[1]["validation_accuracy"] > 0.85
    params = names["state"].variables["params"]
    np.testing.assert_allclose([params["slope"], params["offset"]], [3, 1], atol=1e-3)


def test_readme_first_screen_shows_ladder_and_commands() -> None:
    """Catches a first screen that grew until the two commands or a rung fell off it."""
    screen = "\n".join(README.splitlines()[:24])
    assert "pip install -e . && telic demo" in screen
    assert "pip install -e '.[test]' && pytest" in screen
    assert [line[2] for line in screen.splitlines() if re.match(r"\| \d \|", line)] == list("12345")
