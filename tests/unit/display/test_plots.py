"""Plots while a loop runs: the right points, in any order of events, after a restart, and on any terminal."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import telic
from telic.display import Plot, plots
from telic.display.characters import draw_characters
from telic.errors import ContractError
from telic.loop.state import LoopState, Metrics


class Drawn:
    """A picture that keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[dict[str, list[list[float]]]] = []
        self.open_count = self.close_count = 0

    def open(self) -> None:
        self.open_count += 1

    def show(self, series: Any) -> None:
        self.shown.append({name: [list(xs), list(ys)] for name, (xs, ys) in series.items()})

    def close(self, series: Any) -> None:
        self.show(series)
        self.close_count += 1


def batches(count: int = 6, rows: int = 4) -> list[Any]:
    return [(np.full((rows,), i + 1, np.float32), np.zeros((rows,), np.float32)) for i in range(count)]


def loop() -> telic.Loop:
    model = (lambda key, x: {"w": jnp.ones(())}, lambda params, x: params["w"] * x)
    return telic.trainer(model, "mean_absolute_error", telic.optimizers.sgd(0.0), log=0)


def drawn_by(made: telic.Loop, *metrics: str, **options: Any) -> Drawn:
    """Attach a plot to a loop and give the picture it draws on."""
    made.plot(*metrics, notebook=False, **options)
    picture = Drawn()
    (plot,) = {id(a.handler.__self__): a.handler.__self__ for a in made._attachments if _is_plot(a.handler)}.values()
    plot._picture = picture
    return picture


def _is_plot(handler: Any) -> bool:
    return isinstance(getattr(handler, "__self__", None), Plot)


def test_points_are_those_of_their_iteration() -> None:
    """Catches a value one firing late drawn at the firing it was read in, and a last point that is missing."""
    made = loop()
    picture = drawn_by(made, filter=telic.every(2))
    final = made.run(batches(5))
    means = [np.mean(range(1, n + 1)) for n in (2, 4, 5)]
    assert picture.shown[-1]["loss"][0] == [2, 4, 5]
    assert picture.shown[-1]["loss"][1] == pytest.approx(means)
    assert final.handler_state["plot/loss"]["loss"][0] == [2, 4, 5]
    assert (picture.open_count, picture.close_count) == (1, 1)


def test_a_plot_does_not_keep_iterations_apart() -> None:
    """Catches a plot that is asked at every iteration, which ends the fusion of all."""
    made = loop().plot("loss", notebook=False)
    plan = [a.filter for a in made._attachments if _is_plot(a.handler) and a.event == "iteration_completed"]
    assert [f.next_fire(0, 0) for f in plan] == [10]


def test_validation_has_a_point_for_each_evaluation() -> None:
    """Catches a value that is drawn again at every iteration after it, as a flat curve, or at a later iteration."""
    made = loop()
    picture = drawn_by(made, "loss", "validation_loss", filter=telic.every(2))
    made.validate(batches(1), event="step_completed", filter=telic.every(3))
    made.run(batches(7), epochs=1)
    assert picture.shown[-1]["validation_loss"] == [[3, 6], [1.0, 1.0]]
    assert picture.shown[-1]["loss"][0] == [2, 4, 6, 7]


def test_a_continued_run_goes_on_with_its_curve() -> None:
    """Catches the seed's counter, which begins anew with each run, and which all plots share."""
    made = loop()
    first, second = made.copy(), made.copy()
    straight = drawn_by(made, filter=telic.every(1))
    whole = made.run(batches(4), epochs=2)
    drawn_by(first, filter=telic.every(1))
    half = first.run(batches(4), epochs=1)
    continued = drawn_by(second, filter=telic.every(1))
    again = second.from_state(half).run(batches(4), epochs=2)
    assert continued.shown[-1] == straight.shown[-1]
    assert continued.shown[-1]["loss"][0] == list(range(1, 9))
    assert continued.shown[0]["loss"][0] == [1, 2, 3, 4]
    assert again.handler_state == whole.handler_state


def test_two_plots_have_records_of_their_own() -> None:
    """Catches one that overwrites the other's points."""
    made = loop().metric("mean_squared_error", "mse")
    made.plot("loss", notebook=False).plot("loss", "mse", notebook=False)
    state = made.run(batches()).handler_state
    assert set(state) == {"plot/loss", "plot/loss#2"}
    assert set(state["plot/loss#2"]) == {"loss", "mse"}


def test_many_points_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a record that grows with the run: a checkpoint of a million steps would hold a million points."""
    monkeypatch.setattr(plots, "_MOST_POINTS", 8)
    made = loop()
    picture = drawn_by(made, filter=telic.every(1))
    made.run(batches(50))
    xs = picture.shown[-1]["loss"][0]
    assert len(xs) <= 8
    assert xs[0] == 1
    assert xs[-1] == 50


def test_pictures_are_throttled() -> None:
    """Catches a chart drawn at each of a thousand firings a second."""
    picture, now = Drawn(), [0.0]
    plot = Plot(["loss"], "plot/loss", picture, clock=lambda: now[0])
    state = LoopState(metrics=Metrics(lambda: {"loss": 1.0}, ("loss",)))
    plot.on_start(state)
    for i in range(100):
        state.total_iterations = i + 1
        plot.on_iteration(state)
        now[0] += 0.01
    assert len(picture.shown) <= 3
    plot.close()
    assert picture.shown[-1]["loss"][0][-1] == 100


def test_an_error_leaves_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a terminal that is not given back, and the last curve lost with the run."""
    made = loop().plot("loss", filter=telic.every(1), notebook=False)

    def fail(state: Any) -> None:
        raise ZeroDivisionError

    made.handle_event("iteration_completed", fail, telic.once(4))
    with pytest.raises(ZeroDivisionError):
        made.run(batches())
    assert "• loss" in capsys.readouterr().out


def test_metrics_are_checked() -> None:
    """Catches a plot of a misspelt name that stays empty for a night."""
    with pytest.raises(ContractError, match=r"plot/los reads the metric 'los'.* Did you mean 'loss'"):
        loop().plot("los", notebook=False).run(batches())
    with pytest.raises(ValueError, match="twice"):
        loop().plot("loss", "loss", notebook=False)
    with pytest.raises(TypeError, match="takes names"):
        loop().plot(3, notebook=False)  # type: ignore[arg-type]
    vector = loop().metric(lambda p: p, "vector", reads="prediction", reduce="last")
    with pytest.raises(ValueError, match="not a scalar"):
        vector.plot("vector", notebook=False).run(batches())


def test_piped_output_has_one_plot(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches escape codes in a log file, and a plot for each epoch."""
    loop().plot("loss", title="mine", notebook=False).run(batches(), epochs=3)
    text = capsys.readouterr().out
    assert text.count("mine") == 1
    assert "\x1b" not in text


def test_a_terminal_is_shared_with_progress() -> None:
    """Catches two live displays on one terminal, each drawing over the other, or rich's error for them."""
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=80, height=40)
    made = loop().progress(plain=False)
    assert made._listener is not None
    made._listener._given_console = terminal  # type: ignore[attr-defined]
    made.plot("loss", filter=telic.every(1), notebook=False)
    made.run(batches(), epochs=2)
    assert "epoch 2/2" in stream.getvalue()
    assert "• loss" in stream.getvalue()
    assert terminal._live_stack == []


# -- characters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "series",
    [
        {},
        {"a": ([], [])},
        {"a": ([1], [2.0])},
        {"a": ([1, 2], [3.0, 3.0])},
        {"a": ([1, 2, 3], [np.nan, np.inf, -np.inf])},
        {"a": ([0, 1], [0.0, -1.0])},
        {"a": (list(range(500)), [1e300] * 250 + [-1e300] * 250)},
        {f"m{i}": ([1, 2], [float(i), 2.0]) for i in range(9)},
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_anything_can_be_drawn(series: Any, log: bool) -> None:
    """Catches a range of zero, a logarithm of zero, and values that are no numbers."""
    text = draw_characters(series, log_x=log, log_y=log, width=40)
    assert all(len(line) <= 60 for line in text.splitlines()[:-1])


def test_a_fall_is_drawn_as_one() -> None:
    """Catches an axis that is upside down."""
    lines = draw_characters({"loss": (list(range(1, 60)), [1.0 / i for i in range(1, 60)])}, log_y=True).splitlines()
    assert lines[0].startswith("      1 ┤•")
    assert lines[13].rstrip().endswith("•")


# -- notebooks --------------------------------------------------------------------------------------------------------


def test_chart_is_vega_lite_with_characters_beside() -> None:
    """Catches a chart of a version that no reader draws, NaN in its JSON, and zeros on a logarithmic axis."""
    pytest.importorskip("altair")
    chart = plots.NotebookChart(log_y=True, title="mine")
    series = {"loss": ([1, 2, 3, 4], [2.0, np.nan, 0.0, 1.0]), "validation_loss": ([4], [3.0])}
    bundle = chart.bundle(series)
    spec = bundle["application/vnd.vegalite.v5+json"]
    assert spec["$schema"].endswith("vega-lite/v5.json")
    (rows,) = spec["datasets"].values() if "datasets" in spec else (spec["data"]["values"],)
    assert [(r["batch"], r["metric"], r["value"]) for r in rows] == [
        (1, "loss", 2.0),
        (4, "loss", 1.0),
        (4, "validation_loss", 3.0),
    ]
    assert spec["encoding"]["y"]["scale"] == {"type": "log"}
    assert "validation_loss" in bundle["text/plain"]


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches IPython in a terminal taken for a notebook, and a chart that fails only when the run starts."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    assert not plots.is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=1)))
    assert plots.is_notebook()
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"telic\[plot\]"):
        loop().plot("loss")


# -- pictures as files ------------------------------------------------------------------------------------------------


def test_confusion_matrix_of_each_epoch(tmp_path: Path) -> None:
    """Catches a matrix that is drawn transposed without a word: rows are the true classes."""
    x = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]
    model = (lambda key, x: {"w": jnp.eye(3)}, lambda params, x: x @ params["w"])
    made = telic.trainer(model, "softmax_cross_entropy", telic.optimizers.sgd(0.0), log=0)
    made.metric(telic.metrics.confusion_matrix(num_classes=3)).confusion(tmp_path / "c.png", names=["a", "b", "c"])
    made.run([(x, np.array([0, 1, 1, 0]))])
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ContractError, match="confusion/confusion_matrix reads the metric 'confusion_matrix'"):
        loop().confusion(tmp_path / "none.png").run(batches())
    from telic.display import draw_confusion

    counts = np.array([[2, 0], [1, 5]])
    axes = draw_confusion(counts).axes[0]
    assert {(t.get_position(), t.get_text()) for t in axes.texts} == {((0, 0), "2"), ((0, 1), "1"), ((1, 1), "5")}
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    for wrong in (np.ones(3), np.ones((2, 3)), np.zeros((0, 0))):
        with pytest.raises(ValueError, match=r"\[classes, classes\]"):
            draw_confusion(wrong)
    with pytest.raises(ValueError, match="names must be one per class"):
        draw_confusion(counts, names=["a"])
