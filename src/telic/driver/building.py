"""How a state is built: where its leaves are to lie, in one program but for draws that are alike, compiled once."""

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

    One program builds it. Functions that draw random numbers, if many are alike, run before, each where its leaf is to
    lie, and are compiled once: XLA's compiler for the CPU takes a fifth of a second and 7 MB for each in a program.

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
    given = [(leaf, i in consume) for i, tree in enumerate(arguments) for leaf in jax.tree.leaves(tree)]
    leaves = _run(traced, given, None if where is None else jax.tree.leaves(where))
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


def _run(traced: Any, arguments: list[tuple[Any, bool]], where: list[Any] | None) -> list[Any]:
    """Run a traced program on (argument, whether it is given away), its results where they are to lie."""
    program: Any = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars), instantiate=True)[0]
    becomes = _becomes(program)
    random = _functions_that_draw(program, becomes if where is not None else None)
    if len(random) - len({id(eqn.params["jaxpr"]) for eqn in random}) < _REPEATED:
        random = []
    inputs = [x for eqn in random for x in eqn.invars]
    before = _up_to(inputs, program.eqns)
    if any(eqn.effects for eqn in [*before, *random]):
        # What they need would happen twice: before them, and in the rest.
        random, inputs, before = [], [], []
    read = _called(program.replace(eqns=before, outvars=inputs), traced.consts, [x for x, _ in arguments])
    numbers = _drawn(random, read, becomes, where)
    # In the order of the leaves that they become: XLA takes the memory of one for the next leaf that is like it.
    drawn = sorted(numbers, key=lambda x: becomes.get(x, len(program.outvars)))
    # What was drawn stands before the rest as its constants do.
    apart = {id(eqn) for eqn in random}
    rest = [eqn for eqn in program.eqns if id(eqn) not in apart]
    last = program.replace(eqns=rest, constvars=[*program.constvars, *drawn])
    taken = {becomes[x]: x for x in drawn if x in becomes and x.aval.dtype == program.outvars[becomes[x]].aval.dtype}
    values = [*((numbers.pop(x), taken.get(becomes.get(x, -1)) is x) for x in drawn), *arguments]

    def finish(given_away: list[Any], kept: list[Any]) -> list[Any]:
        parts = {True: iter(given_away), False: iter(kept)}
        inputs = [next(parts[given]) for _, given in values]
        return _called(last, [*traced.consts, *inputs[: len(drawn)]], inputs[len(drawn) :])

    given_away, kept = ([x for x, given in values if given is part] for part in (True, False))
    return building(finish, where, consume=(0,))(given_away, kept)


def _becomes(program: Any) -> dict[Any, int]:
    """Say of the values in a program which of its results they become: the first of their shape that they go into."""
    found = {x: i for i, x in reversed(list(enumerate(program.outvars))) if isinstance(x, jax.extend.core.Var)}
    for eqn in reversed(program.eqns):
        first: dict[Any, int] = {}
        for i in (found[x] for x in eqn.outvars if x in found):
            shape = program.outvars[i].aval.shape
            first[shape] = min(i, first.get(shape, i))
        for x in eqn.invars:
            i = first.get(getattr(x.aval, "shape", None))
            if i is not None and isinstance(x, jax.extend.core.Var):
                found[x] = min(i, found.get(x, i))
    return found


def _functions_that_draw(program: Any, becomes: dict[Any, int] | None) -> list[Any]:
    """Give a program's calls of functions that draw and read nothing drawn; what they draw must become a leaf."""
    found: list[Any] = []
    drawn: set[Any] = set()
    for eqn in program.eqns:
        is_new = drawn.isdisjoint(x for x in eqn.invars if isinstance(x, jax.extend.core.Var))
        if not is_new or draws(eqn):
            drawn |= set(eqn.outvars)
            is_leaf = becomes is None or all(x in becomes for x in eqn.outvars)
            if is_new and is_leaf and eqn.primitive.name in ("jit", "pjit"):
                found.append(eqn)
    return found


def _drawn(
    random: list[Any], inputs: list[Any], becomes: dict[Any, int], where: list[Any] | None
) -> dict[Any, jax.Array]:
    """Call functions that draw, each where the leaf that it becomes is to lie; those that are alike are one program."""
    found: dict[Any, jax.Array] = {}
    functions: dict[Any, Any] = {}
    values = iter(inputs)
    for eqn in random:
        lies = None if where is None else tuple(where[becomes[x]] for x in eqn.outvars)
        alike = (id(eqn.params["jaxpr"]), lies)
        if alike not in functions:
            function = jax.extend.core.jaxpr_as_fun(eqn.params["jaxpr"])
            functions[alike] = jax.jit(lambda *given, draw=function: tuple(draw(*given)), out_shardings=lies)
        results = functions[alike](*(next(values) for _ in eqn.invars))
        if where is not None:
            # Each takes three times the memory of its result while it runs.
            jax.block_until_ready(results)
        found |= zip(eqn.outvars, results, strict=True)
    return found


def _called(program: Any, constants: list[Any], arguments: list[Any]) -> list[Any]:
    return jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(program, constants))(*arguments)


def _up_to(wanted: list[Any], eqns: list[Any]) -> list[Any]:
    """Give the operations that values need, in their order."""
    read = {x for x in wanted if isinstance(x, jax.extend.core.Var)}
    needed: list[Any] = []
    for eqn in reversed(eqns):
        if not read.isdisjoint(eqn.outvars):
            needed.append(eqn)
            read |= {x for x in eqn.invars if isinstance(x, jax.extend.core.Var)}
    return needed[::-1]
