"""The fields of a batch of token rows, and the one place where inputs and targets are shifted against each other."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from telic.errors import DataError, ShapeError, closest
from telic.mean import wide
from telic.types import Array, Batch

FIELDS: Mapping[str, str] = {
    "tokens": "token ids, int [batch, time + 1]",
    "segment_ids": "document of each token, int [batch, time + 1]; 0 is padding",
    "positions": "position of each token in its document, int [batch, time + 1]",
    "roles": "who wrote each token, int [batch, time + 1]; read with loss_roles=",
    "weights": "weight of each token as a target, [batch, time + 1], or of each row, [batch]",
}
"""What a language objective reads. All but the tokens may be left out; each is aligned with the tokens."""

_ELSEWHERE: Mapping[str, str] = {
    "inputs": "tokens",
    "input_ids": "tokens",
    "text": "tokens",
    "targets": "tokens",
    "labels": "tokens, and weights of 0 for tokens that are no targets",
    "attention_mask": "segment_ids, 0 for padding",
    "mask": "weights",
    "loss_mask": "weights",
    "completion_mask": "weights",
    "position_ids": "positions",
}
"""Names of other libraries, and the field that is meant."""

_DESCRIBED = "; ".join(f"{name} ({what})" for name, what in FIELDS.items())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenRows:
    """A batch after the shift: at each place a token the model reads, and the next one, which it is to predict.

    Attributes:
      inputs: Ids, int32 [batch, time].
      targets: Ids, int32 [batch, time].
      weights: Weight of each target, at least float32 [batch, time]: 0 for padding, the first token of a document,
        roles that are not chosen, and wherever the batch's own weights are 0.
      segment_ids: Document of each input, int32 [batch, time], or None.
      positions: Position of each input, int32 [batch, time], or None.
    """

    inputs: Array
    targets: Array
    weights: Array
    segment_ids: Array | None
    positions: Array | None


def check_rows(batch: Batch) -> None:
    """Check that a batch has the fields of token rows, in shapes that fit.

    Raises:
      DataError: It is no mapping, lacks ``tokens``, or has a field under another library's name.
      ShapeError: A field has another shape than the tokens, or rows are too short to have a target.
      TypeError: Token ids are not integers.
    """
    if not isinstance(batch, Mapping):
        got = f"an array of shape {jnp.shape(batch)}" if hasattr(batch, "shape") else type(batch).__name__
        raise DataError(f'a language objective reads a mapping with {_DESCRIBED}; got {got}; write {{"tokens": rows}}')
    if "tokens" not in batch:
        raise DataError(f"a language objective reads {_DESCRIBED}; got {', '.join(map(str, batch))}")
    for name in batch:
        if name in FIELDS:
            continue
        if name in _ELSEWHERE:
            raise DataError(
                f"a language objective shifts by itself: it reads whole rows in `tokens` and has no field {name!r}; "
                f"give {_ELSEWHERE[name]}"
            )
        if closest(str(name), FIELDS):
            raise DataError(
                f"a language objective has no field {name!r}.{closest(str(name), FIELDS)} It reads {_DESCRIBED}"
            )
    shape = jnp.shape(batch["tokens"])
    if len(shape) != 2:
        raise ShapeError(f"tokens must be rows [batch, time + 1], got shape {shape}; pack or pad documents into rows")
    if shape[1] < 2:
        raise ShapeError(
            f"rows must have at least 2 tokens, one to read and one to predict, got tokens of shape {shape}"
        )
    for name in FIELDS:
        if name not in batch:
            continue
        value = batch[name]
        is_row_weight = name == "weights" and jnp.shape(value) == shape[:1]
        if jnp.shape(value) != shape and not is_row_weight:
            raise ShapeError(
                f"{name} must have the shape of tokens, {shape}, got {jnp.shape(value)}; every field is aligned with "
                "the tokens, and the objective shifts all of them alike"
            )
        if name != "weights" and not jnp.issubdtype(jnp.result_type(value), jnp.integer):
            raise TypeError(f"{name} must be integers, got {jnp.result_type(value)}")


def check_ids(tokens: Any, vocab: int, *, where: str) -> None:
    """Check the ids of rows that lie in host memory; traced rows pass.

    Raises:
      DataError: An id is outside [0, vocab); the first such place is named.
    """
    if isinstance(tokens, Tracer | jax.ShapeDtypeStruct):
        return
    ids = np.asarray(tokens)
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        row, column = (int(x) for x in np.argwhere(outside)[0])
        raise DataError(
            f"{where}: token ids must be in [0, {vocab}), got {int(ids[row, column])} in row {row} at place {column} "
            f"({int(outside.sum())} such ids in all); the tokenizer and the model's vocabulary do not fit"
        )


def token_rows(
    batch: Mapping[str, Any],
    *,
    pad_id: int | None = None,
    eos_id: int | None = None,
    loss_roles: Collection[int] | None = None,
) -> TokenRows:
    """Shift a batch: the model reads all tokens but the last, and predicts all but the first.

    A target counts when it and the token before it belong to one document, neither is padding, its role is chosen, and
    its weight is not 0.

    Args:
      batch: Fields as in `FIELDS`, checked by `check_rows`.
      pad_id: Id that fills up rows, where the batch has no ``segment_ids``. None: no id is special.
      eos_id: Id that ends a document. Where it is `pad_id`, the first of several in a row is a token like any other
        and the rest are padding.
      loss_roles: Roles whose tokens are learned. None: all.
    Raises:
      DataError: Roles are to be chosen and the batch has none, or it has some and none are chosen.
    """
    tokens = jnp.asarray(batch["tokens"]).astype(jnp.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    kept = jnp.ones(targets.shape, bool)
    segments = None
    if "segment_ids" in batch:
        segments = jnp.asarray(batch["segment_ids"]).astype(jnp.int32)
    elif pad_id is not None:
        segments = (~_padding(tokens, pad_id, eos_id)).astype(jnp.int32)
    if segments is not None:
        kept &= (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
    if (loss_roles is not None) != ("roles" in batch):
        raise DataError(
            "the batch has roles, and the objective does not say which are learned: give loss_roles=(...), or leave "
            "the field out to learn every token"
            if loss_roles is None
            else f"loss_roles={tuple(loss_roles)} reads the field `roles`, which the batch lacks; it has "
            f"{', '.join(map(str, batch))}"
        )
    if loss_roles is not None:
        written_by = jnp.asarray(batch["roles"])[:, 1:]
        kept &= jnp.stack([written_by == int(role) for role in loss_roles]).any(0)
    weights = wide(kept)
    if "weights" in batch:
        given = wide(batch["weights"])
        weights = jnp.where(kept, given[:, 1:] if given.ndim == 2 else given[:, None], 0)
    return TokenRows(
        inputs=inputs,
        targets=targets,
        weights=weights,
        segment_ids=None if segments is None else segments[:, :-1],
        positions=jnp.asarray(batch["positions"])[:, :-1].astype(jnp.int32) if "positions" in batch else None,
    )


def _padding(tokens: Array, pad_id: int, eos_id: int | None) -> Array:
    is_pad = tokens == pad_id
    if pad_id != eos_id:
        return is_pad
    # The token that ends a document looks like the padding after it: only what follows another one is padding.
    before = jnp.pad(is_pad[:, :-1], ((0, 0), (1, 0)))
    return is_pad & before


__all__ = ["FIELDS", "TokenRows", "check_ids", "check_rows", "token_rows"]
