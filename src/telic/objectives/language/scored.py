"""What objectives over given completions share: rows of tokens in, the log-prob of each token out."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from telic.contract import Step
from telic.errors import ContractError, DataError, ShapeError, closest
from telic.objectives.from_model import ModelObjective
from telic.objectives.language.batch import check_ids
from telic.objectives.language.objective import AdaptedLanguage
from telic.objectives.language.protocol import LanguageModel
from telic.objectives.language.vocabulary import TokenStatistics, token_statistics
from telic.types import Array, Batch, Key, Variables


@dataclass(frozen=True)
class ScaledHead:
    """A head whose logits are divided by a temperature.

    Attributes:
      kernel: [d_model, vocab].
      bias: [vocab], or None.
      soft_cap: As in `protocol.Head`.
      scale: That of the head, divided by the temperature.
    """

    kernel: Any
    bias: Any
    soft_cap: float | None
    scale: float


class ScoredObjective(ModelObjective):
    """An objective over a language model and completions that somebody chose or sampled.

    Args:
      model: A `LanguageModel`.
      variables: Full or partial weights to start from.
      head_chunks: Blocks the vocabulary is cut into, as in `LMObjective`.
      temperature: Divides the logits, as when the completions were sampled.
      dropout: Whether the policy's dropout draws in training. The reference's never does.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        variables: Any,
        head_chunks: int | None,
        temperature: float = 1.0,
        dropout: bool,
    ):
        if not isinstance(model, LanguageModel):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(
                f"{type(self).__name__} needs a model with the methods init_variables, hidden_states and head (see "
                f"telic.objectives.language.LanguageModel), got {type(model).__name__}; telic.models.Decoder has them"
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise ValueError(f"temperature must be a finite number above 0, got {temperature!r}")
        super().__init__(AdaptedLanguage(model), variables=variables)
        self.language = model
        self._head_chunks, self._temperature, self._dropout = head_chunks, temperature, dropout
        self._vocab: int | None = None

    def bound_to(self, rows: Any) -> Any:
        """Give this objective with the shape of rows of tokens, int [rows, time], whose ids are checked."""
        bound = copy.copy(self)
        bound._inputs = jax.ShapeDtypeStruct((rows.shape[0], rows.shape[1] - 1), jnp.int32)
        if bound._vocab is None:
            key = jax.eval_shape(lambda: jax.random.key(0))
            kernel = jax.eval_shape(lambda key: self.language.head(bound._fresh(key)).kernel, key)
            bound._vocab = int(kernel.shape[1])
        check_ids(rows, bound._vocab, where="the first batch")
        return bound

    def _fresh(self, key: Key) -> Variables:
        return self.language.init_variables(key, jnp.zeros(self._inputs.shape, jnp.int32))

    def score(
        self, variables: Variables, batch: Mapping[str, Any], step: Step, *, is_reference: bool = False
    ) -> TokenStatistics:
        """Score each token of rows but the first, [rows, time - 1].

        Args:
          variables: Of the policy or of the reference.
          batch: ``tokens``, int [rows, time], and optionally ``segment_ids`` and ``positions``.
          step: The moment.
          is_reference: Score without dropout and without a gradient.
        """
        tokens = jnp.asarray(batch["tokens"]).astype(jnp.int32)
        segments, positions = (
            jnp.asarray(batch[name])[:, :-1].astype(jnp.int32) if name in batch else None
            for name in ("segment_ids", "positions")
        )
        states = self.language.hidden_states(
            jax.lax.stop_gradient(variables) if is_reference else variables,
            tokens[:, :-1],
            positions=positions,
            segment_ids=segments,
            train=step.train and self._dropout and not is_reference,
            key=step.key,
        )
        head: Any = self.language.head(variables)
        if self._temperature != 1:
            head = ScaledHead(head.kernel, head.bias, head.soft_cap, head.scale / self._temperature)
        found = token_statistics(states.hidden, head, tokens[:, 1:], chunks=self._head_chunks)
        return jax.lax.stop_gradient(found) if is_reference else found

    def reference_log_probs(self, batch: Mapping[str, Any], step: Step) -> Array:
        """Score rows with the average that is the reference, [rows, time - 1].

        Raises:
          ContractError: There is none.
        """
        if step.averaged is None:
            raise ContractError(
                f"{type(self).__name__} compares the policy with the weights it started from, which its moving average "
                "of decay 1 keeps, and there is none: train and evaluate a TrainState (bare variables have no "
                "average), or give reference='batch' and the field reference_log_probs"
            )
        return self.score(step.averaged, batch, step, is_reference=True).log_prob


def check_fields(
    batch: Batch, fields: Mapping[str, str], required: tuple[str, ...], *, what: str, dims: int
) -> Mapping[str, Any]:
    """Give a batch that has the fields an objective reads, in shapes that fit.

    Args:
      batch: The batch.
      fields: What each field is, by name.
      required: Fields that cannot be left out.
      what: What the objective is called.
      dims: Dimensions of the tokens.
    Raises:
      DataError: It is no mapping, lacks a field, or has one under a name like a field's.
      ShapeError: ``tokens`` has other dimensions or too few places, or a field that is aligned with it another shape.
      TypeError: Token ids are not integers.
    """
    described = "; ".join(f"{name} ({text})" for name, text in fields.items())
    if not isinstance(batch, Mapping):
        got = f"an array of shape {jnp.shape(batch)}" if hasattr(batch, "shape") else type(batch).__name__
        raise DataError(f"{what} reads a mapping with {described}; got {got}")
    missing = [name for name in required if name not in batch]
    if missing:
        raise DataError(f"{what} reads {described}; the batch lacks {', '.join(missing)}: it has {sorted(batch)}")
    for name in batch:
        if name not in fields and closest(str(name), fields):
            raise DataError(f"{what} has no field {name!r}.{closest(str(name), fields)} It reads {described}")
    shape = jnp.shape(batch["tokens"])
    if len(shape) != dims or shape[-1] < 2 or (dims == 3 and shape[1] != 2):
        raise ShapeError(f"{what}: tokens must be {fields['tokens']} with time of at least 2, got shape {shape}")
    for name in ("tokens", "segment_ids", "positions"):
        if name in batch and not jnp.issubdtype(jnp.result_type(batch[name]), jnp.integer):
            raise TypeError(f"{what}: {name} must be integers, got {jnp.result_type(batch[name])}")
    return batch


def check_aligned(batch: Mapping[str, Any], names: tuple[str, ...], *, what: str) -> None:
    """Check that fields have the shape of the tokens.

    Raises:
      ShapeError: One has another; both are named.
    """
    shape = jnp.shape(batch["tokens"])
    for name in names:
        if name in batch and jnp.shape(batch[name]) != shape:
            raise ShapeError(
                f"{what}: {name} must have the shape of tokens, {shape}, got {jnp.shape(batch[name])}; it is aligned "
                "with the tokens, and the objective shifts both"
            )


def is_known(value: Any) -> bool:
    """Say whether an array's values can be looked at: it is neither traced nor a shape alone."""
    return not isinstance(value, Tracer | jax.ShapeDtypeStruct)
