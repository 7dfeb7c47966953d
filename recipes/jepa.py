"""An encoder learns what digits look like without their labels: ``telic train recipes/jepa.py``."""

from dataclasses import dataclass

from examples.jepa_digits import held_out, training
from telic.config import Run


@dataclass(frozen=True)
class Settings:
    """What --set changes."""

    steps: int = 6000
    dim: int = 128
    depth: int = 2


def build(settings: Settings) -> Run:
    """Give the run."""
    trainer, data = training(settings.steps, dim=settings.dim, depth=settings.depth)
    return Run(
        trainer=trainer,
        data=data,
        steps=settings.steps,
        validation=held_out(),
        averaged=True,
        log_every=100,
        checkpoint_every=250,
    )
