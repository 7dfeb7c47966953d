"""MLflow: ``pip install 'telic[mlflow]'``."""

import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telic.trackers.content import content_of, described, flattened
from telic.trackers.extras import missing
from telic.trackers.pictures import write_png


class MLflow:
    """Keeps a run in MLflow's file store, database or server.

    Args:
      experiment: Name of the experiment; made when it does not exist.
      uri: Tracking address: a folder, a database or a server. None leaves it to MLflow's own settings.
      name: Name of the run.
      run_id: Identity of the run to continue, or None for a new one.
    """

    def __init__(
        self,
        experiment: str,
        *,
        uri: str | os.PathLike[str] | None = None,
        name: str | None = None,
        run_id: str | None = None,
    ):
        self.experiment = experiment
        self.uri = None if uri is None else os.fspath(uri)
        self.name = name
        self.run_id = run_id
        self._client: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin or continue the run, and write the configuration as parameters.

        Raises:
          ImportError: mlflow-skinny is not installed.
        """
        try:
            from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise missing("mlflow-skinny", "mlflow", "MLflow") from error
        self.close()
        client: Any = MlflowClient(tracking_uri=self.uri)
        if self.run_id is None:
            found = client.get_experiment_by_name(self.experiment)
            experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
            self.run_id = str(client.create_run(experiment, run_name=self.name).info.run_id)
        else:
            client.update_run(self.run_id, status="RUNNING")
        # A parameter is written once; a continued run leaves those it has.
        written = client.get_run(self.run_id).data.params
        for name, value in flattened(config).items():
            if name not in written:
                client.log_param(self.run_id, name, str(value)[:6000])
        self._client = client

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Keep scalars."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = time.time_ns() // 1_000_000
        metrics = [Metric(name, float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Keep pictures as one image, texts as a table; an array's histogram as JSON."""
        content = content_of(value)
        stem = f"{name}_{step:08d}"
        if content.pictures:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{stem.replace('/', '_')}.png"
                write_png(path, content.sheet())
                self._client.log_artifact(self.run_id, str(path), "pictures")
        if content.texts:
            text = "\n\n".join(f"{row['prompt']}\n--> {row['completion']}" for row in content.texts)
            self._client.log_text(self.run_id, text, f"texts/{stem}.txt")
        if content.values is not None:
            self._client.log_text(self.run_id, json.dumps(described(content)), f"histograms/{stem}.json")
        if content.scalars is not None:
            self.log({f"{name}/{key}": x for key, x in content.scalars.items()}, step)

    def close(self) -> None:
        """Mark the run as finished."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self.run_id)
