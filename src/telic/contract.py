"""The contract between an objective and everything that trains it.

An objective says how to initialise variables, what to optimise on a batch and, optionally, how to evaluate one. The
trainer differentiates, accepts or rejects, accumulates and commits. This page is all that either knows of the other.
"""

import abc
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from telic.artifacts import kind_of
from telic.ema import EMASpec
from telic.errors import ContractError
from telic.mean import Mean, Terms, wide
from telic.precision import Policy
from telic.tree import leading_dimension
from telic.types import Array, Batch, Key, PyTree, Variables


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What an objective may know of the moment it is asked at.

    Attributes:
      step: Index of the accepted microbatch, int32.
      key: PRNG key of this attempt, ``fold_in(run_key, attempts)``; a rejected attempt does not reuse it.
      updates: Optimizer updates committed so far, int32; constant within a window. The clock for schedules in a loss.
      train: True in training, False in evaluation. Static: it may decide Python branches.
      averaged: The variables with the moving average laid over; None without one. Never differentiated.
      precision: Dtypes of this run. Parameters, averaged ones too, and inputs come in its compute dtype, and what a
        model's forward pass gives is cast to its output dtype before a loss sees it. Static.
    """

    step: Any = 0
    key: Any = None
    updates: Any = 0
    train: bool = field(default=True, metadata={"static": True})
    averaged: Any = None
    precision: Policy = field(default_factory=Policy, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Aux:
    """What a loss reports beside its statistics.

    Attributes:
      metrics: Scalars or Means by name; logged as their mean over the logging interval.
      variables: Whole replacement collections, never ``params``: they replace the state's after each accepted
        microbatch, in order.
      effects: Additive observations, summed over the window and given once per commit to `Objective.apply_effects`.
      qk_stats: Per-head maxima; the window's maximum reaches optimizers that accept extra arguments.
      outputs: Predictions, targets and the like, for loop metrics; never stored in state.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    variables: Mapping[str, Any] | None = None
    effects: Any = None
    qk_stats: Any = None
    outputs: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Objective(abc.ABC):
    """What to optimise: variables, a loss made of additive statistics, and optionally an evaluation.

    Subclass it and implement `init` and `loss`. Everything else has a default that is right for most. Methods are
    pure: they compute arrays from their arguments and the objective's configuration.

    Attributes:
      ema: Moving average to keep, or None. May be assigned on any instance.
    """

    ema: EMASpec | None = None

    @abc.abstractmethod
    def init(self, key: Key, variables: Any = None) -> Variables:
        """Give the complete variables, ``{"params": ..., ...}``.

        Args:
          key: PRNG key.
          variables: What `held_variables` returned, when the objective holds weights. None means the configured ones.
        """

    def bind(self, example: Batch) -> "Objective":
        """Give this objective with the shapes it learns from a first batch. The default needs none."""
        del example
        return self

    @abc.abstractmethod
    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Give the loss of one microbatch: statistics, or (statistics, `Aux`).

        Statistics are a `Mean`, `Terms`, an array of per-example losses, a scalar (one term of mass one), or any
        pytree of additive statistics when `reduce_loss` is overridden.
        """

    def reduce_loss(self, statistics: Any) -> tuple[Array, Array]:
        """Give (value, has_data) of merged statistics; override it for statistics of your own."""
        match statistics:
            case Mean() | Terms():
                return statistics.value(), statistics.has_data()
            case _ if jax.tree.structure(statistics) == jax.tree.structure(0.0) and jnp.ndim(statistics) == 0:
                return wide(statistics), jnp.asarray(True)
            case _:
                raise ContractError(
                    f"{type(self).__name__}.loss returned statistics of its own "
                    f"({jax.tree.structure(statistics)}), so it must implement "
                    "reduce_loss(statistics) -> (value, has_data); or return Mean(total, mass), Terms or a scalar"
                )

    def apply_effects(self, variables: Variables, effects: Any) -> Mapping[str, Any]:
        """Give replacement collections (never ``params``) for the effects of a committed window."""
        raise ContractError(
            f"{type(self).__name__}.loss returned Aux(effects=...), so it must implement "
            "apply_effects(variables, effects) -> {collection: ...}"
        )

    def held_variables(self) -> Any:
        """Give the arrays this objective starts from, or None. They reach programs as arguments."""
        return None

    @property
    def initializer(self) -> jax.tree_util.Partial:
        """`init` with the held arrays bound, as a pytree: call it under jit with a key."""
        held = self.held_variables()
        if held is None:
            return jax.tree_util.Partial(self.init)
        if "variables" not in inspect.signature(self.init).parameters:
            raise ContractError(
                f"{type(self).__name__} holds weights (held_variables returned arrays), so its init must accept "
                "them: def init(self, key, variables=None)"
            )
        return jax.tree_util.Partial(self.init, variables=held)

    def evaluate(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Give scoring artifacts for a batch: one of `telic.artifacts`, a tuple of them, or None.

        Metrics whose ``reads`` is the artifact's type pool it over every example; `Scalars` are reported as they are.
        Like a loss it is traced and compiled, together with the loss: what both compute is computed once. One that
        cannot be traced, since it works on the host, runs as it is; compile its device work yourself.

        Args:
          variables: The weights to score, or the averaged ones where that was asked for.
          batch: One batch, its every row an example.
          step: The moment; ``step.train`` is False and ``step.key`` depends on the batch's index alone, so that each
            pass draws the same.
        """
        del variables, batch, step
        return None

    def preview(self, variables: Variables, batch: Batch, step: Step, *, scored: Any = None) -> Any:
        """Give artifacts to look at, once per evaluation: by default those of the first scoring.

        It is called as it is, not traced, in every process: compile its device work yourself. What it gives is
        gathered, and process 0 decodes and writes it.

        Args:
          variables: As for `evaluate`.
          batch: The first batch of the data.
          step: The moment, with a key of its own, the same at each evaluation.
          scored: What `evaluate` gave for this batch; None where it gives nothing.
        """
        return scored if scored is not None else self.evaluate(variables, batch, step)


F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__telic_objective__"


def objective(fn: F) -> F:
    """Mark a function ``(forward, variables, inputs, targets) -> (loss, output)`` as an objective.

    Use it where the number of parameters alone does not tell, for example on a function with ``*args``.

    Example:
      >>> @objective
      ... def penalised(forward, variables, inputs, targets):
      ...     output = forward(variables, inputs)
      ...     return (output.prediction - targets) ** 2, output
    """
    setattr(fn, _MARK, True)
    return fn


def is_marked(fn: object) -> bool:
    """Say whether a function, or what it wraps, carries the mark of `objective`."""
    return getattr(fn, _MARK, False) is True


def mean_loss(mean: Mean) -> tuple[Array, Array]:
    """Give (value, has_data) of a `Mean`: total / mass in at least float32, and whether the mass is positive."""
    return mean.value(), mean.has_data()


def scalar_loss(objective: Objective, variables: Variables, batch: Batch, step: Step) -> tuple[Array, Aux]:
    """Give (loss, aux) of one batch, to differentiate directly."""
    statistics, aux = call_loss(objective, variables, batch, step)
    return reduce_statistics(objective, statistics)[0], aux


def owns_statistics(objective: Objective) -> bool:
    """Say whether an objective reduces its statistics itself."""
    return type(objective).reduce_loss is not Objective.reduce_loss


def has_evaluation(objective: Objective) -> bool:
    """Say whether an objective scores batches: `evaluate` is its own, of its class or assigned to it."""
    return getattr(objective.evaluate, "__func__", None) is not Objective.evaluate


def has_preview(objective: Objective) -> bool:
    """Say whether an objective has something to show: a preview or an evaluation of its own."""
    return getattr(objective.preview, "__func__", None) is not Objective.preview or has_evaluation(objective)


def as_artifacts(returned: Any, what: str) -> tuple[Any, ...]:
    """Give what an evaluation returned as a tuple: one artifact, a tuple of them, or None.

    Args:
      returned: What `evaluate` or `preview` gave.
      what: What it is called in errors, such as ``Digits.evaluate``.
    Raises:
      ContractError: It is an array, a mapping or text, or holds one: metrics and sinks go by the type.
    """
    found = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    for item in found:
        if not dataclasses.is_dataclass(item) or isinstance(item, type | Mean):
            raise ContractError(
                f"{what} must return an artifact (TokenScores, ImageGrid, TextSamples, Representations, Scalars), a "
                f"tuple of them, or None, got {kind_of(item)}; write Scalars({{'name': Mean.of(values)}}) for values"
            )
    return tuple(found)


def call_preview(objective: Objective, variables: Variables, batch: Batch, step: Step, scored: Any) -> tuple[Any, ...]:
    """Call an objective's preview and check what it returned: a tuple of artifacts."""
    shown = objective.preview(variables, batch, step, scored=scored)
    return as_artifacts(shown, f"{type(objective).__name__}.preview")


def summable(statistics: PyTree) -> PyTree:
    """Give an objective's own statistics in dtypes that add up: floats in at least float32, booleans as counts."""

    def one(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        if leaf.dtype == jnp.bool_:
            return leaf.astype(jnp.int32)
        return wide(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf

    return jax.tree.map(one, statistics)


def reduce_statistics(objective: Objective, statistics: PyTree) -> tuple[Array, Array]:
    """Give (value, has_data) of statistics: a scalar of at least float32, and whether there is mass.

    Raises:
      ContractError: The objective has no `reduce_loss` for them, or the value is no scalar.
    """
    who = type(objective).__name__
    if not owns_statistics(objective):
        value, has_data = objective.reduce_loss(statistics)
    else:
        answer: Any = objective.reduce_loss(summable(statistics))
        match answer:
            case (value, has_data):
                pass
            case _:
                raise ContractError(
                    f"{who}.reduce_loss must return (value, has_data), got {type(answer).__name__}; has_data says "
                    "whether there is anything to learn from, such as mass > 0"
                )
    if jnp.ndim(value) != 0:
        raise ContractError(
            f"{who}: the loss of a batch must be a scalar, got shape {jnp.shape(value)}; return "
            "Mean(total=losses.sum(), mass=losses.size), or the array of per-example losses itself"
        )
    return wide(value), jnp.asarray(has_data)


def call_loss(objective: Objective, variables: Variables, batch: Batch, step: Step) -> tuple[PyTree, Aux]:
    """Call an objective's loss and check what it returned: (statistics, aux).

    Raises:
      ContractError: It returned something that is neither statistics nor (statistics, Aux).
    """
    returned = objective.loss(variables, batch, step)
    match returned:
        case (statistics, Aux() as aux):
            pass
        case (statistics, None):
            aux = Aux()
        case tuple() if len(returned) == 2:
            raise ContractError(
                f"{type(objective).__name__}.loss must return statistics or (statistics, Aux), got a pair whose "
                f"second item is {type(returned[1]).__name__}; write Aux(metrics={{...}}, variables=...)"
            )
        case None:
            raise ContractError(f"{type(objective).__name__}.loss returned None; return Mean(total, mass) or a scalar")
        case _:
            statistics, aux = returned, Aux()
    return _as_statistics(objective, statistics, batch), aux


def _as_statistics(objective: Objective, statistics: Any, batch: Batch) -> PyTree:
    """Turn a bare array of per-example losses into a Mean; leave everything else as it is."""
    owns = owns_statistics(objective)
    if owns and isinstance(statistics, Terms):
        raise ContractError(
            f"{type(objective).__name__}.loss returned Terms, which reduce themselves, and reduce_loss is overridden: "
            "leave reduce_loss out, or return a mapping of totals and masses of your own"
        )
    is_bare = jax.tree.structure(statistics) == jax.tree.structure(0.0)
    if owns or not is_bare or jnp.ndim(statistics) == 0:
        return statistics
    return loss_mean(statistics, None, batch)


def loss_mean(values: Array, weights: Any, batch: Batch) -> Mean:
    """Turn an array of per-example losses into a Mean over its elements.

    Args:
      values: Losses, [batch, ...].
      weights: Masses of the values' shape or its leading part, or None.
      batch: Whose leading dimension the values must have.
    Raises:
      ContractError: The leading dimension is another one, as after a broadcast of (n,) against (n, 1).
    """
    rows = leading_dimension(batch)
    if rows is not None and jnp.shape(values)[0] != rows:
        raise ContractError(
            f"a loss array must have the batch's leading dimension ({rows}), got shape {jnp.shape(values)}; "
            "return one loss per example, Mean(total, mass), or a scalar"
        )
    return Mean.of(values, weights)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Result:
    """What a step may return instead of the bare new state.

    Attributes:
      state: The new state.
      outputs: Named values that metrics may read; never stored. None means the state itself is read.
      accepted: bool scalar; metrics skip the batch where it is False. None means accepted.
      mass: Mass of the batch in metrics that give one scalar per batch. None means its leading dimension.
    """

    state: Any
    outputs: Any = None
    accepted: Any = None
    mass: Any = None


def as_result(value: Any) -> Result:
    """Give what a step returned as a `Result`."""
    return value if isinstance(value, Result) else Result(value)
