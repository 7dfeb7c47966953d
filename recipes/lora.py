"""Adapters alone are trained on conversations, over frozen pretrained weights: ``telic train recipes/lora.py``.

`base` is a folder of Hugging Face files. Where there is none, a small Llama is made and read some of the standard
library first, so that nothing is downloaded.
"""

from dataclasses import dataclass
from pathlib import Path

from examples.language_lora import pretrained, training
from telic.config import Run
from telic.interop import load_huggingface


@dataclass(frozen=True)
class Settings:
    """What --set changes."""

    steps: int = 300
    base: Path = Path("runs/lora_base")
    pretraining_steps: int = 100


def build(settings: Settings) -> Run:
    """Give the run."""
    if not (settings.base / "config.json").is_file():
        pretrained(settings.base, settings.pretraining_steps)
    _, trainer, data, _ = training(*load_huggingface(settings.base))
    return Run(trainer=trainer, data=data, steps=settings.steps, log_every=100, checkpoint_every=100)
