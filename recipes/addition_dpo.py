"""Two-digit addition as text, from pairs of answers: ``telic train recipes/addition_dpo.py``.

It goes on from the run of addition_sft.py, which it trains first where it is not there.
"""

from dataclasses import dataclass
from pathlib import Path

from examples.addition_dpo import training
from telic.config import Run, open_recipe


@dataclass(frozen=True)
class Settings:
    """What --set changes."""

    steps: int = 400
    sft_steps: int = 500
    start: Path = Path("runs/addition_sft")


def finetuned(start: Path, steps: int):
    """Give the variables of a run of addition_sft.py, which goes on to so many updates where it has fewer."""
    recipe = open_recipe(Path(__file__).with_name("addition_sft.py"))
    settings = recipe.read([f"steps={steps}"])
    return recipe.run(settings).train(start, settings=recipe.asked(settings)).variables


def build(settings: Settings) -> Run:
    """Give the run."""
    trainer, data = training(finetuned(settings.start, settings.sft_steps), settings.steps)
    return Run(trainer=trainer, data=data, steps=settings.steps, eval_every=100, checkpoint_every=100)
