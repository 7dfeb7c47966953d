"""The JEPA objective: predict what a slowly moving encoder makes of hidden patches from the patches that are seen."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from telic import tree
from telic.artifacts import Representations
from telic.contract import Aux, Objective, Step
from telic.ema import EMASpec
from telic.errors import ContractError, DataError, ShapeError
from telic.mean import Mean, Terms, wide
from telic.models import Forward, adapt
from telic.objectives.from_model import without_dropped
from telic.objectives.jepa import features
from telic.objectives.jepa.features import Distance
from telic.objectives.jepa.masks import Masks, MultiBlockMask
from telic.types import Array, Batch, Key, Variables


class JepaObjective(Objective):
    """Train an encoder by predicting features of hidden patches, without labels and without pixels.

    The context encoder sees some patches; the predictor gives the features of blocks of others; the target encoder, the
    moving average of the first, sees all of them. No gradient reaches the targets.

    Args:
      encoder: Takes ``x`` and ``indices`` (int [batch, tokens], or None for all patches) by name, and gives the
        features [batch, tokens, dim] of those patches, such as `telic.models.ViT`.
      predictor: Takes ``context``, ``context_indices`` and ``target_indices`` by name, and gives the features of the
        targets, such as `telic.models.ViTPredictor`.
      masks: A `MultiBlockMask`.
      field: Field of the batch that holds images [batch, height, width, channels] or videos, floating-point.
      label: Field with class ids, which `evaluate` passes on to probes where the batch has it; None passes none.
      momentum: The target encoder's decay: a number, or a function of the updates; `momentum_ramp` by default.
      distance: "smooth_l1", "l1" or "l2".
      normalize_targets: Layer-norm the targets, without parameters.
      variance_weight: Weight of VICReg's variance term on the pooled context features; 0 leaves it out.
      covariance_weight: Weight of its covariance term.
      variables: Weights to start from, full or partial.
    Raises:
      ValueError: A setting is out of range.
    Example:
      >>> from telic.models import ViT, ViTPredictor
      >>> masks = MultiBlockMask.for_grid((7, 7))
      >>> objective = JepaObjective(ViT(patch=4, dim=32), ViTPredictor(grid=(7, 7), dim=16), masks)
      >>> objective.ema.select
      'params/encoder/**'

    Source: Assran et al. 2023 (I-JEPA); Bardes et al. 2024 (V-JEPA).
    """

    def __init__(
        self,
        encoder: Any,
        predictor: Any,
        masks: MultiBlockMask,
        *,
        field: str = "image",
        label: str | None = "label",
        momentum: float | Callable[[Any], Any] | None = None,
        distance: Distance = "smooth_l1",
        normalize_targets: bool = True,
        variance_weight: float = 0.0,
        covariance_weight: float = 0.0,
        variables: Any = None,
    ):
        self.models = {"encoder": adapt(encoder), "predictor": adapt(predictor)}
        self.masks = masks
        self.field = field
        self.label = label
        self.ema = EMASpec(momentum_ramp() if momentum is None else momentum, select="params/encoder/**")
        features.distances(0.0, 0.0, distance)
        self.distance: Distance = distance
        self.normalize_targets = normalize_targets
        if variance_weight < 0 or covariance_weight < 0:
            raise ValueError(
                f"weights of the penalties must be 0 or more, got {variance_weight!r} and {covariance_weight!r}"
            )
        self.variance_weight = variance_weight
        self.covariance_weight = covariance_weight
        self._given = variables
        self._image: Any = None

    def bind(self, example: Batch) -> "JepaObjective":
        """Give this objective with the shape of a first batch's images."""
        images = self._images(example)
        bound = copy.copy(self)
        bound._image = jax.ShapeDtypeStruct(jnp.shape(images), images.dtype)
        return bound

    def held_variables(self) -> Any:
        """Give the weights to start from, or None."""
        return self._given

    def init(self, key: Key, variables: Any = None) -> Variables:
        """Initialise both models, with given weights laid over.

        Raises:
          ContractError: No batch has been seen.
          ShapeError: The encoder has another number of patches than the masks' grid.
          ValueError: A given leaf has another shape, or neither model has it.
        """
        if self._image is None:
            raise ContractError(
                "the models' shapes are learned from a first batch: run and fit do it; call place(example=batch) or "
                "objective.bind(batch) to do it by hand"
            )
        rows = self._image.shape[0]
        images = jnp.zeros(self._image.shape, self._image.dtype)
        context = jnp.zeros((rows, self.masks.context_size), jnp.int32)
        targets = jnp.zeros((rows, self.masks.target_size), jnp.int32)
        parts = {"encoder": self.models["encoder"].init(tree.fold_name(key, "encoder"), _encoded(images, context))}
        found = jax.eval_shape(
            lambda v: self._run("encoder", _joined(v), _encoded(images, None), Step(train=False)), parts
        )
        tokens = found.prediction
        if len(tokens.shape) != 3 or tokens.shape[1] != self.masks.num_patches:
            raise ShapeError(
                f"the encoder must give one feature for each of the {self.masks.num_patches} patches of the masks' "
                f"grid {self.masks.grid}, [batch, {self.masks.num_patches}, dim], got {tokens.shape}; make the "
                "grid that of the image's size over the patch size"
            )
        seen = jnp.zeros((rows, self.masks.context_size, tokens.shape[-1]), tokens.dtype)
        wanted = {"context": seen, "context_indices": context, "target_indices": targets}
        parts["predictor"] = self.models["predictor"].init(tree.fold_name(key, "predictor"), wanted)
        start = _joined(parts)
        given = self._given if variables is None else variables
        if given is None:
            return start
        laid, _, unused = tree.overlay(start, tree.as_plain(given), what="variables")
        if unused:
            raise ValueError(
                f"variables= has leaves that the models lack: {', '.join(unused)}; names begin with params/encoder/ or "
                "params/predictor/"
            )
        return laid

    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Give the mean distance between predicted and target features; `Terms` where penalties were asked for."""
        if self.ema is None:
            raise ContractError(
                "JepaObjective.ema was set to None, and its targets are the moving average of the encoder: with the "
                "encoder itself as target everything becomes one constant. Set "
                "ema=EMASpec(decay, select='params/encoder/**')"
            )
        weights = batch.get("weights")
        images = without_dropped(self._images(batch), weights)
        rows = images.shape[0]
        masks = self.masks.draw(self._key(step, "masks"), rows)
        context = self._run("encoder", variables, _encoded(images, masks.context), step)
        predicted = self._run("predictor", variables, _folded(context.prediction, masks), step)
        whole = variables if step.averaged is None else step.averaged
        still = Step(step=step.step, key=step.key, updates=step.updates, train=False, precision=step.precision)
        target = jax.lax.stop_gradient(wide(self._run("encoder", whole, _encoded(images, None), still).prediction))
        wanted = features.layer_normed(target) if self.normalize_targets else target
        wanted = jnp.take_along_axis(wanted[:, None], masks.targets[..., None], axis=2)
        found = predicted.prediction.reshape(*wanted.shape[:3], -1)
        if found.shape != wanted.shape:
            raise ShapeError(
                f"the predictor must give features of the encoder's width, {wanted.shape[-1]}, got {found.shape[-1]}; "
                "its last layer projects back to the width of the context it is given"
            )
        per_row = features.distances(found, wanted, self.distance).mean(axis=(1, 2, 3))
        pooled = target.mean(axis=1)
        metrics = {"repr_std": features.spread(pooled), "repr_cov_offdiag": features.correlation(pooled)}
        state = _changed(variables, {"encoder": context, "predictor": predicted}) if step.train else None
        outputs = {"prediction": found, "targets": wanted, "losses": per_row}
        aux = Aux(metrics=metrics, variables=state, outputs=outputs)
        return self._statistics(Mean.of(per_row, weights), context.prediction, weights), aux

    def _statistics(self, mean: Mean, context: Array, weights: Any) -> Any:
        """Add the penalties asked for. They compare the rows of a microbatch; each counts by its mass."""
        if not self.variance_weight and not self.covariance_weight:
            return mean
        pooled = wide(context).mean(axis=1)
        if weights is not None:
            raise DataError(
                "variance and covariance are taken over the rows of a batch, which cannot be weighted: leave the "
                "field 'weights' out, or the penalties"
            )
        terms: dict[str, tuple[Any, Mean]] = {"prediction": (1.0, mean)}
        if self.variance_weight:
            value = features.variance_penalty(pooled)
            terms["variance"] = (self.variance_weight, Mean(value * mean.mass, mean.mass))
        if self.covariance_weight:
            value = features.covariance_penalty(pooled)
            terms["covariance"] = (self.covariance_weight, Mean(value * mean.mass, mean.mass))
        return Terms(terms)

    def evaluate(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Give mean-pooled features with labels, for probes; the loss's metrics already tell of collapse."""
        images = self._images(batch)
        found = self._run("encoder", variables, _encoded(images, None), step)
        pooled = wide(found.prediction).mean(axis=1)
        labels = batch.get(self.label) if self.label is not None else None
        return Representations(pooled, labels)

    def represent(self, variables: Variables, images: Any) -> Array:
        """Give mean-pooled features, [batch, dim]: what a linear probe reads."""
        found = self._run("encoder", variables, _encoded(jnp.asarray(images), None), Step(train=False))
        return wide(found.prediction).mean(axis=1)

    def _run(self, part: str, variables: Variables, inputs: Any, step: Step) -> Forward:
        own = {name: held[part] for name, held in variables.items() if isinstance(held, Mapping) and part in held}
        key = None if step.key is None else tree.fold_name(step.key, part)
        output: Forward = self.models[part].forward(own, inputs, train=step.train, key=key)
        return output.replace(prediction=step.precision.cast_output(output.prediction))

    def _images(self, batch: Batch) -> Any:
        if not isinstance(batch, Mapping) or self.field not in batch:
            got = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
            raise DataError(
                f"a batch for JEPA is a mapping with {self.field!r}, got {got}; name the field with field=, or rename "
                "the column"
            )
        images = batch[self.field]
        if not tree.is_float(images):
            got = getattr(images, "dtype", type(images).__name__)
            raise DataError(f"{self.field!r} must be floating-point, scaled to about [-1, 1], got {got}")
        return images

    @staticmethod
    def _key(step: Step, name: str) -> Key:
        if step.key is None:
            raise ContractError("a JEPA loss draws masks: pass Step(key=jax.random.key(...))")
        return tree.fold_name(step.key, name)


def momentum_ramp(start: float = 0.996, end: float = 1.0, *, steps: float = 100_000) -> Callable[[Any], Array]:
    """Give a decay that rises linearly with the updates, from `start` to `end` at update `steps`, then stays.

    Source: Assran et al. 2023, momentum_scheduler.
    """
    if not 0 <= start <= end <= 1:
        raise ValueError(f"momentum_ramp takes 0 <= start <= end <= 1, got {start!r} and {end!r}")
    if not steps >= 1:
        raise ValueError(f"momentum_ramp takes at least one step, got {steps!r}")

    def decay(updates: Any) -> Array:
        part = jnp.minimum(wide(updates) / steps, 1.0)
        # The end itself, where start + (end - start) · 1 would miss it by a rounding.
        return jnp.where(part < 1, start + (end - start) * part, end)

    return decay


def _joined(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Turn {part: {collection: tree}} into {collection: {part: tree}}."""
    names = {name for collections in parts.values() for name in collections}
    return {
        name: {part: collections[name] for part, collections in parts.items() if name in collections} for name in names
    }


def _changed(variables: Variables, outputs: Mapping[str, Forward]) -> dict[str, Any] | None:
    """Give the collections that a forward pass changed, whole."""
    new: dict[str, Any] = {}
    for part, output in outputs.items():
        for name, held in output.state.items():
            new[name] = {**new.get(name, variables[name]), part: held}
    return new or None


def _encoded(images: Any, indices: Any) -> dict[str, Any]:
    return {"x": images, "indices": indices}


def _folded(context: Array, masks: Masks) -> dict[str, Array]:
    """Give the predictor's inputs with one row for each target block of each example."""
    blocks = masks.targets.shape[1]
    return {
        "context": jnp.repeat(context, blocks, axis=0),
        "context_indices": jnp.repeat(masks.context, blocks, axis=0),
        "target_indices": masks.targets.reshape(-1, masks.targets.shape[-1]),
    }
