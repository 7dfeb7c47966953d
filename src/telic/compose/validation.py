"""Evaluation inside a run: the loop's own metrics over other data, under names of their own."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from telic.artifacts import ArtifactSink
from telic.compose.programs import has_loss, reads_gradients, with_loss
from telic.contract import Objective, has_evaluation, has_preview
from telic.display.figures import Confusion
from telic.display.plots import Plot
from telic.display.previews import PreviewFolder, Previews
from telic.driver import DriverOptions, Gathering, StepDriver
from telic.errors import ContractError, closest
from telic.evaluate import EvaluationPass, Preview
from telic.handlers import Checkpoint, Monitor
from telic.loop.attachments import Attachment
from telic.loop.ports import Placement, StepProgram
from telic.loop.reducers import Reducer, reported
from telic.loop.state import REJECTED, LoopState
from telic.metrics.base import is_host
from telic.train.evaluation import EvalStep
from telic.train.step import TrainStep


@dataclass
class Validation:
    """Handler that evaluates, records under its prefix, and shows a preview.

    Attributes:
      reducers: Gives the metrics of the loop, as they are when it evaluates.
      program: The evaluation step.
      batches: The data, readable any number of times.
      prefix: What the names of its values begin with.
      placement: Where batches live.
      own: Metrics of this validation alone, by name.
      sink: Where the objective's preview goes; None shows none.
    """

    reducers: Callable[[], Mapping[str, Reducer]]
    program: StepProgram
    batches: Iterable[Any]
    prefix: str
    placement: Placement
    own: Mapping[str, Reducer] = field(default_factory=dict[str, Reducer])
    sink: ArtifactSink | None = None
    _sink: ArtifactSink | None = field(default=None, repr=False)
    _shown: ArtifactSink | None = field(default=None, repr=False)
    _pass: EvaluationPass | None = field(default=None, repr=False)
    _metrics: dict[str, Reducer] = field(default_factory=dict[str, Reducer], repr=False)
    _ran: bool = field(default=False, repr=False)

    @property
    def what(self) -> str:
        """What it is called in errors."""
        if not self.prefix:
            return "the evaluation"
        name = self.prefix.removeprefix("validation_").removesuffix("_")
        return f"the validation {name!r}" if name else "the validation"

    @property
    def has_run(self) -> bool:
        """Whether it has evaluated anything yet."""
        return self._ran

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names that it records; None where they are not known before it ran."""
        if self._pass is None or not self._pass.knows_names:
            return None
        return tuple(self.prefix + name for name in self._pass.names)

    def of(self, reducers: Callable[[], Mapping[str, Reducer]]) -> "Validation":
        """Give the same validation for another loop's metrics."""
        return replace(self, reducers=reducers, _pass=None, _metrics={}, _ran=False)

    def check(self) -> None:
        """Refuse what cannot be computed, before anything is initialised.

        Raises:
          ValueError: A metric of its own has the name of one of the loop.
          ContractError: A metric reads an artifact, and the objective evaluates nothing; a preview of an objective that
            has nothing to show; nothing to compute at all.
        """
        metrics = self.reducers()
        for name in self.own:
            if name in metrics:
                raise ValueError(f"{self.what} has a metric {name!r} of its own, and the loop has one: rename one")
        objective = getattr(self.program, "objective", None)
        if not isinstance(objective, Objective):
            return
        who = type(objective).__name__
        if not has_evaluation(objective):
            for name, reducer in {**metrics, **self.own}.items():
                kind = reducer.metric.reads
                if isinstance(kind, type):
                    raise ContractError(
                        f"metric {name!r} reads {kind.__name__}, which nobody makes: {who} has no evaluation of its "
                        f"own. Write def evaluate(self, variables, batch, step) that returns {kind.__name__}(...)"
                    )
        if self.sink is not None and not has_preview(objective):
            raise ContractError(
                f"{self.what} has a place for previews, and {who} has nothing to show: write "
                "evaluate(variables, batch, step) or preview(variables, batch, step, *, scored=None), or leave preview "
                "out"
            )
        if not (has_loss(self.program) or metrics or self.own or has_evaluation(objective) or self.sink is not None):
            raise ContractError(
                f"{self.what} computes nothing: there is no loss, no metric and no preview; attach a metric, or leave "
                "the validation out"
            )

    def open(self, directory: Path | None, trackers: Sequence[ArtifactSink] = ()) -> None:
        """Find the places of the previews: that of the sink, or one in the run's directory, and the run's trackers.

        Raises:
          ValueError: The previews were to go to the run's directory, and it has neither one nor a tracker.
        """
        if self.sink is None:
            return
        places = [self.sink]
        if isinstance(self.sink, PreviewFolder):
            is_homeless = self.sink.folder is None and directory is None and bool(trackers)
            places = [] if is_homeless else [self.sink.under(directory)]
        self._sink = Previews((*places, *trackers))

    def prepare(self, state: LoopState) -> None:
        """Look at the first batch and trace what will be computed: raises what a pass would, compiles nothing."""
        if not _is_over(state):
            self._evaluation().prepare(state.step_state)

    def evaluate(self, given: Any, *, step: int) -> dict[str, Any]:
        """Give the values of some weights; previews are numbered by the step."""
        return self._evaluation().run(given, step=step)

    def __call__(self, state: LoopState) -> None:
        values = self.evaluate(state.step_state, step=state.steps)
        self._ran = True
        state.metrics.add({self.prefix + name: value for name, value in values.items()})

    def _evaluation(self) -> EvaluationPass:
        if self._pass is None or self._metrics != self.reducers() or self._shown != self._sink:
            # The metrics are all those attached before the run; one attached between runs makes a new program.
            self._metrics = dict(self.reducers())
            self._shown = self._sink
            # There are no gradients in an evaluation.
            reducers = {name: r for name, r in {**self._metrics, **self.own}.items() if not reads_gradients(r)}
            self._pass = evaluation_pass(
                self.program,
                with_loss(reducers, self.program),
                self.batches,
                self.placement,
                preview=None if self._sink is None else Preview(self._sink, self.prefix),
                what=self.what,
            )
        return self._pass


def _is_over(state: LoopState) -> bool:
    """Whether a run ends as it starts, so that nothing will be evaluated."""
    if state.max_steps is not None:
        return state.steps >= state.max_steps
    return state.max_epoch is not None and state.epoch >= state.max_epoch


def check_average(evaluation: StepProgram, training: StepProgram) -> None:
    """Refuse to evaluate averaged weights where training keeps none, before anything runs.

    Raises:
      ContractError: The trained objective has no EMASpec.
    """
    wanted = isinstance(evaluation, EvalStep) and evaluation.averaged
    if wanted and isinstance(training, TrainStep) and training.objective.ema is None:
        raise ContractError(
            f"averaged=True evaluates the moving average of the weights, and {type(training.objective).__name__} keeps "
            "none: set objective.ema = telic.EMASpec(decay=0.999) before training, or leave averaged out"
        )


def check_evaluated(reducers: Mapping[str, Reducer], program: StepProgram, validations: Sequence[Validation]) -> None:
    """Refuse metrics that nobody would compute, before anything is initialised.

    Raises:
      ContractError: A metric reads an artifact or works on the host, and the loop has no validation.
    """
    for validation in validations:
        validation.check()
    is_evaluation = isinstance(program, EvalStep)
    for name, reducer in reducers.items():
        kind = reducer.metric.reads
        if not reducer.is_of_evaluation or validations or (is_evaluation and not is_host(reducer.metric)):
            continue
        what = f"reads {kind.__name__}, which an evaluation makes" if isinstance(kind, type) else "works on the host"
        remedy = "attach loop.validate(data), or give fit eval_every= and data with a val"
        if is_evaluation:
            remedy = "compute it with trainer.evaluate(data, state=..., metrics=...)"
        raise ContractError(f"metric {name!r} {what}, and nothing in this run evaluates for it: {remedy}")


def begin(attachments: Sequence[Attachment], state: LoopState, names: Sequence[str]) -> None:
    """Look at all that a run will evaluate and watch, before its first step.

    Args:
      attachments: The loop's handlers.
      state: Where the run starts.
      names: Of the metrics that the step reports.
    Raises:
      ValueError: Two validations, or a validation and a metric, record the same name.
      ContractError: A handler watches a metric that cannot come. Where handlers of the user's own may add metrics,
        this is known at the handler's first event only.
    """
    validations = validations_of(attachments)
    for validation in validations:
        validation.prepare(state)
    if _is_over(state):
        return
    taken: dict[str, str] = dict.fromkeys(names, "the loop")
    is_open = any(not _is_own(a.handler) for a in attachments)
    for validation in validations:
        found = validation.names
        is_open = is_open or found is None
        for name in found or ():
            if name in taken:
                raise ValueError(
                    f"{validation.what} records {name!r}, and so does {taken[name]}: give one of them another name="
                )
            taken[name] = validation.what
    if is_open:
        return
    for record, metric in _watched(attachments):
        if metric not in taken and record not in state.handler_state and metric != REJECTED:
            raise ContractError(
                f"{record} reads the metric {metric!r}, which nothing in this run records.{closest(metric, taken)} "
                f"There will be: {', '.join(taken) or 'none'}. Attach the metric or the validation that gives it"
            )


def validations_of(attachments: Sequence[Attachment]) -> list[Validation]:
    """Give the validations among a loop's handlers, each once."""
    found: dict[int, Validation] = {id(a.handler): a.handler for a in attachments if isinstance(a.handler, Validation)}
    return list(found.values())


def _watched(attachments: Sequence[Attachment]) -> Iterator[tuple[str, str]]:
    """Give (who, metric) of every handler that reads one metric by name."""
    for attachment in attachments:
        handler: Any = attachment.handler
        match handler:
            case Monitor() as monitor:
                yield monitor.record, monitor.metric
            case Checkpoint(metric=str(metric)) as saver:
                yield saver.record, metric
            case Confusion() as drawing:
                yield drawing.record, drawing.metric
            case _ if isinstance(getattr(handler, "__self__", None), Plot):
                plot: Plot = handler.__self__
                yield from ((plot.record, metric) for metric in plot.metrics)
            case _:
                pass


def _is_own(handler: Any) -> bool:
    """Whether a handler is one of this package: none of them adds metrics but a validation."""
    module = getattr(handler, "__module__", None) or type(handler).__module__
    return str(module).split(".")[0] == __name__.split(".")[0]


def evaluation_pass(
    program: StepProgram,
    reducers: Mapping[str, Reducer],
    batches: Iterable[Any],
    placement: Placement,
    *,
    preview: Preview | None = None,
    what: str = "the evaluation",
) -> EvaluationPass:
    """Give an evaluation of a data set; each batch shape of it is one program."""

    def make_driver(bound: StepProgram, computed: Mapping[str, Reducer]) -> Gathering:
        options = DriverOptions(strict=False)
        return Gathering(StepDriver(bound, computed, placement, options, carries=False, reported=reported))

    return EvaluationPass(
        program,
        batches,
        reducers,
        make_driver,
        placement=placement,
        agree=placement.processes.agree,
        preview=preview,
        what=what,
    )
