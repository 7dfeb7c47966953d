"""The names that telic registers itself, for files of settings that need no program."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from flax import linen as nn

from telic import optimizers
from telic.config.registry import register
from telic.data import ByteTokenizer, Dataset, columns, digits_split, pack, standard_library, tokenize
from telic.errors import DataError, SettingsError
from telic.models import Decoder, DecoderConfig, DiT, generate
from telic.objectives import LMObjective, supervised

_SCHEDULES = (
    optimizers.constant,
    optimizers.constant_with_warmup,
    optimizers.cosine,
    optimizers.cosine_decay,
    optimizers.cosine_with_min_lr,
    optimizers.cosine_with_restarts,
    optimizers.exponential_decay,
    optimizers.inverse_sqrt,
    optimizers.linear,
    optimizers.linear_decay,
    optimizers.polynomial,
    optimizers.polynomial_decay,
    optimizers.warmup_cosine,
    optimizers.warmup_stable_decay,
)

_HELD_OUT_DIGITS = 2000


def register_all() -> None:
    """Register every name of telic's own."""
    for name, optimizer in optimizers.NAMES.items():
        register("optimizer", name)(optimizer)
    for schedule in _SCHEDULES:
        register("schedule")(schedule)
    register("data", "digits")(digits)
    register("data", "arrays")(arrays)
    register("data", "standard_library")(library)
    register("data", "text_files")(text_files)
    register("model", "mlp")(mlp)
    register("model", "convnet")(ConvNet)
    register("model", "dit")(DiT)
    register("model", "decoder", settings=DecoderConfig)(Decoder)
    register("objective", "supervised")(by_loss)
    register("objective", "language")(LMObjective)
    register("objective", "byte_language")(byte_language)


def digits(*, batch: int = 64, seed: int = 0, flat: bool = False) -> Dataset:
    """Give ten thousand handwritten digits, 2,000 of them held out.

    Args:
      batch: Digits per batch.
      seed: Seed of the order.
      flat: Give rows of 784 numbers for a dense model.
    """
    return columns(digits_split("all", flat=flat), batch=batch, seed=seed, held_out=_HELD_OUT_DIGITS)


def arrays(*, file: Path, batch: int = 64, seed: int = 0, held_out: int = 0) -> Dataset:
    """Give the arrays of an ``.npz`` file as columns: ``inputs``, ``targets`` and whatever else the objective reads.

    Args:
      file: What ``numpy.savez`` wrote.
      batch: Records per batch.
      seed: Seed of the order.
      held_out: Records taken off the end for validation.
    """
    if not file.is_file():
        raise SettingsError(f"data.file must be an .npz file, and there is none at {file}")
    try:
        with np.load(file, allow_pickle=False) as stored:
            table = {name: stored[name] for name in stored.files}
    except (ValueError, OSError, AttributeError) as error:
        raise DataError(f"{file} cannot be read: {error}; write it with numpy.savez(file, inputs=..., ...)") from error
    return columns(table, batch=batch, seed=seed, held_out=held_out)


def library(
    *, length: int = 128, batch: int = 16, held_out_bytes: int = 60_000, max_bytes: int | None = None
) -> Dataset:
    """Give the source of Python's standard library as rows of bytes; one module in twenty is held out.

    Args:
      length: Targets per row.
      batch: Rows per batch.
      held_out_bytes: Bytes to validate on, at most.
      max_bytes: Bytes to train on, at most; None takes all.
    """
    tokenizer = ByteTokenizer()
    train = tokenize(standard_library("train", max_bytes=max_bytes).values(), tokenizer)
    held_out = tokenize(standard_library("held_out", max_bytes=held_out_bytes).values(), tokenizer)
    return pack(train, length=length, batch=batch, val=held_out)


def text_files(
    *, folder: Path, pattern: str = "**/*.txt", length: int = 128, batch: int = 16, every: int = 20
) -> Dataset:
    """Give the text files below a folder as rows of bytes.

    Args:
      folder: Where they are.
      pattern: Which of them, as a glob.
      length: Targets per row.
      batch: Rows per batch.
      every: One file in so many, by name, is held out.
    """
    found = sorted(path for path in folder.glob(pattern) if path.is_file())
    if len(found) < 2:
        raise DataError(f"{folder} has {len(found)} files of {pattern}: at least two are needed, one of them held out")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in found]
    tokenizer = ByteTokenizer()
    held_out = [text for i, text in enumerate(texts) if i % every == 0]
    train = [text for i, text in enumerate(texts) if i % every]
    return pack(tokenize(train, tokenizer), length=length, batch=batch, val=tokenize(held_out, tokenizer))


def mlp(*, outputs: int, widths: tuple[int, ...] = (128,), activation: Literal["relu", "gelu", "tanh"] = "relu") -> Any:
    """Give a dense network.

    Args:
      outputs: Width of the last layer.
      widths: Widths of the hidden layers.
      activation: What follows each of them.
    """
    between = {"relu": nn.relu, "gelu": nn.gelu, "tanh": nn.tanh}[activation]
    layers: list[Any] = []
    for width in widths:
        layers += [nn.Dense(width), between]
    return nn.Sequential([*layers, nn.Dense(outputs)])


class ConvNet(nn.Module):
    """Convolutions that each halve the picture, and two dense layers.

    Attributes:
      outputs: Width of the last layer.
      features: Channels of the convolutions.
      hidden: Width of the dense layer between.
      dropout: Share of its entries dropped in training.
    """

    outputs: int
    features: tuple[int, ...] = (16, 32)
    hidden: int = 64
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Any, *, train: bool = False) -> Any:
        """Give the outputs of images [batch, height, width, channels]."""
        for features in self.features:
            x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.outputs)(nn.Dropout(self.dropout, deterministic=not train)(x))


def by_loss(model: Any, *, loss: str) -> Any:
    """Give the objective of a model and a loss by name.

    Args:
      model: The model.
      loss: A name from `telic.losses`.
    """
    return supervised(model, loss)


def byte_language(
    model: Any, *, label_smoothing: float = 0.0, z_loss: float = 0.0, sample_tokens: int = 64, temperature: float = 0.6
) -> LMObjective:
    """Give next-byte prediction for `telic.data.ByteTokenizer`, with samples as text and ``bits_per_byte``.

    Args:
      model: A decoder.
      label_smoothing: As for `telic.objectives.LMObjective`.
      z_loss: As there.
      sample_tokens: Bytes to sample for each prompt.
      temperature: Of the samples.
    """
    tokenizer = ByteTokenizer()

    return LMObjective(
        model,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        token_bytes=tokenizer.token_bytes,
        decode=tokenizer.decode,
        sample_tokens=sample_tokens,
        temperature=temperature,
        # Other models have no cache of keys and values, and the objective runs them whole for each byte.
        generate=generate if isinstance(model, Decoder) else None,
    )
