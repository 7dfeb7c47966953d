"""One attempt: differentiate the loss of a microbatch and say, leaf by leaf, whether everything is finite."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from telic import tree
from telic.artifacts import kind_of
from telic.contract import Aux, Objective, Step, call_loss, reduce_statistics
from telic.errors import ContractError
from telic.mean import Mean, Terms
from telic.precision import LossScale, Policy
from telic.train.statistics import canonical, masses
from telic.types import Array, Batch, PyTree, Variables

RESERVED_METRICS = frozenset({"loss", "gradient_norm", "learning_rate", "rejected", "updates"})
"""Names the trainer reports itself; an objective's metrics may not take them."""

CHECKS = ("loss", "statistics", "mass ≥ 0", "Aux.variables", "Aux.effects", "Aux.qk_stats", "optimizer result", "plan")
"""What is checked beside the gradient's leaves, in the order of `Rejections.finite`.

All but two say that values are finite. "mass ≥ 0" says that no mass is negative, "plan" that the masses a window was
planned with are those it had. The last two are known when a window closes.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attempt:
    """What one microbatch gave, before anything is decided.

    Attributes:
      value: Loss of the microbatch alone, at least float32 scalar.
      has_data: Whether it has mass.
      statistics: What the objective returned.
      aux: What it reported beside.
      gradient: Gradient of the differentiated scalar, trainable leaves only, at least float32.
    """

    value: Array
    has_data: Array
    statistics: PyTree
    aux: Aux
    gradient: PyTree

    @property
    def checked(self) -> PyTree:
        """Everything of it that must be finite."""
        aux = self.aux
        return self.value, self.statistics, aux.variables, aux.effects, aux.qk_stats, self.gradient

    def flags(self, trained: PyTree) -> Array:
        """Say of each thing that is checked whether it is finite, for a tree of trainable parameters: bool [checks].

        Only a rejection needs them, so they are computed there. What a commit finds out is True here.
        """
        leaves = [jnp.asarray(True) for _ in jax.tree.leaves(trained)] if self.gradient is None else []
        leaves += [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(self.gradient)]
        loss, statistics, *collected, _ = (tree.all_finite(part) for part in self.checked)
        late = jnp.asarray(True)
        return jnp.stack([loss, statistics, has_masses(self.statistics), *collected, late, late, *leaves])


def has_masses(statistics: PyTree) -> Array:
    """Say whether no mass in statistics is negative (nor NaN): bool scalar."""
    return jnp.stack([jnp.asarray(True), *(mass >= 0 for mass in masses(statistics).values())]).all()


def checked_names(trained: PyTree) -> tuple[str, ...]:
    """Give the names of everything an attempt checks, for a tree of trainable parameters."""
    return (*CHECKS, *(f"gradient of params/{name}" for name in tree.leaf_names(trained)))


Seed = Callable[[PyTree], Array]
"""From statistics to the scalar to differentiate, where that is not the loss of the microbatch."""


def make_attempt(
    objective: Objective,
    variables: Variables,
    trained: PyTree,
    batch: Batch,
    step: Step,
    *,
    policy: Policy,
    loss_scale: LossScale,
    seed: Seed | None = None,
    differentiate: bool = True,
) -> Attempt:
    """Differentiate one microbatch with respect to the trainable leaves.

    Args:
      objective: What to optimise.
      variables: The whole tree.
      trained: ``variables["params"]`` with None at each leaf that is not trained.
      batch: The microbatch.
      step: The moment, with this attempt's key.
      policy: Dtypes to compute in.
      loss_scale: Multiplies the differentiated scalar and divides the gradient.
      seed: Chooses the scalar to differentiate; None takes the loss of the microbatch.
      differentiate: False runs forward only and gives no gradient.
    """

    def run(trained: PyTree) -> tuple[Array, Any]:
        view = {**variables, "params": tree.combine(variables["params"], trained)}
        statistics, aux = loss_in(policy, objective, view, batch, step)
        aux = check_aux(objective, aux, variables)
        value, has_data = reduce_statistics(objective, statistics)
        scalar = value if seed is None else seed(statistics)
        return loss_scale.scale(scalar), (value, has_data, statistics, aux)

    if not differentiate:
        gradient: PyTree = None
        _, (value, has_data, statistics, aux) = run(trained)
    else:
        gradient, (value, has_data, statistics, aux) = jax.grad(run, has_aux=True)(trained)
        gradient = loss_scale.unscale(gradient)
    return Attempt(value, has_data, statistics, aux, gradient)


def planned_value(planned: PyTree) -> Seed:
    """Give the seed of one-pass `Terms`: each total over its mass in the whole window."""

    def seed(statistics: PyTree) -> Array:
        parts = [
            jnp.where(planned[name] > 0, mean.total / jnp.where(planned[name] > 0, planned[name], 1), 0)
            for name, mean in canonical(statistics).items()
        ]
        return sum(parts[1:], start=parts[0])

    return seed


def check_aux(objective: Objective, aux: Aux, variables: Variables) -> Aux:
    """Check what a loss reported beside its statistics, and give it in the state's dtypes.

    Raises:
      ContractError: ``params`` or an unknown collection in `Aux.variables`, another structure or shape, a metric with
        a reserved name or that is no scalar, or something that is no array.
    """
    who = type(objective).__name__
    for name, value in aux.metrics.items():
        if name in RESERVED_METRICS:
            raise ContractError(
                f"{who}: Aux.metrics[{name!r}] takes a name the trainer reports itself; choose another "
                f"(reserved: {', '.join(sorted(RESERVED_METRICS))})"
            )
        if not isinstance(value, Mean) and (not _is_numeric(value) or jnp.ndim(value) != 0):
            raise ContractError(
                f"{who}: Aux.metrics[{name!r}] must be a scalar or a Mean, got {kind_of(value)}; "
                "reduce it with .mean(), or put it in Aux.outputs and attach a metric that reads it"
            )
    for place in ("effects", "qk_stats", "outputs"):
        for name, leaf in tree.named_leaves(getattr(aux, place)).items():
            if not _is_numeric(leaf):
                raise ContractError(
                    f"{who}: Aux.{place} holds {kind_of(leaf)} at {name or 'its root'!r}: arrays and numbers alone "
                    "leave a compiled step; keep text and objects outside, or give numbers that stand for them"
                )
    if aux.variables is None:
        return aux
    given = check_collections(f"{who}: Aux.variables", aux.variables, variables)
    return Aux(aux.metrics, given, aux.effects, aux.qk_stats, aux.outputs)


def _is_numeric(value: Any) -> bool:
    """Say whether a compiled step can give a value back: an array or a Python number."""
    return tree.is_array(value) or isinstance(value, int | float | complex)


def check_collections(what: str, given: Mapping[str, Any], variables: Variables) -> dict[str, Any]:
    """Check replacement collections against the state's, and cast them to its dtypes."""
    if not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ContractError(f"{what} must map collections to trees, got {type(given).__name__}")
    out: dict[str, Any] = {}
    for name, new in given.items():
        if name == "params":
            raise ContractError(
                f"{what} may not hold 'params': parameters change through the optimizer. Return only the other "
                "collections, such as 'batch_stats'"
            )
        if name not in variables:
            raise ContractError(
                f"{what} holds the collection {name!r}, which the state lacks (it has "
                f"{', '.join(sorted(variables))}); return it from init too"
            )
        out[name] = _matched(f"{what}[{name!r}]", tree.as_plain(new), variables[name])
    return out


def _matched(what: str, new: Any, old: Any) -> Any:
    if jax.tree.structure(new) != jax.tree.structure(old):
        before, after = set(tree.leaf_names(old)), set(tree.leaf_names(new))
        raise ContractError(
            f"{what} must have the state's structure; missing: {sorted(before - after) or 'nothing'}, "
            f"unknown: {sorted(after - before) or 'nothing'}. Return the whole collection"
        )
    for name, (a, b) in zip(
        tree.leaf_names(new), zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True), strict=True
    ):
        if jnp.shape(a) != jnp.shape(b):
            raise ContractError(f"{what}/{name} must have shape {jnp.shape(b)}, got {jnp.shape(a)}")
    return jax.tree.map(lambda a, b: jnp.asarray(a, jnp.result_type(b)), new, old)


def loss_in(policy: Policy, objective: Objective, variables: Variables, batch: Batch, step: Step) -> tuple[PyTree, Aux]:
    """Call an objective's loss under a policy: parameters and inputs in its compute dtype, and the step says so."""
    averaged = None if step.averaged is None else cast_variables(policy, step.averaged)
    moment = replace(step, averaged=averaged, precision=policy)
    return call_loss(objective, cast_variables(policy, variables), cast_batch(policy, batch), moment)


def cast_variables(policy: Policy, variables: Variables) -> Variables:
    """Cast the parameters to the computing dtype; layer state keeps its own."""
    if policy.compute is None:
        return variables
    return {**variables, "params": policy.cast_compute(variables["params"])}


_EXACT_FIELDS = frozenset({"targets", "weights"})


def cast_batch(policy: Policy, batch: Batch) -> Batch:
    """Cast a batch's floating-point fields to the computing dtype; targets and weights stay exact."""
    if policy.compute is None:
        return batch
    match batch:
        case Mapping():
            return {k: v if k in _EXACT_FIELDS else policy.cast_compute(v) for k, v in batch.items()}
        case (inputs, *exact):
            return (policy.cast_compute(inputs), *exact)
        case _:
            return policy.cast_compute(batch)


def outputs_of(value: Array, statistics: PyTree, aux: Aux, policy: Policy) -> dict[str, Any]:
    """Give what metrics may read of one batch; everything unread is dead code in a compiled program."""
    metrics = dict(aux.metrics)
    if isinstance(statistics, Terms):
        for name, mean in statistics.means().items():
            if name in metrics or name in RESERVED_METRICS:
                raise ContractError(f"a term named {name!r} and a metric of that name: rename one")
            metrics[name] = mean
    return {
        "loss": value,
        "statistics": statistics,
        "metrics": metrics,
        **policy.cast_output(dict(aux.outputs)),
    }
