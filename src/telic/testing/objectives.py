"""Checks that an objective keeps the contract of `telic.contract`, run on the user's own objective and batch."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from telic import optimizers, tree
from telic.contract import Objective, Step, call_loss, owns_statistics, reduce_statistics
from telic.driver import build_state, check_constants
from telic.errors import CaptureError, TelicError
from telic.mean import merge_statistics
from telic.precision import Policy
from telic.train import statistics as statistic
from telic.train.masses import mass_reads
from telic.train.state import TrainState
from telic.train.step import TrainStep
from telic.types import Batch, PyTree

_CLOSE = 1e-4
"""Statistics count as equal up to this part of their largest magnitude: float32 sums in another order."""


class ObjectiveFault(TelicError, AssertionError):
    """An objective breaks its contract; the message is the report."""


@dataclass(frozen=True)
class Check:
    """One property and what was found.

    Attributes:
      name: What was checked.
      verdict: "pass", "fail", or "note" for what is allowed and worth knowing.
      detail: What was found, and what to do about a failure.
    """

    name: str
    verdict: Literal["pass", "fail", "note"]
    detail: str


@dataclass(frozen=True)
class Report:
    """What `check_objective` found. Printed, it is one line for each check.

    Attributes:
      objective: Name of the objective's class.
      checks: Every check, in the order made.
    """

    objective: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed; notes are no failures."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(c.name for c in self.checks if c.verdict == "fail")

    @property
    def exit_code(self) -> int:
        """0, or 1 when something failed: for ``sys.exit(report.exit_code)``."""
        return int(not self.ok)

    def check(self) -> "Report":
        """Give this report, or raise when something failed.

        Raises:
          ObjectiveFault: Its message is the report.
        """
        if not self.ok:
            raise ObjectiveFault(str(self))
        return self

    def __str__(self) -> str:
        width = max(len(c.name) for c in self.checks)
        lines = [f"  {c.verdict:<4}  {c.name:<{width}}  {c.detail}".rstrip() for c in self.checks]
        result = "keeps its contract" if self.ok else f"breaks its contract: {', '.join(self.failed)}"
        return "\n".join([f"{self.objective} {result}", *lines])


def check_objective(objective: Objective, batch: Batch, *, key: int = 0) -> Report:
    """Prove on an objective and one of its batches what training relies on.

    Nothing is trained and nothing is kept. Use it in a test as ``check_objective(objective, batch).check()``. The batch
    should be a real one with four rows or more and some mass; its rows are cut, joined and repeated.

    Args:
      objective: The objective.
      batch: A batch as it is trained on.
      key: Seed of the weights and of what the loss draws.
    Returns:
      A `Report`. In-batch losses and batch statistics, which no split leaves equal, are notes and no failures.
    Example:
      >>> import numpy as np, telic
      >>> model = (lambda key, x: {"params": {"w": np.ones(2)}}, lambda variables, x: x @ variables["params"]["w"])
      >>> objective = telic.supervised(model, "mean_squared_error")
      >>> check_objective(objective, (np.ones((4, 2), "f"), np.ones(4, "f"))).ok
      True
    """
    return Report(type(objective).__name__, tuple(_checks(objective, batch, key)))


def _checks(objective: Objective, batch: Batch, key: int) -> Iterator[Check]:
    batch = jax.tree.map(jnp.asarray, batch)
    try:
        subject = _Subject.of(objective, batch, key)
    except (TypeError, ValueError) as error:
        yield Check("contract", "fail", str(error))
        return
    yield Check("contract", "pass", "what the loss returns is what training takes")
    for name, check in (
        ("purity", _purity),
        ("captures", _captures),
        ("masses", _masses),
        ("splits", _splits),
        ("zero mass", _zero_mass),
        ("dtypes", _dtypes),
        ("compilation", _compilation),
        ("rejection", _rejection),
        ("trainable", _trainable),
        ("evaluation", _evaluation),
    ):
        verdict, detail = check(subject)
        yield Check(name, verdict, detail)


Finding = tuple[Literal["pass", "fail", "note"], str]


@dataclass(frozen=True)
class _Subject:
    """The objective on its batch: bound, with a step and a first state."""

    objective: Objective
    step: TrainStep
    state: TrainState
    batch: Batch
    run: Callable[[Any, Batch, Step], PyTree]
    advance: Callable[[TrainState, Batch], Any]
    traces: list[int]

    @staticmethod
    def of(objective: Objective, batch: Batch, key: int) -> "_Subject":
        optimizer = optax.with_extra_args_support(optimizers.adamw(1e-3, weight_decay=0.1))
        # The commit's result goes unchecked, so that a rejection is the loss's or the gradient's own.
        step = TrainStep(objective, optimizer, jax.random.key(key), keep_previous=False).bind(batch)
        state = step.initial_state(step.objective.initializer, step.key)
        jax.eval_shape(step.step, state, batch)

        def run(variables: Any, batch: Batch, moment: Step) -> PyTree:
            found, _ = call_loss(step.objective, variables, batch, moment)
            return statistic.canonical(found, own=owns_statistics(step.objective))

        traces: list[int] = []

        def advance(state: TrainState, batch: Batch) -> Any:
            traces.append(1)
            result = step.step(state, batch)
            return result.state, result.accepted

        return _Subject(step.objective, step, state, batch, run, advance, traces)

    def moment(self, *, train: bool = True, draw: int = 0) -> Step:
        info = self.step.moment(self.state, self.state.attempts + draw)
        return dataclasses.replace(info, train=train)

    def statistics(self, batch: Batch, *, train: bool = True, draw: int = 0) -> PyTree:
        """Give the summable statistics of a batch."""
        return build_state(self.run, self.state.variables, batch, self.moment(train=train, draw=draw))

    def trace(self) -> Any:
        """Give the loss of the batch as a program."""

        def run(variables: Any, batch: Batch, moment: Step) -> Any:
            return call_loss(self.objective, variables, batch, moment)

        return jax.make_jaxpr(run)(self.state.variables, self.batch, self.moment())


def _purity(subject: _Subject) -> Finding:
    try:
        with jax.checking_leaks():
            subject.trace()
    except Exception as error:
        # The class of a leak is JAX's own, and private.
        if "leak" not in str(error).lower():
            raise
        return "fail", "the loss keeps a traced value on an object of its own: return it in Aux.outputs instead"
    one, two = subject.trace(), subject.trace()
    same = str(one) == str(two) and all(np.array_equal(a, b) for a, b in zip(one.consts, two.consts, strict=True))
    if not same:
        return "fail", (
            "tracing the loss twice gives two programs: it reads or counts something outside of its arguments. Read "
            "step.step and step.updates for the time, and step.key for random numbers"
        )
    if not _equal(subject.statistics(subject.batch), subject.statistics(subject.batch), 0):
        return "fail", "the same batch, variables and key gave two results: draw from step.key alone"
    return "pass", "same arguments, same program, same result"


def _captures(subject: _Subject) -> Finding:
    try:
        check_constants(subject.trace(), subject.step)
    except CaptureError as error:
        return "fail", str(error)
    own = {id(x) for x in jax.tree.leaves(vars(subject.objective)) if isinstance(x, jax.Array) and x.size > 1}
    if any(id(c) in own for c in subject.trace().consts):
        return "fail", (
            "the loss reads an array that the objective holds, which is compiled in as a constant: return it from "
            "held_variables and init, and read it from variables"
        )
    return "pass", "no array of the objective is compiled in"


def _masses(subject: _Subject) -> Finding:
    state = subject.state
    trained = subject.step.trained(state.variables)
    try:
        reads = mass_reads(subject.objective, state.variables, trained, subject.batch, subject.moment, policy=Policy())
    except ValueError as error:
        return "fail", str(error)
    found, _ = call_loss(subject.objective, state.variables, subject.batch, subject.moment())
    negative = [name or "the Mean" for name, mass in statistic.masses(found).items() if not bool(mass >= 0)]
    if negative:
        return "fail", f"negative mass in {', '.join(negative)}: a mass counts data, so it is 0 or more"
    if owns_statistics(subject.objective):
        return "note", "statistics of your own: that their masses are free of parameters cannot be told"
    if reads.trained:
        return "note", f"a mass may read {', '.join(reads.trained)}, but changing them does not change it"
    return "pass", "masses come from the batch alone, and none is negative"


def _splits(subject: _Subject) -> Finding:
    rows = tree.leading_dimension(subject.batch) or 0
    if rows < 4:
        return "note", f"a batch of {rows} rows cannot be cut in four: not checked"
    mode = next((train for train in (True, False) if _is_deterministic(subject, train)), None)
    if mode is None:
        return "note", "the loss draws random numbers whose shape follows the batch's: splits cannot be compared"
    quarter = rows // 4
    a, b, c, d = (_rows(subject.batch, slice(i * quarter, (i + 1) * quarter)) for i in range(4))

    def of(*parts: Batch) -> PyTree:
        return subject.statistics(_joined(*parts), train=mode)

    where = "" if mode else " (in inference: the loss draws random numbers in training)"
    if _equal(of(a, b), merge_statistics(of(a), of(b)), _CLOSE):
        return "pass", f"the statistics of a batch are the sum of those of its parts{where}"
    if statistic.is_scalar(call_loss(subject.objective, subject.state.variables, a, subject.moment())[0]):
        return "note", "a scalar loss counts each microbatch alike: return Mean(total, mass) to weigh by the data"
    whole = of(a, b)
    if _equal(of(a, b, a, b), merge_statistics(whole, whole), _CLOSE):
        return "note", "rows act on each other through statistics of the batch (BatchNorm): a split changes the loss"
    averaged = (
        "statistics of a batch are not the sum of those of its parts: return sums, such as "
        "Mean(total=losses.sum(), mass=losses.size), not averages"
    )
    if _equal(of(a, b, a, b), whole, _CLOSE):
        return "fail", averaged
    effect = jax.tree.map(jnp.subtract, of(a, b), of(a, c))
    elsewhere = jax.tree.map(jnp.subtract, of(d, b), of(d, c))
    if _equal(effect, elsewhere, _CLOSE, of(a, b)):
        return "fail", averaged
    return "note", (
        "rows of a batch act on each other (an in-batch loss): a split changes the loss. Rows statistics make it exact "
        "over a window"
    )


def _zero_mass(subject: _Subject) -> Finding:
    leaves, structure = jax.tree.flatten(subject.batch)
    names = tree.leaf_names(subject.batch)

    def loss(params: Any, batch: Batch) -> Any:
        variables = {**subject.state.variables, "params": params}
        found, _ = call_loss(subject.objective, variables, batch, subject.moment())
        return reduce_statistics(subject.objective, found)

    trained = subject.step.trained(subject.state.variables)

    def value_of(trained: Any, batch: Batch) -> Any:
        return loss(tree.combine(subject.state.variables["params"], trained), batch)

    differentiate = jax.value_and_grad(value_of, has_aux=True)
    for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        empty = structure.unflatten([jnp.zeros_like(x) if j == i else x for j, x in enumerate(leaves)])
        (value, has_data), gradient = build_state(differentiate, trained, empty)
        if bool(has_data):
            continue
        label = name or f"a field of shape {leaf.shape}"
        moved = not bool(tree.all_finite(gradient)) or any(bool((g != 0).any()) for g in jax.tree.leaves(gradient))
        # A reduction of its own may give any value where there is no data: nothing is committed then.
        if moved or (float(value) != 0 and not owns_statistics(subject.objective)):
            return "fail", (
                f"with {label} all zero there is no mass, yet the loss is {float(value):.4g} and its gradient is not "
                "zero: multiply by the mask before summing, and leave the division to Mean"
            )
        return "pass", f"with {label} all zero the loss and its gradient are 0"
    return "note", "no field of this batch makes the mass 0 when it is all zero"


def _dtypes(subject: _Subject) -> Finding:
    for accumulate in (1, 2):
        step = dataclasses.replace(subject.step, accumulate=accumulate)
        state = subject.state
        if accumulate > 1:
            state = state.replace(window=step.empty_window(state, subject.batch))
        after = jax.eval_shape(step.step, state, subject.batch).state
        moved = [
            name
            for name, (old, new) in _pairs(state, after).items()
            if (jnp.shape(old), jnp.result_type(old)) != (new.shape, new.dtype)
        ]
        if moved:
            return "fail", f"a step changes the dtype or shape of {', '.join(moved)}"
    return "pass", "a step keeps every dtype and shape"


def _compilation(subject: _Subject) -> Finding:
    state, _ = build_state(subject.advance, subject.state, subject.batch)
    once = len(subject.traces)
    for _ in range(2):
        state, _ = build_state(subject.advance, state, subject.batch)
    if len(subject.traces) != once:
        return "fail", f"three steps on batches of one shape were traced {len(subject.traces)} times"
    return "pass", "one program for batches of one shape"


def _rejection(subject: _Subject) -> Finding:
    def poison(leaf: Any) -> Any:
        return jnp.full_like(leaf, jnp.nan) if tree.is_float(leaf) else leaf

    variables = {**subject.state.variables, "params": jax.tree.map(poison, subject.state.variables["params"])}
    state = subject.state.replace(variables=variables)
    after, accepted = build_state(subject.advance, state, subject.batch)
    if bool(accepted):
        return "fail", "NaN parameters gave a finite loss and gradient: the loss hides what is not finite"
    moved = [
        name
        for name, (old, new) in _pairs(state, after).items()
        if _bytes(old) != _bytes(new) and not name.startswith(("attempts", "learner/rejections"))
    ]
    if moved:
        return "fail", f"a rejected attempt changed {', '.join(moved)}"
    return "pass", "an attempt that is not finite changes no bit"


def _trainable(subject: _Subject) -> Finding:
    params = subject.state.variables["params"]
    names = tree.leaf_names(subject.step.trained(subject.state.variables))
    if len(names) < 2:
        return "pass", "there is one trainable leaf"
    chosen = f"params/{names[0]}"
    step = dataclasses.replace(subject.step, trainable=lambda name: name == chosen)
    state = step.initial_state(lambda key: {**subject.state.variables}, subject.step.key)
    after = build_state(step.step, state, subject.batch).state
    pairs = _pairs(params, after.variables["params"])
    moved = [name for name, (old, new) in pairs.items() if name != names[0] and _bytes(old) != _bytes(new)]
    if moved:
        return "fail", f"frozen leaves moved: {', '.join(moved)}"
    return "pass", f"training {chosen} alone leaves the other leaves as they are"


def _evaluation(subject: _Subject) -> Finding:
    variables = subject.state.variables
    before = {name: _bytes(x) for name, x in tree.named_leaves(variables).items()}
    _, aux = call_loss(subject.objective, variables, subject.batch, subject.moment(train=False))
    for collection, new in (aux.variables or {}).items():
        pairs = _pairs(variables[collection], new)
        moved = [f"{collection}/{n}" for n, (old, now) in pairs.items() if _bytes(old) != _bytes(now)]
        if moved:
            return "fail", f"in evaluation the loss changes {', '.join(moved)}: return no variables when not step.train"
    program = subject.step.evaluation()
    build_state(program.step, program.adopt(subject.batch, subject.state), subject.batch)
    if {name: _bytes(x) for name, x in tree.named_leaves(variables).items()} != before:
        return "fail", "evaluation wrote into the variables"
    return "pass", "evaluation changes nothing"


def _is_deterministic(subject: _Subject, train: bool) -> bool:
    one, two = (subject.statistics(subject.batch, train=train, draw=draw) for draw in (0, 1))
    return _equal(one, two, 0)


def _rows(batch: Batch, part: slice) -> Batch:
    rows = tree.leading_dimension(batch)
    return jax.tree.map(lambda x: x[part] if jnp.ndim(x) and x.shape[0] == rows else x, batch)


def _joined(*parts: Batch) -> Batch:
    return jax.tree.map(lambda *x: jnp.concatenate(x) if jnp.ndim(x[0]) else x[0], *parts)


def _equal(a: PyTree, b: PyTree, tolerance: float, scale: PyTree = None) -> bool:
    """Say whether two trees are equal up to a part of the largest magnitude of each leaf (of `scale`, where given)."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    sizes = jax.tree.leaves(b if scale is None else scale)
    for x, y, size in zip(jax.tree.leaves(a), jax.tree.leaves(b), sizes, strict=True):
        if jnp.shape(x) != jnp.shape(y):
            return False
        bound = tolerance * float(jnp.abs(size).max()) if jnp.size(size) else 0.0
        if not np.allclose(x, y, rtol=0, atol=bound, equal_nan=True):
            return False
    return True


def _pairs(a: PyTree, b: PyTree) -> dict[str, tuple[Any, Any]]:
    second = tree.named_leaves(b)
    return {name: (leaf, second[name]) for name, leaf in tree.named_leaves(a).items()}


def _bytes(leaf: Any) -> bytes:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()
