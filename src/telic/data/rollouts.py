"""Completions drawn with the policy that learns, as a source of batches: the loop stays the one there is.

A rollout is a batch of prompts, each continued several times, with rewards and advantages. It is drawn when the last
one is used up, with the variables as they are then, and gone through as often as asked for.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import jax
import numpy as np
from numpy.typing import NDArray

from telic.advantages import Baseline, Scale, group_advantages
from telic.data.dataset import as_count
from telic.data.table import epoch_order
from telic.data.text.chat import prompt_rows
from telic.data.text.tokenizer import Tokenizer
from telic.errors import DataError, ShapeError
from telic.loop.ports import Position, View
from telic.train.state import TrainState
from telic.types import Batch, Key, Variables

Reward: TypeAlias = Callable[..., Any]
"""``(prompts, completions, **columns) -> numbers``, one for each completion; texts and columns are lists."""

_ROLLOUT = 0x52_4F_4C_4C


class Sampled(Protocol):
    """What a sampler gives: `telic.models.Continuations`, or what has these attributes.

    Attributes:
      tokens: Ids of the completions, int [rows, max_new_tokens].
      lengths: Tokens of each, the one that stopped it included, int [rows]; what stands after them does not matter.
      sampling_log_probs: Log-prob of each token under the distribution it was drawn from, nats, of the tokens' shape.
    """

    @property
    def tokens(self) -> Any: ...

    @property
    def lengths(self) -> Any: ...

    @property
    def sampling_log_probs(self) -> Any: ...


class Sampler(Protocol):
    """Continues prompts: ``functools.partial(telic.models.generate, model, stop_tokens=(tokenizer.eos_id,))``."""

    def __call__(self, variables: Variables, prompts: Any, /, *, mask: Any, max_new_tokens: int, key: Key) -> Sampled:
        """Give completions.

        Args:
          variables: The policy's.
          prompts: Ids, int32 [rows, time], padded on the left.
          mask: 1 where a prompt has a token, int32 [rows, time].
          max_new_tokens: Longest completion.
          key: PRNG key: the same key, prompts and variables give the same completions.
        """
        ...


@dataclass(frozen=True)
class _Plan:
    """How batches follow each other: what a position is counted in."""

    rollouts: int
    uses: int


class Rollouts:
    """Batches for `telic.objectives.GRPOObjective`, drawn with the variables that learn: give it to `fit` as data.

    A batch holds rows ``prompt + completion``: ``tokens``, ``segment_ids`` (0 at padding), ``completion_mask``,
    ``old_log_probs`` (the sampler's), ``advantages`` and ``rewards``. It is never read ahead of the variables it needs,
    so the loop runs it one batch at a time.

    A rollout serves ``updates · microbatches`` batches: it is cut into `microbatches` batches and gone through
    `updates` times. With ``Trainer(accumulate=microbatches)`` those are windows, and `updates` of them learn from one
    rollout (μ in the papers).

    What was drawn is a part of the position, so a run that was killed goes on with the same completions; one that was
    killed while it drew draws the same ones again. Keys come from (seed, rollout) alone.

    Args:
      prompts: Texts; or columns by name, ``{"prompt": texts, "answer": ...}``, of which the reward gets all but the
        prompts.
      tokenizer: Makes ids of prompts and texts of completions.
      generate: Continues prompts; see `Sampler`.
      reward: ``(prompts, completions, **columns) -> numbers``, one for each completion, in lists as long as there are
        completions.
      group: Completions per prompt, at least 2.
      batch: Prompts per rollout.
      max_new_tokens: Longest completion.
      updates: How often a rollout is gone through.
      microbatches: Batches that a rollout is cut into.
      averaged: Draw with the moving average instead of the live variables.
      scale: Of the advantages, as in `telic.advantages.group_advantages`.
      baseline: Of the advantages.
      seed: Of the order of the prompts and of the draws.
      shuffle: Draw the order of the prompts anew for each pass.
    Raises:
      ValueError: A count is out of range, or there are fewer prompts than a rollout takes.
      DataError: There are no prompts, one is empty, or a column has another length.
    """

    read_ahead = False
    fresh = True

    def __init__(
        self,
        prompts: Sequence[str] | Mapping[str, Sequence[Any]],
        tokenizer: Tokenizer,
        *,
        generate: Sampler,
        reward: Reward,
        group: int,
        batch: int,
        max_new_tokens: int,
        updates: int = 1,
        microbatches: int = 1,
        averaged: bool = False,
        scale: Scale = "group",
        baseline: Baseline = "mean",
        seed: int = 0,
        shuffle: bool = True,
    ):
        for name, function in (("generate", generate), ("reward", reward)):
            if not callable(function):
                raise TypeError(f"Rollouts {name} must be a function, got {type(function).__name__}")
        self._texts, self._columns = _as_columns(prompts)
        self._tokenizer, self._generate, self._reward = tokenizer, generate, reward
        self._rows = prompt_rows(self._texts, tokenizer)
        self._group = as_count("Rollouts group", group, minimum=1)
        self._batch = as_count("Rollouts batch", batch, minimum=1)
        self._max_new_tokens = as_count("Rollouts max_new_tokens", max_new_tokens, minimum=1)
        self._updates = as_count("Rollouts updates", updates, minimum=1)
        self._microbatches = as_count("Rollouts microbatches", microbatches, minimum=1)
        self._averaged, self._seed, self._shuffle = averaged, as_count("Rollouts seed", seed, minimum=0), shuffle
        self._scale: Scale = scale
        self._baseline: Baseline = baseline
        # Of anything that has no place here: a group of one, an unknown scale.
        group_advantages(np.zeros(self._group), group=self._group, scale=scale, baseline=baseline)
        if self._batch > len(self._texts):
            raise ValueError(f"a rollout of {self._batch} prompts needs as many: there are {len(self._texts)}")
        rows = self._batch * self._group
        if rows % self._microbatches:
            raise ValueError(
                f"a rollout of {self._batch} prompts · {self._group} completions does not divide into "
                f"{self._microbatches} microbatches"
            )
        self._plan = _Plan(len(self._texts) // self._batch, self._updates * self._microbatches)
        self._identity = {
            "seed": self._seed,
            "prompts": _digest(self._rows),
            "batch": self._batch,
            "group": self._group,
            "max_new_tokens": self._max_new_tokens,
            "updates": self._updates,
            "microbatches": self._microbatches,
            "shuffle": bool(shuffle),
        }
        self._epoch: int | None = None
        self._continuous = False
        self._pass = 0
        self._rollout = 0
        self._use = 0
        self._drawn: dict[str, NDArray[Any]] | None = None

    # -- the port ------------------------------------------------------------------------------------------------

    def begin(self, epoch: int, *, continuous: bool = False) -> None:
        """Start an epoch, one pass over the prompts; for the one already begun, change nothing but `continuous`."""
        self._continuous = continuous
        if epoch == self._epoch:
            return
        if self._epoch is not None and (self._rollout or self._use):
            self._next_pass()
        self._epoch = epoch

    def example(self) -> Batch:
        """Give a batch in the shapes to come: completions of the first id, which count and say nothing."""
        rows = self._batch * self._group // self._microbatches
        prompt = self._rows["tokens"].shape[1]
        shape = (rows, prompt + self._max_new_tokens)
        return _fields(
            tokens=np.zeros(shape, np.int32),
            segment_ids=np.ones(shape, np.int32),
            completion_mask=np.tile((np.arange(shape[1]) >= prompt).astype(np.int32), (rows, 1)),
            old_log_probs=np.zeros(shape, np.float32),
            advantages=np.zeros(rows, np.float32),
            rewards=np.zeros(rows, np.float32),
        )

    def next(self, view: View) -> tuple[Batch, Position]:
        """Give the next batch, drawing a rollout when there is none left, and the position after it.

        Raises:
          DataError: The reward function gave something else than one finite number per completion, or there is no
            training state to draw with.
        """
        if self._epoch is None:
            self.begin(view.epoch)
        self._advance()
        if self._drawn is None:
            self._drawn = self._draw(self._variables(view))
        rows = self._batch * self._group // self._microbatches
        first = self._use % self._microbatches * rows
        batch = {name: array[first : first + rows] for name, array in self._drawn.items()}
        self._use += 1
        return batch, self.get_state()

    def skip(self, count: int) -> None:
        """Go past batches without drawing; a rollout that is entered in its middle is drawn when it is needed."""
        for _ in range(count):
            self._advance()
            self._use += 1

    def get_state(self) -> Position:
        """Give the position of the next batch, with the rollout that is not used up."""
        return {
            "epoch": self._epoch or 0,
            "pass": self._pass,
            "rollout": self._rollout,
            "use": self._use,
            "identity": dict(self._identity),
            "drawn": None if self._drawn is None or self._use == self._plan.uses else dict(self._drawn),
        }

    def set_state(self, position: Position) -> None:
        """Go to a position that `get_state` or `next` gave.

        Raises:
          DataError: It is none, or was taken with other prompts or counts; the first difference is named.
        """
        fields = self.get_state()
        given = cast(Mapping[str, Any], position if isinstance(position, Mapping) else {})
        if set(given) != set(fields):
            raise DataError(
                f"a position of Rollouts has the fields {', '.join(fields)}, got {position!r:.200}; pass what "
                "get_state() gave"
            )
        for name, here in self._identity.items():
            there = cast(Mapping[str, Any], given["identity"]).get(name)
            if there != here:
                raise DataError(
                    f"the position was taken with {name}={there!r}, these rollouts have {name}={here!r}; resume with "
                    "the same prompts and counts, or start a new run"
                )
        self._epoch, self._pass, self._rollout, self._use = (
            as_count(f"a position's {name}", given[name], minimum=0) for name in ("epoch", "pass", "rollout", "use")
        )
        drawn = given["drawn"]
        self._drawn = None if drawn is None else {name: np.asarray(array) for name, array in drawn.items()}

    def close(self) -> None:
        """Do nothing: nothing is open."""

    # -- drawing -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Go to the next rollout when this one is used up; raise StopIteration at the end of an epoch."""
        if self._use == self._plan.uses:
            self._use, self._rollout, self._drawn = 0, self._rollout + 1, None
        if self._rollout == self._plan.rollouts:
            if not self._continuous:
                # As it was, so that the end of an epoch is a place that can be come back to.
                self._use, self._rollout = self._plan.uses, self._rollout - 1
                raise StopIteration
            self._next_pass()

    def _next_pass(self) -> None:
        self._pass, self._rollout, self._use, self._drawn = self._pass + 1, 0, 0, None

    def _variables(self, view: View) -> Variables:
        match view.step_state:
            case TrainState() as state:
                if not self._averaged:
                    return state.variables
                if state.ema is None:
                    raise DataError("Rollouts(averaged=True) draws with the moving average, and the objective has none")
                return state.averaged
            case Mapping() as variables if "params" in variables:
                return cast(Variables, variables)
            case other:
                raise DataError(
                    f"Rollouts draw with the variables of a training state, got {type(other).__name__}: give them to "
                    "Trainer.fit or a trainer's loop as training data; to evaluate, call generate yourself"
                )

    def _draw(self, variables: Variables) -> dict[str, NDArray[Any]]:
        """Draw a rollout and score it."""
        size = len(self._texts)
        order = epoch_order(self._seed, self._pass, size) if self._shuffle else np.arange(size)
        chosen = order[self._rollout * self._batch : (self._rollout + 1) * self._batch]
        which = np.repeat(chosen, self._group)
        prompts, prompt_mask = (self._rows[name][which] for name in ("tokens", "mask"))
        key = jax.random.fold_in(jax.random.key(self._seed), _ROLLOUT)
        for number in (self._pass, self._rollout):
            key = jax.random.fold_in(key, number)
        sampled = self._generate(variables, prompts, mask=prompt_mask, max_new_tokens=self._max_new_tokens, key=key)
        shape = (self._batch * self._group, self._max_new_tokens)
        tokens = _array(sampled, "tokens", shape)
        log_probs = _array(sampled, "sampling_log_probs", shape)
        is_written = np.arange(self._max_new_tokens) < _array(sampled, "lengths", shape[:1])[:, None]
        rewards = self._scores(which, tokens, is_written)
        advantages = group_advantages(rewards, group=self._group, scale=self._scale, baseline=self._baseline)
        before = np.zeros(prompts.shape, np.float32)
        written = is_written.astype(np.int32)
        return _fields(
            tokens=np.concatenate([prompts, np.where(is_written, tokens, 0).astype(np.int32)], axis=1),
            segment_ids=np.concatenate([prompt_mask, written], axis=1),
            completion_mask=np.concatenate([np.zeros_like(prompt_mask), written], axis=1),
            old_log_probs=np.concatenate([before, np.where(is_written, log_probs, 0).astype(np.float32)], axis=1),
            advantages=advantages.astype(np.float32),
            rewards=rewards.astype(np.float32),
        )

    def _scores(
        self, which: NDArray[np.int64], tokens: NDArray[Any], is_written: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        prompts = [self._texts[i] for i in which]
        completions = [self._tokenizer.decode(row[kept]) for row, kept in zip(tokens, is_written, strict=True)]
        columns = {name: [column[i] for i in which] for name, column in self._columns.items()}
        return checked_rewards(self._reward(prompts, completions, **columns), prompts, completions)


def checked_rewards(given: Any, prompts: Sequence[str], completions: Sequence[str]) -> NDArray[np.float64]:
    """Give what a reward function returned as numbers, [rows].

    Raises:
      DataError: It is not one finite number per completion; a completion and its prompt are shown.
    """
    rows = len(completions)
    if given is None or isinstance(given, str | Mapping):
        raise DataError(
            f"the reward function must return {rows} numbers, one for each completion, and returned "
            f"{given!r:.80}; its first prompt was {prompts[0]!r:.200}"
        )
    values = list(np.asarray(jax.device_get(given)).ravel() if _is_array(given) else given)
    if len(values) != rows or (_is_array(given) and np.ndim(given) != 1):
        raise DataError(
            f"the reward function must return {rows} numbers, one for each completion, and returned {len(values)} "
            f"(shape {np.shape(given)}); its first prompt was {prompts[0]!r:.200}"
        )
    for prompt, completion, value in zip(prompts, completions, values, strict=True):
        try:
            number = math.nan if value is None or isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"the reward function returned {value!r:.80} for the completion {completion!r:.200} of the prompt "
                f"{prompt!r:.200}; a reward is a finite number, such as 0.0 for an answer that cannot be read"
            )
    return np.asarray([float(value) for value in values], np.float64)


def _array(sampled: Sampled, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.asarray(jax.device_get(getattr(sampled, name)))
    if array.shape != shape:
        raise ShapeError(
            f"generate must give {name} of shape {shape} for {shape[0]} prompts, got {array.shape}; "
            "telic.models.generate does, when it is left to pad and stop as it is told"
        )
    return array


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array)


def _as_columns(prompts: Any) -> tuple[list[str], dict[str, Sequence[Any]]]:
    """Give the texts of prompts and the columns beside them.

    Raises:
      DataError: There are none, they are no texts, or a column has another length.
    """
    columns: dict[str, Any] = {}
    texts = prompts
    if isinstance(prompts, Mapping):
        columns = {str(name): column for name, column in cast(Mapping[str, Any], prompts).items()}
        if "prompt" not in columns:
            raise DataError(f"columns of prompts need one called 'prompt', got {sorted(columns)}")
        texts = columns.pop("prompt")
        for reserved in ("prompts", "completions"):
            if reserved in columns:
                raise DataError(f"a reward function gets {reserved} already: call the column {reserved!r} otherwise")
    if isinstance(texts, str):
        raise DataError(f"prompts are a list of texts, got one text: write [{texts!r:.40}]")
    texts = list(texts)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"prompt {number} is no text but {type(text).__name__} {text!r:.80}")
    if not texts:
        raise DataError("there are no prompts")
    for name, column in columns.items():
        if len(column) != len(texts):
            raise DataError(f"the column {name!r} has {len(column)} values for {len(texts)} prompts")
    return texts, columns


def _digest(rows: Mapping[str, NDArray[np.int32]]) -> str:
    digest = hashlib.sha256()
    for name in ("tokens", "mask"):
        digest.update(f"{rows[name].shape}".encode())
        digest.update(np.ascontiguousarray(rows[name]).tobytes())
    return digest.hexdigest()[:16]


def _fields(**arrays: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Give the fields of a batch, in one order."""
    return arrays
