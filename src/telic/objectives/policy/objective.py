"""`GRPOObjective`: learning from sampled completions and their advantages."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from telic.contract import Aux, Step
from telic.ema import EMASpec
from telic.errors import DataError, ShapeError, unknown_name
from telic.mean import Mean, wide
from telic.objectives.language.protocol import LanguageModel
from telic.objectives.language.scored import ScoredObjective, check_aligned, check_fields, is_known
from telic.objectives.policy.ratios import (
    Estimator,
    Level,
    importance_ratios,
    kl_estimate,
    masked,
    sampling_weights,
)
from telic.objectives.policy.surrogates import Aggregate, Cispo, Clip, aggregate, token_advantages
from telic.types import Array, Batch, Variables

FIELDS: Mapping[str, str] = {
    "tokens": "token ids, int [rows, time], each row a prompt and a completion",
    "completion_mask": "weight of each token that the policy wrote, [rows, time]; 0 for prompts, tools and padding",
    "advantages": "advantage of each completion, [rows], or of each token, [rows, time]",
    "old_log_probs": "log-prob of each token under the policy that wrote it, nats, [rows, time]",
    "sampling_log_probs": "the same as the program that sampled computed it, [rows, time]; NaN where it did not",
    "reference_log_probs": "log-prob of each token under the reference, nats, [rows, time]",
    "rewards": "reward of each completion, [rows]; only reported",
    "segment_ids": "sequence of each token, int [rows, time]; 0 is padding, and rows may hold several",
    "positions": "position of each token, int [rows, time]",
}
"""What `GRPOObjective` reads. The first three are needed; [rows, time] fields are aligned with the tokens."""

_ALIGNED = ("completion_mask", "old_log_probs", "sampling_log_probs", "reference_log_probs", "segment_ids", "positions")

_WHAT = "GRPOObjective"


class _Tokens(NamedTuple):
    """What is known of the tokens that are scored: all but the first of each row."""

    log_probs: Array
    entropy: Array
    mask: Array
    advantages: Array
    segments: Array | None


class GRPOObjective(ScoredObjective):
    """Group-relative policy optimisation: make completions likelier that did better than others of their prompt.

    A batch holds completions with their advantages, such as `telic.data.Rollouts` gives; where they come from is not
    this objective's business. The ratio is taken to ``old_log_probs``, or to the policy itself where the batch has
    none. ``sampling_log_probs``, from another program than the one that learns, correct for the difference
    (truncated importance sampling).

    The loss is one `Mean`, so that microbatches add up to exactly one batch, whatever their lengths. A row without a
    token of the policy's has no mass.

    Args:
      model: A `LanguageModel`, such as `telic.models.Decoder`.
      variables: Full or partial weights to start from.
      surrogate: "clip" is PPO's, "cispo" keeps every token's gradient under a cut weight.
      epsilon_low: How far below 1 a ratio may go; of "clip".
      epsilon_high: How far above 1; under "cispo" the largest weight itself. None: 0.2, and 5 under "cispo".
      dual_clip: Bound, > 1, on ratios at negative advantages; of "clip". None sets none.
      importance: "token", or "sequence" for one ratio per completion (GSPO, whose epsilons are near 3e-4).
      aggregate: What each completion weighs: "sequence_mean" (GRPO), "token_mean" (DAPO), "constant" (Dr. GRPO),
        "sequence_sum".
      max_tokens: Longest completion, by which "constant" divides.
      beta: Weight of the KL to the reference; 0 keeps none.
      kl: Its estimator, "k1", "k2" or "k3".
      kl_importance: Weigh the estimate by π / π_old: without it it is biased once the policy has moved.
      kl_limit: Where the estimate of a token is cut; 10 is usual, None cuts nothing.
      reference: "start" keeps the weights of the start as an average of decay 1 of the trainable leaves; "batch" reads
        ``reference_log_probs``.
      sampling_level: Correct each "token" by its own ratio, or each "sequence" by the product.
      sampling_mode: "truncate" cuts correcting weights at `sampling_highest`, "mask" drops those outside of
        [`sampling_lowest`, `sampling_highest`].
      sampling_highest: Largest correcting weight.
      sampling_lowest: Least one that "mask" keeps.
      temperature: That of the sampling; logits are divided by it.
      dropout: Whether the policy's dropout draws in training.
      head_chunks: Blocks the vocabulary is cut into, as in `LMObjective`.
    Raises:
      ValueError: An option is out of range.
      TypeError: `model` lacks a method of the protocol.
    Source: Shao 2024 (https://arxiv.org/abs/2402.03300), Yu 2025 DAPO (https://arxiv.org/abs/2503.14476), Liu 2025
      Dr. GRPO (https://arxiv.org/abs/2503.20783); golden grpo_trl, grpo_verl, grpo_end_to_end.
    Example:
      >>> from telic.models import Decoder, DecoderConfig
      >>> decoder = Decoder(DecoderConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2))
      >>> rows = {
      ...     "tokens": np.ones((2, 5), int),
      ...     "completion_mask": np.ones((2, 5)),
      ...     "advantages": np.array([1.0, -1.0]),
      ... }
      >>> objective = GRPOObjective(decoder).bind(rows)
      >>> loss, aux = objective.loss(objective.init(jax.random.key(0)), rows, Step(train=False))
      >>> print(loss.value(), aux.metrics["ratio"].value())
      0.0 1.0
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        variables: Any = None,
        surrogate: Literal["clip", "cispo"] = "clip",
        epsilon_low: float | None = None,
        epsilon_high: float | None = None,
        dual_clip: float | None = None,
        importance: Level = "token",
        aggregate: Aggregate = "sequence_mean",
        max_tokens: int | None = None,
        beta: float = 0.0,
        kl: Estimator = "k3",
        kl_importance: bool = False,
        kl_limit: float | None = None,
        reference: Literal["start", "batch"] = "start",
        sampling_level: Level = "token",
        sampling_mode: Literal["truncate", "mask"] = "truncate",
        sampling_highest: float = 2.0,
        sampling_lowest: float = 0.0,
        temperature: float = 1.0,
        dropout: bool = False,
        head_chunks: int | None = None,
    ):
        super().__init__(model, variables=variables, head_chunks=head_chunks, temperature=temperature, dropout=dropout)
        for name, value, known in (
            ("surrogate", surrogate, ("clip", "cispo")),
            ("importance", importance, ("token", "sequence")),
            ("aggregate", aggregate, ("sequence_mean", "token_mean", "constant", "sequence_sum")),
            ("kl", kl, ("k1", "k2", "k3")),
            ("reference", reference, ("start", "batch")),
            ("sampling_level", sampling_level, ("token", "sequence")),
            ("sampling_mode", sampling_mode, ("truncate", "mask")),
        ):
            if value not in known:
                raise unknown_name(name, value, known)
        if surrogate == "cispo" and (epsilon_low is not None or dual_clip is not None):
            raise ValueError("epsilon_low and dual_clip are of surrogate='clip': CISPO cuts weights from above only")
        if (aggregate == "constant") != (max_tokens is not None):
            raise ValueError(
                f"aggregate='constant' divides by max_tokens, the longest completion, and nothing else reads it: got "
                f"aggregate={aggregate!r} and max_tokens={max_tokens!r}"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens!r}")
        if kl_limit is not None and not kl_limit > 0:
            raise ValueError(f"kl_limit must be above 0, got {kl_limit!r}")
        if not beta >= 0:
            raise ValueError(f"beta must be a number of at least 0, got {beta!r}")
        if not 0 <= sampling_lowest < sampling_highest:
            raise ValueError(
                f"correcting weights need 0 <= sampling_lowest < sampling_highest, got {sampling_lowest!r} and "
                f"{sampling_highest!r}"
            )
        if surrogate == "cispo":
            self._surrogate: Any = Cispo(5.0 if epsilon_high is None else epsilon_high)
        else:
            low, high = (0.2 if x is None else x for x in (epsilon_low, epsilon_high))
            self._surrogate = Clip(low, high, dual_clip)
        self._importance: Level = importance
        self._aggregate: Aggregate = aggregate
        self._max_tokens = max_tokens
        self._kl: Estimator = kl
        self._kl_limit = kl_limit
        self._beta, self._kl_importance, self._reference = beta, kl_importance, reference
        self._sampling: dict[str, Any] = {
            "level": sampling_level,
            "mode": sampling_mode,
            "highest": sampling_highest,
            "lowest": sampling_lowest,
        }
        if beta and reference == "start":
            self.ema = EMASpec(decay=1.0)

    def bind(self, example: Batch) -> "GRPOObjective":
        """Give this objective with the shape of a first batch's rows, checked.

        Raises:
          DataError: A field is missing, an id is outside the vocabulary, or an advantage is not finite.
          ShapeError: Fields differ in shape.
        """
        self._checked(example)
        advantages = example["advantages"]
        if is_known(advantages) and not np.isfinite(np.asarray(advantages)).all():
            row = int(np.argwhere(~np.isfinite(np.asarray(advantages)))[0][0])
            raise DataError(f"{_WHAT}: the advantage of row {row} of the first batch is not finite: look at its reward")
        return self.bound_to(example["tokens"])

    def _checked(self, batch: Batch) -> None:
        check_fields(batch, FIELDS, ("tokens", "completion_mask", "advantages"), what=_WHAT, dims=2)
        check_aligned(batch, _ALIGNED, what=_WHAT)
        shape = jnp.shape(batch["tokens"])
        for name, allowed in (("advantages", (shape[:1], shape)), ("rewards", (shape[:1],))):
            if name in batch and jnp.shape(batch[name]) not in allowed:
                raise ShapeError(
                    f"{_WHAT}: {name} must be {FIELDS[name]}, for tokens of shape {shape}, got {jnp.shape(batch[name])}"
                )
        if self._beta and (self._reference == "batch") != ("reference_log_probs" in batch):
            raise DataError(
                f"{_WHAT}: there is no reference: reference='batch' reads the field reference_log_probs, which the "
                "batch lacks; add it, or keep the weights of the start with reference='start'"
                if self._reference == "batch"
                else f"{_WHAT}: the batch has reference_log_probs, and the objective keeps a reference of its own: say "
                "reference='batch' to use the field, or leave it out"
            )

    # -- loss ----------------------------------------------------------------------------------------------------

    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Compare what the policy makes of each token with what the one that wrote it did."""
        self._checked(batch)
        tokens = self._tokens(variables, batch, step)
        mask, segments = tokens.mask, tokens.segments
        old = _shifted(batch, "old_log_probs", jax.lax.stop_gradient(tokens.log_probs))
        ratios = importance_ratios(tokens.log_probs, old, mask, level=self._importance, segments=segments)
        losses = self._surrogate(ratios, masked(tokens.log_probs, mask), tokens.advantages)
        metrics = self._metrics(batch, tokens, ratios, old)
        if "sampling_log_probs" in batch:
            given = _shifted(batch, "sampling_log_probs", None)
            weights, missing = sampling_weights(old, given, mask, segments=segments, **self._sampling)
            losses = losses * weights
            metrics["sampling_weight"] = Mean.of(weights, mask)
            metrics["missing_log_probs"] = Mean.of(missing, mask)
        if self._beta:
            kl = self._divergence(tokens, batch, old, step)
            losses = losses + self._beta * kl
            metrics["kl"] = Mean.of(jax.lax.stop_gradient(kl), mask)
        loss = aggregate(losses, mask, over=self._aggregate, max_tokens=self._max_tokens, segments=segments)
        outputs = {"advantages": tokens.advantages, "log_probs": tokens.log_probs, "weights": mask}
        return loss, Aux(metrics=metrics, outputs=outputs)

    def _tokens(self, variables: Variables, batch: Batch, step: Step) -> _Tokens:
        found = self.score(variables, batch, step)
        # A token is scored from the one before it, so nothing scores the first of a sequence.
        mask = wide(batch["completion_mask"])[:, 1:]
        advantages = jnp.asarray(batch["advantages"])
        segments = None
        if "segment_ids" in batch:
            ids = jnp.asarray(batch["segment_ids"])
            segments = ids[:, 1:]
            mask = jnp.where((segments == ids[:, :-1]) & (segments != 0), mask, 0)
        return _Tokens(
            log_probs=found.log_prob,
            entropy=jax.lax.stop_gradient(found.entropy),
            mask=mask,
            advantages=token_advantages(advantages if advantages.ndim == 1 else advantages[:, 1:], mask),
            segments=segments,
        )

    def _divergence(self, tokens: _Tokens, batch: Batch, old: Array, step: Step) -> Array:
        if self._reference == "batch":
            reference = _shifted(batch, "reference_log_probs", None)
        else:
            reference = self.reference_log_probs(batch, step)
        kl = kl_estimate(tokens.log_probs, reference, tokens.mask, estimator=self._kl, limit=self._kl_limit)
        if self._kl_importance:
            kl = kl * importance_ratios(
                tokens.log_probs, old, tokens.mask, level=self._importance, segments=tokens.segments
            )
        return kl

    def _metrics(self, batch: Batch, tokens: _Tokens, ratios: Array, old: Array) -> dict[str, Any]:
        mask, segments = tokens.mask, tokens.segments
        over: Aggregate = "sequence_mean" if self._importance == "sequence" else "token_mean"
        ratios = jax.lax.stop_gradient(ratios)
        counted = wide(mask != 0)
        metrics = {
            "ratio": aggregate(ratios, mask, over=over, segments=segments),
            "entropy": Mean.of(tokens.entropy, mask),
            "old_kl": Mean.of(kl_estimate(jax.lax.stop_gradient(tokens.log_probs), old, mask), mask),
            "completion_tokens": aggregate(counted, counted, over="sequence_sum", segments=segments),
            "zero_advantage": aggregate(tokens.advantages == 0, mask, over="sequence_mean", segments=segments),
        }
        for name, clipped in self._surrogate.clipped(ratios, tokens.advantages).items():
            metrics[name] = aggregate(clipped, mask, over=over, segments=segments)
        if "rewards" in batch:
            metrics["reward"] = Mean.of(batch["rewards"])
        return metrics


def _shifted(batch: Mapping[str, Any], name: str, default: Any) -> Any:
    """Give the log-probs of all tokens but the first of each row."""
    return wide(batch[name])[:, 1:] if name in batch else default
