"""A run as a value: a trainer, its data, and how far it goes. What commands train, evaluate, sample and export."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from telic.checkpoints import Checkpoints, plain
from telic.checkpoints.directory import RunDirectory, Saved
from telic.checkpoints.leaves import fill
from telic.compose import Trainer
from telic.compose.trainers import fitting_loop
from telic.config.settings import changes
from telic.contract import has_preview
from telic.data import DataPartition, Dataset
from telic.display.previews import PreviewFolder
from telic.errors import CheckpointError, SettingsError
from telic.loop.state import LoopState
from telic.train.state import TrainState

RECORD = "run.json"
"""The file of a run directory that says, among other things, what the run was asked."""

_MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Course:
    """How far a run goes and what it does on its way: what a program and a file of settings say alike."""

    steps: int | None = None
    epochs: int | None = None
    eval_every: int | Literal["epoch"] | None = None
    averaged: bool = False
    preview: bool = False
    log_every: int = 50
    checkpoint_every: int | None = None
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class Run(Course):
    """What a program's ``build`` gives: everything a command needs to train, evaluate, sample and export.

    Constructing one computes nothing and opens nothing.

    Args:
      trainer: Objective, optimizer and key. Leave its `checkpoints` out: a command gives the run its directory.
      data: As for `telic.Trainer.fit`.
      steps: Updates in all.
      epochs: Epochs in all; 1 when neither is given.
      metrics: Metrics to attach, in training and in evaluation.
      validation: What to evaluate; by default the Dataset's `val`.
      eval_every: Updates between evaluations, or "epoch"; None evaluates nothing while training.
      averaged: Evaluate, sample and export the averaged weights.
      preview: Show the objective's previews at each evaluation, in the run's directory.
      log_every: Updates between log lines; 0 writes none.
      checkpoint_every: Updates between checkpoints; None saves at each epoch's end and at the run's.
      keep: Newest checkpoints that stay.
    Raises:
      SettingsError: Both steps and epochs are given.
    Example:
      >>> from telic import supervised
      >>> pair = (lambda key, x: {"w": 0.0}, lambda params, x: params["w"] * x)
      >>> Run(trainer=Trainer(supervised(pair, "mean_squared_error"), "sgd", key=0), data=[], steps=3).log_every
      50
    """

    trainer: Trainer
    data: Any
    metrics: Sequence[Any] = ()
    validation: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.trainer, Trainer):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"Run(trainer=) takes a telic.Trainer, got {type(self.trainer).__name__}")
        if self.steps is not None and self.epochs is not None:
            raise SettingsError(f"a run goes by steps={self.steps} or by epochs={self.epochs}: give one")

    def train(
        self,
        directory: str | Path | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        resume: Literal["auto", "never", "must"] = "auto",
        say: Callable[[str], None] = print,
    ) -> TrainState:
        """Train, and give the final state. With a directory the run is recorded there, and goes on from there.

        Args:
          directory: The run's directory; None keeps nothing.
          settings: What the run was asked, as a table: ``run.json`` of the directory keeps it.
          resume: "auto" continues when there is a checkpoint, "must" insists on one, "never" begins anew.
          say: Takes what changed in the settings of a run that goes on.
        """
        saved = self.trainer.checkpoints if directory is None else self.checkpoints(Path(directory))
        # Validation data without a cadence is for evaluate alone.
        evaluates = self.eval_every is not None
        loop = fitting_loop(
            self.trainer,
            self.data,
            log_every=self.log_every,
            eval_every=self.eval_every,
            metrics=self.metrics,
            validation=self.validation if evaluates else None,
            averaged=self.averaged and evaluates,
            preview=self.preview and evaluates and directory is not None,
            checkpoint_every=None if saved is None else self.checkpoint_every,
            checkpoints=saved,
            resume=resume,
            profile=None,
            record=None,
        )
        if directory is not None and settings is not None:
            if resume != "never":
                report_changes(Path(directory), settings, say)
            loop.record(directory, interval=(self.log_every or 50) * self.trainer.accumulate, config=settings)
        final: LoopState = loop.run(self.data, steps=self.steps, epochs=self.epochs)
        return final.step_state

    def checkpoints(self, directory: Path) -> Checkpoints:
        """Give where this run saves itself: the directory, with what the trainer says of checkpoints where it does."""
        own = self.trainer.checkpoints
        return Checkpoints(directory, keep=self.keep) if own is None else replace(own, directory=directory)

    def restore(self, directory: str | Path) -> tuple[TrainState, str]:
        """Give the state of a run's newest whole checkpoint, and that checkpoint's name. The run may be under way.

        Raises:
          CheckpointError: There is none, or none is whole.
          MismatchError: It is of another model or optimizer; the leaves are listed.
        """
        saved = _newest(Path(directory), self.checkpoints(Path(directory)))
        described = saved.body.get("batch")
        if described is None:
            raise CheckpointError(f"checkpoint {saved.name} of {directory} does not say what its batches look like")
        like = self.trainer.place(example=plain.example(described))
        what = f"the state of checkpoint {saved.name} of {directory}"
        arrays = {name: leaf for name, leaf in saved.arrays.items() if name == "state" or name.startswith("state/")}
        return fill("state", like, arrays, what=what), saved.name

    def evaluate(self, state: Any) -> dict[str, Any]:
        """Give the loss and metrics of a state over the validation data, every example once.

        Args:
          state: A TrainState, LoopState or variables.
        Raises:
          SettingsError: The run has nothing to evaluate.
        """
        data = self.data if self.validation is None else self.validation
        if self.validation is None and (not isinstance(data, Dataset) or data.val is None):
            raise SettingsError(
                "this run has no validation data: give Run(validation=batches), or a Dataset with held-out records"
            )
        if not isinstance(data, Mapping):
            return self._scores(data, state)
        sets = cast(Mapping[str, Any], data).items()
        return {f"{name}_{metric}": x for name, held_out in sets for metric, x in self._scores(held_out, state).items()}

    def sample(self, state: Any, folder: str | Path) -> list[Path]:
        """Write what the objective's preview shows of a state, and give the files.

        It reads the first batch of the validation data, or of the training data where there is none.

        Args:
          state: A TrainState, LoopState or variables.
          folder: Where the files go.
        Raises:
          SettingsError: The objective shows nothing, or its data cannot be read without training.
        """
        objective, sink = self.trainer.objective, _Noted(PreviewFolder(folder))
        if has_preview(objective):
            self.trainer.evaluate([self._batch()], state=state, averaged=self.averaged, preview=sink)
        if not sink.stems:
            raise SettingsError(
                f"{type(objective).__name__} shows nothing: give it a method preview(variables, batch, step, *, "
                "scored=None) that returns an artifact of telic.artifacts"
            )
        return [path for stem in sink.stems for path in sorted(Path(folder).glob(f"{stem}.*"))]

    def _batch(self) -> Any:
        sets = list(self.validation.values()) if isinstance(self.validation, Mapping) else [self.validation]
        chosen = self.data if self.validation is None else sets[0]
        if isinstance(chosen, Dataset):
            opened = chosen.train if chosen.val is None else chosen.val
            batches = iter(opened(DataPartition()) if callable(opened) else opened)
        elif isinstance(chosen, Iterable) and not isinstance(chosen, Iterator):
            batches = iter(cast(Iterable[Any], chosen))
        else:
            raise SettingsError(
                f"samples are made for a batch, and {type(chosen).__name__} gives none without training: give "
                "Run(validation=batches)"
            )
        for batch in batches:
            return batch
        raise SettingsError("samples are made for a batch, and the data has none")

    def _scores(self, data: Any, state: Any) -> dict[str, Any]:
        return self.trainer.evaluate(data, state=state, metrics=self.metrics, averaged=self.averaged)


@dataclass
class _Noted:
    """A folder of previews that notes what it wrote."""

    folder: PreviewFolder
    stems: list[str] = field(default_factory=list[str])

    def artifact(self, name: str, value: Any, step: int) -> None:
        self.folder.artifact(name, value, step)
        self.stems.append(f"{name}_{step:06d}")


def recorded(directory: Path) -> dict[str, Any] | None:
    """Give what a run was asked, as its record says; None where it says nothing.

    Raises:
      SettingsError: The record is damaged.
    """
    path = directory / RECORD
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(_MOST_BYTES))["settings"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingsError(f"{path} does not say what the run was asked ({error!r}): remove it to go on") from None
    return cast(dict[str, Any], found) if isinstance(found, dict) and found else None


def report_changes(directory: Path, settings: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Say what differs from what the run in a directory was asked before."""
    before = recorded(directory)
    if before is not None:
        for line in changes(before, settings):
            say(f"{directory.resolve().name}: {line}")


def _newest(directory: Path, config: Checkpoints) -> Saved:
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {directory}; train the run first, or give its directory")
    found = RunDirectory(config).find()
    if found.saved is None:
        raise CheckpointError(f"{directory} has no checkpoint; train the run first, or give its directory")
    return found.saved
