"""Metrics of a loop: what each reads from a step's result, and how it is carried over the batches of an epoch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from telic import tree
from telic.artifacts import find_artifact
from telic.contract import Result
from telic.errors import ContractError, closest
from telic.mean import Mean
from telic.metrics.base import Metric, Mode, Reads, is_host
from telic.types import Batch, PyTree

RESERVED = frozenset({"epoch", "iteration", "rejected"})
"""Names that log lines and records use themselves."""


@dataclass(frozen=True)
class Reducer:
    """A metric under its name in one loop. Pure: it is traced into the step's program.

    Attributes:
      name: Name in `LoopState.metrics`.
      metric: What is computed.
    """

    name: str
    metric: Metric

    @property
    def always(self) -> bool:
        """Whether attempts that were rejected are in it too: only the count of them is such a metric."""
        return isinstance(self.metric, _Rejected)

    @property
    def is_of_evaluation(self) -> bool:
        """Whether evaluations alone compute it: it reads an artifact, or works on the host."""
        return isinstance(self.metric.reads, type) or is_host(self.metric)

    def init(self, result: Result, batch: Batch) -> PyTree:
        """Give the empty accumulator for results and batches of these shapes."""
        # Traced, since a function of the outputs may compute with what it reads.
        args = jax.eval_shape(lambda result, batch: self.arguments(result, batch)[0], result, batch)
        return jax.tree.map(jnp.asarray, self.metric.init(*args))

    def update(self, accumulator: PyTree, result: Result, batch: Batch) -> PyTree:
        """Fold one batch's result into the accumulator."""
        args, weights = self.arguments(result, batch)
        if weights is None:
            return self.metric.update(accumulator, *args)
        return self.metric.update(accumulator, *args, weights=weights)

    def compute(self, accumulator: PyTree) -> Any:
        """Give the metric's value."""
        return self.metric.compute(accumulator)

    def arguments(self, result: Result, batch: Batch) -> tuple[tuple[Any, ...], Any]:
        """Give what the metric reads of one batch, and the batch's weights; an artifact has weights of its own."""
        outputs = result.state if result.outputs is None else result.outputs
        reads = self.metric.reads
        if isinstance(reads, type):
            artifacts = outputs.get("artifacts", ()) if isinstance(outputs, Mapping) else ()
            return (find_artifact(artifacts, reads, f"metric {self.name!r}"),), None
        if callable(reads):
            args = reads(outputs)
            if not isinstance(args, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
                raise ContractError(
                    f"metric {self.name!r}: reads must return the metric's arguments as a tuple, got "
                    f"{type(args).__name__}; write `lambda outputs: (outputs[...],)`"
                )
        else:
            args = tuple(self._read(name, outputs, batch) for name in reads)
        weights = outputs.get("weights") if isinstance(outputs, Mapping) else None
        return args, weights

    def _read(self, name: str, outputs: Any, batch: Batch) -> Any:
        if name == "batch":
            return batch
        if name.startswith("batch."):
            return self._walk(name, name.split(".")[1:], batch, "the batch lacks")
        return self._walk(name, name.split("."), outputs, "the step's outputs lack")

    def _walk(self, name: str, words: list[str], value: Any, where: str) -> Any:
        for word in words:
            match value:
                case Mapping() if word in value:
                    value = value[word]
                case tuple() | list() if word.isdigit() and int(word) < len(value):
                    value = value[int(word)]
                case _ if not isinstance(value, Mapping | tuple | list) and hasattr(value, word):
                    value = getattr(value, word)
                case _:
                    known = list(value) if isinstance(value, Mapping) else tree.leaf_names(value)
                    raise ContractError(
                        f"metric {self.name!r} reads {name!r}, which {where}.{closest(word, map(str, known))} "
                        f"There: {', '.join(map(str, known)) or 'nothing'}. Choose with reads=(...)"
                    )
        return value


@dataclass(frozen=True)
class _Reported:
    """Metric of something an objective reports: a Mean by its mass, a scalar by the rows of its batch."""

    name: str
    mode: Mode = None

    @property
    def reads(self) -> Reads:
        return (f"metrics.{self.name}", "batch")

    def init(self, *args: Any) -> Mean:
        value, _ = args
        like = value.total if isinstance(value, Mean) else value
        dtype = jnp.promote_types(jnp.result_type(like), jnp.float32)
        return Mean(jnp.zeros(jnp.shape(like), dtype), jnp.zeros((), dtype))

    def update(self, acc: Mean, *args: Any, weights: Any = None) -> Mean:
        del weights
        value, batch = args
        if not isinstance(value, Mean):
            rows = tree.leading_dimension(batch) or 1
            value = Mean(jnp.asarray(value, acc.total.dtype) * rows, jnp.asarray(rows, acc.mass.dtype))
        return Mean(acc.total + value.total, acc.mass + value.mass)

    def merge(self, a: Mean, b: Mean) -> Mean:
        return a.merge(b)

    def compute(self, acc: Mean) -> Any:
        return acc.measured()


@dataclass(frozen=True)
class _Rejected:
    """Metric that counts what a step rejected."""

    name: str = "rejected"
    mode: Mode = "min"
    reads: Reads = ("rejected",)

    def init(self, *args: Any) -> Any:
        del args
        return jnp.zeros((), jnp.int32)

    def update(self, acc: Any, *args: Any, weights: Any = None) -> Any:
        del weights
        return acc + args[0]

    def merge(self, a: Any, b: Any) -> Any:
        return a + b

    def compute(self, acc: Any) -> Any:
        return acc


def reported(result: Result, taken: Mapping[str, Any]) -> dict[str, Reducer]:
    """Give a reducer for each metric that a step reports by itself and nobody attached under that name."""
    outputs = result.outputs
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get("metrics"), Mapping):
        return {}
    found = {name: Reducer(name, _Reported(name)) for name in outputs["metrics"]}
    if "rejected" in outputs:
        found["rejected"] = Reducer("rejected", _Rejected())
    return {name: reducer for name, reducer in found.items() if name not in taken}
