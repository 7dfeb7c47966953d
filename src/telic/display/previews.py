"""Previews of a run as files: pictures, texts and numbers that an evaluation shows, one set for each event.

Attach it with ``loop.validate(data, preview="runs/first/previews")``.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from telic.artifacts import (
    ArtifactSink,
    Decode,
    ImageGrid,
    Representations,
    Scalars,
    TextSamples,
    captions_of,
    texts_of,
)
from telic.display.figures import draw_features, draw_images, save_figure
from telic.jsonable import as_json
from telic.mean import Mean
from telic.places import local


@dataclass(frozen=True)
class PreviewFolder:
    """Writes artifacts as files: images as ``.png``, texts as ``.txt`` and ``.json``, all else as ``.json``.

    A file is called ``<name>_<updates>``, so that a run which repeats an evaluation after a restart writes the same
    file again. It appears complete or not at all.

    Args:
      folder: Directory; made when the first artifact comes. None stands for ``previews`` in the run's directory, which
        the loop fills in when it runs.
      decode: Makes text of one row of ids, for artifacts that bring no decoder of their own.
    """

    folder: str | os.PathLike[str] | None = None
    decode: Decode | None = None

    def under(self, directory: Path | None) -> "PreviewFolder":
        """Give this sink with its place: its own, or one in a run's directory.

        Raises:
          ValueError: There is neither.
        """
        if self.folder is not None:
            return self
        if directory is None:
            raise ValueError(
                "preview=True writes to the run's directory, and this run has none: give preview='runs/previews', or "
                "give the run a place with Trainer(checkpoints=...) or loop.record(path)"
            )
        return replace(self, folder=directory / "previews")

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Write one artifact.

        Args:
          name: What it shows, such as ``validation_image_grid``.
          value: The artifact, its arrays in NumPy.
          step: Updates so far.
        """
        if self.folder is None:
            raise ValueError("this PreviewFolder has no directory: PreviewFolder('runs/first/previews')")
        folder = local(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        # A name may have dots, and a slash of a set's name leads nowhere else.
        stem = f"{name.replace('/', '_').replace(os.sep, '_')}_{step:06d}"
        picture, page, data = (folder / f"{stem}.{kind}" for kind in ("png", "txt", "json"))
        match value:
            case ImageGrid():
                save_figure(draw_images(value, captions=captions_of(value, self.decode)), picture)
            case TextSamples():
                samples = texts_of(value, self.decode)
                write_text(data, json.dumps(samples, indent=1, ensure_ascii=False) + "\n")
                write_text(page, _page(samples))
            case Representations():
                save_figure(draw_features(value), picture)
            case Scalars():
                _write_json(data, {name: _number(x) for name, x in value.values.items()})
            case _ if dataclasses.is_dataclass(value):
                fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
                _write_json(data, {n: x for n, x in fields.items() if x is not None and not callable(x)})
            case _:
                _write_json(data, value)


@dataclass(frozen=True)
class Previews:
    """Several places for one preview.

    Attributes:
      sinks: Each is given every artifact, in this order.
    """

    sinks: tuple[ArtifactSink, ...]

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Give an artifact to each."""
        for sink in self.sinks:
            sink.artifact(name, value, step)


def as_previews(preview: Any) -> Any:
    """Give where previews go: None for False, a `PreviewFolder` for a path or True, a sink as it is.

    Raises:
      TypeError: It is none of these.
    """
    match preview:
        case False | None:
            return None
        case True:
            return PreviewFolder()
        case str() | os.PathLike():
            return PreviewFolder(preview)
        case _ if callable(getattr(preview, "artifact", None)) and not isinstance(preview, type):
            return preview
        case _:
            raise TypeError(
                "preview is a directory, True for the run's own, or a sink with artifact(name, value, step), got "
                f"{preview!r}"
            )


def _page(samples: list[dict[str, Any]]) -> str:
    """Give samples for reading: each with its number, the prompt as it is, the completion after an arrow."""
    blocks = (
        f"--- {i} ---\n" + (f"{s['prompt']}\n" if s["prompt"] else "") + f"--> {s['completion']}\n"
        for i, s in enumerate(samples, start=1)
    )
    return "\n".join(blocks)


def _number(value: Any) -> Any:
    return float(value.measured()) if isinstance(value, Mean) else value


def _write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(as_json(value), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that appears complete or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
