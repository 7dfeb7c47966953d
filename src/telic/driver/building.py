"""How a state is built: apart, where it lies on one device, or in one program that lays out its leaves."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.interpreters import partial_eval

from telic.driver.tracing import knows_option
from telic.types import PyTree

_SCHEDULER = "xla_cpu_scheduler_type"
_FEW_TEMPORARIES = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
"""XLA option, and its value, that orders a program so that few of its values are there at once, on the CPU."""


def build_state(
    build: Callable[..., PyTree],
    *arguments: Any,
    shardings: Callable[[PyTree], PyTree] | None = None,
    consume: tuple[int, ...] = (),
) -> PyTree:
    """Build a state, its arguments (held arrays among them) passed as data.

    Where its leaves are to lie on several devices, one program builds it. On one device its operations run apart, and
    equal ones are compiled once: in one program each leaf that is drawn costs XLA a fifth of a second on the CPU.

    Args:
      build: Builds it.
      arguments: What it takes.
      shardings: Gives where each leaf of the state is to lie, from its shapes, or None where there is one device only.
        Without it one program builds the state where XLA puts it.
      consume: Numbers of the arguments that are given away.
    """
    if shardings is None:
        return building(build, None, consume)(*arguments)
    traced, shapes = jax.make_jaxpr(build, return_shape=True)(*arguments)
    where = shardings(shapes)
    if where is not None:
        return building(build, where, consume)(*arguments)
    given_away = {id(leaf) for i in consume for leaf in jax.tree.leaves(arguments[i])}
    leaves = _run_apart(traced, jax.tree.leaves(arguments), given_away)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def building(build: Callable[..., PyTree], where: PyTree, consume: tuple[int, ...] = ()) -> Any:
    """Give the jitted function that builds a state, its leaves where they are to lie; None leaves that to XLA."""
    if where is None:
        return jax.jit(build, donate_argnums=consume)
    options = None
    if jax.default_backend() == "cpu" and knows_option(_SCHEDULER, _FEW_TEMPORARIES):
        # In XLA's own order all leaves are drawn before any is finished: another copy of the parameters.
        options = {_SCHEDULER: _FEW_TEMPORARIES}
    return jax.jit(build, out_shardings=where, donate_argnums=consume, compiler_options=options)


def _run_apart(traced: Any, arguments: list[Any], given_away: set[int]) -> list[Any]:
    """Run the operations that the results of a traced program need, one after the other.

    Args:
      traced: The program.
      arguments: Its arguments.
      given_away: Ids of those whose memory the results may have.
    """
    program, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars), instantiate=True)
    leaves = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(program, traced.consts))(*arguments)
    # A step gives its state away, so no leaf may be the caller's own, nor be there twice.
    taken = {id(x) for x in [*arguments, *traced.consts]} - given_away
    for i, leaf in enumerate(leaves):
        if id(leaf) in taken or not isinstance(leaf, jax.Array):
            leaves[i] = jnp.array(leaf, copy=True)
        taken.add(id(leaf))
    return leaves
