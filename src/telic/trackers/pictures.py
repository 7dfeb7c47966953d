"""Pictures for services: 8-bit pixels, one sheet of many, a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

HostArray: TypeAlias = NDArray[Any]
"""An array in the host's memory."""


@dataclass(frozen=True)
class Picture:
    """One picture for a service: uint8 [height, width, channels] with 1, 3 or 4 channels, and its caption."""

    pixels: HostArray
    caption: str | None = None


def as_pixels(image: Any) -> HostArray:
    """Give an image in [0, 1] as uint8 [height, width, channels]; a video as its frames beside each other."""
    image = np.nan_to_num(np.asarray(image, np.float32))
    if image.ndim == 4:
        image = np.concatenate(list(image), axis=1)
    return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def tiled(pictures: tuple[Picture, ...], columns: int | None = None) -> HostArray:
    """Give pictures of one size as one: uint8 [height, width, channels], about square, a white pixel between them."""
    columns = columns or max(1, round(len(pictures) ** 0.5))
    height, width, channels = pictures[0].pixels.shape
    rows = -(-len(pictures) // columns)
    sheet = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = (i // columns) * (height + 1), (i % columns) * (width + 1)
        sheet[top : top + height, left : left + width] = picture.pixels
    return sheet


def write_png(path: Path, pixels: HostArray) -> None:
    """Write uint8 [height, width, channels] as a PNG file."""
    # Slow to import, and most runs write no pictures.
    from matplotlib.image import imsave

    if pixels.shape[-1] == 1:
        imsave(path, pixels[..., 0], cmap="gray", vmin=0, vmax=255)
    else:
        imsave(path, pixels)
