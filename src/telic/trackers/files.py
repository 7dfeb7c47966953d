"""The tracker that needs no account: JSON lines, PNG pictures and text files in a folder."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from telic.jsonable import as_json
from telic.places import local
from telic.trackers.content import content_of, described
from telic.trackers.pictures import write_png


class JsonLines:
    """Writes scalars to ``scalars.jsonl``, the configuration to ``config.json`` and artifacts to ``artifacts/``.

    A line is ``{"step": 100, "train/loss": 0.5, ...}``; NaN and infinities are written by name, since JSON has no such
    numbers. A run that continues appends; `read_scalars` reads the file and keeps, of steps written twice, the later.

    Args:
      folder: Directory; made by `start`.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = local(folder).absolute()
        self._file: TextIO | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder, write the configuration and open the file of scalars."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(as_json(config), indent=1, allow_nan=False) + "\n"
        (self.folder / "config.json").write_text(text, encoding="utf-8")
        self._file = (self.folder / "scalars.jsonl").open("a", encoding="utf-8")
        if self._file.tell() and not _ends_a_line(self.folder / "scalars.jsonl"):
            self._file.write("\n")  # what a killed run left unfinished must not swallow the next line

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write one line, complete when this returns."""
        if self._file is None:
            raise RuntimeError("JsonLines.log before start(config)")
        self._file.write(json.dumps({"step": step, **as_json(scalars)}, allow_nan=False) + "\n")
        self._file.flush()

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Write pictures as PNG, texts and scalars as JSON, and of an array its histogram as JSON."""
        folder = self.folder / "artifacts"
        stem = f"{name.replace('/', '_').replace(os.sep, '_')}_{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        content = content_of(value)
        if content.pictures:
            captions = [picture.caption for picture in content.pictures]
            write_png(folder / f"{stem}.png", content.sheet())
            if any(captions):
                _write(folder / f"{stem}.json", {"captions": captions})
        elif not content.is_empty:
            _write(folder / f"{stem}.json", described(content))

    def close(self) -> None:
        """Close the file; harmless when it is closed already."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def read_scalars(path: str | os.PathLike[str]) -> dict[int, dict[str, float]]:
    """Read scalars that `JsonLines` wrote: ``{step: {name: value}}`` in the order of the steps.

    A line that a killed run left unfinished is dropped.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        step = int(record.pop("step"))
        steps[step] = steps.get(step, {}) | {name: float(value) for name, value in record.items()}
    return dict(sorted(steps.items()))


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(as_json(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
