"""trackio, a local app: ``pip install 'telic[trackio]'``."""

from collections.abc import Mapping
from typing import Any

from telic.trackers.content import as_logged, content_of
from telic.trackers.extras import missing


class Trackio:
    """Keeps a run in trackio's local database; ``trackio show`` opens it.

    Args:
      project: Name of the project.
      name: Name of the run; None lets trackio choose. A run of that name is continued.
    """

    def __init__(self, project: str, *, name: str | None = None):
        self.project = project
        self.name = name
        self._trackio: Any = None
        self._run: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin or continue the run.

        Raises:
          ImportError: trackio is not installed.
        """
        try:
            import trackio  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise missing("trackio", "trackio", "Trackio") from error
        self.close()
        self._trackio = trackio
        self._run = trackio.init(
            project=self.project,
            name=self.name,
            config=dict(config),
            resume="allow" if self.name else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self.name = self._run.name

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Keep scalars."""
        self._run.log(dict(scalars), step=step)

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Keep pictures as one image, texts as a table, arrays as a histogram."""
        content, pictures = content_of(value), None
        if content.pictures:
            sheet = content.sheet()
            pictures = self._trackio.Image(sheet.repeat(3, axis=-1) if sheet.shape[-1] == 1 else sheet)
        logged = as_logged(self._trackio, name, content, pictures)
        if logged:
            self._run.log(logged, step=step)

    def close(self) -> None:
        """End the run and wait until it is written."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()
