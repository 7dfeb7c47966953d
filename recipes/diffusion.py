"""A small diffusion transformer draws digits: ``telic train recipes/diffusion.py``; ``telic sample`` shows them."""

from dataclasses import dataclass
from typing import Literal

from examples.diffusion_digits import digits, training
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
    test = digits("test")
    return Run(
        trainer=trainer,
        data=data,
        steps=settings.steps,
        validation=[{name: rows[i : i + 500] for name, rows in test.items()} for i in range(0, 2000, 500)],
        averaged=True,
        log_every=100,
        checkpoint_every=250,
    )
