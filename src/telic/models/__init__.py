"""One small interface over Flax Linen, Flax NNX, Equinox and plain functions.

`adapt` turns a model of any of these libraries into a value with ``init``, ``forward``, ``bind`` and ``held``. All of
them name leaves alike: variables are collections of nested plain dictionaries with string keys.

`Decoder` is a language model of telic's own, described by a `DecoderConfig`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from telic.models.autoencoder import Autoencoder, Latents
    from telic.models.base import Forward, Model
    from telic.models.decoder import (
        Decoder,
        DecoderConfig,
        Experts,
        LinearScaling,
        Llama3Scaling,
        Rotary,
        YarnScaling,
        attention_kernels,
        stack_layers,
        unstack_layers,
    )
    from telic.models.dispatch import adapt
    from telic.models.dit import DiT
    from telic.models.sampling import Continuations, generate
    from telic.models.unet import UNet
    from telic.models.vit import ViT, ViTPredictor

__all__ = [
    "Forward",
    "Model",
    "adapt",
    "Decoder",
    "DecoderConfig",
    "Experts",
    "Rotary",
    "LinearScaling",
    "Llama3Scaling",
    "YarnScaling",
    "attention_kernels",
    "stack_layers",
    "unstack_layers",
    "generate",
    "Continuations",
    "DiT",
    "UNet",
    "ViT",
    "ViTPredictor",
    "Autoencoder",
    "Latents",
]

_HOMES = {
    "Forward": "base",
    "Model": "base",
    "adapt": "dispatch",
    "Decoder": "decoder",
    "DecoderConfig": "decoder",
    "Experts": "decoder",
    "Rotary": "decoder",
    "LinearScaling": "decoder",
    "Llama3Scaling": "decoder",
    "YarnScaling": "decoder",
    "attention_kernels": "decoder",
    "stack_layers": "decoder",
    "unstack_layers": "decoder",
    "generate": "sampling",
    "Continuations": "sampling",
    "DiT": "dit",
    "UNet": "unet",
    "Autoencoder": "autoencoder",
    "Latents": "autoencoder",
    "ViT": "vit",
    "ViTPredictor": "vit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
