"""Two-digit addition as text, from right answers: ``telic train recipes/addition_sft.py``."""

from dataclasses import dataclass

from examples.addition_sft import training
from telic.config import Run


@dataclass(frozen=True)
class Settings:
    """What --set changes."""

    steps: int = 500


def build(settings: Settings) -> Run:
    """Give the run."""
    trainer, data = training(settings.steps)
    return Run(trainer=trainer, data=data, steps=settings.steps, eval_every=100, checkpoint_every=100)
