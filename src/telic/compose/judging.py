"""The handlers that judge a run: validation, and what acts on how a metric goes."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from telic.artifacts import ArtifactSink
from telic.compose.attaching import Attaching, as_reduced, listed, record_of
from telic.compose.rehearsal import placed
from telic.compose.validation import Validation, validations_of
from telic.contract import Objective
from telic.data import DataPartition, as_validation
from telic.display.previews import as_previews
from telic.errors import ContractError
from telic.handlers import Checkpoint, EarlyStop, Monitor, ReduceRate, as_mode
from telic.loop import events as ev
from telic.loop.attachments import Attachment, Handler
from telic.loop.filters import Filter, always, as_filter
from telic.loop.ports import StepProgram
from telic.loop.reducers import Reducer
from telic.loop.serialize import serialize_state
from telic.loop.state import LoopState
from telic.loop.status import HALT_LOOP
from telic.objectives import as_objective
from telic.objectives.from_model import FunctionObjective, Supervised
from telic.train.evaluation import EvalStep
from telic.train.step import TrainStep


class Judging(Attaching):
    """What is measured on other data, and what follows from a metric: an action, an end, a lower rate, a file."""

    def validate(
        self,
        data: Any,
        *,
        model: Any = None,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        name: str | None = None,
        averaged: bool = False,
        limit: int | None = None,
        metrics: Sequence[Any] = (),
        preview: bool | str | os.PathLike[str] | ArtifactSink = False,
    ) -> Self:
        """Evaluate on other data and record ``validation_<metric>`` beside the training metrics.

        Every metric of this loop is computed as it is in training, and the objective's loss as ``validation_loss``; of
        an objective with an `evaluate` also the metrics that read its artifacts, and its `Scalars`. Training state and
        keys are untouched; the program is compiled once. A loop may have any number of validations, each with data,
        name, event and filter of its own.

        Args:
          data: Batches that can be read many times, or a Dataset, whose `val` is used; or ``{name: data}`` for several
            sets, each as if given by itself with that `name`.
          model: What to evaluate; by default this loop's own objective. A model, which is judged by the loss of a
            supervised loop; an Objective, or an evaluation step.
          event: When to evaluate.
          filter: At which firings.
          name: Name of a further data set: ``validation_<name>_<metric>``.
          averaged: Evaluate the averaged weights.
          limit: Batches per pass at most; needed for data without an end.
          metrics: Metrics of this validation alone: names, Metrics or functions.
          preview: Where the objective's `preview` goes, once per evaluation: a directory, an `ArtifactSink`, or True
            for ``previews`` in the run's directory. Trackers of the loop get it too.
        Raises:
          ValueError: A validation of that name is attached already.
        """
        self._check_idle()
        if isinstance(data, Mapping) and _are_sets(data):
            if name is not None:
                raise ValueError(f"the sets {', '.join(map(str, data))} have names of their own: leave name= out")
            options: dict[str, Any] = {"event": event, "filter": filter, "averaged": averaged, "limit": limit}
            for one, held_out in data.items():
                self.validate(held_out, model=model, name=one, metrics=metrics, preview=preview, **options)
            return self
        program = self._evaluation(model, averaged)
        prefix = "validation_" if name is None else f"validation_{name}_"
        if any(v.prefix == prefix for v in validations_of(self._attachments)):
            had = "without a name" if name is None else f"named {name!r}"
            raise ValueError(f"this loop has a validation {had} already; give another name=")
        own: dict[str, Reducer] = {}
        for metric in listed(metrics):
            made = as_reduced(metric, None, reduce="mean", reads=None)
            if made.name in own:
                raise ValueError(f"two metrics of this validation are named {made.name!r}; rename one")
            own[made.name] = Reducer(made.name, made)
        evaluation = Validation(
            reducers=lambda: self.reducers,
            program=program,
            batches=as_validation(data, partition=DataPartition(*self._placement.partition), limit=limit),
            prefix=prefix,
            placement=self._placement,
            own=own,
            sink=as_previews(placed(preview) if isinstance(preview, str | os.PathLike) else preview),
        )
        return self.handle_event(event, evaluation, filter, name="validate")

    def monitor(
        self,
        metric: str,
        action: Handler,
        name: str | None = None,
        *,
        mode: Literal["min", "max"] | None = None,
        improved: Callable[[float, float], Any] | None = None,
        trigger: Callable[[float], Any] | None = None,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        patience: int | None = None,
        min_delta: float = 0.0,
        cooldown: int = 0,
    ) -> Self:
        """Act when a metric has not improved for some events in a row.

        Args:
          metric: Name of a metric of this loop, or of one that `validate` records.
          action: ``(LoopState) -> answer``, a handler of its own.
          name: Name of the record in `LoopState.handler_state`; by default made of the metric.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          improved: ``(current, best) -> bool``, instead of a mode.
          trigger: ``(current) -> bool``, instead of improvement: the action runs when it holds.
          event: When to look.
          filter: At which firings.
          patience: The action runs at this event in a row without improvement, counted from 1; 3 by default. With
            `trigger`, at this event in a row where it holds; 1 by default. 0 is the same as 1.
          min_delta: An improvement is more than this.
          cooldown: Events after an action that are not counted.
        Raises:
          ValueError: The name is taken, or nothing says which direction is better.
        """
        self._check_idle()
        record = self._record_name("monitor", metric, name)
        if patience is None:
            patience = 3 if trigger is None else 1
        chosen = as_mode(mode, metric, self._mode_of(metric)) if improved is None and trigger is None else mode
        watch = Monitor(
            metric,
            action,
            record,
            mode=chosen,
            improved=improved,
            trigger=trigger,
            patience=patience,
            min_delta=min_delta,
            cooldown=cooldown,
            awaits=self._awaits(record, metric),
        )
        return self.handle_event(event, watch, filter, name=record)

    def early_stop(
        self,
        metric: str,
        *,
        mode: Literal["min", "max"] | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        restore_best: bool = False,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        name: str | None = None,
    ) -> Self:
        """End the run when a metric has not improved for some events in a row.

        Args:
          metric: Name of a metric of this loop, or of one that `validate` records.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          patience: The run ends at this event in a row without improvement, counted from 1; 0 is the same as 1.
          min_delta: An improvement is more than this.
          restore_best: Give back the step state of the best event, whoever ended the run. Needs the memory of a second
            state, and makes saved states as much larger.
          event: When to look.
          filter: At which firings.
          name: Name of the record in `LoopState.handler_state`.
        """
        self._check_idle()
        record = self._record_name("early_stop", metric, name)
        stop = EarlyStop(record, HALT_LOOP, restore_best)
        watch = Monitor(
            metric,
            stop,
            record,
            mode=as_mode(mode, metric, self._mode_of(metric)),
            patience=patience,
            min_delta=min_delta,
            awaits=self._awaits(record, metric),
            on_best=stop.on_best,
        )
        self.handle_event(event, watch, filter, name=record)
        self.handle_event(ev.STARTED, stop.on_started, name=record)
        return self.handle_event((ev.COMPLETED, ev.HALTED), stop.on_end, name=record)

    def reduce_lr_on_plateau(
        self,
        metric: str,
        *,
        factor: float = 0.1,
        patience: int = 3,
        mode: Literal["min", "max"] | None = None,
        min_lr: float | None = None,
        min_factor: float | None = None,
        cooldown: int = 0,
        min_delta: float = 0.0,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        name: str | None = None,
    ) -> Self:
        """Multiply the learning rate by a factor when a metric has not improved for some events in a row.

        Args:
          metric: Name of a metric of this loop, or of one that `validate` records.
          factor: In (0, 1).
          patience: The rate is lowered at this event in a row without improvement, counted from 1.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          min_lr: The rate does not go below; needs an optimizer whose rate has a name in its state.
          min_factor: The product of all reductions does not go below.
          cooldown: Events after a reduction that are not counted.
          min_delta: An improvement is more than this.
          event: When to look.
          filter: At which firings.
          name: Name of the record in `LoopState.handler_state`.
        """
        self._check_idle()
        record = self._record_name("reduce_lr", metric, name)
        lower = ReduceRate(record, factor, min_lr, min_factor)
        watch = Monitor(
            metric,
            lower,
            record,
            mode=as_mode(mode, metric, self._mode_of(metric)),
            patience=patience,
            min_delta=min_delta,
            cooldown=cooldown,
            awaits=self._awaits(record, metric),
        )
        self.handle_event(ev.STARTED, lower.check, name=record)
        return self.handle_event(event, watch, filter, name=record)

    def checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        criteria: str | None = None,
        mode: Literal["min", "max"] | None = None,
        keep_last: int | Literal["all"] | None = None,
        keep_best: int | Literal["all"] = 1,
        event: str | Sequence[str] = ev.EPOCH_COMPLETED,
        filter: Filter = always,
        file_pattern: str | Callable[[LoopState], str] = "checkpoint_{epoch}_{iteration}",
        compress: bool = False,
        name: str | None = None,
    ) -> Self:
        """Write the loop state to files: at each event, or when a metric improves.

        A file holds what `telic.serialize_state` gives after all other handlers of the event have run; read it with
        `telic.deserialize_state` and go on with `from_state`.

        Args:
          directory: Where files go; made when the run starts.
          criteria: Name of a metric: a file is written when it is better than ever before in this directory.
          mode: "min" or "max"; not needed for the loss, nor for a metric attached before that says which.
          keep_last: Newest files that stay, or "all". Without criteria 2; with criteria 0, and any other number writes
            each event besides the improvements.
          keep_best: Best files that stay, or "all"; of equal scores the oldest is the best.
          event: When to write.
          filter: At which firings.
          file_pattern: File name with ``{epoch}``, ``{iteration}``, ``{total_iterations}`` and ``{steps}``, or a
            function of the state; one plain name, which cannot leave the directory.
          compress: Compress the files with zlib.
          name: Name of the record in `LoopState.handler_state`.
        """
        self._check_idle()
        if criteria is None and mode is not None:
            raise ValueError(f"mode={mode!r} says which value of criteria= is better: give criteria as well")
        record = self._record_name("checkpoint", criteria, name)
        if keep_last is None:
            keep_last = 2 if criteria is None else 0
        saver = Checkpoint(
            placed(directory),
            lambda state: serialize_state(state, compress=compress),
            record,
            pattern=file_pattern,
            metric=criteria,
            mode=None if criteria is None else as_mode(mode, criteria, self._mode_of(criteria)),
            keep_last=keep_last,
            keep_best=keep_best,
            awaits=None if criteria is None else self._awaits(record, criteria),
        )
        self.handle_event(ev.STARTED, saver.prepare, name=record)
        chosen = as_filter(filter)
        for one in self._resolve(event):
            # Late, so that the file holds what the event's other handlers remember.
            self._attachments.append(Attachment(one, saver, chosen, record, late=True))
        return self

    def _mode_of(self, metric: str) -> Literal["min", "max"] | None:
        """Give the direction that a metric of this loop, or the one that a validation computes again, carries."""
        plain = metric in self._metrics
        found = [metric] if plain else [m for m in self._metrics if metric == f"validation_{m}"]
        if not found and metric.startswith("validation_"):
            found = [m for m in self._metrics if metric.endswith(f"_{m}")]
        return self._metrics[max(found, key=len)].metric.mode if found else None

    def _awaits(self, record: str, metric: str) -> Callable[[], bool]:
        """Give a test whether a validation that runs before a handler, and has not run yet, may record a metric."""

        def awaits() -> bool:
            readers = [(i, a) for i, a in enumerate(self._attachments) if record_of(a) == record]
            return any(
                metric.startswith(v.handler.prefix)
                and not v.handler.has_run
                and any(a.event != v.event or a.late or j < i for i, a in readers)
                for j, v in enumerate(self._attachments)
                if isinstance(v.handler, Validation)
            )

        return awaits

    def _evaluation(self, model: Any, averaged: bool) -> StepProgram:
        if model is None:
            if not isinstance(self._program, TrainStep):
                raise ContractError(
                    "this loop's step is not built from an objective, so say what to evaluate: "
                    "validate(data, model=...)"
                )
            return self._program.evaluation(averaged=averaged)
        if isinstance(model, EvalStep):
            if averaged and not model.averaged:
                model = replace(model, averaged=True)
            return model
        if isinstance(model, Objective):
            return EvalStep(model, averaged=averaged)
        objective = self._program.objective if isinstance(self._program, TrainStep) else None
        if isinstance(self._program, TrainStep) and isinstance(objective, Supervised | FunctionObjective):
            return replace(self._program.evaluation(averaged=averaged), objective=objective.with_model(model))
        return EvalStep(as_objective(None, model), averaged=averaged)


def _are_sets(data: Mapping[Any, Any]) -> bool:
    """Say whether a mapping holds data sets by name: one of a batch's fields, or of arrays, is a batch or columns."""
    is_batch = set(data) <= {"inputs", "targets", "weights"} or any(hasattr(value, "shape") for value in data.values())
    return not is_batch
