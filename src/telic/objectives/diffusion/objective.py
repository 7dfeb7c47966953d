"""The diffusion objective: a network learns the way back from noise to data, at noise levels drawn at random."""

import copy
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from telic import tree
from telic.artifacts import ImageGrid, Scalars
from telic.contract import Aux, Step
from telic.ema import EMASpec
from telic.errors import ContractError, DataError, ShapeError
from telic.mean import Mean, wide
from telic.models import Forward
from telic.objectives.diffusion.guidance import Guidance
from telic.objectives.diffusion.process import Process, as_process
from telic.objectives.diffusion.samplers import Point, Sampler, as_sampler, run_sampler, way
from telic.objectives.from_model import ModelObjective, without_dropped
from telic.types import Array, Batch, Key, Variables


class Autoencoder(Protocol):
    """What a latent model needs of its autoencoder. Its weights are frozen, under ``variables["autoencoder"]``."""

    @property
    def variables(self) -> Variables:
        """The weights, by collection."""
        ...

    def encode(self, variables: Variables, images: Any, *, key: Key) -> Array:
        """Give the latents of images, of about unit variance; `key` is for those that draw."""
        ...

    def decode(self, variables: Variables, latents: Any) -> Array:
        """Give the images of latents."""
        ...


class DiffusionObjective(ModelObjective):
    """Train a network to denoise: diffusion, flow matching and EDM, on images, videos, vectors or latents.

    The loss of an example is the weighted squared error of the network's output at one noise level drawn for it. Time,
    noise, dropped conditions, the encoder's draw and the network's dropout have keys of their own: changing one leaves
    the others as they are.

    Args:
      model: Takes ``x`` (the noisy data), ``t`` (a number that tells the noise level, [batch]) and the conditions by
        name, and gives an array of x's shape. A pair (init, apply) of functions gets them as one mapping.
      process: A name ("flow", "edm", "ddpm", "cosine", "min_snr", "zero_snr") or a `Process`.
      field: Field of the batch that holds the data, floating-point [batch, ...].
      conditions: ``{field: null}``: the batch's fields that the model gets, each with the value that stands for "no
        condition", such as the id after the last class.
      condition_dropout: Part of the examples whose conditions are all replaced by their nulls, in training.
      data_range: Between which values the data lie, checked on the first batch; None checks nothing (and samples are
        not clipped), for data that are standardised or latent.
      autoencoder: Train in the latents of an `Autoencoder`, and decode samples.
      ema_decay: Decay of the average of the parameters that evaluation and samples use, a function of the updates, or
        None for no average.
      sampler: How `sample` and `preview` sample: a name or a value of `telic.objectives.diffusion.samplers`.
      num_steps: Steps of it.
      guidance: Its guidance: a scale, a `Guidance`, or None.
      scoring: What `evaluate` makes of each batch beside losses: "denoised" shows the data found in noise, "samples"
        draws a sample for each row's conditions, for metrics that compare distributions.
      num_levels: Noise levels at which `evaluate` reports the loss.
      variables: Weights to start from, as for `telic.supervised`.
    Raises:
      ValueError: A setting is out of range, or guidance comes without conditions or without their dropout.
    Example:
      >>> import jax.numpy as jnp
      >>> from telic.models import DiT
      >>> objective = DiffusionObjective(DiT(dim=32, depth=1, classes=11), "flow", conditions={"label": 10})
      >>> objective.ema.decay
      0.999

    Source: Ho et al. 2020; Karras et al. 2022; Liu et al. 2023; Ho and Salimans 2022 for the dropped conditions.
    """

    def __init__(
        self,
        model: Any,
        process: str | Process = "flow",
        *,
        field: str = "image",
        conditions: Mapping[str, Any] | None = None,
        condition_dropout: float = 0.1,
        data_range: tuple[float, float] | None = (-1.0, 1.0),
        autoencoder: Autoencoder | None = None,
        ema_decay: Any = 0.999,
        sampler: str | Sampler = "ddim",
        num_steps: int = 50,
        guidance: float | Guidance | None = None,
        scoring: Literal["denoised", "samples"] = "denoised",
        num_levels: int = 5,
        variables: Any = None,
    ):
        frozen = {} if autoencoder is None else {"autoencoder": tree.as_plain(autoencoder.variables)}
        super().__init__(model, variables=variables, frozen=frozen)
        self.process = as_process(process)
        self.field = field
        self.conditions = dict(conditions or {})
        if not 0 <= condition_dropout < 1:
            raise ValueError(f"condition_dropout is a part of the examples, in [0, 1), got {condition_dropout!r}")
        self.condition_dropout = condition_dropout
        if data_range is not None and not data_range[0] < data_range[1]:
            raise ValueError(f"data_range is (low, high), got {data_range!r}")
        self.data_range = data_range
        if {"x", "t", field} & set(self.conditions):
            raise ValueError(
                f"conditions are fields beside {field!r}, and none is called 'x' or 't', which the model's other "
                f"arguments are; got {sorted(self.conditions)}"
            )
        self.autoencoder = autoencoder
        self.ema = None if ema_decay is None else EMASpec(ema_decay)
        self.sampler = as_sampler(sampler)
        self.num_steps = num_steps
        self.guidance = self._as_guidance(guidance)
        if scoring not in ("denoised", "samples"):
            raise ValueError(f"scoring must be 'denoised' or 'samples', got {scoring!r}")
        self.scoring = scoring
        if num_levels < 0:
            raise ValueError(f"num_levels must be 0 or more, got {num_levels!r}")
        self.num_levels = num_levels
        self._shape: tuple[int, ...] | None = None

    # -- what is learned of a batch ------------------------------------------------------------------------------

    def bind(self, example: Batch) -> "DiffusionObjective":
        """Give this objective with the shapes of a first batch, whose values are checked too."""
        data, conditions = self._fields(example)
        self._check_range(data)
        bound = copy.copy(self)
        bound._shape = tuple(jnp.shape(data)[1:])
        shape = jax.ShapeDtypeStruct(jnp.shape(data), wide(jnp.zeros((), data.dtype)).dtype)
        if self.autoencoder is not None:
            shape = jax.eval_shape(
                lambda v, x: self._latents(v, x, jax.random.key(0)), {"autoencoder": self.autoencoder.variables}, shape
            )
        time = jax.ShapeDtypeStruct(shape.shape[:1], jnp.float32)
        bound._inputs = {"x": shape, "t": time, **tree.shape_structs(conditions)}
        return bound

    def _fields(self, batch: Batch) -> tuple[Any, dict[str, Any]]:
        """Take a batch apart: (data, conditions)."""
        wanted = [self.field, *self.conditions]
        names = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        missing = [name for name in wanted if not isinstance(batch, Mapping) or name not in batch]
        if missing:
            raise DataError(
                f"a batch for diffusion is a mapping with {', '.join(map(repr, wanted))}; "
                f"{', '.join(map(repr, missing))} is missing from {names}. Name the fields with "
                "field= and conditions=, or rename the columns"
            )
        data = batch[self.field]
        if not tree.is_float(data):
            got = getattr(data, "dtype", type(data).__name__)
            low, high = self.data_range or (-1.0, 1.0)
            how = " Write images / 127.5 - 1." if got == np.uint8 and (low, high) == (-1, 1) else " Scale them first."
            raise DataError(f"{self.field!r} must be floating-point in [{low:g}, {high:g}], got {got}.{how}")
        if jnp.ndim(data) < 2:
            raise ShapeError(f"{self.field!r} must be [batch, ...], got {jnp.shape(data)}")
        return data, {name: batch[name] for name in self.conditions}

    def _check_range(self, data: Any) -> None:
        """Raise when the values lie outside of the range. Compiled programs cannot look; the first batch shows it."""
        if self.data_range is None or isinstance(data, Tracer) or not tree.is_array(data) or not data.size:
            return
        low, high = self.data_range
        smallest, largest = float(np.min(data)), float(np.max(data))
        slack = 1e-3 * (high - low)
        if smallest < low - slack or largest > high + slack:
            raise DataError(
                f"{self.field!r} must lie in [{low:g}, {high:g}], got values from {smallest:.4g} to {largest:.4g}; "
                "scale them, give their range as data_range=(low, high), or data_range=None for data without one"
            )

    # -- the loss ------------------------------------------------------------------------------------------------

    def loss(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Give the mean over the examples of their weighted squared errors, each at a noise level of its own."""
        data, conditions = self._fields(batch)
        weights = batch.get("weights")
        data = self._latents(variables, without_dropped(data, weights), _named(step, "encode"))
        rows = data.shape[0]
        t = self.process.schedule.draw(_named(step, "time"), (rows,))
        noise = jax.random.normal(_named(step, "noise"), data.shape, data.dtype)
        if step.train and self.conditions and self.condition_dropout:
            drop = jax.random.bernoulli(_named(step, "drop"), self.condition_dropout, (rows,))
            conditions = self._without(conditions, drop)
        x = self.process.noised(data, noise, t)
        output = self._forward(variables, x, t, conditions, step)
        losses = self.process.losses(output.prediction, data, noise, t)
        state = dict(output.state) if step.train and output.state else None
        outputs = {"prediction": output.prediction, "losses": losses, "t": t, "sown": output.sown}
        return Mean.of(losses, weights), Aux(variables=state, outputs=outputs)

    def _forward(self, variables: Variables, x: Array, t: Any, conditions: Mapping[str, Any], step: Step) -> Forward:
        inputs, time = self.process.network_inputs(x, t)
        return self._network(variables, inputs, time, conditions, step)

    def _network(self, variables: Variables, x: Array, time: Any, conditions: Any, step: Step) -> Forward:
        """Run the network on its scaled input. The time stays in float32: bfloat16 has 256 of them in an octave."""
        inputs = {"x": step.precision.cast_compute(x), "t": time, **conditions}
        key = None if step.key is None else tree.fold_name(step.key, "dropout")
        try:
            output: Forward = self.model.forward(variables, inputs, train=step.train, key=key)
        except TypeError as error:
            error.add_note(
                f"the model of a DiffusionObjective is called with {', '.join(inputs)} by name: write "
                f"def __call__(self, {', '.join(inputs)}), or a pair (init, apply) that takes them as one mapping"
            )
            raise
        if jnp.shape(output.prediction) != jnp.shape(x):
            raise ShapeError(
                f"the model must give an array of its input's shape, {jnp.shape(x)}, got "
                f"{jnp.shape(output.prediction)}; its last layer needs as many channels as the data"
            )
        return output.replace(prediction=wide(step.precision.cast_output(output.prediction)))

    def _without(self, conditions: Mapping[str, Any], drop: Any) -> dict[str, Any]:
        """Replace conditions by their nulls in the rows to drop."""
        out: dict[str, Any] = {}
        for name, value in conditions.items():
            null = jnp.broadcast_to(jnp.asarray(self.conditions[name], value.dtype), value.shape[1:])
            out[name] = jnp.where(drop.reshape(-1, *[1] * (value.ndim - 1)), null, value)
        return out

    def _latents(self, variables: Variables, data: Any, key: Key) -> Array:
        data = wide(data)
        if self.autoencoder is None:
            return data
        return jax.lax.stop_gradient(wide(self.autoencoder.encode(variables["autoencoder"], data, key=key)))

    # -- sampling ------------------------------------------------------------------------------------------------

    def sample(
        self,
        variables: Variables,
        key: Key,
        num: int | None = None,
        *,
        conditions: Mapping[str, Any] | None = None,
        shape: tuple[int, ...] | None = None,
        sampler: str | Sampler | None = None,
        num_steps: int | None = None,
        spacing: str | None = None,
        guidance: float | Guidance | None = None,
        step: Step | None = None,
    ) -> Array:
        """Draw samples. The loop over the steps is one compiled program; compile it whole with ``jax.jit``.

        Args:
          variables: Weights; those of the average are `TrainState.averaged`.
          key: Drives the starting noise and the sampler's.
          num: How many; None draws one for each row of `conditions`.
          conditions: Fields by name, [num, ...], as in a batch; None draws without conditions.
          shape: Shape of one sample; None takes that of the batch this objective was bound to.
          sampler: None takes the objective's, and so for the others.
          num_steps: Steps of the sampler.
          spacing: Where its steps lie, a name that the schedule knows.
          guidance: A scale or a `Guidance`.
          step: The moment, for its precision.
        Returns:
          Samples, [num, ...], in the data's range.
        Raises:
          ValueError: The sampler does not fit, guidance needs conditions, or nothing says what to draw.
        """
        shape = self._sample_shape(shape)
        given = None if conditions is None else self._as_conditions(conditions)
        rows = num if num is not None else (None if given is None else tree.leading_dimension(given))
        if rows is None:
            raise ValueError("sample needs num=, how many to draw, or conditions= with one row for each")
        guide = self.guidance if guidance is None else self._as_guidance(guidance)
        if given is None:
            given = self._nulls(rows)
            guide = None
        chosen = self.sampler if sampler is None else as_sampler(sampler)
        schedule = self.process.schedule
        path = way(schedule, schedule.times(num_steps or self.num_steps, spacing=spacing))
        self._check_start(path)
        moment = Step(key=key, train=False) if step is None else step
        start, draws = jax.random.split(key)
        noise = jax.random.normal(start, (rows, *shape))
        x = noise * float(np.hypot(path.alpha[0], path.sigma[0]))
        denoise = self._denoiser(variables, given, guide, moment)
        data = run_sampler(denoise, x, path, sampler=chosen, schedule=schedule, key=draws)
        if self.autoencoder is not None:
            data = wide(self.autoencoder.decode(variables["autoencoder"], data))
        return data if self.data_range is None else jnp.clip(data, *self.data_range)

    def _denoiser(self, variables: Variables, conditions: dict[str, Any], guide: Guidance | None, step: Step) -> Any:
        """Give (x, point) -> data for some conditions, guided where asked for."""
        schedule, prediction = self.process.schedule, self.process.prediction

        def network(x: Array, point: Point, given: dict[str, Any]) -> Array:
            time = jnp.broadcast_to(schedule.network_time(point.t), x.shape[:1])
            scaled = x * prediction.input_scale(point.alpha, point.sigma)
            return self._network(variables, scaled, time, given, step).prediction

        def both(guide: Guidance, x: Array, point: Point) -> Array:
            nulls = self._without(conditions, jnp.ones(x.shape[0], bool))
            joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), conditions, nulls)
            conditional, unconditional = jnp.split(network(jnp.concatenate([x, x]), point, joined), 2)
            return guide.mix(conditional, unconditional)

        def denoise(x: Array, point: Point) -> Array:
            if guide is None or guide.scale == 1:
                output = network(x, point, conditions)
            elif guide.is_everywhere:
                output = both(guide, x, point)
            else:
                here = guide
                acts = here.acts(point.sigma / jnp.maximum(point.alpha, jnp.finfo(x.dtype).tiny))
                output = jax.lax.cond(acts, lambda x: both(here, x, point), lambda x: network(x, point, conditions), x)
            return prediction.estimates(x, output, point.alpha, point.sigma)[0]

        return denoise

    def _nulls(self, rows: int) -> dict[str, Any]:
        """Give conditions that say nothing, in the dtypes and shapes of the bound batch."""
        if self.conditions and self._inputs is None:
            raise ContractError("sampling without conditions needs their shapes: call objective.bind(batch) first")
        return {
            name: jnp.broadcast_to(jnp.asarray(null, self._inputs[name].dtype), (rows, *self._inputs[name].shape[1:]))
            for name, null in self.conditions.items()
        }

    def _as_conditions(self, conditions: Mapping[str, Any]) -> dict[str, Any]:
        missing = sorted(set(self.conditions) - set(conditions))
        unknown = sorted(set(conditions) - set(self.conditions))
        if missing or unknown:
            raise DataError(
                f"conditions must be {', '.join(map(repr, self.conditions)) or 'none'}, one row for each sample; "
                f"missing: {missing}, unknown: {unknown}"
            )
        return {name: jnp.asarray(value) for name, value in conditions.items()}

    def _as_guidance(self, given: float | Guidance | None) -> Guidance | None:
        guide = Guidance(float(given)) if isinstance(given, int | float) else given
        if guide is None or guide.scale == 1:
            return guide
        if not self.conditions:
            raise ValueError(
                "guidance strengthens a condition, and there is none; give conditions={field: null}, the null being "
                "the value that means no condition"
            )
        if not self.condition_dropout:
            raise ValueError(
                "guidance needs a network that was trained without its conditions too, and condition_dropout is 0; "
                "train with condition_dropout=0.1"
            )
        return guide

    def _sample_shape(self, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        if self._inputs is not None and shape is None:
            return tuple(self._inputs["x"].shape[1:])
        if shape is None:
            raise ContractError(
                "sample needs shape=, that of one sample, or an objective that saw a batch: bind(batch)"
            )
        return tuple(shape)

    def _check_start(self, path: Point) -> None:
        with jax.ensure_compile_time_eval():
            zero, levels = jnp.zeros(()), (jnp.asarray(path.alpha[0]), jnp.asarray(path.sigma[0]))
            found, _ = self.process.prediction.estimates(zero, zero, *levels)
        if not np.isfinite(found):
            raise ValueError(
                f"sampling starts at pure noise, where {type(self.process.prediction).__name__} says nothing of the "
                "data; use Velocity(), FlowVelocity() or Data() as the prediction"
            )

    # -- evaluation ----------------------------------------------------------------------------------------------

    def evaluate(self, variables: Variables, batch: Batch, step: Step) -> Any:
        """Give the loss at some noise levels, by name (``level_0_loss`` has the least noise), and a grid of images."""
        data, conditions = self._fields(batch)
        weights = batch.get("weights")
        latents = self._latents(variables, without_dropped(data, weights), _named(step, "encode"))
        noise = jax.random.normal(_named(step, "noise"), latents.shape, latents.dtype)
        scores: dict[str, Mean] = {}
        found: Any = None
        for i, t in enumerate(self._levels()):
            times = jnp.broadcast_to(jnp.asarray(t), latents.shape[:1])
            x = self.process.noised(latents, noise, times)
            output = self._forward(variables, x, times, conditions, step).prediction
            scores[f"level_{i}_loss"] = Mean.of(self.process.losses(output, latents, noise, times), weights)
            if i == self.num_levels // 2:
                found, _ = self.process.estimates(x, output, times)
        images = ()
        if _is_pictures(jnp.shape(data)):
            if self.scoring == "samples":
                bound = self if self._inputs is not None else self.bind(batch)
                shown = bound.sample(variables, _named(step, "sample"), data.shape[0], conditions=conditions, step=step)
            elif found is not None:
                shown = found
                if self.autoencoder is not None:
                    shown = self.autoencoder.decode(variables["autoencoder"], found)
            else:
                shown = data
            images = (ImageGrid(self._shown(shown)),)
        return (Scalars(scores), *images) if scores else images or None

    def preview(self, variables: Variables, batch: Batch, step: Step, *, scored: Any = None) -> Any:
        """Give a grid of samples, one for each of the first 64 rows' conditions, the same noise at each event."""
        data, conditions = self._fields(batch)
        if not _is_pictures(jnp.shape(data)):
            return scored
        rows = min(64, data.shape[0])
        given = {name: value[:rows] for name, value in conditions.items()} if self.conditions else None
        bound = self if self._inputs is not None else self.bind(batch)
        return ImageGrid(self._shown(bound.sample(variables, step.key, rows, conditions=given, step=step)))

    def _levels(self) -> Any:
        """Give the times at which evaluation reports, from little noise to much: inside the sampler's range."""
        if not self.num_levels:
            return ()
        return np.asarray(self.process.schedule.times(2 * self.num_levels))[::-1][::2]

    def _shown(self, images: Any) -> Array:
        low, high = self.data_range or (-1.0, 1.0)
        return jnp.clip((wide(images) - low) / (high - low), 0, 1)


def _named(step: Step, name: str) -> Key:
    """Give the key of one kind of draw: another kind's number of draws does not move it."""
    if step.key is None:
        raise ContractError("a diffusion loss draws noise: pass Step(key=jax.random.key(...))")
    return tree.fold_name(step.key, name)


def _is_pictures(shape: tuple[int, ...]) -> bool:
    return len(shape) in (4, 5) and shape[-1] in (1, 3, 4)
