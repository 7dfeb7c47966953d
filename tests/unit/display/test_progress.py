"""What a person sees while a run goes on."""

import io
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import telic
from telic.display import Progress
from telic.display.progress import format_metrics, format_seconds, printable


def batches(count: int = 4) -> list[dict[str, np.ndarray]]:
    x = np.arange(count * 4, dtype=np.float32).reshape(count, 4, 1)
    return [{"inputs": row, "targets": 2 * row} for row in x]


def loop() -> telic.Loop:
    pair = (lambda key, x: {"w": jnp.zeros(())}, lambda params, x: params["w"] * x)
    return telic.trainer(pair, "mean_squared_error", telic.optimizers.sgd(1e-4), log=0)


def attach(made: telic.Loop, shown: Progress) -> telic.Loop:
    """Attach a display as Loop.progress does, every batch."""
    made.handle_event("started", shown.on_start)
    made.handle_event("iteration_completed", shown.on_iteration)
    made.handle_event(["epoch_completed", "epoch_halted"], shown.on_epoch_end)
    made.handle_event(["completed", "halted", "interrupted"], shown.on_end)
    return made


class Clock:
    """Seconds that pass only when somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


def test_piped_output_has_one_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a bar that writes a line per batch into a pipe or a notebook (S40)."""
    loop().validate(batches(2)).progress().run(batches(40), epochs=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("epoch")] == [
        "epoch 1/3",
        "epoch 2/3",
        "epoch 3/3",
    ]
    assert lines[0] == "compiling the step ..."
    assert re.fullmatch(r"compiled the step in \d+\.\d s", lines[1])
    assert len(lines) == 5
    assert all("loss" in line and "| validation loss" in line for line in lines[2:])
    assert not any("\x1b" in line for line in lines)


def test_terminal_shows_batches_metrics_and_time_left() -> None:
    """Catches a live line that never gets its numbers, and one that is still there when the run is over."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120, height=20)
    shown = Progress(console=console, batches=8, clock=Clock())
    seen: list[str] = []

    def look(state: Any) -> None:
        with console.capture() as captured:
            console.print(shown._render())
        seen.append(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", captured.get()))

    attach(loop(), shown).handle_event("iteration_completed", look).run(batches(8), epochs=2)
    assert "1/16 batches" in seen[0]
    assert "16/16 batches" in seen[-1]
    assert re.search(r"\d/s", seen[-1])
    assert re.search(r"\d s left", seen[4])
    assert "loss" in seen[4]
    assert shown._live is None
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_compiling_shows_its_seconds() -> None:
    """Catches a terminal that looks dead while XLA compiles."""
    clock = Clock()
    shown = Progress(clock=clock)
    shown.compiling("the step")
    clock.now += 22.5
    assert str(shown._render()) == "compiling the step ... 23 s"


def test_error_in_a_run_gives_the_terminal_back() -> None:
    """Catches a cursor that stays hidden after an exception, which fires no closing event."""
    stream = io.StringIO()
    made = loop().progress(plain=False)
    shown = made._listener
    assert isinstance(shown, Progress)
    shown._given_console = Console(file=stream, force_terminal=True)

    def fail(state: Any) -> None:
        raise ZeroDivisionError

    made.handle_event("iteration_completed", fail)
    with pytest.raises(ZeroDivisionError):
        made.run(batches())
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h") == 1


def test_halt_from_epoch_completed_leaves_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches the epoch that is written twice because it fires both closing events."""
    loop().progress(plain=True).handle_event("epoch_completed", lambda s: telic.HALT_LOOP).run(batches(), epochs=5)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("epoch 1/5") for line in lines) == 1
    assert lines[-1] == "halted in epoch 1/5"


def test_display_changes_no_bit() -> None:
    """Catches a display that touches the state, or the order of the run."""
    bare = loop().run(batches(30), epochs=2)
    watched = loop().progress(plain=True).run(batches(30), epochs=2)
    np.testing.assert_array_equal(bare.step_state.variables["params"]["w"], watched.step_state.variables["params"]["w"])


def test_metrics_line_groups_validation_and_skips_arrays() -> None:
    """Catches a confusion matrix that breaks the line, and validation values torn from their names."""
    line = format_metrics(
        {"loss": 0.5, "acc": 0.25, "matrix": np.eye(2), "validation_acc": 0.75, "validation_b_loss": 1}
    )
    assert line == "loss 0.5  acc 0.25 | validation acc 0.75  b_loss 1"
    assert format_metrics({}) == ""


def test_names_cannot_move_the_cursor() -> None:
    """Catches a metric's name that writes escape sequences to the terminal."""
    assert printable("a\x1b[2Jb\n") == "a?[2Jb?"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (8.2, "8 s"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")]
)
def test_seconds(seconds: float, text: str) -> None:
    """Catches 59.6 s shown as 60 s, and minutes without their zero."""
    assert format_seconds(seconds) == text
