"""What an evaluation makes of a batch: values of a known meaning, for metrics to pool and for people to look at.

`Objective.evaluate` returns one of these, a tuple of them, or None; a metric whose ``reads`` is one of the types pools
its statistics over every example. `Objective.preview` returns those to be shown, and an `ArtifactSink` shows them.

Every type crosses jit: fields that hold arrays are data, texts and functions are static.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from telic.errors import ContractError, ShapeError

T = TypeVar("T")

Decode: TypeAlias = Callable[[Any], str]
"""Turns one row of ids, a NumPy array, into text. It runs on the host, on process 0 alone."""


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, tuple) and all(isinstance(x, str) for x in value))


def _register(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a tree whose texts are static, whatever field they stand in."""
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType] every cls here is a dataclass
    always_static = {f.name for f in fields if f.metadata.get("static")}

    def flatten_with_keys(value: Any) -> Any:
        items = [(f.name, getattr(value, f.name)) for f in fields]
        static = tuple((name, x) for name, x in items if name in always_static or _is_text(x))
        fixed = {name for name, _ in static}
        names = tuple(name for name, _ in items if name not in fixed)
        children = [(jax.tree_util.GetAttrKey(name), x) for name, x in items if name not in fixed]
        return children, (names, static)

    def unflatten(aux: Any, children: Any) -> Any:
        names, static = aux
        made = object.__new__(cls)
        for name, x in (*zip(names, children, strict=True), *static):
            object.__setattr__(made, name, x)
        return made

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


@_register
@dataclass(frozen=True)
class TokenScores:
    """How well a model predicted each token: what perplexity, token accuracy and bits per byte are made of.

    Attributes:
      log_probs: Log-probability of each target token, in nats (≤ 0), [rows, time] or any other shape.
      mask: Weight of each token, of the shape of `log_probs` or its leading part; 0 drops it, whatever stands there.
        None counts every token.
      correct: Whether the most likely token was the target, bool, shape of `log_probs`; None where not known.
      num_bytes: Bytes of text that each target token stands for, shape of `log_probs`; None where not known.
      confidence: Probability of the most likely token, in [0, 1], shape of `log_probs`; None where not known.
    Raises:
      ShapeError: An optional field has another shape than `log_probs`.
    """

    log_probs: Any
    mask: Any = None
    correct: Any = None
    num_bytes: Any = None
    confidence: Any = None

    def __post_init__(self) -> None:
        shape = jnp.shape(self.log_probs)
        for name in ("correct", "num_bytes", "confidence"):
            value = getattr(self, name)
            if value is not None and jnp.shape(value) != shape:
                raise ShapeError(
                    f"TokenScores.{name} must have the shape of log_probs, {shape}, got {jnp.shape(value)}; give one "
                    "value per token"
                )
        if self.mask is not None and jnp.shape(self.mask) != shape[: jnp.ndim(self.mask)]:
            raise ShapeError(
                f"TokenScores.mask must have the shape of log_probs, {shape}, or its leading part, got "
                f"{jnp.shape(self.mask)}; give one weight per token, or one per row"
            )


@_register
@dataclass(frozen=True)
class ImageGrid:
    """Pictures to look at, or to compare with others.

    Attributes:
      images: [n, height, width, channels] with 1 (grey), 3 (RGB) or 4 (RGBA) channels, floating-point in [0, 1];
        a video is one row of frames, [n, frames, height, width, channels]. Values outside are clipped when drawn.
      captions: Text of each picture: a tuple of n strings, or an array [n, ...] of which `decode` makes text.
      columns: Pictures beside each other; None makes the grid about square.
      decode: Makes a caption of one row of `captions`; None writes numbers as they are. Static.
    Raises:
      ShapeError: `images` has another rank or number of channels, or captions are not one per picture.
      TypeError: `images` are integers: which range they have cannot be known.
    """

    images: Any
    captions: Any = None
    columns: int | None = field(default=None, metadata={"static": True})
    decode: Decode | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        shape = jnp.shape(self.images)
        if len(shape) not in (4, 5) or shape[-1] not in (1, 3, 4):
            raise ShapeError(
                "ImageGrid.images must be [n, height, width, channels] or [n, frames, height, width, channels] with "
                f"1, 3 or 4 channels, got {shape}; grey pictures need a last axis of 1: images[..., None]"
            )
        dtype = jnp.result_type(self.images)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"ImageGrid.images must be floating-point in [0, 1], got {dtype}; divide by 255 first")
        if isinstance(self.captions, list):
            object.__setattr__(self, "captions", tuple(self.captions))
        if self.captions is not None and num_rows(self.captions) != shape[0]:
            raise ShapeError(
                f"ImageGrid.captions must be one per picture, {shape[0]}, got {num_rows(self.captions)}: "
                "give a tuple of strings or an array [n, ...]"
            )


@_register
@dataclass(frozen=True)
class TextSamples:
    """Prompts and what a model made of them.

    Attributes:
      prompts: A tuple of strings, or token ids [n, time]; None where there were none.
      completions: A tuple of strings, or token ids [n, time].
      prompt_mask: 1 where a prompt has a token, [n, time]; None where every place has one.
      completion_mask: The same for completions.
      decode: Makes text of one row of ids; None leaves it to the sink, which without a decoder writes the ids. Static.
    Raises:
      ShapeError: Prompts and completions are not as many, or a mask has not the shape of the ids.
    """

    prompts: Any
    completions: Any
    prompt_mask: Any = None
    completion_mask: Any = None
    decode: Decode | None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("prompts", "completions"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, _listed(getattr(self, name)))
        count = num_rows(self.completions)
        if self.prompts is not None and num_rows(self.prompts) != count:
            raise ShapeError(f"TextSamples: {num_rows(self.prompts)} prompts and {count} completions; give as many")
        for name, ids in (("prompt_mask", self.prompts), ("completion_mask", self.completions)):
            mask = getattr(self, name)
            shape = None if ids is None or _is_text(ids) else jnp.shape(ids)
            if mask is not None and jnp.shape(mask) != shape:
                raise ShapeError(f"TextSamples.{name} must have the shape of its ids, {shape}, got {jnp.shape(mask)}")


@_register
@dataclass(frozen=True)
class Representations:
    """Features of examples: for probes, nearest neighbours, retrieval and distances between distributions.

    Attributes:
      features: One vector per example, [n, dim].
      labels: Class id of each example, int [n]; None where there are none.
      partners: Features of another view of each example, [n, dim], the row that a query must find; None where there
        are none.
    Raises:
      ShapeError: A field has another number of rows, or `partners` another shape than `features`.
    """

    features: Any
    labels: Any = None
    partners: Any = None

    def __post_init__(self) -> None:
        shape = jnp.shape(self.features)
        if len(shape) != 2:
            raise ShapeError(f"Representations.features must be [n, dim], got {shape}; pool or flatten each example")
        if self.labels is not None and jnp.shape(self.labels) != shape[:1]:
            raise ShapeError(f"Representations.labels must be class ids [{shape[0]}], got {jnp.shape(self.labels)}")
        if self.partners is not None and jnp.shape(self.partners) != shape:
            raise ShapeError(f"Representations.partners must be {shape}, like features, got {jnp.shape(self.partners)}")


@_register
@dataclass(frozen=True)
class Scalars:
    """Values of an evaluation by name: reported as ``validation_<name>`` without a metric that reads them.

    Attributes:
      values: ``{name: Mean | scalar}``. A `Mean` is pooled by its mass, a scalar by the rows of its batch.
    Raises:
      ContractError: A value holds an array or text.
    """

    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise ContractError(f"Scalars takes {{name: Mean or scalar}}, got {type(self.values).__name__}")
        for name, value in self.values.items():
            leaves = jax.tree.leaves(value)
            if not leaves or any(_is_text(leaf) or np.ndim(leaf) != 0 for leaf in leaves):
                raise ContractError(
                    f"Scalars[{name!r}] must be a Mean or a scalar, got {kind_of(value)}; reduce it, as with "
                    "Mean.of(per_example_values)"
                )


Artifact: TypeAlias = TokenScores | ImageGrid | TextSamples | Representations | Scalars
"""One of the artifact types built in. A frozen dataclass of yours, registered as a tree, works as well."""


class ArtifactSink(Protocol):
    """Where previews go: a directory, a tracker. It is called on process 0 alone, with host arrays."""

    def artifact(self, name: str, value: Any, step: int) -> None:
        """Take one artifact.

        Args:
          name: What it shows, such as ``validation_images``; the same at every event.
          value: The artifact, its arrays in NumPy.
          step: Updates (in a run of epochs without updates: batches) of the run so far.
        """
        ...


def find_artifact(artifacts: tuple[Any, ...], kind: type, who: str) -> Any:
    """Give the one artifact of a type.

    Args:
      artifacts: Those of one batch.
      kind: The type.
      who: Who asks, in errors, such as ``metric 'perplexity'``.
    Raises:
      ContractError: There is none, or more than one.
    """
    found = [a for a in artifacts if isinstance(a, kind)]
    if len(found) == 1:
        return found[0]
    made = ", ".join(type(a).__name__ for a in artifacts) or "none"
    if not found:
        raise ContractError(
            f"{who} reads {kind.__name__}, which no evaluation makes; the objective's evaluate gave: {made}. Return "
            f"one from evaluate(variables, batch, step), or leave {who} out"
        )
    raise ContractError(f"{who} reads {kind.__name__}, and evaluate gave {len(found)} of them ({made}); return one")


def num_rows(value: Any) -> int:
    """Give how many rows a tuple of texts or an array has; 1 for a scalar or one text."""
    if isinstance(value, tuple | list):
        return len(value)
    return 1 if isinstance(value, str) or jnp.ndim(value) == 0 else int(jnp.shape(value)[0])


def texts_of(samples: TextSamples, decode: Decode | None = None) -> list[dict[str, Any]]:
    """Give samples as ``{"prompt", "completion"}``, in text where there is a decoder, else the ids as numbers.

    Args:
      samples: The samples, arrays in NumPy.
      decode: Used where the samples bring none.
    """
    decode = samples.decode or decode
    prompts = _decoded(samples.prompts, samples.prompt_mask, decode)
    completions = _decoded(samples.completions, samples.completion_mask, decode)
    return [
        {"prompt": prompt, "completion": completion}
        for prompt, completion in zip(prompts or [""] * len(completions), completions, strict=True)
    ]


def captions_of(grid: ImageGrid, decode: Decode | None = None) -> list[str] | None:
    """Give the captions of a grid as text, or None where there are none."""
    if grid.captions is None:
        return None
    rows = _decoded(grid.captions, None, grid.decode or (decode if np.ndim(grid.captions) > 1 else None))
    return [row if isinstance(row, str) else " ".join(map(str, np.ravel(row).tolist())) for row in rows]


def _decoded(rows: Any, mask: Any, decode: Decode | None) -> list[Any]:
    if rows is None:
        return []
    if isinstance(rows, tuple):
        return list(rows)
    made: list[Any] = []
    for i in range(num_rows(rows)):
        row = np.asarray(rows)[i]
        row = row if mask is None else row[np.asarray(mask)[i] != 0]
        made.append(row.tolist() if decode is None else decode(row))
    return made


def _listed(value: list[Any]) -> Any:
    return tuple(value) if _is_text(tuple(value)) else jnp.asarray(value)


def kind_of(value: Any) -> str:
    """Name a value in the user's words, for errors: an array by its shape, anything else by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "shape"):
        return f"an array of shape {value.shape}"
    return f"{type(value).__name__} {value!r:.60}"
