"""A small diffusion transformer draws digits: ``telic train recipes/diffusion.py``; ``telic sample`` shows them."""

from dataclasses import dataclass
from typing import Literal

from examples.diffusion_digits import held_out, training
from telic.config import Run


@dataclass(frozen=True)
class Settings:
    """What --set changes."""

    process: Literal["flow", "edm"] = "flow"
    steps: int = 3000
    dim: int = 128
    depth: int = 3


def build(settings: Settings) -> Run:
    """Give the run."""
    trainer, data = training(settings.process, settings.steps, dim=settings.dim, depth=settings.depth)
    return Run(
        trainer=trainer,
        data=data,
        steps=settings.steps,
        validation=held_out(),
        averaged=True,
        log_every=100,
        checkpoint_every=250,
    )
