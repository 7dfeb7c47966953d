"""`LMObjective`: next-token prediction over rows of tokens."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic.artifacts import Decode, TextSamples, TokenScores
from telic.contract import Aux, Step
from telic.ema import EMASpec
from telic.errors import ContractError
from telic.mean import Mean, Terms
from telic.models.base import Forward
from telic.objectives.from_model import ModelObjective
from telic.objectives.language import router as routers
from telic.objectives.language.batch import TokenRows, check_ids, check_rows, token_rows
from telic.objectives.language.protocol import LanguageModel
from telic.objectives.language.router import RouterSums, Scope
from telic.objectives.language.sampling import Generate, sampler_for
from telic.objectives.language.vocabulary import (
    TokenStatistics,
    block_columns,
    next_token_loss,
    token_statistics,
)
from telic.types import Array, Batch, Key, Variables


class LMObjective(ModelObjective):
    """Next-token cross entropy, as a mean over the targets that count.

    A batch is a mapping with ``tokens``, int [batch, time + 1], and optionally ``segment_ids``, ``positions``,
    ``roles`` and ``weights``, each aligned with the tokens (`telic.objectives.language.batch.FIELDS`). The objective
    shifts, once: the model reads all tokens but the last and predicts all but the first. Targets of padding, of the
    first token of a document, of roles that are not chosen and of weight 0 have no mass; the loss is a mean over
    tokens, so a long document weighs more than a short one (weigh by ``weights`` for anything else).

    The vocabulary's logits are never kept whole when there are many (`head_chunks`). Everything is computed in at
    least float32 from the logits on. Metrics may read ``nll``, ``predicted``, ``targets`` and ``weights``, each
    [batch, time], and where they are kept whole the logits as ``prediction``.

    Ids outside the vocabulary raise where the first batch lies on the host; in a later batch they make the row's loss
    NaN, so that the attempt is rejected and counted, and the batch can be looked at.

    Args:
      model: A `LanguageModel`: ``hidden_states``, ``head`` and ``init_variables``, such as `telic.models.Decoder`.
      variables: Full or partial weights to start from, ``{"params": ...}``.
      pad_id: Id that fills up rows of batches without ``segment_ids``.
      eos_id: Id that ends a document; needed only where it is the `pad_id`, to keep it as a target.
      loss_roles: Roles whose tokens are learned; needed exactly when batches have ``roles``.
      label_smoothing: e in (1 - e) on the target plus e / vocab on every token, in [0, 1).
      z_loss: Weight of the squared log-normalizer, added outside of the smoothing.
      head_chunks: Blocks the vocabulary is cut into; 1 keeps logits whole, None chooses by their number.
      balance_loss: Weight of the experts' balance loss (`router.sequence_balance`).
      balance_scope: "sequence" forms the experts' shares in each row, which is additive. "batch" forms them over all
        rows of a window, which is exact by running each microbatch twice.
      router_z_loss: Weight of the routers' z-loss (`router.router_z`).
      balance_rate: Size of the moves of the experts' selection biases at each update (`router.bias_change`).
      balance_centered: Whether these moves keep the sum of the biases.
      qk_stats: Report the largest attention logits, which ``telic.optimizers.qk_clip`` reads.
      token_bytes: Bytes of text each id stands for, [vocab], for ``bits_per_byte``; a tokenizer of `telic.data` has
        them.
      decode: Makes text of a row of ids, for samples.
      prompts: Ids to continue in previews, int [n, time]; None takes the first half of four rows of the batch.
      sample_tokens: Tokens to sample for each prompt; fewer where the model's `config.max_length` ends before.
      temperature: Of the samples; 0 takes the likeliest token.
      generate: How to sample. None takes `telic.models.generate`, which keeps keys and values, where the model has
        its methods, and else runs the whole model for each token.
      ema: Moving average to keep.
    Raises:
      TypeError: `model` lacks a method of the protocol.
      ValueError: An option is out of range.
    Example:
      >>> from telic.models import Decoder, DecoderConfig
      >>> decoder = Decoder(DecoderConfig(vocab_size=11, d_model=8, num_layers=1, num_heads=2))
      >>> objective = LMObjective(decoder).bind({"tokens": np.zeros((2, 5), np.int32)})
      >>> variables = objective.init(jax.random.key(0))
      >>> loss, aux = objective.loss(variables, {"tokens": np.ones((2, 5), np.int32)}, Step(train=False))
      >>> print(loss.mass)
      8.0
    """

    def __new__(cls, *args: Any, balance_scope: Scope = "sequence", **options: Any) -> "LMObjective":
        """Choose the class: statistics that a window pools whole need a reduction of their own."""
        del args, options
        return object.__new__(_WindowBalanced if cls is LMObjective and balance_scope == "batch" else cls)

    def __init__(
        self,
        model: LanguageModel,
        *,
        variables: Any = None,
        pad_id: int | None = None,
        eos_id: int | None = None,
        loss_roles: Sequence[int] | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        head_chunks: int | None = None,
        balance_loss: float = 0.0,
        balance_scope: Scope = "sequence",
        router_z_loss: float = 0.0,
        balance_rate: float = 0.0,
        balance_centered: bool = False,
        qk_stats: bool = False,
        token_bytes: Any = None,
        decode: Decode | None = None,
        prompts: Any = None,
        sample_tokens: int = 64,
        temperature: float = 1.0,
        generate: Generate | None = None,
        ema: EMASpec | None = None,
    ):
        if not isinstance(model, LanguageModel):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(
                f"LMObjective needs a model with the methods init_variables, hidden_states and head (see "
                f"telic.objectives.language.LanguageModel), got {type(model).__name__}; telic.models.Decoder has them"
            )
        super().__init__(AdaptedLanguage(model), variables=variables)
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing!r}")
        for name, value in (
            ("z_loss", z_loss),
            ("balance_loss", balance_loss),
            ("router_z_loss", router_z_loss),
            ("balance_rate", balance_rate),
            ("temperature", temperature),
        ):
            if not value >= 0:
                raise ValueError(f"{name} must be a number ≥ 0, got {value!r}")
        if balance_scope not in ("sequence", "batch"):
            raise ValueError(f"balance_scope must be 'sequence' or 'batch', got {balance_scope!r}")
        if loss_roles is not None and not len(loss_roles):
            raise ValueError("loss_roles is empty: nothing would be learned; name a role, or leave it out for all")
        if balance_rate and not callable(getattr(model, "add_router_bias", None)):
            raise TypeError(
                f"balance_rate moves the routers' biases through {type(model).__name__}.add_router_bias(variables, "
                "change), which it lacks; leave balance_rate out, or use balance_loss"
            )
        self.language: Any = model
        self.ema = ema
        self._pad_id, self._eos_id = pad_id, eos_id
        self._loss_roles = None if loss_roles is None else tuple(int(role) for role in loss_roles)
        self._label_smoothing, self._z_loss, self._head_chunks = label_smoothing, z_loss, head_chunks
        self._balance_loss, self._router_z_loss = balance_loss, router_z_loss
        self._balance_rate, self._balance_centered = balance_rate, balance_centered
        self._qk_stats = qk_stats
        self._token_bytes = None if token_bytes is None else _small(token_bytes)
        self._decode, self._sample_tokens, self._temperature = decode, sample_tokens, temperature
        self._prompts = None if prompts is None else _as_prompts(prompts)
        self._generate = generate
        self._vocab: int | None = None

    # -- binding -------------------------------------------------------------------------------------------------

    def bind(self, example: Batch) -> "LMObjective":
        """Give this objective with the shape of a first batch's rows, checked.

        Raises:
          DataError: The batch lacks tokens, has a field under another name, or holds ids outside the vocabulary.
          ShapeError: Rows are too short, or fields differ in shape.
        """
        check_rows(example)
        bound = copy.copy(self)
        shape = jnp.shape(example["tokens"])
        bound._inputs = jax.ShapeDtypeStruct((shape[0], shape[1] - 1), jnp.int32)
        if bound._vocab is None:
            key = jax.eval_shape(lambda: jax.random.key(0))
            kernel = jax.eval_shape(lambda key: self.language.head(bound._fresh(key)).kernel, key)
            bound._vocab = int(kernel.shape[1])
            bound._check_options()
        check_ids(example["tokens"], bound._vocab, where="the first batch")
        return bound

    def _fresh(self, key: Key) -> Variables:
        return self.language.init_variables(key, jnp.zeros(self._inputs.shape, jnp.int32))

    def _check_options(self) -> None:
        for name, value in (("pad_id", self._pad_id), ("eos_id", self._eos_id)):
            if value is not None and not 0 <= value < (self._vocab or 0):
                raise ValueError(f"{name} must be an id of the vocabulary, in [0, {self._vocab}), got {value}")
        if self._token_bytes is not None and self._token_bytes.shape != (self._vocab,):
            raise ValueError(
                f"token_bytes must have one number for each of {self._vocab} ids, got shape {self._token_bytes.shape}"
            )

    # -- loss ----------------------------------------------------------------------------------------------------

    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Predict each token from those before it."""
        rows = self._rows(batch)
        states, head, found = self._predict(variables, rows, step)
        loss = next_token_loss(found, label_smoothing=self._label_smoothing, z_loss=self._z_loss)
        loss = jnp.where(_is_sound(rows, head), loss, jnp.nan)
        data = Mean.of(loss, rows.weights)
        return self._statistics(data, states.router), self._aux(rows, states, head, found, step)

    def _rows(self, batch: Batch) -> TokenRows:
        check_rows(batch)
        return token_rows(batch, pad_id=self._pad_id, eos_id=self._eos_id, loss_roles=self._loss_roles)

    def _predict(self, variables: Variables, rows: TokenRows, step: Step) -> tuple[Any, Any, TokenStatistics]:
        states = self.language.hidden_states(
            variables,
            rows.inputs,
            positions=rows.positions,
            segment_ids=rows.segment_ids,
            train=step.train,
            key=step.key,
            qk_stats=self._qk_stats and step.train,
        )
        head = self.language.head(variables)
        return states, head, token_statistics(states.hidden, head, rows.targets, chunks=self._head_chunks)

    @property
    def _has_router_loss(self) -> bool:
        return bool(self._balance_loss or self._router_z_loss)

    def _statistics(self, data: Mean, router: Any) -> Any:
        self._check_router(router)
        if not self._has_router_loss:
            return data
        terms: dict[str, tuple[float, Mean]] = {"next_token": (1.0, data)}
        if self._balance_loss:
            terms["balance"] = (self._balance_loss, routers.sequence_balance(router))
        if self._router_z_loss:
            terms["router_z"] = (self._router_z_loss, routers.router_z(router))
        return Terms(terms)

    def _check_router(self, router: Any) -> None:
        if router is None and (self._has_router_loss or self._balance_rate):
            raise ContractError(
                "balance_loss, router_z_loss and balance_rate are for a mixture of experts, and the model's "
                "hidden_states report no router; leave them out"
            )

    def _aux(self, rows: TokenRows, states: Any, head: Any, found: TokenStatistics, step: Step) -> Aux:
        weights = rows.weights
        nll = -found.log_prob
        metrics: dict[str, Any] = {
            "cross_entropy": Mean.of(nll, weights),
            "token_accuracy": Mean.of(found.predicted == rows.targets, weights),
        }
        if self._z_loss:
            metrics["z_loss"] = Mean.of(jnp.square(found.log_normalizer), weights)
        if self._token_bytes is not None:
            counts = jnp.where(weights != 0, self._bytes_of(rows.targets), 0)
            metrics["bits_per_byte"] = Mean(Mean.of(nll, weights).total / np.log(2), (counts * weights).sum())
        router: Any = states.router
        if router is not None:
            metrics["largest_expert_load"] = routers.largest_share(router)
        effects: Any = None
        if self._balance_rate and step.train and router is not None:
            effects = {"counts": jax.lax.stop_gradient(router.counts).sum(1)}
        outputs = {"targets": rows.targets, "weights": weights, "nll": nll, "predicted": found.predicted}
        vocab = head.kernel.shape[1]
        if block_columns(rows.targets.size, vocab, self._head_chunks) >= vocab:
            outputs["prediction"] = head.logits(states.hidden)
        return Aux(
            metrics=metrics,
            variables=dict(states.state) if step.train and states.state else None,
            effects=effects,
            qk_stats=states.qk_max if self._qk_stats and step.train else None,
            outputs=outputs,
        )

    def _bytes_of(self, ids: Array) -> Array:
        return jnp.take(jnp.asarray(self._token_bytes), ids, mode="clip").astype(jnp.float32)

    def apply_effects(self, variables: Variables, effects: Any) -> Mapping[str, Any]:
        """Move the experts' selection biases by the window's counts."""
        change = routers.bias_change(effects["counts"], rate=self._balance_rate, centered=self._balance_centered)
        return self.language.add_router_bias(variables, change)

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, variables: Variables, batch: Batch, step: Step) -> TokenScores:
        """Score each target: log-probability, whether it was the likeliest, and the bytes it stands for."""
        rows = self._rows(batch)
        _, _, found = self._predict(variables, rows, dataclasses.replace(step, train=False))
        return TokenScores(
            log_probs=found.log_prob,
            mask=rows.weights,
            correct=found.predicted == rows.targets,
            num_bytes=None if self._token_bytes is None else self._bytes_of(rows.targets),
            confidence=jnp.exp(found.top_logit - found.log_normalizer),
        )

    def preview(self, variables: Variables, batch: Batch, step: Step, *, scored: Any = None) -> TextSamples:
        """Continue prompts: those of the objective, or the beginnings of some rows of the batch."""
        del scored
        if self._prompts is not None:
            prompts = jnp.asarray(self._prompts)
        else:
            tokens = jnp.asarray(batch["tokens"]).astype(jnp.int32)
            prompts = tokens[:4, : max(tokens.shape[1] // 2, 1)]
        key = step.key if step.key is not None else jax.random.key(0)
        # No further than the model reaches; prompts that are too long themselves are refused by the sampler.
        room = getattr(getattr(self.language, "config", None), "max_length", None)
        count = self._sample_tokens if room is None else max(1, min(self._sample_tokens, room - prompts.shape[1]))
        made = (self._generate or sampler_for(self.language))(
            self.language,
            variables,
            prompts,
            max_new_tokens=count,
            temperature=self._temperature,
            key=key,
        )
        return TextSamples(prompts=prompts, completions=made.tokens, decode=self._decode)


class _WindowBalanced(LMObjective):
    """The form whose balance loss pools the routers' sums over a whole window."""

    def _statistics(self, data: Mean, router: Any) -> Any:
        self._check_router(router)
        statistics: dict[str, Any] = {"next_token": data}
        if router is not None:
            statistics |= {"router": RouterSums.of(router), "router_z": routers.router_z(router)}
        return statistics

    def reduce_loss(self, statistics: Any) -> tuple[Array, Array]:
        """Give the loss of the pooled statistics."""
        data: Mean = statistics["next_token"]
        value, has_data = data.value(), data.has_data()
        if "router" in statistics:
            value = value + self._balance_loss * statistics["router"].balance()
            value = value + self._router_z_loss * statistics["router_z"].value()
            has_data = has_data | (statistics["router"].tokens > 0)
        return value, has_data


@dataclass(frozen=True, eq=False)
class AdaptedLanguage:
    """A language model as a `telic.models.Model`, from tokens to logits."""

    language: Any

    def init(self, key: Key, inputs: Any) -> dict[str, Any]:
        return dict(self.language.init_variables(key, inputs))

    def forward(self, variables: Variables, inputs: Any, *, train: bool, key: Key | None = None) -> Forward:
        states = self.language.hidden_states(variables, inputs, train=train, key=key)
        logits = self.language.head(variables).logits(states.hidden)
        return Forward(prediction=logits, state=states.state if train else {})

    def bind(self, variables: Variables) -> Callable[[Any], Array]:
        """Give a function from tokens [batch, time] to logits [batch, time, vocab]."""
        return lambda tokens: self.forward(variables, tokens, train=False).prediction

    def held(self) -> None:
        return None


def _is_sound(rows: TokenRows, head: Any) -> Array:
    """Say of each row whether every id that it reads is in the vocabulary, bool [batch, 1]; padding may be anything."""
    bad = (rows.inputs < 0) | (rows.inputs >= head.kernel.shape[1])
    if rows.segment_ids is not None:
        bad &= rows.segment_ids != 0
    return ~bad.any(1, keepdims=True)


def _small(token_bytes: Any) -> Any:
    """Give a table of byte counts in the narrowest dtype that holds it: it is a constant of the program."""
    table = np.asarray(token_bytes)
    if table.ndim != 1 or not np.issubdtype(table.dtype, np.integer) or (table.size and table.min() < 0):
        raise ValueError(
            f"token_bytes must be a number of bytes ≥ 0 for each id, int [vocab], got {table.dtype} {table.shape}"
        )
    return table.astype(np.uint8 if table.size and table.max() < 256 else np.int32)


def _as_prompts(prompts: Any) -> Any:
    ids = np.asarray(prompts)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not ids.size:
        raise ValueError(f"prompts must be token ids, int [n, time], got {ids.dtype} {ids.shape}; make them one length")
    return ids.astype(np.int32)
