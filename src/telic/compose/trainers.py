"""The trainer: an objective, an optimizer and a key, composed into steps, loops and runs."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

from telic import optimizers, tree
from telic import precision as precisions
from telic.artifacts import ArtifactSink
from telic.checkpoints import Checkpoints
from telic.compose.attaching import listed
from telic.compose.caching import cache_directory
from telic.compose.check import CheckReport, check_training
from telic.compose.describing import trainer_line
from telic.compose.fitting import Budget, fitted
from telic.compose.loops import Loop
from telic.compose.metering import Reporter, as_reporter
from telic.compose.saving import Saving, as_saving
from telic.compose.validation import Validation
from telic.contract import Objective
from telic.data import DataPartition, Dataset, as_validation
from telic.display.previews import as_previews
from telic.driver import build_state
from telic.errors import ContractError
from telic.loop import events as ev
from telic.loop.filters import always, every
from telic.loop.ports import Placement
from telic.loop.state import LoopState
from telic.placement import check_mesh, placement_for
from telic.shard import Layout, MeshSpec
from telic.trackers import as_group
from telic.train.state import TrainState
from telic.train.step import TrainStep
from telic.types import Batch, Key


class Trainer:
    """Trains an objective. Constructing one computes nothing and opens nothing.

    Args:
      objective: What to optimise.
      optimizer: An Optax transformation, or a name from `telic.optimizers`.
      key: Seed, or a JAX PRNG key. Two trainers with equal keys give equal bits.
      accumulate: Microbatches per update. The update is that of one big batch, for any masses.
      microbatch: Rows per microbatch when each incoming batch is to be sliced instead; "auto" takes the most whose step
        fits `memory_limit_bytes`. The update is that of the whole batch.
      trainable: Filter over names such as ``params/encoder/**``; every other parameter keeps its bits.
      precision: Policy or its short form, such as "bfloat16".
      loss_scale: None, "static", "dynamic" or a `telic.precision` loss scale.
      nonfinite: "reject" skips an attempt with anything not finite, "raise" stops at the first, "allow" checks nothing.
      max_rejected: Rejected attempts in a row that end the run with `NonFiniteError`.
      keep_previous: Check the result of each commit too, and undo it whole; by default for states up to 16 MiB.
      checkpoints: Where runs of `fit` and `loop` save themselves and go on from; None saves nothing.
      tracker: Where metrics of `fit` and `loop` go beside the run's own record: one of `telic.trackers`, or a list.
      memory_limit_bytes: Device memory that a step may use, for ``microbatch="auto"``; None takes nine tenths of what
        the device has, or half of the machine's where that is the device.
      profile: True prints, when a run ends, where its time went and what a step costs; a function takes that report.
      compile_cache: Directory that keeps compiled programs for the next start; True for one in the user's cache
        directory. None leaves it to the environment variable ``TELIC_COMPILE_CACHE``, False keeps none.
      mesh: Devices to train on: a `MeshSpec`, or a mesh with its axes. None takes JAX's default device.
      layout: Where on the mesh the parts of the state lie; None splits the largest dimension of each over `fsdp`.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: optax.GradientTransformation | str,
        *,
        key: int | Key,
        accumulate: int = 1,
        microbatch: int | Literal["auto"] | None = None,
        trainable: tree.PathFilter | None = None,
        precision: Any = None,
        loss_scale: Any = None,
        nonfinite: Literal["reject", "raise", "allow"] = "reject",
        max_rejected: int = 20,
        keep_previous: bool | None = None,
        checkpoints: Checkpoints | None = None,
        tracker: Any = None,
        memory_limit_bytes: int | None = None,
        profile: bool | Reporter | None = None,
        compile_cache: bool | str | os.PathLike[str] | None = None,
        mesh: MeshSpec | Mesh | None = None,
        layout: Layout | None = None,
    ):
        if not isinstance(objective, Objective):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise TypeError(
                f"Trainer takes an Objective, got {type(objective).__name__}; from a model and a loss make one with "
                "telic.supervised(model, loss)"
            )
        if not getattr(objective, "has_loss", True):
            raise TypeError(
                "a trainer needs a loss: a name such as 'mean_squared_error', a function (targets, prediction), or an "
                "objective function; None serves eval_step and evaluator only"
            )
        _check_count("accumulate", accumulate)
        _check_count("max_rejected", max_rejected)
        if memory_limit_bytes is not None and microbatch != "auto":
            raise ValueError(
                f"memory_limit_bytes={memory_limit_bytes} is what microbatch='auto' fits a step to: give that too"
            )
        if microbatch is not None:
            if isinstance(microbatch, str) and microbatch != "auto":
                raise ValueError(f"microbatch is a number of rows or 'auto', got {microbatch!r}")
            if microbatch != "auto":
                _check_count("microbatch", microbatch)
            if accumulate != 1:
                raise ValueError(
                    f"accumulate={accumulate} joins batches and microbatch={microbatch} slices them: give one"
                )
        if nonfinite not in ("reject", "raise", "allow"):
            raise ValueError(f"nonfinite must be 'reject', 'raise' or 'allow', got {nonfinite!r}")
        self.objective = objective
        self.optimizer = optax.with_extra_args_support(optimizers.get(optimizer))
        self.key = key if isinstance(key, jax.Array) else _as_key(key)
        self.accumulate = accumulate
        self.microbatch: int | Literal["auto"] | None = microbatch
        self.memory = Budget(memory_limit_bytes) if microbatch == "auto" else None
        if trainable is not None:
            tree.as_filter(trainable)
        self.trainable = trainable
        self.precision = precisions.policy(precision)
        self.loss_scale = precisions.loss_scale(loss_scale)
        self.nonfinite: Literal["reject", "raise", "allow"] = nonfinite
        self.max_rejected = max_rejected
        self.keep_previous = keep_previous
        as_saving(checkpoints, None, "auto")
        self.checkpoints = checkpoints
        self.tracker = as_group(tracker)
        as_reporter(profile)
        self.profile = profile
        cache_directory(compile_cache)
        self.compile_cache = compile_cache
        check_mesh(mesh, layout)
        self.mesh = mesh
        self.layout = layout

    def __repr__(self) -> str:
        options: dict[str, tuple[Any, Any]] = {
            "accumulate": (self.accumulate, 1),
            "microbatch": (self.microbatch, None),
            "trainable": (self.trainable, None),
            "precision": (self.precision, precisions.policy(None)),
            "nonfinite": (self.nonfinite, "reject"),
            "max_rejected": (self.max_rejected, 20),
            "checkpoints": (None if self.checkpoints is None else str(self.checkpoints.directory), None),
        }
        return trainer_line(self.objective, self.key, options)

    # -- state and step ------------------------------------------------------------------------------------------

    def train_step(self, example: Batch | None = None) -> TrainStep:
        """Give the pure step: init, step, flush.

        Args:
          example: A batch; needed for ``microbatch="auto"``, which is chosen for its shapes.
        Raises:
          ValueError: The microbatch is "auto" and there is no example.
        """
        if self.memory is None:
            return self._step()
        if example is None:
            raise ValueError("microbatch='auto' is chosen for a batch: train_step(example=batch)")
        whole = self._placement.whole(example)
        return fitted(self._step().bind(whole), whole, self.memory, LoopState(), self._placement)

    def _step(self) -> TrainStep:
        """Give the step; with "auto" one that takes each batch whole, for all that needs no slices."""
        return TrainStep(
            self.objective,
            self.optimizer,
            self.key,
            accumulate=self.accumulate,
            microbatch=None if self.microbatch == "auto" else self.microbatch,
            trainable=self.trainable,
            policy=self.precision,
            loss_scale=self.loss_scale,
            nonfinite=self.nonfinite,
            max_rejected=self.max_rejected,
            keep_previous=self.keep_previous,
            make_state=self._placed,
        )

    def initial_state(self, initializer: Callable[[Key], Any] | None = None, key: Key | None = None) -> TrainState:
        """Build the state a run starts from: the one place where it is built.

        Args:
          initializer: ``key -> variables``; None uses the objective's.
          key: Root key; None uses the trainer's.
        """
        step = self._step()
        return step.initial_state(
            self.objective.initializer if initializer is None else initializer, self.key if key is None else key
        )

    def place(self, example: Batch | None = None, *, consume: bool = False) -> TrainState:
        """Build the state under jit, where it will lie, held arrays passed as arguments.

        Args:
          example: A batch whose shapes the objective learns; not needed when it knows them.
          consume: Give the arrays that the objective holds away, so that none of them is there twice: they cannot be
            used again, and neither can the objective to begin anew.
        """
        whole = None if example is None else self._placement.whole(example)
        objective = self.objective if whole is None else self.objective.bind(whole)
        self._placement.learn(objective)
        state = self._placed(objective.initializer, self.key, consume=consume)
        return state if whole is None else self._placement.settle(self._step().open(state, whole))

    @cached_property
    def _placement(self) -> Placement:
        """Where this trainer's batches and states live; its devices are looked for when they are needed."""
        return placement_for(self.mesh, self.layout)

    def _placed(self, initializer: Any, key: Key, consume: bool = False) -> TrainState:
        held = self._placement.scatter(initializer)
        given_away = (0,) if consume else ()
        return build_state(self.initial_state, held, key, shardings=self._placement.shardings, consume=given_away)

    # -- running -------------------------------------------------------------------------------------------------

    def loop(
        self,
        *,
        log: int = 50,
        metrics: Sequence[Any] = (),
        validate: Any = None,
        fuse: bool = True,
        compiler_options: Mapping[str, Any] | None = None,
        profile: bool | Reporter | None = None,
        compile_cache: bool | str | os.PathLike[str] | None = None,
        checkpoints: Checkpoints | None = None,
        checkpoint_every: int | None = None,
        resume: Literal["auto", "never", "must"] = "auto",
        tracker: Any = None,
        track_every: int = 50,
        record: bool | str | os.PathLike[str] | None = None,
    ) -> Loop:
        """Give a loop over this trainer's step.

        Args:
          log: Batches between log lines; 0 writes none.
          metrics: Metrics to attach: names, Metrics or functions.
          validate: Data to evaluate at each epoch's end.
          fuse: Run several iterations in one dispatch where no handler needs the host; the bits are the same.
          compiler_options: Handed to XLA.
          profile: As for the trainer, whose choice holds where this is None.
          compile_cache: As for the trainer, whose choice holds where this is None.
          checkpoints: Where the run saves itself and goes on from; by default the trainer's.
          checkpoint_every: Updates between checkpoints; None leaves it to `checkpoints`.
          resume: "auto" continues when there is a checkpoint, "must" insists on one, "never" begins anew and sets
            those there are aside.
          tracker: As for the trainer, whose choice holds where this is None.
          track_every: Updates between the values that trackers get.
          record: Directory that keeps a record of the run, as `Loop.record` writes it; True for that of its
            checkpoints. None keeps one where there are checkpoints, False none.
        Raises:
          ValueError: The record is to go to the directory of checkpoints, and there are none.
        """
        saving = as_saving(self.checkpoints if checkpoints is None else checkpoints, checkpoint_every, resume)
        made = Loop(self._step()).drive(
            fuse=fuse,
            compiler_options=compiler_options,
            profile=self.profile if profile is None else profile,
            compile_cache=self.compile_cache if compile_cache is None else compile_cache,
            memory=self.memory,
            placement=self._placement,
        )
        for metric in listed(metrics):
            made.metric(metric)
        if isinstance(log, bool) or not isinstance(log, int) or log < 0:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
            raise ValueError(f"log is the number of batches between lines, 0 for none, got {log!r}")
        if validate is not None:
            made.validate(validate)
        if log:
            made.log(log)
        made.track(self.tracker if tracker is None else tracker, interval=track_every)
        if saving is not None:
            made.save(saving.config, resume=saving.resume)
        place = _record_place(record, saving)
        return made if place is None else made.record(place, interval=log or track_every)

    def fit(
        self,
        data: Any,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        log_every: int = 50,
        eval_every: int | Literal["epoch"] | None = None,
        metrics: Sequence[Any] = (),
        checkpoint_every: int | None = None,
        state: Any = None,
        resume: Literal["auto", "never", "must"] = "auto",
        profile: bool | Reporter | None = None,
        validation: Any = None,
        averaged: bool = False,
        preview: bool | str | os.PathLike[str] | ArtifactSink = False,
        record: bool | str | os.PathLike[str] | None = None,
    ) -> TrainState:
        """Train and give the final state.

        Args:
          data: A Dataset, an iterable of batches, or a function ``(epoch) -> iterable``.
          steps: Updates in all, of one continuous stream.
          epochs: Epochs in all; 1 when neither is given.
          log_every: Updates between log lines; 0 writes none.
          eval_every: Updates between evaluations, or "epoch"; None evaluates nothing.
          metrics: Metrics to attach.
          checkpoint_every: Updates between checkpoints; None leaves it to the trainer's `checkpoints`.
          state: A TrainState, LoopState or variables to start from; copied, never consumed. A checkpoint of this run
            goes before it.
          resume: "auto" continues when the run has a checkpoint, "must" insists on one, "never" begins anew and sets
            those there are aside.
          profile: As for the trainer, whose choice holds where this is None.
          validation: What to evaluate: batches, or ``{name: batches}`` for several sets, reported as
            ``validation_<name>_<metric>``; by default the Dataset's `val`.
          averaged: Evaluate the averaged weights.
          preview: Where the objective's preview goes at each evaluation, as for `Loop.validate`.
          record: Directory that keeps a record of the run, as for `loop`; None keeps one where there are checkpoints.
        Raises:
          ValueError: There is something to evaluate and no eval_every, or the reverse.
        """
        made = fitting_loop(
            self,
            data,
            log_every=log_every,
            eval_every=eval_every,
            metrics=metrics,
            checkpoint_every=checkpoint_every,
            resume=resume,
            profile=profile,
            validation=validation,
            averaged=averaged,
            preview=preview,
            record=record,
            checkpoints=None,
        )
        final: LoopState = made.run(data, steps=steps, epochs=epochs, state=state)
        return final.step_state

    def evaluate(
        self,
        data: Any,
        *,
        state: Any = None,
        metrics: Sequence[Any] = (),
        averaged: bool = False,
        limit: int | None = None,
        preview: bool | str | os.PathLike[str] | ArtifactSink = False,
    ) -> dict[str, Any]:
        """Give the loss and metrics of some weights over data, every example once.

        Metrics may read what the objective's `evaluate` makes; its `Scalars` are reported by themselves.

        Args:
          data: Batches that can be read again, or a Dataset, whose `val` is used.
          state: A TrainState, LoopState or variables.
          metrics: Metrics to compute beside the loss.
          averaged: Use the averaged weights.
          limit: Batches at most.
          preview: Where the objective's preview goes: a directory, an `ArtifactSink`, or True for ``previews`` in the
            directory of the trainer's checkpoints.
        """
        program = self._step().evaluation(averaged=averaged)
        loop = Loop(program)
        for metric in listed(metrics):
            loop.metric(metric)
        given = state.step_state if isinstance(state, LoopState) else state
        if given is None:
            held = self.objective.held_variables()
            if held is None:
                raise ContractError("evaluate needs weights: pass state= (a TrainState, a LoopState or variables)")
            given = self.objective.initializer(jax.random.key(0))
        evaluation = Validation(
            reducers=lambda: loop.reducers,
            program=program,
            batches=as_validation(data, partition=DataPartition(*self._placement.partition), limit=limit),
            prefix="",
            placement=self._placement,
            sink=as_previews(preview),
        )
        evaluation.check()
        evaluation.open(None if self.checkpoints is None else Path(self.checkpoints.directory))
        return evaluation.evaluate(given, step=int(given.updates) if isinstance(given, TrainState) else 0)

    def check(self, data: Any, *, metrics: Sequence[Any] = ()) -> CheckReport:
        """Try once what a run will do, and stop: one attempt, one validation batch, every metric, one save and restore.

        Print what it gives before leaving for the night: it raises nothing, writes no file, and leaves this trainer as
        it was.

        Args:
          data: What `fit` will be given; no iterator, which would lose its first batch.
          metrics: What `fit` will be given.
        Returns:
          The report as text; `ok` says whether all is well, `failures` has the lines that say what is not.
        """
        return check_training(self._step(), data, metrics=metrics, memory=self.memory, placement=self._placement)


def _record_place(record: Any, saving: Saving | None) -> Path | None:
    """Give the directory that keeps a run's record; None for a run that keeps none."""
    if record is None or record is True:
        if saving is None and record:
            raise ValueError(
                "record=True keeps the record beside the checkpoints, and there are none: give a directory"
            )
        return None if saving is None else Path(saving.config.directory)
    return None if record is False else Path(record)


def fitting_loop(
    trainer: Trainer,
    data: Any,
    *,
    log_every: int,
    eval_every: int | Literal["epoch"] | None,
    metrics: Sequence[Any],
    checkpoint_every: int | None,
    resume: Literal["auto", "never", "must"],
    profile: bool | Reporter | None,
    validation: Any,
    averaged: bool,
    preview: bool | str | os.PathLike[str] | ArtifactSink,
    record: bool | str | os.PathLike[str] | None,
    checkpoints: Checkpoints | None,
) -> Loop:
    """Give the loop that `Trainer.fit` runs; `checkpoints` as for `Trainer.loop`, all else as for `fit`."""
    suites = _suites(data, validation, eval_every, averaged=averaged, preview=preview)
    if isinstance(log_every, bool) or not isinstance(log_every, int) or log_every < 0:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"log_every is the number of updates between lines, 0 for none, got {log_every!r}")
    made = trainer.loop(
        log=0,
        metrics=metrics,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        resume=resume,
        profile=profile,
        track_every=log_every or 50,
        record=False,
    )
    for name, held_out in suites.items():
        event, chosen = _cadence(eval_every)
        made.validate(held_out, event=event, filter=chosen, name=name, averaged=averaged, preview=preview)
    if log_every:
        made.log(log_every * trainer.accumulate).log_updates()
    saving = as_saving(trainer.checkpoints if checkpoints is None else checkpoints, checkpoint_every, resume)
    place = _record_place(record, saving)
    if place is not None:
        made.record(place, interval=(log_every or 50) * trainer.accumulate)
    return made


def _suites(data: Any, validation: Any, eval_every: Any, *, averaged: bool, preview: Any) -> dict[str | None, Any]:
    """Give what a run evaluates, by name.

    Raises:
      ValueError: Something is to be evaluated and nobody says when, or the reverse.
    """
    if eval_every is None:
        asked = {"validation": validation is not None, "averaged": averaged, "preview": preview is not False}
        for name in (name for name, given in asked.items() if given):
            raise ValueError(f"fit was given {name}= and no eval_every=, so nothing would be evaluated: say how often")
        return {}
    if validation is None:
        if not isinstance(data, Dataset):
            raise ValueError(
                f"eval_every= evaluates the val of a Dataset, and fit was given {type(data).__name__}: pass "
                "validation=, or leave eval_every out"
            )
        return {None: data}
    if isinstance(validation, Mapping):
        if not validation:
            raise ValueError("validation={} names no data: pass {'name': batches}, or leave eval_every out")
        return dict(validation)
    return {None: validation}


def _cadence(eval_every: Any) -> tuple[str, Any]:
    if eval_every == "epoch":
        return ev.EPOCH_COMPLETED, always
    if isinstance(eval_every, bool) or not isinstance(eval_every, int) or eval_every < 1:
        raise ValueError(f"eval_every is a positive number of updates, or 'epoch', got {eval_every!r}")
    return ev.STEP_COMPLETED, every(eval_every)


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _as_key(key: Any) -> Key:
    if isinstance(key, bool) or not isinstance(key, int):
        raise TypeError(f"key must be a whole number or a JAX PRNG key, got {key!r}")
    return jax.random.key(key)
