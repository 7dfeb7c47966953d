"""What services can show of an artifact, and of a configuration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from telic.artifacts import ImageGrid, Scalars, TextSamples, captions_of, texts_of
from telic.mean import Mean
from telic.trackers.pictures import HostArray, Picture, as_pixels, tiled


@dataclass(frozen=True, eq=False)
class Content:
    """An artifact in the four forms that services know; most artifacts fill one of them.

    Attributes:
      pictures: Pictures, in order.
      texts: ``{"prompt": ..., "completion": ...}`` each.
      scalars: Named values.
      values: Numbers whose distribution is of interest, one dimension; None where there are none.
      columns: Pictures beside each other in `sheet`; None makes it about square.
    """

    pictures: tuple[Picture, ...] = ()
    texts: tuple[Mapping[str, str], ...] = ()
    scalars: Mapping[str, float] | None = None
    values: HostArray | None = None
    columns: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.pictures or self.texts or self.scalars is not None or self.values is not None)

    def sheet(self) -> HostArray:
        """Give all pictures as one, uint8 [height, width, channels]."""
        return tiled(self.pictures, self.columns)


def content_of(value: Any) -> Content:
    """Give what of an artifact a service can show; nothing for artifacts that only metrics read.

    Args:
      value: An artifact with arrays in NumPy, or an array of numbers.
    Raises:
      TypeError: It is text or a mapping, or an array of something else than numbers.
    """
    match value:
        case ImageGrid():
            captions = captions_of(value) or [None] * len(value.images)
            return Content(
                pictures=tuple(
                    Picture(as_pixels(image), caption) for image, caption in zip(value.images, captions, strict=True)
                ),
                columns=value.columns,
            )
        case TextSamples():
            return Content(texts=tuple({k: _as_text(v) for k, v in row.items()} for row in texts_of(value)))
        case Scalars():
            return Content(scalars={name: _number(x) for name, x in value.values.items()})
        case str() | Mapping():
            raise TypeError(
                f"a tracker shows artifacts (ImageGrid, TextSamples, Scalars) and arrays, got {type(value).__name__}"
            )
        case _ if hasattr(value, "dtype"):
            array = np.asarray(value)
            if array.dtype.kind not in "fiub":
                # bfloat16 and its like are numbers that NumPy files under "void".
                array = array.astype(np.float32)
            return Content(values=array.reshape(-1))
        case _:
            return Content()


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Give nested mappings as one, names joined by a slash, for services whose parameters are flat."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def histogram(values: Any, bins: int = 64) -> tuple[HostArray, HostArray]:
    """Give (counts, edges) of the finite values."""
    values = np.asarray(values, np.float64)
    return np.histogram(values[np.isfinite(values)], bins=bins)


def described(content: Content) -> Any:
    """Give an artifact's content without pictures as plain values; of an array its histogram."""
    if content.texts:
        return [dict(row) for row in content.texts]
    if content.scalars is not None:
        return dict(content.scalars)
    counts, edges = histogram(content.values)
    return {"counts": counts.tolist(), "edges": edges.tolist()}


def as_logged(service: Any, name: str, content: Content, pictures: Any) -> dict[str, Any]:
    """Give an artifact's content as `log` of wandb and trackio takes it: their classes are called the same.

    Args:
      service: The package, which has Table and Histogram.
      name: The artifact's name.
      content: What of it can be shown.
      pictures: Its pictures in the package's own class, in which the two differ; None where there are none.
    """
    logged: dict[str, Any] = {} if pictures is None else {name: pictures}
    if content.texts:
        rows = [[row["prompt"], row["completion"]] for row in content.texts]
        logged[name] = service.Table(columns=["prompt", "completion"], data=rows)
    if content.values is not None:
        logged[name] = service.Histogram(content.values)
    if content.scalars is not None:
        logged |= {f"{name}/{key}": x for key, x in content.scalars.items()}
    return logged


def as_page(texts: Sequence[Mapping[str, str]]) -> str:
    """Give prompts and completions as one text, blocks of four spaces, which Markdown shows as they are."""
    pairs = ("\n".join((row["prompt"], f"--> {row['completion']}")) for row in texts)
    return "\n\n---\n\n".join("    " + pair.replace("\n", "\n    ") for pair in pairs)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(map(str, value))


def _number(value: Any) -> float:
    return float(value.measured()) if isinstance(value, Mean) else float(value)
