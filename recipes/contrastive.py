"""Digits and their moved copies learn to find each other: ``telic train recipes/contrastive.py``."""

from dataclasses import dataclass

from examples.contrastive import training
from telic.config import Run


@dataclass(frozen=True)
class Settings:
    """What --set changes."""

    epochs: int = 5
    learning_rate: float = 2e-3


def build(settings: Settings) -> Run:
    """Give the run."""
    trainer, data, held_out = training(settings.learning_rate)
    return Run(
        trainer=trainer,
        data=data,
        epochs=settings.epochs,
        metrics=("recall_at_k",),
        validation=held_out,
        eval_every="epoch",
    )
