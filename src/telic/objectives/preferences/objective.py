"""`DPOObjective`: learning from pairs of completions of which one was preferred."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from telic.contract import Aux, Step
from telic.ema import EMASpec
from telic.errors import DataError, ShapeError, unknown_name
from telic.mean import Mean, Rows, Terms, wide
from telic.objectives.language.protocol import LanguageModel
from telic.objectives.language.scored import ScoredObjective, check_aligned, check_fields, is_known
from telic.objectives.preferences.losses import NAMES, OF_SCORES, SMOOTHED, Divergence, Pairs, PreferenceLoss
from telic.objectives.preferences.scores import completion_sums, reward_metrics
from telic.types import Array, Batch, Variables

FIELDS: Mapping[str, str] = {
    "tokens": "token ids, int [pairs, 2, time], each row a prompt and a completion, the chosen one first",
    "completion_mask": "which tokens belong to a completion, [pairs, 2, time]",
    "segment_ids": "0 where a row is padding, 1 elsewhere, int [pairs, 2, time]; needed for padding on the left",
    "positions": "position of each token, int [pairs, 2, time]",
    "weights": "weight of each pair, [pairs]",
    "reference_log_probs": "the reference's log-prob of each completion, nats summed over its tokens, [pairs, 2]",
}
"""What `DPOObjective` reads. Tokens and completion_mask are needed; every field is aligned with the tokens."""

_WHAT = "DPOObjective"

SFT = "sft"


class _Scored(NamedTuple):
    """A batch with its log-probs."""

    pairs: Pairs
    chosen_log_probs: Array
    chosen_mask: Array
    identical: Array


class DPOObjective(ScoredObjective):
    """Direct preference optimisation: raise the preferred completion of each pair above the other.

    The reference is the policy as it was at the start. It is kept as a moving average of decay 1 of the trained
    leaves: with adapters and ``Trainer(trainable=...)`` that is a copy of the adapters alone. With
    ``reference="batch"`` nothing is kept, and batches carry what the reference said of them.

    A pair without a token in one of its completions has no mass. Reported are ``reward_chosen``,
    ``reward_rejected``, ``reward_margin``, ``reward_accuracy`` (a tie counts as wrong), the log-probs of both, and the
    share of pairs whose completions are the same, which teach nothing.

    Args:
      model: A `LanguageModel`, such as `telic.models.Decoder`.
      variables: Full or partial weights to start from: those after supervised fine-tuning.
      loss_type: A name of `telic.objectives.preferences.NAMES`, "sft", or ``{name: weight}`` for a sum of several.
        "sft" is the next-token loss of the chosen completions, a mean over tokens.
      beta: How much a log-ratio counts, > 0.
      label_smoothing: Probability that a pair is labelled the wrong way round, in [0, 0.5): conservative DPO.
      length_normalized: Divide log-ratios by the number of tokens. IPO on sums is the paper's, on means TRL's.
      reference: "start", or "batch" for the field ``reference_log_probs``.
      reference_free: Leave the reference out, of loss and rewards alike.
      divergence: Which f-divergence keeps the policy near the reference.
      alpha: Order of ``divergence="alpha"``.
      margin: Log-ratio by which chosen must lead; SimPO is ``reference_free``, ``length_normalized`` and a margin.
      tail_weight: Weight of the tokens by which one completion is longer than the other (`completion_sums`).
      discopop_temperature: Of the blend in "discopop".
      dropout: Whether the policy's dropout draws in training; the reference's never does.
      head_chunks: Blocks the vocabulary is cut into, as in `LMObjective`.
    Raises:
      ValueError: An option is out of range, or has no meaning for any of the losses.
      TypeError: `model` lacks a method of the protocol.
    Source: Rafailov 2023 (https://arxiv.org/abs/2305.18290); golden dpo_trl, dpo_other, dpo_end_to_end.
    Example:
      >>> from telic.models import Decoder, DecoderConfig
      >>> decoder = Decoder(DecoderConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2))
      >>> batch = {"tokens": np.arange(20).reshape(2, 2, 5) % 11, "completion_mask": np.ones((2, 2, 5), int)}
      >>> objective = DPOObjective(decoder, beta=0.1).bind(batch)
      >>> start = objective.init(jax.random.key(0))
      >>> loss, _ = objective.loss(start, batch, Step(averaged=start, train=False))
      >>> print(loss.value().round(4))
      0.6931
    """

    def __new__(cls, *args: Any, loss_type: Any = "sigmoid", **options: Any) -> "DPOObjective":
        """Choose the class: a loss that ranks the pairs of a whole window needs a reduction of its own."""
        del args, options
        ranks = any(name in ("aot", "aot_unpaired") for name in _weights_of(loss_type))
        return object.__new__(_RankingDPO if cls is DPOObjective and ranks else cls)

    def __init__(
        self,
        model: LanguageModel,
        *,
        variables: Any = None,
        loss_type: str | Mapping[str, float] = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        length_normalized: bool = False,
        reference: Literal["start", "batch"] = "start",
        reference_free: bool = False,
        divergence: Divergence = "reverse_kl",
        alpha: float = 1.0,
        margin: float = 0.0,
        tail_weight: float = 1.0,
        discopop_temperature: float = 0.05,
        dropout: bool = False,
        head_chunks: int | None = None,
    ):
        super().__init__(model, variables=variables, head_chunks=head_chunks, dropout=dropout)
        if reference not in ("start", "batch"):
            raise unknown_name("reference", reference, ("start", "batch"))
        if not 0 <= tail_weight <= 1:
            raise ValueError(f"tail_weight must be in [0, 1], got {tail_weight!r}")
        self._weights = _weights_of(loss_type)
        options: dict[str, tuple[Any, Any, frozenset[str]]] = {
            "label_smoothing": (label_smoothing, 0.0, SMOOTHED),
            "divergence": (divergence, "reverse_kl", OF_SCORES),
            "alpha": (alpha, 1.0, OF_SCORES),
            "margin": (margin, 0.0, OF_SCORES),
            "temperature": (discopop_temperature, 0.05, frozenset({"discopop"})),
        }
        for option, (value, default, users) in options.items():
            if value != default and not users & set(self._weights):
                raise ValueError(
                    f"{option}={value!r} has no meaning in {' and '.join(self._weights)}; it acts in "
                    f"{', '.join(sorted(users))}"
                )
        self._losses = {
            name: PreferenceLoss(
                name,
                beta=beta,
                length_normalized=length_normalized,
                **{option: value for option, (value, _, users) in options.items() if name in users},
            )
            for name in self._weights
            if name != SFT
        }
        # Checked also where "sft" is the only loss, whose rewards are reported with it.
        self._beta = PreferenceLoss(beta=beta).beta
        self._reference = reference
        self._reference_free = reference_free
        self._tail_weight = tail_weight
        if reference == "start" and not reference_free:
            self.ema = EMASpec(decay=1.0)

    def bind(self, example: Batch) -> "DPOObjective":
        """Give this objective with the shape of a first batch's rows, checked.

        Raises:
          DataError: A field is missing, an id is outside the vocabulary, or the completions of a pair are the same.
          ShapeError: Fields differ in shape.
        """
        self._checked(example)
        tokens = example["tokens"]
        _refuse_identical(example)
        rows = jax.ShapeDtypeStruct((2 * tokens.shape[0], tokens.shape[2]), jnp.int32)
        if is_known(tokens):
            rows = np.asarray(tokens).reshape(-1, tokens.shape[2])
        return self.bound_to(rows)

    def _checked(self, batch: Batch) -> None:
        check_fields(batch, FIELDS, ("tokens", "completion_mask"), what=_WHAT, dims=3)
        check_aligned(batch, ("completion_mask", "segment_ids", "positions"), what=_WHAT)
        pairs = jnp.shape(batch["tokens"])[0]
        for name, shape in (("weights", (pairs,)), ("reference_log_probs", (pairs, 2))):
            if name in batch and jnp.shape(batch[name]) != shape:
                raise ShapeError(
                    f"{_WHAT}: {name} must have shape {shape}, got {jnp.shape(batch[name])}: {FIELDS[name]}"
                )
        if self._reference_free:
            return
        given = "reference_log_probs" in batch
        if given != (self._reference == "batch"):
            raise DataError(
                f"{_WHAT}: there is no reference: reference='batch' reads the field reference_log_probs, which the "
                "batch lacks; add it, or keep the weights of the start with reference='start'"
                if not given
                else f"{_WHAT}: the batch has reference_log_probs, and the objective keeps a reference of its own: say "
                "reference='batch' to use the field, or leave it out"
            )

    # -- loss ----------------------------------------------------------------------------------------------------

    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Compare the completions of each pair."""
        scored = self._scored(variables, batch, step)
        return self._statistics(scored), self._aux(scored)

    def _scored(self, variables: Variables, batch: Batch, step: Step) -> _Scored:
        self._checked(batch)
        tokens = jnp.asarray(batch["tokens"])
        pairs, _, time = tokens.shape
        rows = {
            n: jnp.asarray(batch[n]).reshape(-1, time) for n in ("tokens", "segment_ids", "positions") if n in batch
        }
        # A token is scored from the one before it, so nothing scores the first.
        mask = jnp.asarray(batch["completion_mask"])[..., 1:] != 0
        weights = wide(mask.any(-1).all(-1))
        if "weights" in batch:
            weights = jnp.where(weights != 0, wide(batch["weights"]), 0)
        log_probs = self.score(variables, rows, step).log_prob.reshape(pairs, 2, time - 1)
        sums = completion_sums(log_probs, mask, tail_weight=self._tail_weight)
        if self._reference_free:
            reference = jnp.zeros_like(sums)
        elif self._reference == "batch":
            reference = jax.lax.stop_gradient(wide(batch["reference_log_probs"]))
        else:
            reference_log_probs = self.reference_log_probs(rows, step).reshape(pairs, 2, time - 1)
            reference = completion_sums(reference_log_probs, mask, tail_weight=self._tail_weight)
        # What stands in a pair that is not counted, NaN included, reaches no loss.
        kept = weights[:, None] != 0
        sums, reference = jnp.where(kept, sums, 0), jnp.where(kept, reference, 0)
        lengths = mask.sum(-1)
        compared = Pairs(
            chosen=sums[:, 0],
            rejected=sums[:, 1],
            reference_chosen=reference[:, 0],
            reference_rejected=reference[:, 1],
            chosen_tokens=lengths[:, 0],
            rejected_tokens=lengths[:, 1],
            mask=weights,
        )
        return _Scored(compared, log_probs[:, 0], mask[:, 0] * weights[:, None], _identical(tokens, mask))

    def _means(self, scored: _Scored) -> dict[str, Mean]:
        """Give the mean of each loss that adds up over pairs."""
        means = {
            name: Mean.of(loss(scored.pairs), scored.pairs.mask)
            for name, loss in self._losses.items()
            if not loss.compares_pairs
        }
        if SFT in self._weights:
            means[SFT] = Mean.of(-scored.chosen_log_probs, scored.chosen_mask)
        return means

    def _statistics(self, scored: _Scored) -> Any:
        means = self._means(scored)
        if len(means) == 1:
            ((name, mean),) = means.items()
            return mean * self._weights[name] if self._weights[name] != 1 else mean
        return Terms({name: (self._weights[name], mean) for name, mean in means.items()})

    def _aux(self, scored: _Scored) -> Aux:
        pairs = jax.lax.stop_gradient(scored.pairs)
        outputs = {
            "reward_chosen": self._beta * pairs.chosen_ratio,
            "reward_rejected": self._beta * pairs.rejected_ratio,
            "weights": pairs.mask,
        }
        same = Mean.of(scored.identical, scored.pairs.mask)
        return Aux(metrics={**reward_metrics(scored.pairs, self._beta), "identical_pairs": same}, outputs=outputs)


class _RankingDPO(DPOObjective):
    """The form whose loss compares the pairs of a whole window, rank by rank."""

    def _statistics(self, scored: _Scored) -> Any:
        pairs = scored.pairs
        fields = (pairs.chosen, pairs.rejected, pairs.reference_chosen, pairs.reference_rejected)
        lengths = (wide(pairs.chosen_tokens), wide(pairs.rejected_tokens), wide(pairs.mask))
        return {"means": self._means(scored), "pairs": Rows(jnp.stack([*fields, *lengths], axis=-1))}

    def reduce_loss(self, statistics: Any) -> tuple[Array, Array]:
        """Give the loss of all pairs of a window."""
        pairs = Pairs(*jnp.unstack(statistics["pairs"].values, axis=-1))
        has_data = (pairs.mask != 0).any()
        value = sum((self._weights[name] * mean.value() for name, mean in statistics["means"].items()), jnp.zeros(()))
        kept = wide(pairs.mask != 0)
        for name, loss in self._losses.items():
            if loss.compares_pairs:
                # Ranks of dropped pairs come last and give 0.
                value = value + self._weights[name] * Mean(loss(pairs).sum(), kept.sum()).value()
        return value, has_data


def _weights_of(loss_type: Any) -> dict[str, float]:
    """Give the losses by name with their weights.

    Raises:
      ValueError: A name is not known, or nothing is named.
      TypeError: It is neither a name nor a mapping.
    """
    weights = {loss_type: 1.0} if isinstance(loss_type, str) else loss_type
    if not isinstance(weights, Mapping):
        raise TypeError(f"loss_type takes a name or {{name: weight}}, got {loss_type!r}")
    if not weights:
        raise ValueError("loss_type is empty: name a loss, such as 'sigmoid'")
    for name in weights:
        if name not in NAMES and name != SFT:
            raise unknown_name("loss_type", name, (*NAMES, SFT))
    return {str(name): float(weight) for name, weight in weights.items()}


def _identical(tokens: Array, mask: Array) -> Array:
    """Say of which pairs both completions are the same tokens at the same places, bool [pairs]."""
    shown = jnp.where(mask, tokens[..., 1:], -1)
    return (shown[:, 0] == shown[:, 1]).all(-1)


def _refuse_identical(batch: Mapping[str, Any]) -> None:
    values = (batch["tokens"], batch["completion_mask"])
    if not all(map(is_known, values)):
        return
    tokens, mask = (np.asarray(x)[..., 1:] for x in values)
    shown = np.where(mask != 0, tokens, -1)
    same = (shown[:, 0] == shown[:, 1]).all(-1) & (mask != 0).any((1, 2))
    if same.any():
        row = int(np.flatnonzero(same)[0])
        completion = shown[row, 0]
        raise DataError(
            f"{_WHAT}: the chosen and the rejected completion of pair {row} of the first batch are the same, "
            f"{completion[completion >= 0].tolist()} ({int(same.sum())} such pairs in all): they say nothing about "
            "what is preferred; drop them"
        )
