"""Weights & Biases: ``pip install 'telic[wandb]'``."""

import os
from collections.abc import Mapping
from typing import Any

from telic.trackers.content import as_logged, content_of
from telic.trackers.extras import missing


class WeightsAndBiases:
    """Sends a run to Weights & Biases; with ``mode="offline"`` it is kept in a folder for ``wandb sync``.

    A tracker that is started again continues its run. Give `run_id` to continue one of an earlier process.

    Args:
      project: Name of the project.
      name: Name of the run; None lets the service choose.
      run_id: Identity of the run to continue, or None for a new one.
      mode: "online", "offline" or "disabled"; None leaves it to the service's own settings.
      folder: Where wandb keeps its files; None leaves it to the service.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str | None = None,
        run_id: str | None = None,
        mode: str | None = None,
        folder: str | os.PathLike[str] | None = None,
    ):
        self.project = project
        self.name = name
        self.run_id = run_id
        self.mode = mode
        self.folder = None if folder is None else os.fspath(folder)
        self._wandb: Any = None
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin or continue the run.

        Raises:
          ImportError: wandb is not installed.
        """
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise missing("wandb", "wandb", "WeightsAndBiases") from error
        self.close()
        self._wandb = wandb
        self._run = wandb.init(
            project=self.project,
            name=self.name,
            id=self.run_id,
            resume=None if self.run_id is None else "allow",
            mode=self.mode,  # pyright: ignore[reportArgumentType] the service checks it
            dir=self.folder,
            config=dict(config),
        )
        self.run_id = self._run.id

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Send scalars. Steps below one that was sent already are refused by the service."""
        self._run.log(dict(scalars), step=step)

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Send pictures as images, texts as a table, arrays as a histogram."""
        content, pictures = content_of(value), None
        if content.pictures:
            pictures = [
                self._wandb.Image(p.pixels[..., 0] if p.pixels.shape[-1] == 1 else p.pixels, caption=p.caption)
                for p in content.pictures
            ]
        logged = as_logged(self._wandb, name, content, pictures)
        if logged:
            self._run.log(logged, step=step)

    def close(self) -> None:
        """End the run and wait until it is sent."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
