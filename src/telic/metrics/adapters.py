"""Metrics of other libraries as metrics of a loop: classes in clu's form (clu, metrax) and Flax NNX's metric objects.

Of these libraries Flax alone is imported: a class in clu's form is one with ``from_model_output``, ``empty``, ``merge``
and ``compute``, whoever wrote it.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from telic.errors import ContractError
from telic.metrics.base import Mode, Reads, as_reads
from telic.types import PyTree

_OUTPUTS = {
    "labels": "targets",
    "targets": "targets",
    "logits": "prediction",
    "predictions": "prediction",
    "prediction": "prediction",
}
"""Which output a parameter of these names takes, when nobody says otherwise."""

_WORDS = {"targets": "labels", "prediction": "logits"}
"""What these libraries call our outputs, where they take arguments by name only."""

_SAMPLE_WEIGHTS = "sample_weights"


@runtime_checkable
class BatchClass(Protocol):
    """The class of a metric in clu's form: immutable values, one per batch, that merge."""

    @classmethod
    def from_model_output(cls, *args: Any, **kwargs: Any) -> Any: ...

    @classmethod
    def empty(cls) -> Any: ...

    def merge(self, other: Any) -> Any: ...

    def compute(self) -> Any: ...


def is_foreign(x: Any) -> bool:
    """Say whether `as_foreign` takes it."""
    return is_batch_class(x) or isinstance(x, nnx.Metric)


def is_batch_class(x: Any) -> TypeGuard[type[BatchClass]]:
    """Say whether it is a class of metrics in clu's form."""
    return isinstance(x, type) and issubclass(x, BatchClass)


def as_foreign(x: Any, name: str | None, reads: Any) -> "ClassMetric | ObjectMetric":
    """Make a metric from a class in clu's form or an NNX metric object.

    Args:
      x: Such a class, or such an object, which is read and never written.
      name: Under which the value is reported; by default the class's name in small letters.
      reads: Which output each parameter takes, ``{"values": "loss"}``; or names or a function as for every metric.
        By default ``labels`` takes the targets and ``logits`` or ``predictions`` the prediction.
    Raises:
      ValueError: There is no name.
      ContractError: What the parameters take is not known.
    """
    made = type(x).__name__ if isinstance(x, nnx.Metric) else x.__name__
    if name is None and made.lstrip("_") in ("FromOutput", "FromFun"):
        # clu makes these classes; all of one kind would have one name.
        raise ValueError(f"must provide name for a metric made from {made}: name='...'")
    label = made.lower() if name is None else name
    if isinstance(x, nnx.Metric):
        return ObjectMetric(x, label, *_object_arguments(x, label, reads))
    return ClassMetric(x, label, *_class_arguments(x, label, reads))


@dataclass(frozen=True)
class ClassMetric:
    """A metric class in clu's form: each batch is one value of it, and values merge.

    Attributes:
      cls: The class.
      name: Under which the value is reported.
      reads: Where the arguments come from.
      words: Under which parameter names they are given; None gives them by position.
      mode: Which direction is better, None when unknown.
    """

    cls: type[BatchClass]
    name: str
    reads: Reads
    words: tuple[str, ...] | None
    mode: Mode = None

    def init(self, *args: Any) -> PyTree:
        """Give the class's empty value, in the structure, shapes and dtypes that merging settles on.

        Raises:
          ContractError: Values grow with each batch, so that no program can carry them.
        """
        settled = self.cls.empty()
        for is_second in (False, True):
            shapes = jax.eval_shape(lambda acc, *a: acc.merge(self._of(a, None)), settled, *args)
            old, new = jax.tree.leaves(settled), jax.tree.leaves(shapes)
            # The empty value may hold scalars for what a batch gives in its own shape; after that nothing grows.
            fits = len(old) == len(new) and all(
                jnp.shape(o) == n.shape or (jnp.ndim(o) == 0 and not is_second) for o, n in zip(old, new, strict=True)
            )
            if not fits:
                raise ContractError(
                    f"metric {self.name!r}: values of {self.cls.__name__} change their shapes as they merge, so they "
                    "cannot be computed inside a compiled step; use a metric with sums of fixed shapes"
                )
            leaves = [jnp.broadcast_to(jnp.asarray(o, n.dtype), n.shape) for o, n in zip(old, new, strict=True)]
            settled = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        return settled

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Merge a batch's value.

        Raises:
          ContractError: The batch has weights, and the class takes none.
        """
        return self.merge(acc, self._of(args, weights))

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Merge two values."""
        return a.merge(b)

    def compute(self, acc: PyTree) -> Any:
        """Give the value's result."""
        return acc.compute()

    def _of(self, args: tuple[Any, ...], weights: Any) -> Any:
        more: dict[str, Any] = {}
        if weights is not None and not _reads_weights(self.reads):
            if _SAMPLE_WEIGHTS not in _parameters(self.cls):
                raise _no_weights(self.name, self.cls.__name__)
            more[_SAMPLE_WEIGHTS] = weights
        if self.words is None:
            return self.cls.from_model_output(*args, **more)
        return self.cls.from_model_output(**dict(zip(self.words, args, strict=True)), **more)


@dataclass(frozen=True, eq=False)
class ObjectMetric:
    """An NNX metric: an object that updates in place, carried as the tree of its variables.

    Attributes:
      metric: The object. It is a pattern: what it holds is not read, and it is never written.
      name: Under which the value is reported.
      reads: Where the arguments come from.
      words: Under which names `update` is given them.
      mode: Which direction is better, None when unknown.
    """

    metric: nnx.Metric
    name: str
    reads: Reads
    words: tuple[str, ...]
    mode: Mode = None

    def init(self, *args: Any) -> PyTree:
        """Give the variables of a metric that was reset, in the dtypes that updates settle on."""
        fresh = nnx.clone(self.metric)
        fresh.reset()
        empty = nnx.state(fresh)
        shapes = jax.eval_shape(self.update, empty, *args)
        return jax.tree.map(lambda old, new: jnp.asarray(old, new.dtype), empty, shapes)

    def update(self, acc: PyTree, *args: Any, weights: Any = None) -> PyTree:
        """Give the variables after one more update.

        Raises:
          ContractError: The batch has weights, and nobody said what the metric makes of them.
        """
        if weights is not None and not _reads_weights(self.reads):
            raise _no_weights(self.name, type(self.metric).__name__)
        metric = self._with(acc)
        metric.update(**dict(zip(self.words, args, strict=True)))
        return nnx.state(metric)

    def merge(self, a: PyTree, b: PyTree) -> PyTree:
        """Join two sets of variables, where the kind of metric is known.

        Raises:
          TypeError: An NNX metric has no merge, and this one is neither an average nor Welford's.
        """
        match self.metric:
            case nnx.metrics.Average():
                return jax.tree.map(jnp.add, a, b)
            case nnx.metrics.Welford():
                left: Any = self._with(a)
                right: Any = self._with(b)
                count = left.count[...] + right.count[...]
                share = right.count[...] / jnp.maximum(count, 1)
                delta = right.mean[...] - left.mean[...]
                left.m2[...] = left.m2[...] + right.m2[...] + delta**2 * left.count[...] * share
                left.mean[...] = left.mean[...] + delta * share
                left.count[...] = count
                return nnx.state(left)
            case _:
                raise TypeError(f"metric {self.name!r}: nnx's {type(self.metric).__name__} has no merge")

    def compute(self, acc: PyTree) -> Any:
        """Give the metric's result."""
        return self._with(acc).compute()

    def _with(self, acc: PyTree) -> Any:
        return nnx.merge(nnx.graphdef(self.metric), acc)


def _class_arguments(cls: type[BatchClass], name: str, reads: Any) -> tuple[Reads, tuple[str, ...] | None]:
    """Give (what is read, under which parameter names)."""
    parameters = _parameters(cls)
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if isinstance(reads, Mapping):
        words, sources = tuple(reads), as_reads(list(reads.values()))
    elif reads is not None:
        sources = as_reads(reads)
        if not isinstance(sources, tuple):
            return sources, None
        words = tuple(by_position[: len(sources)]) if len(by_position) >= len(sources) else _own_words(sources)
    else:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind not in kinds]
        if not needed or any(word not in _OUTPUTS for word in needed):
            raise _unknown_arguments(name, cls.__name__, needed)
        words, sources = tuple(needed), tuple(_OUTPUTS[word] for word in needed)
    try:
        inspect.signature(cls.from_model_output).bind(**dict.fromkeys(words))
    except TypeError as error:
        raise ContractError(
            f"metric {name!r}: {cls.__name__}.from_model_output{inspect.signature(cls.from_model_output)} cannot be "
            f"given {', '.join(words)}: {error}. Name each parameter and what it takes: "
            "reads={'labels': 'targets', ...}"
        ) from error
    return sources, words


def _object_arguments(metric: nnx.Metric, name: str, reads: Any) -> tuple[Reads, tuple[str, ...]]:
    """Give (what is read, under which names `update` is given it)."""
    argument = metric.argname if isinstance(metric, nnx.metrics.Average | nnx.metrics.Welford) else None
    is_accuracy = isinstance(metric, nnx.metrics.Accuracy)
    if isinstance(reads, Mapping):
        return as_reads(list(reads.values())), tuple(reads)
    if reads is None:
        if is_accuracy:
            return ("targets", "prediction"), ("labels", "logits")
        if argument is None or argument == "values":
            raise _unknown_arguments(name, type(metric).__name__, [] if argument is None else [argument])
        return (argument,), (argument,)
    sources = as_reads(reads)
    if isinstance(sources, tuple) and (is_accuracy or argument is None or len(sources) > 1):
        return sources, _own_words(sources)
    if is_accuracy or argument is None:
        raise _unknown_arguments(name, type(metric).__name__, [])
    return sources, (argument,)


def _own_words(sources: tuple[str, ...]) -> tuple[str, ...]:
    last = [source.split(".")[-1] for source in sources]
    return tuple(_WORDS.get(word, word) for word in last)


def _parameters(cls: type[BatchClass]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls.from_model_output).parameters


def _reads_weights(reads: Reads) -> bool:
    return not isinstance(reads, tuple) or any("weights" in source.split(".") for source in reads)


def _no_weights(name: str, made: str) -> ContractError:
    return ContractError(
        f"metric {name!r}: the batch has weights and {made} takes none. Where they are 0 and 1 give them as its mask, "
        "reads={..., 'mask': 'weights'}; else use a metric of telic.metrics, which are weighted"
    )


def _unknown_arguments(name: str, made: str, needed: list[str]) -> ContractError:
    takes = f"takes {', '.join(needed)}" if needed else "does not say what it takes"
    return ContractError(
        f"metric {name!r}: {made} {takes}; say which output each parameter gets, for example "
        f"reads={{'{needed[0] if needed else 'values'}': 'loss'}}"
    )
