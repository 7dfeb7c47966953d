"""One commit: the optimizer's update, deferred effects and the moving average."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from telic import tree
from telic.contract import Objective
from telic.errors import ContractError
from telic.train.attempt import check_collections
from telic.train.state import TrainState
from telic.types import Array, PyTree, Variables

_EMA_KEY = 0x45_4D_41
"""Folded into an attempt's key for stochastic rounding, so that it shares no draw with the objective."""


def commit(
    state: TrainState,
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    trained: PyTree,
    gradient: PyTree,
    *,
    variables: Variables,
    value: Array,
    effects: PyTree,
    qk_stats: PyTree,
) -> TrainState:
    """Apply one optimizer update to a state; counters of attempts are not touched.

    Args:
      state: The state before; its learner gives optimizer state, average and counters.
      objective: Gives `ema` and `apply_effects`.
      optimizer: An Optax transformation.
      trained: The trainable parameters, None elsewhere.
      gradient: Gradient of the window's loss, same structure, at least float32.
      variables: The whole tree with the window's layer state.
      value: The window's loss.
      effects: Summed effects, or None.
      qk_stats: Maxima over the window, or None.
    """
    learner = state.learner
    gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, trained)
    extra: dict[str, Any] = {"value": value}
    if qk_stats is not None:
        extra["qk_stats"] = qk_stats
    updates, opt_state = _update(optimizer, gradient, learner.opt_state, trained, extra)
    updates = jax.tree.map(lambda u: u * learner.rate_factor.astype(u.dtype), updates)
    trained = optax.apply_updates(trained, updates)
    new: dict[str, Any] = {**variables, "params": tree.combine(variables["params"], trained)}
    if effects is not None:
        what = f"{type(objective).__name__}.apply_effects"
        new |= check_collections(what, objective.apply_effects(new, effects), new)
    average = learner.ema
    if average is not None and objective.ema is not None:
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.attempts), _EMA_KEY)
        average = objective.ema.move(average, new, learner.updates, key)
    return state.replace(
        variables=new, opt_state=opt_state, ema=average, updates=learner.updates + jnp.asarray(1, jnp.int32)
    )


def _update(
    optimizer: optax.GradientTransformationExtraArgs, gradient: PyTree, opt_state: PyTree, trained: PyTree, extra: Any
) -> tuple[PyTree, PyTree]:
    try:
        return optimizer.update(gradient, opt_state, trained, **extra)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ContractError(
            f"the optimizer's update asks for arguments that a step does not have; it gives {', '.join(extra)} "
            f"({error}). A line search, as in optax.lbfgs(), evaluates the loss again itself: use "
            "optax.lbfgs(learning_rate, linesearch=None), or an optimizer that needs the gradient alone"
        ) from error
