"""How a state is built: in one program, where its leaves are to lie; on one device equal draws are compiled once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
from jax.interpreters import partial_eval

from telic.driver.tracing import draws, knows_option
from telic.types import PyTree

_SCHEDULER = "xla_cpu_scheduler_type"
_FEW_TEMPORARIES = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
"""XLA option, and its value, that orders a program so that few of its values are there at once, on the CPU."""

_REPEATED = 6
"""Draws that are like another from which on they run apart: fewer take less time in the program of the rest."""


def build_state(
    build: Callable[..., PyTree],
    *arguments: Any,
    shardings: Callable[[PyTree], PyTree] | None = None,
    consume: tuple[int, ...] = (),
) -> PyTree:
    """Build a state, its arguments (held arrays among them) passed as data.

    One program builds it. On one device what draws random numbers runs before, and equal draws are compiled once: XLA
    takes a fifth of a second on the CPU for each in a program.

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
    leaves = _run(traced, [(leaf, i in consume) for i, tree in enumerate(arguments) for leaf in jax.tree.leaves(tree)])
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


def _run(traced: Any, arguments: list[tuple[Any, bool]]) -> list[Any]:
    """Run a traced program on (argument, whether it is given away)."""
    program, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars), instantiate=True)
    random = [eqn for eqn in program.eqns if draws(eqn)]
    if len(random) - len({id(eqn.params.get("jaxpr", eqn)) for eqn in random}) < _REPEATED:
        random = []
    apart = {id(eqn) for eqn in random}
    before = _up_to(apart, program.eqns)
    if any(eqn.effects for eqn in before):
        # What they need would happen twice: before them, and in the rest.
        random, apart, before = [], set[int](), []
    drawn = [x for eqn in random for x in eqn.outvars]
    first = program.replace(eqns=before, outvars=drawn)
    numbers = _called(first, traced.consts, [x for x, _ in arguments])
    # What was drawn stands before the rest as its constants do.
    rest = [eqn for eqn in program.eqns if id(eqn) not in apart]
    last = program.replace(eqns=rest, constvars=[*program.constvars, *drawn])

    def finish(given_away: list[Any], kept: list[Any], numbers: list[Any]) -> list[Any]:
        parts = {True: iter(given_away), False: iter(kept)}
        return _called(last, [*traced.consts, *numbers], [next(parts[given]) for _, given in arguments])

    parts = ([x for x, given in arguments if given is part] for part in (True, False))
    return jax.jit(finish, donate_argnums=0)(*parts, numbers)


def _called(program: Any, constants: list[Any], arguments: list[Any]) -> list[Any]:
    return jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(program, constants))(*arguments)


def _up_to(wanted: set[int], eqns: list[Any]) -> list[Any]:
    """Give the operations whose ids are wanted and those that they need, in their order."""
    read: set[Any] = set()
    needed: list[Any] = []
    for eqn in reversed(eqns):
        if id(eqn) in wanted or not read.isdisjoint(eqn.outvars):
            needed.append(eqn)
            read |= {x for x in eqn.invars if isinstance(x, jax.extend.core.Var)}
    return needed[::-1]
