"""Two-digit addition as text, from rewards: ``telic train recipes/addition_grpo.py``.

It goes on from the run of addition_sft.py, which it trains first where it is not there.
"""

from dataclasses import dataclass
from pathlib import Path

from examples.addition_grpo import training
from recipes.addition_dpo import finetuned
from telic.config import Run


@dataclass(frozen=True)
class Settings:
    """What --set changes."""

    steps: int = 500
    sft_steps: int = 500
    start: Path = Path("runs/addition_sft")


def build(settings: Settings) -> Run:
    """Give the run."""
    trainer, data = training(finetuned(settings.start, settings.sft_steps), settings.steps)
    return Run(trainer=trainer, data=data, steps=settings.steps, checkpoint_every=100)
