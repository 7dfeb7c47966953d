"""The train step: a pure function of state and microbatch.

An attempt has two phases. *Fold* adds the microbatch to the window's sums, or leaves every sum as it was when
something is not finite. *Close*, at the window's last attempt, commits one optimizer update from the sums if they
have mass. With one attempt per window the two are one select, and no sums are kept.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from telic import ema, tree
from telic.contract import Objective, Result, Step, call_loss
from telic.errors import ContractError, NonFiniteError
from telic.mean import Terms
from telic.precision import Identity, LossScale, Policy
from telic.train import slices
from telic.train import statistics as statistic
from telic.train import window as windows
from telic.train.attempt import (
    CHECKS,
    Attempt,
    Seed,
    cast_batch,
    cast_variables,
    checked_names,
    local_value,
    make_attempt,
    outputs_of,
    planned_value,
)
from telic.train.commit import commit
from telic.train.evaluation import EvalStep
from telic.train.state import Learner, Rejections, TrainState, Window
from telic.types import Array, Batch, Key, PyTree, Variables

SMALL_STATE_BYTES = 16 * 2**20
"""Up to this size the result of a commit is checked too, since the previous state is cheap to keep."""


@dataclass(frozen=True, eq=False)
class TrainStep:
    """A pure train step with its initialiser: unjitted, and fit for jit, scan and vmap.

    Attributes:
      objective: What to optimise.
      optimizer: Any Optax transformation; it sees the trainable parameters only.
      key: Root key; `init` splits it into the initialiser's and the run's.
      accumulate: Attempts per committed window, K.
      microbatch: Rows per attempt when each incoming batch is sliced instead; None does not slice.
      trainable: Filter over names such as ``params/encoder/**``; None trains every floating-point parameter.
      policy: Dtypes of parameters, computation and outputs.
      loss_scale: Loss scale to start from.
      nonfinite: "reject" skips what is not finite, "raise" stops at the first, "allow" checks nothing.
      max_rejected: Rejected attempts in a row that end the run.
      keep_previous: Check a commit's result too and undo it whole; None does so for states up to 16 MiB.
      make_state: Builds the state from an initializer; None uses `initial_state`.
      plans: The caller gives `step` the masses of each window (`window_of`), so that `Terms` need one pass only.
    """

    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    key: Key
    accumulate: int = 1
    microbatch: int | None = None
    trainable: tree.PathFilter | None = None
    policy: Policy = Policy()
    loss_scale: LossScale | None = None
    nonfinite: Literal["reject", "raise", "allow"] = "reject"
    max_rejected: int = 20
    keep_previous: bool | None = None
    make_state: Callable[[Any, Key], TrainState] | None = None
    plans: bool = False

    @property
    def period(self) -> int:
        """Attempts per window as the host counts them: `accumulate`, or 1 when batches are sliced inside."""
        return self.accumulate

    def bind(self, example: Batch) -> "TrainStep":
        """Give this step with the shapes its objective learns from a first batch."""
        return dataclasses.replace(self, objective=self.objective.bind(example))

    # -- state ---------------------------------------------------------------------------------------------------

    def init(self, batch: Batch) -> TrainState:
        """Give the state before the first step; `batch` gives shapes only."""
        bound = self.bind(batch)
        make = self.make_state or bound.initial_state
        return bound.open(make(bound.objective.initializer, self.key), batch)

    def initial_state(self, initializer: Any, key: Key) -> TrainState:
        """Build the state: variables from the initializer, everything else empty.

        Args:
          initializer: ``key -> variables``, a pytree whose held arrays are its leaves.
          key: Root key; (initialiser's key, run key) are its two halves.
        Raises:
          ContractError: The variables have no ``params``.
        """
        init_key, run_key = jax.random.split(key)
        variables = self.policy.cast_params(checked_variables(self.objective, initializer(init_key)))
        variables = tree.copy_leaves(variables)
        trained = self.trained(variables)
        spec = self.objective.ema
        everything = {**jax.tree.map(lambda _: None, variables), "params": trained}
        return TrainState(
            variables=variables,
            learner=Learner(
                opt_state=tree.copy_leaves(self.optimizer.init(trained)),
                ema=None if spec is None else spec.start(variables, everything),
                window=Window(slot=jnp.zeros((), jnp.int32)),
                loss_scale=self.scale,
                rate_factor=jnp.ones((), jnp.float32),
                microbatches=jnp.zeros((), jnp.int32),
                updates=jnp.zeros((), jnp.int32),
                rejections=Rejections.none(len(checked_names(trained))),
            ),
            key=run_key,
            attempts=jnp.zeros((), jnp.int32),
        )

    def adopt(self, batch: Batch, given: Any) -> TrainState:
        """Give a starting state from a TrainState (copied), or from full or partial variables.

        Raises:
          TypeError: It is neither.
        """
        match given:
            case TrainState():
                # The structure of a fresh state is the contract; a window that was never opened is opened.
                return self.bind(batch).open(tree.copy_leaves(given), batch)
            case Mapping():
                fresh = self.init(batch)
                variables, _, unknown = tree.overlay(fresh.variables, tree.as_plain(given), what="state")
                if unknown:
                    raise ContractError(
                        f"state= holds leaves the model lacks: {', '.join(unknown)}; "
                        f"it has {', '.join(tree.leaf_names(fresh.variables))}"
                    )
                cast = jax.tree.map(lambda new, old: jnp.array(new, old.dtype, copy=True), variables, fresh.variables)
                return fresh.replace(variables=cast)
            case _:
                raise TypeError(
                    f"state= takes a TrainState, a LoopState or a mapping of variables, got {type(given).__name__}"
                )

    def open(self, state: TrainState, batch: Batch) -> TrainState:
        """Give a state whose window has room for what this step accumulates."""
        if self.accumulate == 1 or state.window.statistics is not None:
            return state
        return state.replace(window=self._empty_window(state, batch))

    def _empty_window(self, state: TrainState, batch: Batch) -> Window:
        """Give an empty window of the kind that this objective's statistics need."""
        shapes = jax.eval_shape(lambda s, b: self._attempt(s, b, local_value), state, batch)
        collections = {name: tree_ for name, tree_ in state.variables.items() if name != "params"}
        if windows.is_shared(shapes.statistics):
            return windows.shared(shapes, shapes.gradient)
        if isinstance(shapes.statistics, Terms) and self.plans:
            return windows.planned(shapes, shapes.gradient, collections, state.microbatches)
        return windows.replayed(shapes, batch, collections, state.microbatches, self._slots(batch))

    def _slots(self, batch: Batch) -> int:
        if self.microbatch is None:
            return self.accumulate
        rows = tree.leading_dimension(batch) or 1
        return -(-rows // self.microbatch)

    @property
    def scale(self) -> LossScale:
        """The loss scale a run starts with."""
        return self.loss_scale if self.loss_scale is not None else Identity()

    def trained(self, variables: Variables) -> PyTree:
        """Give ``params`` with None at each leaf that is not trained."""
        params = {"params": variables["params"]}
        if self.trainable is not None:
            tree.check_selects(params, self.trainable, what="trainable")
            params, _ = tree.partition(params, self.trainable)
        return jax.tree.map(lambda leaf: leaf if tree.is_float(leaf) else None, params["params"])

    # -- attempts ------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, batch: Batch, window: Any = None) -> Result:
        """Give the state after one attempt, and the attempt's outputs.

        Args:
          state: The state before.
          batch: One microbatch, or one batch to slice when `microbatch` is set.
          window: Masses of the whole window (`window_of`), for one-pass `Terms`; read at its first attempt.
        """
        if self.microbatch is not None:
            return self._sliced(state, batch)
        if self.accumulate == 1:
            return self._single(state, batch)
        return self._windowed(state, batch, window)

    def _info(self, state: TrainState, attempt: Array, step: Array, variables: Variables) -> Step:
        average = ema.averaged(variables, state.ema)
        return Step(
            step=step,
            key=jax.random.fold_in(state.key, attempt),
            updates=state.updates,
            train=True,
            averaged=None if average is None else jax.lax.stop_gradient(average),
        )

    def _attempt(self, state: TrainState, batch: Batch, seed: Seed | None) -> Attempt:
        return make_attempt(
            self.objective,
            state.variables,
            self.trained(state.variables),
            batch,
            self._info(state, state.attempts, state.microbatches, state.variables),
            policy=self.policy,
            loss_scale=state.loss_scale,
            seed=seed,
        )

    def _single(self, state: TrainState, batch: Batch) -> Result:
        """One attempt that is its own window: the commit is computed always and kept by a select."""
        attempt = self._attempt(state, batch, local_value)
        trained = self.trained(state.variables)
        variables = {**state.variables, **(attempt.aux.variables or {})}
        done = commit(
            state,
            self.objective,
            self.optimizer,
            trained,
            attempt.gradient,
            variables=variables,
            value=attempt.value,
            effects=attempt.aux.effects,
            qk_stats=attempt.aux.qk_stats,
        )
        finite = self._with_result(attempt.finite, state, done)
        accepted = self._accepts(state, finite)
        # Without data the layer state of an accepted attempt is kept, and nothing is committed.
        idle = state.replace(variables={**variables, "params": state.variables["params"]})
        kept = tree.select(accepted & attempt.has_data, done, tree.select(accepted, idle, state))
        return self._result(kept, state, attempt, finite, accepted)

    def _windowed(self, state: TrainState, batch: Batch, window: Any) -> Result:
        """Fold one attempt into the window, and close the window at its last."""
        if window is not None and state.window.planned is not None:
            first = state.window.slot == 0
            masses = jax.tree.map(
                lambda new, old: jnp.where(first, jnp.asarray(new, old.dtype), old), window, state.window.planned
            )
            state = state.replace(window=dataclasses.replace(state.window, planned=masses))
        elif state.window.planned is not None:
            raise ContractError(
                "this state plans the masses of its windows: call step(state, batch, window=window_of(batches)), or "
                "use a step with plans=False and a fresh state"
            )
        result = self._fold(state, batch)
        after = result.state
        running = ~state.rejections.stopped
        slot = jnp.where(running, after.window.slot + 1, after.window.slot)
        due = running & (slot == self.accumulate)
        opened = after.replace(window=dataclasses.replace(after.window, slot=slot))
        closed = jax.lax.cond(due, self._close, lambda s: s, opened)
        return dataclasses.replace(result, state=closed)

    def _fold(self, state: TrainState, batch: Batch) -> Result:
        """Add one microbatch to the window's sums, or leave every sum."""
        state = self._mark_start(state)
        window = state.window
        replays = window.gradient is None
        if window.planned is not None:
            seed: Seed | None = planned_value(window.planned)
        else:
            seed = None if replays else local_value
        attempt = self._attempt(state, batch, seed)
        accepted = self._accepts(state, attempt.finite)
        start = windows.start_of(window)
        if start is not None:
            # The window is the unit of rejection: after one rejected attempt the others of it change nothing.
            whole = accepted & ~start.failed
            window = windows.with_start(window, dataclasses.replace(start, failed=start.failed | ~accepted))
            accepted = whole
        if replays:
            window = windows.store(
                window,
                attempt,
                accepted,
                batch=batch,
                variables=state.variables,
                index=state.attempts,
                step=state.microbatches,
                accumulate=self._slots(batch) if self.microbatch is None else self._room(window),
            )
        else:
            window = windows.add(window, attempt, accepted)
        variables = {**state.variables, **(attempt.aux.variables or {})}
        folded = state.replace(variables=variables)
        kept = tree.select(accepted, folded, state).replace(window=window)
        return self._result(kept, state, attempt, attempt.finite, accepted)

    def _room(self, window: Window) -> int:
        return int(window.stored[0][0].used.shape[0])

    def _mark_start(self, state: TrainState) -> TrainState:
        """At a window's first attempt, note what a rejected window goes back to."""
        start = windows.start_of(state.window)
        if start is None:
            return state
        collections = {name: state.variables[name] for name in start.collections}
        fresh = windows.Start(collections, state.microbatches, jnp.zeros((), bool))
        kept = tree.select(state.window.slot == 0, fresh, start)
        return state.replace(window=windows.with_start(state.window, kept))

    def _close(self, state: TrainState, count: int | None = None) -> TrainState:
        """Commit the window's sums if they have mass, empty them and set the slot to 0."""
        window, trained = state.window, self.trained(state.variables)
        good = jnp.asarray(True)
        leaves = jnp.ones((state.rejections.finite.shape[0] - len(CHECKS),), bool)
        if window.planned is not None:
            value, gradient, has_data = windows.planned_gradient(window)
        elif window.gradient is not None:
            value, gradient, has_data = windows.shared_gradient(window)
        else:
            value, gradient, has_data = self._replayed(state, trained, count)
            leaves = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradient)])
            good = leaves.all() | (self.nonfinite == "allow")
        done = commit(
            state,
            self.objective,
            self.optimizer,
            trained,
            gradient,
            variables=state.variables,
            value=value,
            effects=window.effects,
            qk_stats=window.qk_stats,
        )
        finite = jnp.concatenate([jnp.ones((len(CHECKS),), bool), leaves])
        finite = self._with_result(finite, state, done)
        good = finite.all() | (self.nonfinite == "allow")
        kept = tree.select(has_data & good, done, state)
        start = windows.start_of(window)
        if start is not None:
            lost = start.failed | (has_data & ~good)
            before = {**state.variables, **start.collections}
            kept = tree.select(lost, state.replace(variables=before, microbatches=start.microbatches), kept)
        if self.nonfinite != "allow":
            undone = has_data & ~good
            kept = kept.replace(
                rejections=self._record(kept, finite, ~undone, state.attempts - 1, None, counted=undone)
            )
        empty = windows.cleared(window)
        return kept.replace(window=dataclasses.replace(empty, slot=jnp.zeros_like(empty.slot)))

    def _replayed(self, state: TrainState, trained: PyTree, count: int | None) -> tuple[Array, PyTree, Array]:
        def run(trained: PyTree, batch: Batch, read: Mapping[str, Any], attempt: Array, step: Array) -> PyTree:
            variables = {**state.variables, **read}
            view = {**variables, "params": tree.combine(variables["params"], trained)}
            info = self._info(state, attempt, step, variables)
            statistics, _ = call_loss(
                self.objective, cast_variables(self.policy, view), cast_batch(self.policy, batch), info
            )
            return statistic.canonical(statistics)

        slots = state.window.stored[0][0]
        example = jax.tree.map(lambda x: x[0], slots)
        original = jax.eval_shape(lambda s, e: self._attempt(s, e.batch, None).statistics, state, example)
        return windows.replayed_gradient(
            state.window,
            trained,
            replay=run,
            reduce=lambda pooled: statistic.reduce(self.objective, original, pooled),
            scale=state.loss_scale,
            count=count,
        )

    def _sliced(self, state: TrainState, batch: Batch) -> Result:
        """Slice a batch into the attempts of one window: whole slices by scan, then the remainder."""
        rows, size = tree.leading_dimension(batch), self.microbatch
        if rows is None or size is None or rows <= size:
            return self._single(state, batch)
        count, rest = divmod(rows, size)
        attempts = count + (rest > 0)
        planner = dataclasses.replace(self, plans=True)
        example = jax.tree.map(lambda x: x[:size], batch)
        window = planner._empty_window(state, example)
        if window.planned is None and window.gradient is None:
            window = dataclasses.replace(self, microbatch=None, accumulate=attempts)._empty_window(state, example)
        whole = jax.tree.map(lambda x: x[: count * size].reshape(count, size, *x.shape[1:]), batch)
        last = jax.tree.map(lambda x: x[count * size :], batch)
        if window.planned is not None:
            masses = self._planned_masses(state, whole, last if rest else None, count)
            window = dataclasses.replace(window, planned=masses)

        def one(carry: TrainState, part: Batch) -> tuple[TrainState, Any]:
            result = self._fold(carry, part)
            slot = result.state.window.slot + 1
            after = result.state.replace(window=dataclasses.replace(result.state.window, slot=slot))
            return after, (result.outputs, result.accepted)

        after, (outputs, accepted) = jax.lax.scan(one, state.replace(window=window), whole)
        tail = None
        if rest:
            after, tail = one(after, last)
        closed = jax.lax.cond(state.rejections.stopped, lambda s: s, self._close, after)
        outputs, accepted = slices.joined(outputs, accepted, tail, size, rest)
        return Result(closed.replace(window=state.window), outputs, accepted)

    def _masses(self, state: TrainState, batch: Batch, offset: Any) -> PyTree:
        """Give the masses of one microbatch by term; everything else is dead code once compiled."""
        moment = state.replace(attempts=state.attempts + jnp.asarray(offset, state.attempts.dtype))
        attempt = self._attempt(moment, batch, None)
        return {name: mean.mass for name, mean in statistic.canonical(attempt.statistics).items()}

    def _planned_masses(self, state: TrainState, whole: Batch, last: Batch | None, count: int) -> PyTree:
        offsets = jnp.arange(count, dtype=state.attempts.dtype)
        stacked = jax.lax.map(lambda item: self._masses(state, item[0], item[1]), (whole, offsets))
        masses = jax.tree.map(lambda m: m.sum(0), stacked)
        if last is not None:
            masses = jax.tree.map(jnp.add, masses, self._masses(state, last, count))
        return masses

    def window_of(self, state: TrainState, batches: Sequence[Batch]) -> PyTree:
        """Give the masses of a whole window by term, for `step(..., window=...)`.

        Args:
          state: The state before the window's first attempt.
          batches: The window's microbatches, K of them, or fewer in a short last window.
        """
        masses = [self._masses(state, batch, i) for i, batch in enumerate(batches)]
        return jax.tree.map(lambda *m: sum(m[1:], start=m[0]), *masses)

    def flush(self, state: TrainState) -> TrainState:
        """Commit a window that is not full with its own mass; a state without an open window is left as it is."""
        if self.accumulate == 1:
            return state
        window = state.window
        is_open = (window.slot > 0) & ~state.rejections.stopped
        if window.gradient is None and window.statistics is None:
            # Rows concatenate, so that each length of a short window is a branch of its own.
            branches = [lambda s: s] + [lambda s, n=n: self._close(s, count=n) for n in range(1, self.accumulate)]
            return jax.lax.switch(jnp.where(is_open, window.slot, 0), branches, state)
        return jax.lax.cond(is_open, self._close, lambda s: s, state)

    # -- acceptance ----------------------------------------------------------------------------------------------

    def _with_result(self, finite: Array, state: TrainState, done: TrainState) -> Array:
        keep = self.keep_previous
        if self.nonfinite == "allow" or keep is False:
            return finite
        if keep is None and _num_bytes((state.variables, state.opt_state)) > SMALL_STATE_BYTES:
            return finite
        result = tree.all_finite((done.variables, done.opt_state, done.ema))
        return finite.at[CHECKS.index("optimizer result")].set(result)

    def _accepts(self, state: TrainState, finite: Array) -> Array:
        if self.nonfinite == "allow":
            return jnp.asarray(True)
        return finite.all() & ~state.rejections.stopped

    def _record(
        self, state: TrainState, finite: Array, accepted: Array, attempt: Array, value: Array | None, *, counted: Array
    ) -> Rejections:
        """Update the record of rejections; nothing changes where `counted` is False."""
        old = state.rejections
        consecutive = jnp.where(accepted, 0, old.consecutive + 1)
        budget = 1 if self.nonfinite == "raise" else self.max_rejected
        new = Rejections(
            total=old.total + (~accepted).astype(jnp.int32),
            consecutive=consecutive,
            last=jnp.where(accepted, old.last, attempt),
            finite=jnp.where(accepted, old.finite, finite),
            last_loss=old.last_loss if value is None else jnp.where(accepted, value.astype(jnp.float32), old.last_loss),
            stopped=old.stopped | (consecutive >= budget),
        )
        return tree.select(counted, new, old)

    def _result(
        self, after: TrainState, before: TrainState, attempt: Attempt, finite: Array, accepted: Array
    ) -> Result:
        """Advance the attempt's counters and record, and gather its outputs."""
        running = ~before.rejections.stopped
        learner: dict[str, Any] = {"microbatches": before.microbatches + accepted.astype(jnp.int32)}
        if self.nonfinite != "allow":
            learner["rejections"] = self._record(
                before, finite, accepted, before.attempts, attempt.value, counted=running
            )
        # The scale follows the gradient: an optimizer that overflows by itself does not shrink it.
        adjusted = before.loss_scale.adjust(attempt.finite.all())
        learner["loss_scale"] = tree.select(running, adjusted, before.loss_scale)
        state = after.replace(attempts=before.attempts + running.astype(jnp.int32), **learner)
        return Result(state, self._outputs(attempt), accepted, None)

    def _outputs(self, attempt: Attempt) -> dict[str, Any]:
        outputs = outputs_of(attempt.value, attempt.statistics, attempt.aux, self.policy)
        return {"gradient_norm": optax.tree.norm(attempt.gradient), **outputs}

    # -- what the host may ask -----------------------------------------------------------------------------------

    def health(self, state: TrainState) -> PyTree:
        """Give [stopped, rejected in all] of a state, int32 [2]; None when nothing is checked."""
        if self.nonfinite == "allow":
            return None
        return jnp.stack([state.rejections.stopped.astype(jnp.int32), state.rejections.total])

    def check_health(self, health: PyTree, state: TrainState) -> None:
        """Raise when a fetched health says that the budget of rejected attempts is used up.

        Raises:
          NonFiniteError: It names the leaves that were not finite, the attempt and the last finite loss.
        """
        if health is None or not int(health[0]):
            return
        record = state.rejections
        names = self.checked_names(state)
        bad = tuple(n for n, ok in zip(names, jax.device_get(record.finite).tolist(), strict=True) if not ok)
        attempt, count, last = int(record.last), int(record.consecutive), float(record.last_loss)
        cause = ""
        if not bool(tree.all_finite(state.variables)):
            cause = " The variables themselves are not finite: the optimizer produced them in an earlier commit."
        shown = ", ".join(bad[:6]) + (f", ... ({len(bad)} in all)" if len(bad) > 6 else "")
        raise NonFiniteError(
            f"training stopped after {count} rejected attempt(s) in a row: not finite in attempt {attempt}: {shown}. "
            f"The last finite loss was {last:.6g}.{cause} The state holds what was committed before. "
            "Look at that batch, lower the learning rate, clip the gradient, or raise max_rejected.",
            leaves=bad,
            attempt=attempt,
            state=state,
        )

    def checked_names(self, state: TrainState) -> tuple[str, ...]:
        """Give the names of the flags in `Rejections.finite`."""
        return checked_names(self.trained(state.variables))

    def resume(self, state: TrainState) -> TrainState:
        """Clear the stop flag: a new run may try again."""
        record = dataclasses.replace(
            state.rejections, stopped=jnp.zeros((), bool), consecutive=jnp.zeros((), jnp.int32)
        )
        return state.replace(rejections=record)

    def evaluation(self, *, averaged: bool = False) -> EvalStep:
        """Give the evaluation step of the same objective."""
        return EvalStep(self.objective, self.policy, averaged)

    def held_leaves(self) -> list[Any]:
        """Give the arrays the objective starts from, none of which may be compiled in."""
        return jax.tree.leaves(self.objective.held_variables())

    def model(self, state: TrainState) -> Any:
        """Give the usable trained model of a state, when the objective was built from one."""
        build: Callable[[Variables], Any] | None = getattr(self.objective, "model_of", None)
        return None if build is None else build(state.variables)


def checked_variables(objective: Objective, variables: Any) -> dict[str, Any]:
    """Check what an initializer returned, and give it as plain nested dictionaries.

    Raises:
      ContractError: It is no mapping, or has no ``params``.
    """
    who = type(objective).__name__
    if not isinstance(variables, Mapping):
        raise ContractError(f"{who}.init must return a mapping of collections, got {type(variables).__name__}")
    if "params" not in variables:
        raise ContractError(
            f"{who}.init must return a 'params' collection, got {sorted(map(str, variables)) or 'nothing'}; "
            "write {'params': ..., ...}"
        )
    return tree.as_plain(variables)


def _num_bytes(values: PyTree) -> int:
    return sum(int(x.size) * int(x.dtype.itemsize) for x in jax.tree.leaves(values) if hasattr(x, "size"))
