"""Losses by name: functions ``(targets, prediction, *, options) -> per-example losses``.

None of them reduces over the batch: the caller does, exactly, whatever the sizes of its microbatches. A prediction of
rank ≥ 2, [batch, ..., features], gives losses of shape [batch, ...]: the last axis is averaged (or summed, where the
loss is defined as a sum over classes). A prediction [batch] of a loss that works element by element gives [batch].
Arithmetic is in the prediction's dtype, at least float32. Shapes never broadcast: (n,) against (n, 1) is a ShapeError.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from telic.errors import ShapeError, unknown_name
from telic.mean import Mean, Terms, wide
from telic.tree import is_array
from telic.types import Array, PyTree

Loss: TypeAlias = Callable[[Any, Any], Any]
"""A function ``(targets, prediction) -> array of per-example losses | Mean | scalar``."""

_EPSILON = 1e-7
"""Where probabilities are clipped, in the losses that the seed of this library clips."""


def binary_cross_entropy(
    targets: Any,
    prediction: Any,
    *,
    from_logits: bool = False,
    positive_weight: float | None = None,
    negative_weight: float | None = None,
) -> Array:
    """Give -y·log p - (1-y)·log(1-p), averaged over the last axis.

    Probabilities are clipped to [1e-7, 1 - 1e-7]; the gradient passes through the clip, so that a confidently wrong
    prediction still learns. Prefer logits where the model gives them.

    Args:
      targets: Probabilities in [0, 1], of the prediction's shape.
      prediction: Probabilities, or logits with `from_logits`, [batch] or [batch, ..., features].
      from_logits: Whether the prediction holds logits.
      positive_weight: Factor on the y·log p term. The mean stays that over examples, as in torch's `pos_weight`.
      negative_weight: Factor on the (1-y)·log(1-p) term.
    Returns:
      Losses in nats, [batch, ...].
    Raises:
      ShapeError: Targets and prediction differ in shape.
    """
    y, p = _pair("binary_cross_entropy", targets, prediction)
    if from_logits:
        log_p, log_not_p = jax.nn.log_sigmoid(p), jax.nn.log_sigmoid(-p)
    else:
        p = _clip(p, _EPSILON, 1 - _EPSILON)
        log_p, log_not_p = jnp.log(p + _EPSILON), jnp.log(1 - p + _EPSILON)
    positive = 1.0 if positive_weight is None else positive_weight
    negative = 1.0 if negative_weight is None else negative_weight
    return _mean_last(-positive * y * log_p - negative * (1 - y) * log_not_p)


def sigmoid_cross_entropy(
    targets: Any, prediction: Any, *, positive_weight: float | None = None, negative_weight: float | None = None
) -> Array:
    """Give `binary_cross_entropy` of logits.

    Args:
      targets: Probabilities in [0, 1], of the prediction's shape.
      prediction: Logits, [batch] or [batch, ..., features].
      positive_weight: Factor on the positive term.
      negative_weight: Factor on the negative term.
    """
    return binary_cross_entropy(
        targets, prediction, from_logits=True, positive_weight=positive_weight, negative_weight=negative_weight
    )


def categorical_cross_entropy(
    targets: Any,
    prediction: Any,
    *,
    from_logits: bool = False,
    sparse: bool | None = None,
    class_weights: Any = None,
    label_smoothing: float = 0.0,
) -> Array | Mean:
    """Give -Σ y·log p over the last axis.

    Args:
      targets: A distribution over classes of the prediction's shape, or integer class ids of its shape without the
        last axis. An id outside [0, classes) gives NaN, never another class's loss: give such rows weight 0.
      prediction: Probabilities, or logits with `from_logits`, [batch, ..., classes].
      from_logits: Whether the prediction holds logits.
      sparse: True insists on class ids (then a last axis of size 1 is allowed too), False on distributions; None
        tells them apart by dtype and shape.
      class_weights: One weight a class, [classes]. A row has the weight of its class (of the largest target).
      label_smoothing: e moves the targets to (1-e)·y + e/classes.
    Returns:
      Losses in nats, [batch, ...]. With `class_weights` a `Mean`, so that the loss is Σ(w·l) / Σw over the whole
      batch or window, as in torch's `weight`.
    Raises:
      ShapeError: The targets are neither ids nor distributions for this prediction.
    Example:
      >>> import jax.numpy as jnp
      >>> categorical_cross_entropy(jnp.asarray([1, 0]), jnp.asarray([[0.5, 0.5], [0.25, 0.75]])).round(4)
      Array([0.6931, 1.3863], dtype=float32)
    """
    return _cross_entropy(
        "categorical_cross_entropy", targets, prediction, from_logits, sparse, class_weights, label_smoothing
    )


def softmax_cross_entropy(
    targets: Any, prediction: Any, *, class_weights: Any = None, label_smoothing: float = 0.0
) -> Array | Mean:
    """Give `categorical_cross_entropy` of logits.

    Args:
      targets: Integer class ids [batch, ...], or a distribution over classes [batch, ..., classes].
      prediction: Logits, [batch, ..., classes].
      class_weights: One weight a class, [classes]; makes the result a `Mean`.
      label_smoothing: e moves the targets to (1-e)·y + e/classes.
    """
    return _cross_entropy("softmax_cross_entropy", targets, prediction, True, None, class_weights, label_smoothing)


def _cross_entropy(
    name: str,
    targets: Any,
    prediction: Any,
    from_logits: bool,
    sparse: bool | None,
    class_weights: Any,
    label_smoothing: float,
) -> Array | Mean:
    """Compute every categorical cross entropy: ids and distributions, logits and probabilities, in one code path."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing!r}")
    p = wide(_array(name, "prediction", prediction))
    _needs_classes(name, p.shape)
    y = _array(name, "targets", targets)
    # The smallest normal number keeps log finite without moving any probability that float32 can hold.
    log_p = jax.nn.log_softmax(p) if from_logits else jnp.log(jnp.maximum(p, jnp.finfo(p.dtype).tiny))
    if _means_ids(name, y, p.shape, sparse):
        ids = y.reshape(p.shape[:-1])
        known = (ids >= 0) & (ids < p.shape[-1])
        labels = jnp.where(known, ids, 0)
        picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        losses = jnp.where(known, -picked, jnp.nan)
    else:
        y = y.astype(p.dtype)
        labels = y.argmax(-1)
        losses = -_weighted_logs(y, log_p).sum(-1)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_p.mean(-1)
    if class_weights is None:
        return losses
    weights = wide(class_weights)
    if weights.shape != p.shape[-1:]:
        raise ShapeError(
            f"{name}: class_weights must have one weight for each of {p.shape[-1]} classes, got {weights.shape}"
        )
    return Mean.of(losses, weights[labels])


def _weighted_logs(y: Array, log_p: Array) -> Array:
    """Give y·log p with 0·log 0 = 0, in the gradient too."""
    return y * jnp.where(y == 0, 0, log_p)


def _means_ids(name: str, targets: Array, shape: tuple[int, ...], sparse: bool | None) -> bool:
    """Say whether targets are class ids for a prediction of a shape; raise when they can be neither."""
    integer = jnp.issubdtype(targets.dtype, jnp.integer)
    column = targets.shape == (*shape[:-1], 1)
    if sparse is not False and integer and (targets.shape == shape[:-1] or (sparse is True and column)):
        return True
    if sparse is not True and targets.shape == shape:
        return False
    what = f"got {targets.dtype} targets {targets.shape} and prediction {shape}"
    if sparse is True:
        raise ShapeError(f"{name} with sparse=True needs integer class ids of shape {shape[:-1]}, {what}")
    hint = "give integer class ids of the first shape or one-hot rows of the second"
    if column:
        hint = "for class ids drop the last axis: targets[..., 0].astype(int)"
    elif targets.shape == shape[:-1]:
        hint = "leave sparse out for class ids" if integer else "class ids must be integers: targets.astype(int)"
    raise ShapeError(f"{name} needs class ids {shape[:-1]} or distributions {shape}, {what}; {hint}")


def categorical_hinge(targets: Any, prediction: Any) -> Array:
    """Give max(0, 1 + max((1-y)·p) - Σ y·p) over the last axis.

    Args:
      targets: One-hot rows, [batch, ..., classes].
      prediction: Scores, [batch, ..., classes].
    """
    y, p = _pair("categorical_hinge", targets, prediction, classes=True)
    return jnp.maximum(0, 1 + ((1 - y) * p).max(-1) - (y * p).sum(-1))


def hinge(targets: Any, prediction: Any) -> Array:
    """Give max(0, 1 - y·p), averaged over the last axis.

    Args:
      targets: -1 or 1, of the prediction's shape.
      prediction: Scores, [batch] or [batch, ..., features].
    """
    y, p = _pair("hinge", targets, prediction)
    return _mean_last(optax.hinge_loss(p, y))


def soft_margin(targets: Any, prediction: Any) -> Array:
    """Give log(1 + exp(-y·p)), averaged over the last axis.

    Args:
      targets: -1 or 1, of the prediction's shape.
      prediction: Scores, [batch] or [batch, ..., features].
    """
    y, p = _pair("soft_margin", targets, prediction)
    return _mean_last(jax.nn.softplus(-y * p))


def kl_divergence(targets: Any, prediction: Any) -> Array:
    """Give Σ y·log(y / p) over the last axis, in nats, both clipped to [1e-7, 1].

    Args:
      targets: Distributions, [batch, ..., classes].
      prediction: Probabilities, [batch, ..., classes].
    """
    y, p = _pair("kl_divergence", targets, prediction, classes=True)
    return optax.kl_divergence(jnp.log(_clip(p, _EPSILON, 1.0)), _clip(y, _EPSILON, 1.0))


def poisson(targets: Any, prediction: Any) -> Array:
    """Give p - y·log(p + 1e-7), averaged over the last axis.

    Args:
      targets: Counts, of the prediction's shape.
      prediction: Expected counts, > 0, [batch] or [batch, ..., features].
    """
    y, p = _pair("poisson", targets, prediction)
    return _mean_last(p - y * jnp.log(p + _EPSILON))


def mean_squared_error(targets: Any, prediction: Any) -> Array:
    """Give (p - y)², averaged over the last axis.

    Args:
      targets: Of the prediction's shape.
      prediction: [batch] or [batch, ..., features].
    """
    y, p = _pair("mean_squared_error", targets, prediction)
    return _mean_last(optax.squared_error(p, y))


def mean_absolute_error(targets: Any, prediction: Any) -> Array:
    """Give |p - y|, averaged over the last axis.

    Args:
      targets: Of the prediction's shape.
      prediction: [batch] or [batch, ..., features].
    """
    y, p = _pair("mean_absolute_error", targets, prediction)
    return _mean_last(jnp.abs(p - y))


def log_cosh(targets: Any, prediction: Any) -> Array:
    """Give log cosh(p - y), averaged over the last axis; finite for any finite error.

    Args:
      targets: Of the prediction's shape.
      prediction: [batch] or [batch, ..., features].
    """
    y, p = _pair("log_cosh", targets, prediction)
    return _mean_last(optax.log_cosh(p, y))


def huber(targets: Any, prediction: Any, *, delta: float = 1.0) -> Array:
    """Give ½·e² where |e| ≤ delta, else delta·(|e| - ½·delta), averaged over the last axis.

    Args:
      targets: Of the prediction's shape.
      prediction: [batch] or [batch, ..., features].
      delta: Where the loss turns from quadratic to linear.
    """
    y, p = _pair("huber", targets, prediction)
    return _mean_last(optax.huber_loss(p, y, delta=delta))


def cosine_similarity(targets: Any, prediction: Any) -> Array:
    """Give 1 - cos(y, p) over the last axis: 0 where the directions agree, 2 where they are opposite.

    A loss is minimised, so this is one minus the similarity. A vector shorter than 1e-6 counts as that long, so a zero
    vector has loss 1 and gradient 0.

    Args:
      targets: Vectors, [batch, ..., features].
      prediction: Vectors, [batch, ..., features].
    """
    y, p = _pair("cosine_similarity", targets, prediction, classes=True)
    return optax.cosine_distance(p, y, epsilon=1e-12)


def margin_ranking(targets: Any, prediction: Any, *, margin: float = 0.0) -> Array:
    """Give max(0, -y·(p₁ - p₂) + margin), averaged over the last axis.

    Args:
      targets: 1 where p₁ should rank higher, -1 where p₂ should; of one prediction's shape.
      prediction: The pair (p₁, p₂), each [batch] or [batch, ..., features].
      margin: By how much the higher must lead.
    Raises:
      ShapeError: The prediction is not a pair, or a shape differs.
    """
    if not isinstance(prediction, tuple | list) or len(prediction) != 2:
        raise ShapeError(f"margin_ranking needs a pair (first, second) as prediction, got {_describe(prediction)}")
    y, first = _pair("margin_ranking", targets, prediction[0])
    _, second = _pair("margin_ranking", targets, prediction[1])
    return _mean_last(jnp.maximum(0, -y * (first - second) + margin))


def connectionist_temporal_classification(targets: Any, prediction: Any, *, blank: int = 0) -> Array:
    """Give the CTC loss of each sequence: -log of the probability of all alignments, in nats.

    Args:
      targets: Labels [batch, labels], each row padded on the right with `blank` or a negative number; or the pair
        (lengths [batch], labels [batch, labels]).
      prediction: Logits or log-probabilities [batch, frames, classes]; or the pair (lengths [batch], logits).
      blank: The class that stands for no label.
    Returns:
      Losses [batch]. A row with more labels than frames has no alignment; its loss is about 1e5.
    Raises:
      ShapeError: The ranks or the batch sizes differ.
    Source: Graves et al. 2006, through `optax.ctc_loss`.
    """
    name = "connectionist_temporal_classification"
    label_lengths, labels = targets if isinstance(targets, tuple | list) else (None, targets)
    frame_lengths, logits = prediction if isinstance(prediction, tuple | list) else (None, prediction)
    labels, logits = jnp.asarray(labels), wide(logits)
    if labels.ndim != 2 or logits.ndim != 3 or labels.shape[0] != logits.shape[0]:
        raise ShapeError(
            f"{name} needs labels [batch, labels] and logits [batch, frames, classes], "
            f"got {labels.shape} and {logits.shape}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{name} needs integer labels, got {labels.dtype}")
    padded = (
        (labels < 0) | (labels == blank)
        if label_lengths is None
        else _past_end(name, "labels", label_lengths, labels.shape)
    )
    silent = (
        jnp.zeros(logits.shape[:2], bool)
        if frame_lengths is None
        else _past_end(name, "frames", frame_lengths, logits.shape[:2])
    )
    return optax.ctc_loss(
        logits, silent.astype(logits.dtype), jnp.where(padded, 0, labels), padded.astype(logits.dtype), blank_id=blank
    )


ctc = connectionist_temporal_classification


def _past_end(name: str, what: str, lengths: Any, shape: tuple[int, ...]) -> Array:
    """Give True at each position at or after its row's length."""
    lengths = jnp.asarray(lengths)
    if lengths.shape != shape[:1]:
        raise ShapeError(f"{name}: the lengths of {what} must have shape {shape[:1]}, got {lengths.shape}")
    return jnp.arange(shape[1]) >= lengths[:, None]


NAMES: Mapping[str, Loss] = MappingProxyType(
    {
        fn.__name__: fn
        for fn in (
            binary_cross_entropy,
            categorical_cross_entropy,
            categorical_hinge,
            connectionist_temporal_classification,
            cosine_similarity,
            hinge,
            huber,
            kl_divergence,
            log_cosh,
            margin_ranking,
            mean_absolute_error,
            mean_squared_error,
            poisson,
            sigmoid_cross_entropy,
            soft_margin,
            softmax_cross_entropy,
        )
    }
)
"""The losses that `get` knows, by name."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "bce": "binary_cross_entropy",
        "ctc": "connectionist_temporal_classification",
        "mae": "mean_absolute_error",
        "mse": "mean_squared_error",
    }
)
"""Short names that `get` knows beside `NAMES`."""


def get(loss: Any) -> Loss:
    """Give a loss function from its name, a function, or weighted losses of several outputs.

    Args:
      loss: A name of `NAMES` or `ALIASES`, a function (returned as it is), or what `weighted` takes.
    Raises:
      ValueError: No loss has that name; the nearest is named.
      TypeError: It is something else.
    Example:
      >>> get("mse").__name__
      'mean_squared_error'
    """
    match loss:
        case str():
            name = ALIASES.get(loss, loss)
            if name not in NAMES:
                raise unknown_name("loss", loss, [*NAMES, *ALIASES])
            return NAMES[name]
        case Mapping() | list() | tuple():
            return weighted(loss)
        case _ if callable(loss):
            return loss
        case _:
            raise TypeError(
                "a loss is a name such as 'mean_squared_error', a function (targets, prediction) -> losses, or "
                f"[(loss, weight), ...] for several outputs; got {_describe(loss)}"
            )


_BINARY = (binary_cross_entropy, sigmoid_cross_entropy)


def label_smoothing(loss: Any, smoothing: float = 0.1) -> Loss:
    """Give a loss that sees smoothed targets, (1-e)·y + e/classes.

    Classes are the prediction's last axis. The binary losses, and predictions whose last axis is 1, have two classes
    for each number: (1-e)·y + e/2.

    Args:
      loss: A loss or its name. Bind its options first: ``functools.partial(loss, from_logits=True)``.
      smoothing: e, in [0, 1].
    Returns:
      A loss for targets that are distributions of the prediction's shape, or integer class ids (made one-hot first).
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must be in [0, 1], got {smoothing!r}")
    fn = get(loss)
    inner = fn.func if isinstance(fn, functools.partial) else fn
    name = f"label_smoothing({getattr(inner, '__name__', 'loss')})"

    def smoothed(targets: Any, prediction: Any) -> Any:
        shape: tuple[int, ...] = _array(name, "prediction", prediction).shape
        y = _array(name, "targets", targets)
        classes = shape[-1] if len(shape) > 1 else 1
        binary = inner in _BINARY or classes == 1
        if not binary and _means_ids(name, y, shape, None):
            y = jax.nn.one_hot(y, classes, dtype=jnp.float32)
        elif y.shape != shape:
            raise _unequal(name, y, shape)
        return fn((1 - smoothing) * wide(y) + smoothing / (2 if binary else classes), prediction)

    return smoothed


def weighted(losses: Any) -> Loss:
    """Give the weighted sum of one loss for each output of a model.

    Args:
      losses: ``[(loss, weight), ...]``, matched by position with a tuple or list of outputs; or
        ``{output name: (loss, weight)}`` for a mapping of outputs. A loss alone has weight 1. A loss is a name or a
        function.
    Returns:
      A loss for targets of the same structure as the prediction. Per-example losses are averaged over their trailing
      axes and summed to one array [batch]; where a loss gives a `Mean`, or only some give a scalar, the result is
      `Terms` with one name for each output.
    Raises:
      ValueError: When built, a loss or weight is malformed; when called, the losses do not match the outputs.
    Example:
      >>> import jax.numpy as jnp
      >>> loss = weighted([("mse", 0.5), ("mae", 0.5)])
      >>> loss((jnp.asarray([[2.0]]), jnp.asarray([[2.0]])), (jnp.asarray([[1.0]]), jnp.asarray([[1.0]])))
      Array([1.], dtype=float32)
    """
    named = isinstance(losses, Mapping)
    rules = {k: _rule(k, v) for k, v in (losses.items() if named else enumerate(losses))}
    if not rules:
        raise ValueError("weighted needs at least one (loss, weight), got none")

    def fn(targets: Any, prediction: Any) -> Any:
        outputs, wanted = _outputs(prediction, "prediction", rules, named), _outputs(targets, "targets", rules, named)
        return _weighted_sum({k: (w, loss(wanted[k], outputs[k])) for k, (loss, w) in rules.items()})

    return fn


def _rule(key: Any, rule: Any) -> tuple[Loss, Any]:
    """Read one entry of `weighted`: a loss, or a pair of loss and weight."""
    loss, weight = rule if isinstance(rule, tuple | list) and len(rule) == 2 else (rule, 1.0)
    if not isinstance(loss, str) and not callable(loss):
        raise ValueError(f"losses[{key!r}] must be a loss or (loss, weight), got {rule!r}")
    scalar = isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
    if not scalar and not (is_array(weight) and jnp.ndim(weight) == 0):
        raise ValueError(f"the weight of losses[{key!r}] must be a finite number, got {weight!r}")
    return get(loss), weight


def _outputs(value: Any, what: str, rules: Mapping[Any, Any], named: bool) -> Mapping[Any, Any]:
    """Give the parts of a prediction or of targets by key; raise unless there is one for each loss."""
    if named:
        if not isinstance(value, Mapping):
            raise ValueError(f"losses by name {sorted(rules)} need a mapping as {what}, got {_describe(value)}")
        if set(value) != set(rules):
            raise ValueError(f"there are losses for {sorted(rules)} but {what} has {sorted(value)}: give one for each")
        return value
    if isinstance(value, Mapping):
        raise ValueError(f"{what} has outputs {sorted(value)}: give losses by name, {{name: (loss, weight)}}")
    if not isinstance(value, tuple | list):
        raise ValueError(f"{len(rules)} losses need a tuple of {len(rules)} as {what}, got {_describe(value)}")
    if len(value) != len(rules):
        raise ValueError(f"there are {len(rules)} losses but {what} has {len(value)} parts: give one for each")
    return dict(enumerate(value))


def _weighted_sum(terms: Mapping[Any, tuple[Any, Any]]) -> Any:
    """Sum weighted losses: arrays to one array, scalars to one scalar, anything mixed to `Terms`."""
    values = {k: (w, v if isinstance(v, Mean) else wide(v)) for k, (w, v) in terms.items()}
    arrays = {k: (w, v) for k, (w, v) in values.items() if not isinstance(v, Mean)}
    rows = {k: v.shape[0] for k, (_, v) in arrays.items() if v.ndim}
    if len(set(rows.values())) > 1:
        raise ShapeError(f"the losses of one batch must agree in their leading dimension, got {rows}")
    if len(rows) == len(values):
        return sum(w * v.reshape(v.shape[0], -1).mean(-1) for w, v in arrays.values())
    if not rows and len(arrays) == len(values):
        return sum(w * v for w, v in arrays.values())
    return Terms({str(k): (w, v if isinstance(v, Mean) else Mean.of(v)) for k, (w, v) in values.items()})


def _pair(name: str, targets: Any, prediction: Any, *, classes: bool = False) -> tuple[Array, Array]:
    """Give (targets, prediction) in the prediction's dtype, at least float32; raise unless the shapes are equal."""
    p = wide(_array(name, "prediction", prediction))
    y = _array(name, "targets", targets)
    if y.shape != p.shape:
        raise _unequal(name, y, p.shape)
    if classes:
        _needs_classes(name, p.shape)
    return y.astype(p.dtype), p


def _array(name: str, what: str, value: PyTree) -> Array:
    """Give a value as an array; refuse containers of arrays, which would be stacked, and complex numbers."""
    if isinstance(value, Mapping) or (
        isinstance(value, tuple | list) and any(is_array(leaf) for leaf in jax.tree.leaves(value))
    ):
        raise TypeError(
            f"{name} takes one array as {what}, got {_describe(value)}; for several outputs give one loss each: "
            "[(loss, weight), ...] or {output: (loss, weight)}"
        )
    array = jnp.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name} takes real {what}, got {array.dtype}; stack the real and the imaginary part")
    return array


def _unequal(name: str, targets: Array, shape: tuple[int, ...]) -> ShapeError:
    hint = "reshape one of them"
    if targets.shape == shape[:-1] or targets.shape == (*shape[:-1], 1):
        hint = "add the last axis with targets[..., None]" if shape[-1:] == (1,) else "reshape one of them"
        if jnp.issubdtype(targets.dtype, jnp.integer) and shape[-1] > 1:
            hint = (
                f"for class ids of shape {shape[:-1]} use softmax_cross_entropy (logits) or "
                "categorical_cross_entropy (probabilities)"
            )
    elif shape == targets.shape[:-1] and targets.shape[-1] == 1:
        hint = "drop the targets' last axis with targets[..., 0]"
    return ShapeError(
        f"{name} needs targets and prediction of one shape, got targets {targets.shape} and prediction {shape}; {hint}"
    )


def _needs_classes(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) < 2:
        raise ShapeError(
            f"{name} works over the last axis of [batch, ..., classes], got prediction {shape}; "
            "for one example add a batch axis with prediction[None]"
        )


def _describe(value: Any) -> str:
    if is_array(value):
        return f"an array {jnp.shape(value)}"
    match value:
        case Mapping():
            return f"a mapping with {sorted(map(str, value))}"
        case Sequence() if not isinstance(value, str):
            return f"a {type(value).__name__} of {len(value)}"
        case _:
            return f"{value!r} ({type(value).__name__})"


def _clip(x: Array, low: float, high: float) -> Array:
    """Clip the value and let the gradient pass."""
    return x + jax.lax.stop_gradient(jnp.clip(x, low, high) - x)


def _mean_last(losses: Array) -> Array:
    return losses.mean(-1) if losses.ndim >= 2 else losses
