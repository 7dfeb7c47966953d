"""The train step: a pure function of state and microbatch.

An attempt has two phases. *Fold* adds the microbatch to the window's sums, or leaves every sum as it was when
something is not finite. *Close*, at the window's last attempt, commits one optimizer update from the sums if they
have mass. With one attempt per window the two are one select, and no sums are kept.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from telic import ema, tree
from telic.contract import Objective, Result, Step, owns_statistics
from telic.errors import ContractError, ReplayWarning
from telic.mean import Terms
from telic.precision import Dynamic, Identity, LossScale, Policy
from telic.train import slices
from telic.train import statistics as statistic
from telic.train import window as windows
from telic.train.attempt import (
    CHECKS,
    Attempt,
    checked_names,
    loss_in,
    make_attempt,
    outputs_of,
    planned_value,
)
from telic.train.commit import commit
from telic.train.evaluation import EvalStep
from telic.train.given import check_same_kind, checked_variables, given_variables
from telic.train.health import stopped, warn_if_idle
from telic.train.masses import MassReads, mass_reads
from telic.train.rejection import Verdict, record, record_window, select_in_turn
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
      expose_gradients: Give each attempt's gradient among its outputs, as "gradients": for metrics and probes. There is
        none where an attempt is not differentiated by itself (replayed windows), nor where batches are sliced.
    """

    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    key: Key
    accumulate: int = 1
    microbatch: int | None = None
    trainable: tree.PathFilter | None = None
    policy: Policy = field(default_factory=Policy)
    loss_scale: LossScale | None = None
    nonfinite: Literal["reject", "raise", "allow"] = "reject"
    max_rejected: int = 20
    keep_previous: bool | None = None
    make_state: Callable[[Any, Key], TrainState] | None = None
    plans: bool = False
    expose_gradients: bool = False

    def __post_init__(self) -> None:
        if self.nonfinite == "allow" and isinstance(self.loss_scale, Dynamic):
            raise ValueError(
                "a dynamic loss scale overflows on purpose, and nonfinite='allow' would apply what overflowed: use "
                "nonfinite='reject', or a static loss scale"
            )

    @property
    def period(self) -> int:
        """Attempts per window as the host counts them: `accumulate`, or 1 when batches are sliced inside."""
        return self.accumulate

    def bind(self, example: Batch) -> "TrainStep":
        """Give this step with the shapes its objective learns from a first batch."""
        return dataclasses.replace(self, objective=self.objective.bind(example))

    # -- state ---------------------------------------------------------------------------------------------------

    def init(self, batch: Batch) -> TrainState:
        """Give the state before the first step; `batch` gives shapes only.

        Raises:
          ContractError: JAX raises wherever a NaN is.
        """
        if jax.config.values.get("jax_debug_nans"):
            raise ContractError(
                "jax_debug_nans is on, and would raise at the first step: a state holds NaN where there is no loss "
                "yet. Turn it off and train with nonfinite='raise', which names what is not finite and keeps the batch"
            )
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
        try:
            opt_state = tree.copy_leaves(self.optimizer.init(trained))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ContractError(
                f"the optimizer does not fit the trainable parameters: {error}. It is given params itself, with the "
                f"leaves {', '.join(tree.leaf_names(trained))}, and None at each leaf that is not trained"
            ) from error
        spec = self.objective.ema
        if spec is not None and not isinstance(spec, ema.EMASpec):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(f"objective.ema must be a telic.EMASpec, got {spec!r}; write telic.EMASpec(decay=0.999)")
        everything = {**jax.tree.map(lambda _: None, variables), "params": trained}
        return TrainState(
            variables=variables,
            learner=Learner(
                opt_state=opt_state,
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
        """Give a starting state from a TrainState (copied, free to run again), or from full or partial variables.

        Raises:
          TypeError: It is neither.
          ContractError: It belongs to another model, optimizer or average, or its window is open and does not fit.
        """
        bound = self.bind(batch)
        match given:
            case TrainState():
                check_same_kind(given, jax.eval_shape(bound.initial_state, bound.objective.initializer, self.key))
                return bound.open(bound.resume(tree.copy_leaves(given)), batch)
            case Mapping():
                make = self.make_state or bound.initial_state
                fresh = make(bound.objective.initializer, self.key)
                variables, _, unknown = tree.overlay(fresh.variables, tree.as_plain(given), what="state")
                if unknown:
                    raise ContractError(
                        f"state= holds leaves the model lacks: {', '.join(unknown)}; "
                        f"it has {', '.join(tree.leaf_names(fresh.variables))}"
                    )
                cast = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), variables, fresh.variables)
                # Optimizer state and average start from these weights too.
                return bound.open(make(jax.tree_util.Partial(given_variables, cast), self.key), batch)
            case _:
                raise TypeError(
                    f"state= takes a TrainState, a LoopState or a mapping of variables, got {type(given).__name__}"
                )

    def open(self, state: TrainState, batch: Batch) -> TrainState:
        """Give a state whose window has room for what this step accumulates, and check the loss's masses.

        A window that is open and fits stays as it is.

        Raises:
          ContractError: A mass depends on the parameters, or an open window is not one of this step.
        """
        self._mass_reads(state, batch)
        empty = Window(slot=jnp.zeros((), jnp.int32))
        if self.accumulate > 1:
            empty = self.empty_window(state, batch)
        if windows.same_kind(state.window, empty, self.accumulate):
            return state
        if windows.holds_attempts(state.window):
            raise ContractError(
                f"the state's window is open after {int(state.window.slot)} attempts, and this step "
                f"(accumulate={self.accumulate}) keeps another kind of window: continue with the options the state was "
                "made with, or close its window first with that step's flush(state)"
            )
        return state.replace(window=empty)

    def can_plan(self, state: TrainState, batch: Batch) -> bool:
        """Say whether a window's masses can be known before its first attempt, so that `Terms` need one pass.

        Where it holds, `dataclasses.replace(step, plans=True)` gives the step that takes `window_of`; `open` gives its
        state. Warns when the loss is made of `Terms` and its windows have to run each microbatch twice.
        """
        if self.accumulate == 1 or self.microbatch is not None:
            return False
        shapes = jax.eval_shape(self._attempt, state, batch)
        if not isinstance(shapes.statistics, Terms):
            return False
        reads = self._mass_reads(state, batch)
        unknown = reads.trained + reads.moving
        if unknown:
            warnings.warn(
                f"the masses of these Terms may read {', '.join(unknown)}, so a window cannot be planned and runs each "
                "microbatch twice; compute the masses from the batch alone to need one pass",
                ReplayWarning,
                stacklevel=2,
            )
        return not unknown

    def _mass_reads(self, state: TrainState, batch: Batch) -> MassReads:
        return mass_reads(
            self.objective,
            state.variables,
            self.trained(state.variables),
            batch,
            lambda: self.moment(state),
            policy=self.policy,
        )

    def empty_window(self, state: TrainState, batch: Batch) -> Window:
        """Give an empty window of the kind that this objective's statistics need."""
        shapes = jax.eval_shape(self._attempt, state, batch)
        collections = {name: tree_ for name, tree_ in state.variables.items() if name != "params"}
        if statistic.is_shared(self.objective, shapes.statistics):
            return windows.shared(shapes, shapes.gradient)
        if isinstance(shapes.statistics, Terms) and self.plans:
            return windows.planned(shapes, shapes.gradient, collections, state.microbatches)
        return windows.replayed(
            shapes, batch, collections, state.microbatches, accumulate=self.accumulate, own=self._owns
        )

    @property
    def _owns(self) -> bool:
        return owns_statistics(self.objective)

    @property
    def scale(self) -> LossScale:
        """The loss scale a run starts with."""
        return self.loss_scale if self.loss_scale is not None else Identity()

    def trained(self, variables: Variables) -> PyTree:
        """Give ``params`` with None at each leaf that is not trained.

        Raises:
          ValueError: A glob of `trainable` names no parameter, or nothing is left to train. Selecting everything is
            what None does, and allowed.
        """
        params = {"params": variables["params"]}
        if self.trainable is not None:
            tree.check_selects(params, self.trainable, what="trainable")
            params, _ = tree.partition(params, self.trainable)
        trained = jax.tree.map(lambda leaf: leaf if tree.is_float(leaf) else None, params["params"])
        if not jax.tree.leaves(trained):
            raise ContractError(
                "there is nothing to train: no selected leaf of params is floating-point; params has "
                f"{', '.join(tree.leaf_names(variables['params'])) or 'no leaves'}"
            )
        return trained

    # -- attempts ------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, batch: Batch, window: Any = None) -> Result:
        """Give the state after one attempt, and the attempt's outputs.

        Args:
          state: The state before.
          batch: One microbatch, or one batch to slice when `microbatch` is set.
          window: Masses of the whole window (`window_of`), for one-pass `Terms`; read at its first attempt.
        """
        if self.microbatch is not None:
            result = self._sliced(state, batch)
        elif self.accumulate == 1:
            result = self._single(state, batch)
        else:
            result = self._windowed(state, batch, window)
        # Counted from the record, so that an undone commit and each slice of a batch are in it.
        rejected = result.state.rejections.total - state.rejections.total
        return dataclasses.replace(result, outputs={**result.outputs, "rejected": rejected})

    def moment(self, state: TrainState, attempt: Array | None = None) -> Step:
        """Give what the objective knows of an attempt, by default of the state's next."""
        return self._info(state, state.attempts if attempt is None else attempt, state.microbatches, state.variables)

    def _info(self, state: TrainState, attempt: Array, step: Array, variables: Variables) -> Step:
        average = ema.averaged(variables, state.ema)
        return Step(
            step=step,
            key=jax.random.fold_in(state.key, attempt),
            updates=state.updates,
            train=True,
            averaged=None if average is None else jax.lax.stop_gradient(average),
        )

    def _attempt(
        self, state: TrainState, batch: Batch, *, planned: PyTree = None, differentiate: bool = True
    ) -> Attempt:
        return make_attempt(
            self.objective,
            state.variables,
            self.trained(state.variables),
            batch,
            self.moment(state),
            policy=self.policy,
            loss_scale=state.loss_scale,
            seed=None if planned is None else planned_value(planned),
            differentiate=differentiate,
        )

    def _single(self, state: TrainState, batch: Batch) -> Result:
        """One attempt that is its own window: the commit is computed always and kept by a select."""
        attempt = self._attempt(state, batch)
        trained = self.trained(state.variables)
        variables = {**state.variables, **(attempt.aux.variables or {})}
        checked = attempt
        if _narrows(attempt.gradient, trained):
            # A gradient that is finite in float32 can overflow in the dtype of its parameter.
            checked = dataclasses.replace(attempt, gradient=_as_params(attempt.gradient, trained))
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
        own = Verdict.of(checked, trained)
        verdict = self._with_result(own, state, done)
        accepted = self._accepts(state, verdict)
        # Without data the layer state of an accepted attempt is kept, and nothing is committed.
        idle = state.replace(variables={**variables, "params": state.variables["params"]})
        select = select_in_turn if self._checks_result(state) else tree.select
        kept = select(accepted & attempt.has_data, done, tree.select(accepted, idle, state))
        return self._result(kept, state, attempt, verdict, accepted, overflown=~own.good)

    def _windowed(self, state: TrainState, batch: Batch, window: Any) -> Result:
        """Fold one attempt into the window, and close the window at its last."""
        held = state.window
        if held.gradient is None and held.statistics is None and held.stored is None:
            raise ContractError(
                f"this state has no window for accumulate={self.accumulate}: it is of a step that commits at every "
                "attempt. Give it one with step.open(state, batch), or run(data, state=state)"
            )
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
        return dataclasses.replace(result, state=closed, outputs={**result.outputs, **_gradient_norm(opened.window)})

    def _fold(self, state: TrainState, batch: Batch) -> Result:
        """Add one microbatch to the window's sums, or leave every sum."""
        state = self._mark_start(state)
        window = state.window
        replays = window.gradient is None
        attempt = self._attempt(state, batch, planned=window.planned, differentiate=not replays)
        verdict = Verdict.of(attempt, self.trained(state.variables))
        accepted = self._accepts(state, verdict)
        kept_out = jnp.asarray(False)
        start = windows.start_of(window)
        if start is not None:
            # The window is the unit of rejection: after one rejected attempt the others of it change nothing.
            kept_out = start.failed
            failed = start.failed | (~accepted & ~state.rejections.stopped)
            window = windows.with_start(window, dataclasses.replace(start, failed=failed))
            accepted = accepted & ~kept_out
        if replays:
            window = windows.store(
                window,
                attempt,
                accepted,
                batch=batch,
                variables=state.variables,
                index=state.attempts,
                step=state.microbatches,
                own=self._owns,
            )
        else:
            window = windows.add(window, attempt, accepted)
        variables = {**state.variables, **(attempt.aux.variables or {})}
        folded = state.replace(variables=variables)
        kept = tree.select(accepted, folded, state).replace(window=window)
        return self._result(kept, state, attempt, verdict, accepted, overflown=~verdict.good, kept_out=kept_out)

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
        if window.gradient is not None:
            value, gradient, has_data = windows.summed_gradient(window)
        else:
            value, gradient, has_data = self._replayed(state, trained, count)
        narrow = _as_params(gradient, trained)
        overflown = ~tree.all_finite(narrow)
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
        verdict = Verdict(narrow, (), lambda: _leaf_flags(narrow))
        if window.planned is not None:
            verdict = verdict.also("plan", windows.kept_plan(window))
        verdict = self._with_result(verdict, state, done)
        good = verdict.good if self.nonfinite != "allow" else jnp.asarray(True)
        select = select_in_turn if self._checks_result(state) else tree.select
        kept = select(has_data & good, done, state)
        undone = lost = has_data & ~good
        start = windows.start_of(window)
        if start is not None:
            lost = start.failed | undone
            before = {**state.variables, **start.collections}
            kept = tree.select(lost, state.replace(variables=before, microbatches=start.microbatches), kept)
        if window.gradient is None:
            # A replayed window's gradient is known here first, so its overflow moves the loss scale here.
            shrunk = state.loss_scale.adjust(jnp.asarray(False))
            kept = kept.replace(loss_scale=tree.select(has_data & overflown, shrunk, state.loss_scale))
        if self.nonfinite != "allow":
            kept = kept.replace(
                rejections=record_window(
                    state.rejections,
                    verdict,
                    has_data=has_data,
                    undone=undone,
                    lost=lost,
                    attempt=state.attempts - 1,
                    budget=self._budget,
                )
            )
        empty = windows.cleared(window)
        return kept.replace(window=dataclasses.replace(empty, slot=jnp.zeros_like(empty.slot)))

    def _replayed(self, state: TrainState, trained: PyTree, count: int | None) -> tuple[Array, PyTree, Array]:
        def run(trained: PyTree, batch: Batch, read: Mapping[str, Any], attempt: Array, step: Array) -> PyTree:
            variables = {**state.variables, **read}
            view = {**variables, "params": tree.combine(variables["params"], trained)}
            info = self._info(state, attempt, step, variables)
            statistics, _ = loss_in(self.policy, self.objective, view, batch, info)
            return statistic.canonical(statistics, own=self._owns)

        return windows.replayed_gradient(
            state.window,
            trained,
            replay=run,
            reduce=lambda pooled: statistic.reduce(self.objective, pooled),
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
        example = jax.tree.map(lambda x: x[:size], batch)
        inner = dataclasses.replace(self, microbatch=None, accumulate=attempts)
        inner = dataclasses.replace(inner, plans=inner.can_plan(state, example))
        window = inner.empty_window(state, example)
        whole = jax.tree.map(lambda x: slices.of_rows(x[: count * size], count), batch)
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
        outputs = {**outputs, **_gradient_norm(after.window)}
        return Result(closed.replace(window=state.window), outputs, accepted)

    def _masses(self, state: TrainState, batch: Batch, offset: Any) -> PyTree:
        """Give the masses of one microbatch by term; everything else is dead code once compiled."""
        moment = state.replace(attempts=state.attempts + jnp.asarray(offset, state.attempts.dtype))
        attempt = self._attempt(moment, batch, differentiate=False)
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
        shapes = [[jnp.shape(x) for x in jax.tree.leaves(batch)] for batch in batches]
        same = next((i for i, s in enumerate(shapes) if s != shapes[0]), len(batches))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches[:same])
        masses = [self._planned_masses(state, stacked, None, same)]
        masses += [self._masses(state, batch, i) for i, batch in enumerate(batches[same:], start=same)]
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

    def _checks_result(self, state: TrainState) -> bool:
        """Say whether the result of a commit is looked at: where the previous state is there to go back to."""
        if self.nonfinite == "allow" or self.keep_previous is not None:
            return bool(self.keep_previous) and self.nonfinite != "allow"
        return _num_bytes((state.variables, state.opt_state)) <= SMALL_STATE_BYTES

    def _with_result(self, verdict: Verdict, state: TrainState, done: TrainState) -> Verdict:
        if not self._checks_result(state):
            return verdict
        return verdict.also_finite("optimizer result", (done.variables, done.opt_state, done.ema))

    def _accepts(self, state: TrainState, verdict: Verdict) -> Array:
        if self.nonfinite == "allow":
            return jnp.asarray(True)
        return verdict.good & ~state.rejections.stopped

    @property
    def _budget(self) -> int:
        return 1 if self.nonfinite == "raise" else self.max_rejected

    def _result(
        self,
        after: TrainState,
        before: TrainState,
        attempt: Attempt,
        verdict: Verdict,
        accepted: Array,
        *,
        overflown: Array,
        kept_out: Array | None = None,
    ) -> Result:
        """Advance the attempt's counters and record, and gather its outputs.

        `overflown` says that the attempt itself is not finite, whatever the optimizer made of it; `kept_out` that it
        changes nothing because an earlier one of its window was rejected: it is not rejected itself.
        """
        running = ~before.rejections.stopped
        learner: dict[str, Any] = {"microbatches": before.microbatches + accepted.astype(jnp.int32)}
        if self.nonfinite != "allow":
            counted = running if kept_out is None else running & ~kept_out
            learner["rejections"] = record(
                before.rejections,
                verdict,
                accepted=accepted,
                counted=counted,
                attempt=before.attempts,
                value=attempt.value,
                has_data=attempt.has_data,
                budget=self._budget,
            )
        # The scale follows the gradient: an optimizer that overflows by itself does not shrink it.
        adjusted = before.loss_scale.adjust(~overflown)
        learner["loss_scale"] = tree.select(running, adjusted, before.loss_scale)
        state = after.replace(attempts=before.attempts + running.astype(jnp.int32), **learner)
        return Result(state, self._outputs(attempt), accepted, None)

    def _outputs(self, attempt: Attempt) -> dict[str, Any]:
        outputs = outputs_of(attempt.value, attempt.statistics, attempt.aux, self.policy)
        if self.expose_gradients and self.microbatch is None and attempt.gradient is not None:
            outputs["gradients"] = attempt.gradient
        return outputs if attempt.gradient is None else {"gradient_norm": optax.tree.norm(attempt.gradient), **outputs}

    # -- what the host may ask -----------------------------------------------------------------------------------

    def attempts_made(self, state: TrainState) -> Array:
        """Give the attempts a state has behind it: the index of its next one."""
        return state.attempts

    def num_attempts(self, batch: Batch) -> int:
        """Give how many attempts a batch makes: one, or one for each of its slices."""
        rows, size = tree.leading_dimension(batch), self.microbatch
        return 1 if rows is None or size is None else max(1, -(-rows // size))

    def attempt_batch(self, batch: Batch, index: int) -> Batch:
        """Give the microbatch of one of a batch's attempts."""
        size = self.microbatch
        if size is None or self.num_attempts(batch) == 1:
            return batch
        return jax.tree.map(lambda x: x[index * size : (index + 1) * size], batch)

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
        if health is not None and int(health[0]):
            raises = self.nonfinite == "raise"
            raise stopped(state, self.checked_names(state), budget=self._budget, raises=raises)

    def warn_if_idle(self, state: TrainState) -> None:
        """Warn at the end of a run that made attempts and accepted none of them."""
        warn_if_idle(state, self.checked_names(state))

    def checked_names(self, state: TrainState) -> tuple[str, ...]:
        """Give the names of the flags in `Rejections.finite`."""
        return checked_names(self.trained(state.variables))

    def resume(self, state: TrainState) -> TrainState:
        """Clear the stop flag: a new run may try again."""
        record = dataclasses.replace(
            state.rejections,
            stopped=jnp.zeros((), bool),
            consecutive=jnp.zeros((), jnp.int32),
            windows=jnp.zeros((), jnp.int32),
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


def _narrows(gradient: PyTree, trained: PyTree) -> bool:
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(trained), strict=True)
    return any(g.dtype != p.dtype for g, p in pairs)


def _gradient_norm(window: windows.Window) -> dict[str, Array]:
    """Give the norm of a window's gradient, over the microbatches so far; nothing where a replay is yet to give it."""
    return {} if window.gradient is None else {"gradient_norm": optax.tree.norm(windows.summed_gradient(window)[1])}


def _as_params(gradient: PyTree, trained: PyTree) -> PyTree:
    return jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, trained)


def _leaf_flags(gradient: PyTree) -> Array:
    """Give the flags of a commit whose gradient alone was looked at: bool [checks]."""
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]
    return jnp.stack([*[jnp.asarray(True)] * len(CHECKS), *leaves])


def _num_bytes(values: PyTree) -> int:
    return sum(int(x.size) * int(x.dtype.itemsize) for x in jax.tree.leaves(values) if hasattr(x, "size"))
