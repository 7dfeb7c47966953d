"""Every tracker takes the same run: two moments, pictures, texts, a distribution; what it kept is read back."""

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telic.artifacts import ImageGrid, Representations, Scalars, TextSamples
from telic.mean import Mean
from telic.trackers import JsonLines, MLflow, TensorBoard, Trackio, WeightsAndBiases, read_scalars
from telic.trackers.content import content_of, flattened
from telic.trackers.pictures import as_pixels, tiled

CONFIG = {"optimizer": {"name": "adam", "learning_rate": 1e-3}, "seed": 0}
GRID = ImageGrid(np.linspace(0, 1, 3 * 8 * 8, dtype=np.float32).reshape(3, 8, 8, 1), captions=("a", "b", "c"))
TEXTS = TextSamples(("2+2=",), ("<script>alert(1)</script>",))


def give(tracker: Any) -> None:
    tracker.start(CONFIG)
    tracker.log({"train/loss": 0.5, "validation/accuracy": 0.25}, 10)
    tracker.log({"train/loss": 0.25}, 20)
    tracker.artifact("validation/digits", GRID, 20)
    tracker.artifact("validation/samples", TEXTS, 20)
    tracker.artifact("train/weights", np.linspace(-1, 1, 100), 20)
    tracker.artifact("validation/scalars", Scalars({"fid": Mean(np.float32(6), np.float32(2))}), 20)
    tracker.artifact("validation/features", Representations(np.ones((4, 2), np.float32)), 20)
    tracker.close()
    tracker.close()


def test_files(tmp_path: Path) -> None:
    """Catches a built-in tracker that loses a value, a picture or a text, or writes JSON that is none."""
    give(JsonLines(tmp_path / "run"))
    scalars = read_scalars(tmp_path / "run" / "scalars.jsonl")
    assert scalars == {10: {"train/loss": 0.5, "validation/accuracy": 0.25}, 20: {"train/loss": 0.25}}
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == CONFIG
    files = {p.name for p in (tmp_path / "run" / "artifacts").iterdir()}
    assert files == {
        *("validation_digits_00000020.png", "validation_digits_00000020.json"),
        *("validation_samples_00000020.json", "train_weights_00000020.json", "validation_scalars_00000020.json"),
    }
    texts = json.loads((tmp_path / "run" / "artifacts" / "validation_samples_00000020.json").read_text())
    assert texts == [{"prompt": "2+2=", "completion": "<script>alert(1)</script>"}]
    histogram = json.loads((tmp_path / "run" / "artifacts" / "train_weights_00000020.json").read_text())
    assert sum(histogram["counts"]) == 100
    scalars_file = tmp_path / "run" / "artifacts" / "validation_scalars_00000020.json"
    assert json.loads(scalars_file.read_text()) == {"fid": 3.0}


def test_files_continue_after_a_kill(tmp_path: Path) -> None:
    """Catches a restart that erases the log, and a half-written line that makes it unreadable."""
    first = JsonLines(tmp_path)
    first.start({})
    first.log({"train/loss": 3.0}, 1)
    first.log({"train/loss": math.nan}, 2)
    with (tmp_path / "scalars.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    second = JsonLines(tmp_path)
    second.start({})
    second.log({"train/loss": 2.0}, 2)
    second.close()
    first.close()
    assert read_scalars(tmp_path / "scalars.jsonl") == {1: {"train/loss": 3.0}, 2: {"train/loss": 2.0}}


def test_artifact_names_stay_in_the_folder(tmp_path: Path) -> None:
    """Catches a name that climbs out of the run's folder."""
    tracker = JsonLines(tmp_path / "run")
    tracker.start({})
    tracker.artifact("../../outside", np.ones(3), 0)
    tracker.close()
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_tensorboard(tmp_path: Path) -> None:
    """Catches values under other names or steps than they were given with."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto import event_pb2
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - the format read below is the one it writes

    give(TensorBoard(tmp_path))
    (file,) = tmp_path.glob("events.*")
    data, at, found = file.read_bytes(), 0, {}
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += 12 + size + 4
        for value in event.summary.value:
            found[value.tag, event.step] = value
    assert found["train/loss", 10].simple_value == 0.5
    assert found["train/loss", 20].simple_value == 0.25
    assert found["validation/accuracy", 10].simple_value == 0.25
    assert found["validation/digits", 20].image.height == 17
    assert found["train/weights", 20].histo.num == 100
    assert b"<script>" in found["validation/samples/text_summary", 20].tensor.SerializeToString()
    assert found["validation/scalars/fid", 20].simple_value == 3.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a call that the service's own library refuses."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = WeightsAndBiases("telic-test", name="first", mode="offline", folder=tmp_path)
    give(tracker)
    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 1
    names = (b"train/loss", b"validation/accuracy", b"validation/digits", b"validation/scalars/fid")
    written, deadline = b"", time.monotonic() + 30
    # The service's own process writes the file, and may be behind when finish returns.
    while not all(name in written for name in names) and time.monotonic() < deadline:
        time.sleep(0.1)
        written = next(runs[0].glob("run-*.wandb")).read_bytes()
    assert [name for name in names if name not in written] == []
    assert tracker.run_id is not None
    assert tracker.run_id in runs[0].name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches metrics that the store does not give back, and a restart that makes a second run."""
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = MLflow("telic", uri=(tmp_path / "store").as_uri(), name="first")
    give(tracker)
    again = MLflow("telic", uri=(tmp_path / "store").as_uri(), run_id=tracker.run_id)
    again.start(CONFIG)
    again.log({"train/loss": 0.125}, 30)
    again.close()
    client = MlflowClient(tracking_uri=(tmp_path / "store").as_uri())
    history = client.get_metric_history(str(tracker.run_id), "train/loss")
    assert [(m.step, m.value) for m in history] == [(10, 0.5), (20, 0.25), (30, 0.125)]
    run = client.get_run(str(tracker.run_id))
    assert run.data.params == {"optimizer/name": "adam", "optimizer/learning_rate": "0.001", "seed": "0"}
    assert run.info.status == "FINISHED"
    assert {f.path for f in client.list_artifacts(str(tracker.run_id))} == {"pictures", "texts", "histograms"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches metrics that the local database does not hold."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    give(Trackio("telic-test", name="first"))
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    for name in (b"train/loss", b"validation/accuracy", b"validation/digits"):
        assert name in written


@pytest.mark.parametrize(
    ("tracker", "package", "extra"),
    [
        (TensorBoard("x"), "tensorboardX", "tensorboard"),
        (WeightsAndBiases("x"), "wandb", "wandb"),
        (Trackio("x"), "trackio", "trackio"),
        (MLflow("x"), "mlflow.tracking", "mlflow"),
    ],
)
def test_missing_package_says_what_to_install(
    tracker: Any, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a bare ModuleNotFoundError."""
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ImportError, match=rf"pip install 'telic\[{extra}\]'"):
        tracker.start({})


def test_pixels_are_clipped_and_finite() -> None:
    """Catches bright pixels that wrap round to black, and NaN that becomes any number."""
    image = np.array([[[-1.0], [0.5]], [[2.0], [np.nan]]], np.float32)
    assert as_pixels(image)[..., 0].tolist() == [[0, 128], [255, 0]]


def test_sheet_holds_each_picture_once() -> None:
    """Catches a grid that drops the last row or draws one picture over another."""
    images = np.stack([np.full((2, 3, 3), k / 10, np.float32) for k in range(5)])
    content = content_of(ImageGrid(images, columns=2))
    sheet = content.sheet()
    assert sheet.shape == (3 * 3 - 1, 2 * 4 - 1, 3)
    for k, picture in enumerate(content.pictures):
        top, left = (k // 2) * 3, (k % 2) * 4
        np.testing.assert_array_equal(sheet[top : top + 2, left : left + 3], picture.pixels)
    assert tiled(content.pictures).shape[0] == 3 * 3 - 1


def test_video_shows_its_frames_beside_each_other() -> None:
    """Catches a video that a picture service cannot take."""
    content = content_of(ImageGrid(np.zeros((2, 5, 4, 4, 1), np.float32)))
    assert content.pictures[0].pixels.shape == (4, 20, 1)


@pytest.mark.parametrize("given", ["text", {"a": 1}])
def test_content_of_something_else_is_refused(given: Any) -> None:
    """Catches a mapping that is silently shown as nothing."""
    with pytest.raises(TypeError, match="a tracker shows artifacts"):
        content_of(given)


def test_arrays_of_bfloat16_are_numbers() -> None:
    """Catches weights in bfloat16 that NumPy does not count as numbers."""
    import jax.numpy as jnp

    values = content_of(np.asarray(jnp.arange(4, dtype=jnp.bfloat16))).values
    assert values is not None
    assert values.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert content_of(Representations(np.ones((2, 2), np.float32))).is_empty


def test_flat_configuration() -> None:
    """Catches two parameters of one name after flattening."""
    assert flattened({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}
