"""Objectives built from a model and a loss, or from a model and a four-argument objective function."""

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.contract import Aux, Objective, Step, loss_mean
from telic.errors import ContractError, DataError, ShapeError, ShapeWarning, VariablesWarning
from telic.mean import Mean, Terms, spread_weights
from telic.models import Forward, adapt
from telic.models.linen import LinenModel
from telic.objectives.fields import Fields, supervised_fields
from telic.types import Batch, Key, Variables


class ModelObjective(Objective):
    """An objective over one model: it initialises the model's variables and calls it forward.

    Args:
      model: A Linen module, an NNX or Equinox module, or a pair (init, apply).
      variables: Full or partial tree of weights to start from, by collection. Leaves it lacks are initialised afresh.
      frozen: Further trees by name, put into the variables under that name: arguments of the program, never
        differentiated, never cast.
    """

    def __init__(self, model: Any, *, variables: Any = None, frozen: Mapping[str, Any] | None = None):
        self.model = adapt(model)
        self._given = None if variables is None else _collections(variables)
        self._frozen = dict(frozen or {})
        self._inputs: Any = None
        if "params" in self._frozen:
            raise ValueError("frozen= names a collection beside 'params': call it for what it is, such as 'teacher'")

    def bind(self, example: Batch) -> "ModelObjective":
        """Give this objective with the shapes of a first batch's inputs."""
        fields = supervised_fields(example, needs_targets=False)
        bound = copy.copy(self)
        bound._inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), fields.inputs)
        return bound

    def with_model(self, model: Any) -> "ModelObjective":
        """Give the same objective over another model; its variables are given to it, and none are held."""
        other = copy.copy(self)
        other.model, other._given, other._inputs = adapt(model), None, None
        return other

    def held_variables(self) -> Any:
        """Give the weights in the model's value, the given ones laid over, and the frozen trees."""
        held = self.model.held()
        if held is None and self._given is None and not self._frozen:
            return None
        return {"model": held, "given": self._given, "frozen": self._frozen}

    def init(self, key: Key, variables: Any = None) -> Variables:
        """Initialise the model, with given weights laid over.

        Args:
          key: PRNG key.
          variables: What `held_variables` returned, or weights by collection; None means the configured ones.
        Raises:
          ContractError: No batch has been seen, so the input shapes are unknown.
          ValueError: A given leaf has another shape than the model's.
        """
        if self._inputs is None and self.model.held() is None:
            raise ContractError(
                "the model's shapes are learned from a first batch: run, fit and init(batch) do it; call "
                "place(example=batch) or objective.bind(batch) to do it by hand"
            )
        held: Any = variables if _is_held(variables) else self.held_variables()
        given = None if held is None else held["given"]
        if variables is not None and not _is_held(variables):
            given = _collections(variables)
        if held is not None and held["model"] is not None:
            start = held["model"]
        else:
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._inputs)
            start = self.model.init(key, zeros)
        if given is not None:
            start, missing, unused = tree.overlay(start, given, what="variables")
            _tell(missing, unused)
        frozen = {} if held is None else held["frozen"]
        clash = sorted(set(start) & set(frozen))
        if clash:
            raise ValueError(f"frozen= names collections the model has already: {clash}; choose other names")
        return {**start, **frozen}

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Give the names that the model gives the dimensions of its parameters, by leaf; none where it gives none."""
        if self._inputs is None or not isinstance(self.model, LinenModel):
            return {}
        return self.model.logical_axes(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._inputs))

    def model_of(self, variables: Variables) -> Any:
        """Give the usable model with these weights."""
        return self.model.bind({k: v for k, v in variables.items() if k not in self._frozen})


def _is_held(variables: Any) -> bool:
    return isinstance(variables, Mapping) and set(variables) == {"model", "given", "frozen"}


def _collections(variables: Any) -> dict[str, Any]:
    if not isinstance(variables, Mapping) or "params" not in variables:
        got = sorted(map(str, variables)) if isinstance(variables, Mapping) else type(variables).__name__
        raise ValueError(f"variables= takes weights by collection, {{'params': ...}}, got {got}")
    return tree.as_plain(variables)


def _tell(missing: list[str], unused: list[str]) -> None:
    """Warn of weights that were not given, or given and not used."""
    if not missing and not unused:
        return
    parts = []
    if missing:
        parts.append(f"not given, initialised afresh: {', '.join(missing)}")
    if unused:
        parts.append(f"given, but the model lacks: {', '.join(unused)}")
    warnings.warn(f"variables= does not match the model. {'; '.join(parts)}", VariablesWarning, stacklevel=3)


@dataclass(frozen=True)
class ForwardCall:
    """The model's forward pass as a four-argument objective function gets it.

    The prediction comes in the output dtype of the run's precision, so that a loss computes in it. Each call draws
    from its own key. Under scan or vmap a body is traced once, so its calls share a key unless
    `key` says otherwise.

    Attributes:
      step: The moment: counters, key, averaged weights, and whether this is training.
    """

    _model: Any
    step: Step
    _calls: list[int] = dataclasses.field(default_factory=list[int])

    def __call__(self, variables: Variables, inputs: Any, *, key: Key | None = None) -> Forward:
        """Run the model.

        Args:
          variables: The whole tree, as the objective received it (or one of the same structure).
          inputs: What the model reads, [batch, ...].
          key: Key of this call's draws; None derives one from the attempt's key and the number of this call.
        """
        if key is None and self.step.key is not None:
            self._calls.append(1)
            key = jax.random.fold_in(self.step.key, len(self._calls))
        output: Forward = self._model.forward(variables, inputs, train=self.step.train, key=key)
        return output.replace(prediction=self.step.precision.cast_output(output.prediction))


class Supervised(ModelObjective):
    """A model and a loss ``(targets, prediction) -> per-example losses | Mean | Terms | scalar``."""

    def __init__(
        self,
        model: Any,
        loss: Callable[..., Any] | None,
        *,
        variables: Any = None,
        frozen: Mapping[str, Any] | None = None,
    ):
        super().__init__(model, variables=variables, frozen=frozen)
        self._loss = loss

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss to report: an evaluator may do without."""
        return self._loss is not None

    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Run the model once and compare its prediction with the targets."""
        fields = supervised_fields(batch, needs_targets=self._loss is not None)
        forward = ForwardCall(self.model, step)
        output = forward(variables, fields.inputs)
        if self._loss is None:
            value: Any = Mean(jnp.zeros(()), jnp.zeros(()))
        else:
            value = self._loss(without_dropped(fields.targets, fields.weights), output.prediction)
            _check_broadcast(value, fields.targets, output.prediction)
        return _statistics(value, fields), _aux(output, fields, step)


class FunctionObjective(ModelObjective):
    """A model and a function ``(forward, variables, inputs, targets) -> (loss, output)``."""

    def __init__(
        self,
        model: Any,
        fn: Callable[..., Any],
        *,
        variables: Any = None,
        frozen: Mapping[str, Any] | None = None,
    ):
        super().__init__(model, variables=variables, frozen=frozen)
        self._fn = fn

    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Call the function with the model's forward pass and check what it returned."""
        fields = supervised_fields(batch, needs_targets=False)
        returned = self._fn(ForwardCall(self.model, step), variables, fields.inputs, fields.targets)
        name = getattr(self._fn, "__name__", "the objective function")
        match returned:
            case (value, Forward() as output):
                return _statistics(value, fields), _aux(output, fields, step)
            case (_, other):
                got = f"(loss, {_kind(other)})"
            case Forward():
                got = "the output without the loss"
            case _:
                got = f"{_kind(returned)} alone" if returned is not None else "None"
        raise ContractError(
            f"{name} must return (loss, output), where output is what forward(variables, inputs) gave (use "
            f"output.replace(prediction=...) for another prediction), got {got}; write `return loss, output`"
        )


def _kind(value: Any) -> str:
    """Name what a function returned in the user's words: a traced array is an array."""
    return f"an array of shape {value.shape}" if isinstance(value, jax.Array) else type(value).__name__


def without_dropped(values: Any, weights: Any) -> Any:
    """Give values with 0 in the rows of weight 0: what stands there, NaN included, reaches no gradient."""
    if weights is None:
        return values

    def one(value: Any) -> Any:
        if not tree.is_float(value) or jnp.shape(weights) != jnp.shape(value)[: jnp.ndim(weights)]:
            return value
        return jnp.where(spread_weights(weights, value) != 0, value, 0)

    return jax.tree.map(one, values)


def _check_broadcast(value: Any, targets: Any, prediction: Any) -> None:
    """Refuse a loss that compares every target with every prediction, which trains to nonsense without a word.

    Raises:
      ShapeError: Targets (n,) and prediction (n, 1), or the reverse, gave losses (n, n).
    """
    if not all(isinstance(x, jax.Array | np.ndarray) for x in (value, targets, prediction)):
        return
    shapes = {targets.shape, prediction.shape}
    rows = prediction.shape[0] if prediction.ndim else 1
    if rows > 1 and shapes == {(rows,), (rows, 1)} and value.shape == (rows, rows):
        raise ShapeError(
            f"the loss compared each of {rows} targets with each prediction: targets {targets.shape} and prediction "
            f"{prediction.shape} gave losses {value.shape}; make both one shape, as with prediction[..., 0]"
        )
    if rows > 1 and shapes == {(rows,), (rows, 1)} and value.ndim == 0:
        # A scalar does not show what was compared with what; a loss may have squeezed by itself.
        warnings.warn(
            f"targets {targets.shape} and prediction {prediction.shape} differ by a last axis of 1, and the loss is a "
            f"scalar: if it compares them as they are, it compares each of {rows} targets with each prediction. Make "
            "both one shape, as with prediction[..., 0]",
            ShapeWarning,
            stacklevel=2,
        )


def _statistics(value: Any, fields: Fields) -> Any:
    """Turn a loss into statistics: arrays become Means, weighted when weights came."""
    if isinstance(value, Mean | Terms):
        return value
    if jax.tree.structure(value) != jax.tree.structure(0.0):
        raise ContractError(
            f"a loss must return per-example losses, Mean, Terms or a scalar, got {type(value).__name__}"
        )
    if jnp.ndim(value) == 0:
        if fields.weights is not None:
            raise DataError(
                "the batch has weights, but the loss is a scalar, which cannot be weighted: return one loss per "
                "example, or Mean(total, mass)"
            )
        return value
    return loss_mean(value, fields.weights, fields.inputs)


def _aux(output: Forward, fields: Fields, step: Step) -> Aux:
    outputs = {"prediction": output.prediction, "targets": fields.targets, "sown": output.sown}
    if fields.weights is not None:
        outputs["weights"] = fields.weights
    # In inference nothing is stored, and layers change nothing.
    state = dict(output.state) if step.train and output.state else None
    return Aux(variables=state, outputs=outputs)
