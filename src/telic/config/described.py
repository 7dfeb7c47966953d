"""A run that a file describes: names of what is registered, and numbers."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from telic import tree
from telic.compose import Trainer
from telic.config import builtin
from telic.config.registry import Choice, entry_of
from telic.config.running import Course, Run
from telic.errors import SettingsError

# What telic registers itself: a file may name it without a program.
builtin.register_all()


@dataclass(frozen=True, kw_only=True)
class Described(Course):
    """What a file of settings holds.

    Args:
      data: Registered data.
      objective: Registered objective.
      optimizer: Registered optimizer.
      model: Registered model, for objectives that take one.
      seed: Seed of weights, dropout and every draw of the objective; data has a seed of its own.
      steps: Updates in all.
      epochs: Epochs in all; 1 when neither is given.
      accumulate: Batches joined into one update.
      microbatch: Rows each batch is sliced into instead, or "auto".
      trainable: Parameters that are trained, as patterns such as ``params/head/**``; none given trains all.
      precision: Policy, such as "bfloat16".
      loss_scale: "static" or "dynamic".
      nonfinite: What happens to an attempt that is not finite.
      metrics: Names of metrics.
      eval_every: Updates between evaluations, or "epoch".
      averaged: Evaluate, sample and export the averaged weights.
      preview: Show samples at each evaluation.
      log_every: Updates between log lines; 0 writes none.
      checkpoint_every: Updates between checkpoints.
      keep: Newest checkpoints that stay.
    """

    data: Annotated[Choice, "data"]
    objective: Annotated[Choice, "objective"]
    optimizer: Annotated[Choice, "optimizer"]
    model: Annotated[Choice, "model"] | None = None
    seed: int = 0
    accumulate: int = 1
    microbatch: int | Literal["auto"] | None = None
    trainable: tuple[str, ...] = ()
    precision: str | None = None
    loss_scale: Literal["static", "dynamic"] | None = None
    nonfinite: Literal["reject", "raise", "allow"] = "reject"
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        takes = "model" in entry_of("objective", self.objective.name).given
        if takes and self.model is None:
            raise SettingsError(f"objective {self.objective.name!r} needs a model: add a table [model] with a name")
        if not takes and self.model is not None:
            raise SettingsError(f"objective {self.objective.name!r} takes no model: leave [model] out")


def described_run(settings: Described) -> Run:
    """Build the run that a file describes.

    Raises:
      SettingsError: A part does not take what the file says of it.
    """
    models = () if settings.model is None else (_made("model", settings.model),)
    objective = _made("objective", settings.objective, *models)
    optimizer = _made("optimizer", settings.optimizer)
    try:
        return _run(settings, objective, optimizer, _made("data", settings.data))
    except (ValueError, TypeError) as error:
        raise SettingsError(str(error)) from error


def _made(table: str, choice: Choice, *given: Any) -> Any:
    """Make what a table names; what it does not take is an error of settings, since no code of the user's is in it."""
    try:
        return choice.make(*given)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"[{table}] {choice.name}: {error}") from error


def _run(settings: Described, objective: Any, optimizer: Any, data: Any) -> Run:
    trainer = Trainer(
        objective,
        optimizer,
        key=settings.seed,
        accumulate=settings.accumulate,
        microbatch=settings.microbatch,
        trainable=tree.paths(*settings.trainable) if settings.trainable else None,
        precision=settings.precision,
        loss_scale=settings.loss_scale,
        nonfinite=settings.nonfinite,
    )
    return Run(
        trainer=trainer,
        data=data,
        metrics=settings.metrics,
        **{field.name: getattr(settings, field.name) for field in fields(Course)},
    )
