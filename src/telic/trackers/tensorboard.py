"""TensorBoard, through tensorboardX: ``pip install 'telic[tensorboard]'``."""

import os
from collections.abc import Mapping
from typing import Any

from telic.trackers.content import as_page, content_of, flattened
from telic.trackers.extras import missing


class TensorBoard:
    """Writes event files that ``tensorboard --logdir`` shows.

    Scalars go to the charts of their names, pictures to Images as one sheet, texts to Text, arrays to Histograms and
    the configuration to Text as ``config``. A run that continues adds a file to the folder; TensorBoard joins them.

    Args:
      folder: Log directory; made by `start`.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = os.fspath(folder)
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Open an event file and write the configuration.

        Raises:
          ImportError: tensorboardX is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise missing("tensorboardX", "tensorboard", "TensorBoard") from error
        self.close()
        self._writer = SummaryWriter(self.folder)
        rows = "\n".join(f"| {name} | {value} |" for name, value in flattened(config).items())
        if rows:
            self._writer.add_text("config", f"| name | value |\n| --- | --- |\n{rows}", 0)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write scalars."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Write an artifact to the tab that shows its kind."""
        content = content_of(value)
        if content.pictures:
            # TensorBoard knows grey and RGB.
            self._writer.add_image(name, content.sheet()[..., :3], step, dataformats="HWC")
        if content.texts:
            self._writer.add_text(name, as_page(content.texts), step)
        if content.values is not None:
            self._writer.add_histogram(name, content.values, step)
        if content.scalars is not None:
            self.log({f"{name}/{key}": x for key, x in content.scalars.items()}, step)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
