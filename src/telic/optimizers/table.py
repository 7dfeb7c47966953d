"""Optax's optimizers by name, with the learning rate and weight decay in their state."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from telic.errors import unknown_name
from telic.optimizers.schedules import Schedule
from telic.tree import is_float
from telic.types import Array, PyTree

Rate: TypeAlias = float | Array | Schedule
"""A number, or a function of the update count."""

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
Mask: TypeAlias = PyTree | Callable[[PyTree], PyTree]


def adabelief(
    learning_rate: Rate = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-16,
    eps_root: float = 1e-16,
    nesterov: bool = False,
) -> Optimizer:
    """Give AdaBelief: Adam whose second moment is that of the gradient's surprise, g - m.

    Source: Zhuang et al. 2020, `optax.adabelief`.
    """
    return _inject(
        lambda learning_rate: optax.adabelief(learning_rate, b1, b2, eps, eps_root, nesterov=nesterov),
        learning_rate=learning_rate,
    )


def adagrad(learning_rate: Rate = 1e-3, *, initial_accumulator_value: float = 0.1, eps: float = 1e-7) -> Optimizer:
    """Give Adagrad: rates that fall with the sum of squared gradients. Source: Duchi et al. 2011, `optax.adagrad`."""
    return _inject(
        lambda learning_rate: optax.adagrad(learning_rate, initial_accumulator_value, eps), learning_rate=learning_rate
    )


def adam(
    learning_rate: Rate = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 1e-15,
    mu_dtype: Any = None,
    nesterov: bool = False,
) -> Optimizer:
    """Give Adam.

    Args:
      learning_rate: A number or a schedule.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment.
      eps_root: Added under the root, so that differentiating through an update is finite.
      mu_dtype: Dtype of the first moment; None is the parameters'.
      nesterov: Whether the first moment looks ahead.
    Source: Kingma and Ba 2015, `optax.adam`.
    """
    return _inject(
        lambda learning_rate: optax.adam(learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        learning_rate=learning_rate,
    )


def adamw(
    learning_rate: Rate = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 1e-15,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
    mu_dtype: Any = None,
    nesterov: bool = False,
) -> Optimizer:
    """Give Adam with decoupled weight decay: the decay is times the learning rate and not in the moments.

    Args:
      learning_rate: A number or a schedule.
      b1: Decay of the first moment.
      b2: Decay of the second moment.
      eps: Added to the root of the second moment.
      eps_root: Added under the root.
      weight_decay: Fraction of a parameter taken away per unit of learning rate; a number or a schedule.
      mask: Tree of booleans, or a function of the parameters that gives one: which leaves decay. None is all.
      mu_dtype: Dtype of the first moment; None is the parameters'.
      nesterov: Whether the first moment looks ahead.
    Source: Loshchilov and Hutter 2019, `optax.adamw`.
    """
    return _inject(
        lambda learning_rate, weight_decay: optax.adamw(
            learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov=nesterov
        ),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
    )


def lamb(
    learning_rate: Rate = 1e-2,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 1e-15,
    weight_decay: Rate = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Give LAMB: Adam whose update of each leaf has the norm of the leaf. Source: You et al. 2020, `optax.lamb`."""
    return _inject(
        lambda learning_rate, weight_decay: optax.lamb(learning_rate, b1, b2, eps, eps_root, weight_decay, mask),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
    )


def noisy_sgd(learning_rate: Rate = 1e-2, *, eta: float = 0.01, gamma: float = 0.55, key: int | Array = 0) -> Optimizer:
    """Give SGD with normal noise of variance eta / (1 + count)^gamma on the gradient.

    Args:
      learning_rate: A number or a schedule.
      eta: Variance of the first update's noise.
      gamma: How fast it falls.
      key: Where the noise starts; the state carries it on.
    Source: Neelakantan et al. 2015, `optax.noisy_sgd`.
    """
    return _inject(lambda learning_rate: optax.noisy_sgd(learning_rate, eta, gamma, key), learning_rate=learning_rate)


def radam(
    learning_rate: Rate = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    threshold: float = 5.0,
    nesterov: bool = False,
) -> Optimizer:
    """Give rectified Adam: plain momentum until the second moment can be trusted.

    Source: Liu et al. 2020, `optax.radam`.
    """
    return _inject(
        lambda learning_rate: optax.radam(learning_rate, b1, b2, eps, eps_root, threshold, nesterov=nesterov),
        learning_rate=learning_rate,
    )


def rmsprop(
    learning_rate: Rate = 1e-2,
    *,
    decay: float = 0.9,
    eps: float = 1e-8,
    initial_scale: float = 0.0,
    eps_in_sqrt: bool = True,
    centered: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
) -> Optimizer:
    """Give RMSprop.

    Args:
      learning_rate: A number or a schedule.
      decay: Decay of the mean square.
      eps: Keeps the quotient finite.
      initial_scale: Mean square at the start.
      eps_in_sqrt: Whether eps stands under the root; False is torch's form.
      centered: Whether the variance stands for the mean square.
      momentum: Decay of a velocity, or None.
      nesterov: Whether the velocity looks ahead.
    Source: Tieleman and Hinton 2012, `optax.rmsprop`.
    """
    return _inject(
        lambda learning_rate: optax.rmsprop(
            learning_rate, decay, eps, initial_scale, eps_in_sqrt, centered, momentum, nesterov
        ),
        learning_rate=learning_rate,
    )


def sgd(
    learning_rate: Rate = 1e-2, *, momentum: float | None = None, nesterov: bool = False, momentum_dtype: Any = None
) -> Optimizer:
    """Give stochastic gradient descent.

    Args:
      learning_rate: A number or a schedule.
      momentum: Decay of a velocity, or None.
      nesterov: Whether the velocity looks ahead.
      momentum_dtype: Dtype of the velocity; None is the parameters'.
    """
    return _inject(
        lambda learning_rate: optax.sgd(learning_rate, momentum, nesterov, momentum_dtype), learning_rate=learning_rate
    )


def yogi(learning_rate: Rate = 1e-2, *, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-3) -> Optimizer:
    """Give Yogi: Adam whose second moment moves additively. Source: Zaheer et al. 2018, `optax.yogi`."""
    return _inject(lambda learning_rate: optax.yogi(learning_rate, b1, b2, eps), learning_rate=learning_rate)


def lion(
    learning_rate: Rate = 1e-4,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: Rate = 1e-3,
    mask: Mask | None = None,
    mu_dtype: Any = None,
) -> Optimizer:
    """Give Lion: the sign of a momentum. Its rate is a third to a tenth of Adam's.

    Source: Chen et al. 2023, `optax.lion`.
    """
    return _inject(
        lambda learning_rate, weight_decay: optax.lion(learning_rate, b1, b2, mu_dtype, weight_decay, mask),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
    )


def adafactor(
    learning_rate: Rate = 1e-3,
    *,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
) -> Optimizer:
    """Give Adafactor: a second moment kept as a row and a column for each matrix.

    Args:
      learning_rate: A number or a schedule; relative to each leaf's size with `multiply_by_parameter_scale`.
      min_dim_size_to_factor: Smaller matrices keep the whole second moment.
      decay_rate: Exponent of the second moment's decay.
      multiply_by_parameter_scale: Whether the update of a leaf is relative to its root mean square.
      clipping_threshold: Largest root mean square of an update, or None.
      momentum: Decay of a velocity, or None.
    Source: Shazeer and Stern 2018, `optax.adafactor`.
    """
    return _inject(
        lambda learning_rate: optax.adafactor(
            learning_rate,
            min_dim_size_to_factor=min_dim_size_to_factor,
            decay_rate=decay_rate,
            multiply_by_parameter_scale=multiply_by_parameter_scale,
            clipping_threshold=clipping_threshold,
            momentum=momentum,
        ),
        learning_rate=learning_rate,
    )


def muon(
    learning_rate: Rate = 2e-2,
    *,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    weight_decay: Rate = 0.0,
    consistent_rms: float | None = None,
    adam_learning_rate: float | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
) -> Optimizer:
    """Give Muon: an orthogonalised momentum for matrices, AdamW for every other leaf.

    Args:
      learning_rate: Rate of the matrices; a number or a schedule.
      beta: Decay of the momentum.
      ns_steps: Newton-Schulz iterations.
      nesterov: Whether the momentum looks ahead.
      weight_decay: Decoupled decay of the matrices; a number or a schedule.
      consistent_rms: Root mean square of a matrix's update, 0.2 to use AdamW's rates; None scales by its width.
      adam_learning_rate: Fixed rate of the other leaves; None is `learning_rate`.
      adam_b1: AdamW's decay of the first moment.
      adam_b2: AdamW's decay of the second moment.
    Source: Jordan et al. 2024, `optax.contrib.muon`.
    """
    return _inject(
        lambda learning_rate, weight_decay: contrib.muon(
            learning_rate,
            beta=beta,
            ns_steps=ns_steps,
            nesterov=nesterov,
            weight_decay=weight_decay,
            consistent_rms=consistent_rms,
            adam_learning_rate=adam_learning_rate,
            adam_b1=adam_b1,
            adam_b2=adam_b2,
        ),
        learning_rate=learning_rate,
        weight_decay=weight_decay,
    )


NAMES: Mapping[str, Callable[..., Optimizer]] = MappingProxyType(
    {
        fn.__name__: fn
        for fn in (
            adabelief,
            adafactor,
            adagrad,
            adam,
            adamw,
            lamb,
            lion,
            muon,
            noisy_sgd,
            radam,
            rmsprop,
            sgd,
            yogi,
        )
    }
)
"""The optimizers that `get` knows, by name."""


def get(optimizer: Any) -> optax.GradientTransformation:
    """Give an optimizer from its name (with its default options), or an Optax transformation as it is.

    Raises:
      ValueError: No optimizer has that name; the nearest is named.
      TypeError: It is something else.
    """
    match optimizer:
        case str():
            if optimizer not in NAMES:
                raise unknown_name("optimizer", optimizer, NAMES)
            return NAMES[optimizer]()
        case optax.GradientTransformation():
            return optimizer
        case optax.MultiSteps():
            raise TypeError(
                "optax.MultiSteps averages the gradients of unequal microbatches as if they were equal: give the "
                "optimizer inside it, and accumulate=K to the trainer, which is exact for any masses"
            )
        case _:
            called = f"; call it: {optimizer.__name__}()" if optimizer in NAMES.values() else ""
            raise TypeError(
                "an optimizer is a name such as 'adam' or an Optax transformation such as "
                f"telic.optimizers.adam(1e-3), got {optimizer!r} ({type(optimizer).__name__}){called}"
            )


def _inject(build: Callable[..., optax.GradientTransformation], **rates: Rate) -> Optimizer:
    """Put the rates of an optimizer into its state by name.

    Three things that `optax.inject_hyperparams` alone does not do: the rates' dtype is at least float32 and follows the
    parameters to float64; a NumPy scalar is a rate like any other number; and updates and state keep the dtypes of the
    gradients and of the first state, where a float32 rate would widen bfloat16 ones.

    Args:
      build: Makes the optimizer from its rates.
      **rates: Numbers, or functions of the update count. A function also gets a factor ``<name>_scale`` in the state,
        1 at first, since setting the scheduled value would not last.
    """
    checked = {name: _checked(name, rate) for name, rate in rates.items()}
    scales = {f"{name}_scale": 1.0 for name, rate in checked.items() if callable(rate)}

    def scaled(**values: Any) -> optax.GradientTransformation:
        return build(**{n: values[n] * values[f"{n}_scale"] if f"{n}_scale" in scales else values[n] for n in checked})

    # Optax reads the names to inject from a signature.
    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in (*checked, *scales)]
    vars(scaled)["__signature__"] = inspect.Signature(keywords)

    def injected(tree: PyTree) -> Optimizer:
        double = any(x.dtype in (jnp.float64, jnp.complex128) for x in jax.tree.leaves(tree) if is_float(x))
        dtype = jnp.dtype(jnp.float64 if double else jnp.float32)
        values = {name: _rate(rate, dtype) for name, rate in {**checked, **scales}.items()}
        return optax.inject_hyperparams(scaled, hyperparam_dtype=dtype)(**values)

    def init(params: PyTree) -> PyTree:
        return injected(params).init(params)

    def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, PyTree]:
        new_updates, new_state = injected(updates).update(updates, state, params, **extra_args)
        return jax.tree.map(_in_dtype_of, new_updates, updates), jax.tree.map(_in_dtype_of, new_state, state)

    return Optimizer(init, update)


def _checked(name: str, rate: Any) -> Any:
    """Give a rate as a float, a scalar JAX array (which may be traced) or a function; raise when it is none of them."""
    if isinstance(rate, jax.Array) and rate.ndim == 0 and jnp.issubdtype(rate.dtype, jnp.number):
        return rate
    if isinstance(rate, int | float | np.number | np.ndarray) and not isinstance(rate, bool) and np.ndim(rate) == 0:
        return float(rate)
    if callable(rate) and not isinstance(rate, type):
        return rate
    raise TypeError(f"{name} must be a number or a function of the update count, got {rate!r} ({type(rate).__name__})")


def _rate(rate: Any, dtype: Any) -> Any:
    if callable(rate):
        return lambda count: jnp.asarray(rate(count)).astype(dtype)
    return rate.astype(dtype) if isinstance(rate, jax.Array) else rate


def _in_dtype_of(new: Any, old: Any) -> Any:
    """Give an array in the dtype of the one it replaces."""
    return new if new.dtype == old.dtype else new.astype(old.dtype)
