"""What stands out in a run, in words: what happened, why it matters, what to do."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from telic.reports.reading import Run
from telic.reports.series import split
from telic.reports.text import duration, number

_MIN_SECONDS = 10.0
"""Steps that took less say nothing about where a run's time goes: it has hardly begun."""

_STEP_PARTS = ("data", "dispatch", "device", "handlers", "checkpoint", "loop")


@dataclass(frozen=True)
class Finding:
    """One thing that stands out.

    Attributes:
      level: "bad" where the run is spoilt, "warning" where it is worth a look, "note" otherwise.
      run: Name of the run; empty where it is about several.
      title: What happened, in a few words.
      text: Why it matters and what to do.
    """

    level: Literal["bad", "warning", "note"]
    run: str
    title: str
    text: str


def findings(runs: Sequence[Run]) -> list[Finding]:
    """Give what stands out, the worst first."""
    found = [finding for run in runs for finding in _of(run)]
    if len(runs) > 1:
        found += _between(runs)
    order = {"bad": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.level])


def _of(run: Run) -> Iterator[Finding]:
    yield from _ending(run)
    yield from _numbers(run)
    yield from _generalisation(run)
    yield from _time(run)
    yield from _code(run)


def _ending(run: Run) -> Iterator[Finding]:
    if run.status == "failed":
        error = run.record.get("error")
        why = f"It ended with {error}." if isinstance(error, str) else "It ended with an error."
        yield Finding("bad", run.name, "The run failed", why)
    elif run.status == "gone":
        text = (
            "Its record says that it is running, and its process is not there: it was killed, or the machine stopped. "
            "A run with checkpoints goes on when the same program is started again."
        )
        yield Finding("bad", run.name, "The run ended without a word", text)
    elif run.status == "interrupted":
        text = "Somebody ended it before it was done. Start the same program again to go on."
        yield Finding("note", run.name, "The run was interrupted", text)
    elif run.status == "halted":
        text = "A handler ended it before its plan was done, as early stopping does."
        yield Finding("note", run.name, "The run was halted", text)
    starts = run.record.get("starts")
    if isinstance(starts, list) and len(starts) > 1:  # pyright: ignore[reportUnknownArgumentType] JSON
        count = len(starts)  # pyright: ignore[reportUnknownArgumentType]
        text = "It went on from a checkpoint each time; times and rates are those of its own starts."
        yield Finding("note", run.name, f"The run was started {count} times", text)
    if run.bad_lines:
        text = f"{run.bad_lines} lines of metrics.jsonl could not be read and are left out."
        yield Finding("warning", run.name, "The record is damaged", text)


def _numbers(run: Run) -> Iterator[Finding]:
    spoilt: dict[str, int] = {}
    for line in run.lines:
        for name, value in line.metrics.items():
            if not math.isfinite(value):
                spoilt.setdefault(name, line.batches)
    for name, at in spoilt.items():
        text = (
            f"From batch {at:,} on, {name} is NaN or infinite at least once; such points are gaps in its curve. A "
            "lower learning rate, clipping the gradient, or float32 where it is narrower are the usual remedies."
        )
        yield Finding("bad" if name == "loss" else "warning", run.name, f"{name} was not finite", text)
    # A metric of an epoch so far: its largest value in each epoch is that epoch's count.
    rejected: dict[int, float] = {}
    for line in run.lines:
        count = line.metrics.get("rejected", 0.0)
        if math.isfinite(count):
            rejected[line.epoch] = max(rejected.get(line.epoch, 0.0), count)
    if total := int(sum(rejected.values())):
        batches = max((line.batches for line in run.lines), default=0)
        share = f", {total / batches:.1%} of all" if batches else ""
        text = (
            f"{total:,} attempts{share} had a loss or gradient that was not finite and changed nothing. A few are "
            "harmless, and expected with a dynamic loss scale; many mean that the learning rate or data is at fault."
        )
        yield Finding("warning", run.name, "Attempts were rejected", text)
    yield from _gradients(run)
    rates = [v for line in run.lines for n, v in line.training.items() if n.startswith("learning_rate")]
    if rates and not any(rates):
        text = "Every learning rate recorded is 0, so nothing was learned: look at the schedule and its length."
        yield Finding("bad", run.name, "The learning rate is zero", text)
    losses = [line.metrics["loss"] for line in run.lines if "loss" in line.metrics]
    losses = [loss for loss in losses if math.isfinite(loss)]
    if len(losses) >= 4 and losses[-1] > 2 * abs(losses[0]) + 1e-12 and losses[0] != 0:
        text = f"It was {number(losses[0])} and is {number(losses[-1])}: the learning rate is probably too high."
        yield Finding("bad", run.name, "The loss grew", text)


def _gradients(run: Run) -> Iterator[Finding]:
    norms = [line.training["gradient_norm"] for line in run.lines if "gradient_norm" in line.training]
    finite = sorted(norm for norm in norms if math.isfinite(norm))
    if len(finite) >= 8 and finite[len(finite) // 2] > 0 and finite[-1] > 20 * finite[len(finite) // 2]:
        text = (
            f"The largest norm recorded is {number(finite[-1])}, the usual one {number(finite[len(finite) // 2])}. "
            "Clipping at a few times the usual norm keeps such a batch from undoing what was learned."
        )
        yield Finding("warning", run.name, "The gradient has spikes", text)


def _generalisation(run: Run) -> Iterator[Finding]:
    epochs = [line.metrics for line in run.lines if line.kind == "epoch" and "validation_loss" in line.metrics]
    losses = [metrics["validation_loss"] for metrics in epochs]
    if len(losses) < 4 or not all(map(math.isfinite, losses)):
        return
    best = losses.index(min(losses))
    falling = "loss" in epochs[best] and epochs[-1].get("loss", math.inf) < epochs[best]["loss"]
    if best < len(losses) - 3 and losses[-1] > 1.02 * losses[best] and falling:
        text = (
            f"The validation loss was lowest in epoch {best + 1}, {number(losses[best])}, and is {number(losses[-1])} "
            "now while the training loss went on falling. loop.early_stop('validation_loss', restore_best=True) would "
            "have kept the best weights."
        )
        yield Finding("warning", run.name, "The run overfits", text)


def _time(run: Run) -> Iterator[Finding]:
    spent = split(run)
    total = sum(spent.get(part, 0.0) for part in _STEP_PARTS)
    if total < _MIN_SECONDS:
        return
    remedies: Iterable[tuple[str, float, str, str]] = (
        ("data", 0.2, "The run waits for data", "More workers, fewer transformations, or data kept in memory help."),
        ("handlers", 0.1, "Handlers take time", "Give them a filter such as telic.every(100)."),
        ("checkpoint", 0.1, "Saving takes time", "Save less often with checkpoint_every=, or to a faster disk."),
        (
            "dispatch",
            0.5,
            "Small dispatches",
            "A handler at every batch keeps iterations apart; filters let them fuse.",
        ),
    )
    for part, limit, title, remedy in remedies:
        share = spent.get(part, 0.0) / total
        if share > limit:
            name, which = _slowest(run) if part == "handlers" else ("", "")
            if name == "validate":
                remedy = "Validate less often with a filter, over fewer batches with limit=, or without its pictures."
            text = f"{share:.0%} of the steps' {duration(total)} went there{which}. {remedy}"
            yield Finding("warning", run.name, title, text)
    compiling = spent.get("compile", 0.0)
    if compiling > 10 and compiling > 0.2 * total:
        text = f"It took {duration(compiling)}. compile_cache=True keeps compiled programs for the next start."
        yield Finding("note", run.name, "Compiling takes time", text)


def _slowest(run: Run) -> tuple[str, str]:
    """Give the name of the slowest handler and what is said of it, where the profile of a run that has ended tells."""
    found: Any = run.profile.get("handlers")
    if not isinstance(found, dict) or not found:
        return "", ""
    times = {str(name): value for name, value in cast(dict[Any, Any], found).items() if isinstance(value, int | float)}
    name = max(times, key=lambda name: times[name], default="")
    return (name, f", most of it to {name}, {duration(times[name])}") if name else ("", "")


def _code(run: Run) -> Iterator[Finding]:
    changed: Any = run.part("git").get("changed")
    if isinstance(changed, list) and changed:
        count = len(changed)  # pyright: ignore[reportUnknownArgumentType] JSON
        files = "1 file was" if count == 1 else f"{count} files were"
        text = f"{files} changed and not committed when it started, so its commit alone does not give this run again."
        yield Finding("note", run.name, "The code was not committed", text)


def _between(runs: Sequence[Run]) -> Iterator[Finding]:
    packages = list(dict.fromkeys(name for run in runs for name in run.part("versions")))
    apart = [name for name in packages if len({str(run.part("versions").get(name)) for run in runs}) > 1]
    if apart:
        text = f"{', '.join(apart)} differ between these runs, which by itself changes numbers a little."
        yield Finding("note", "", "Other versions", text)
    devices = {str(run.part("device").get("kind")) for run in runs if run.part("device")}
    if len(devices) > 1:
        text = f"The runs used {', '.join(sorted(devices))}: compare their losses, not their rates."
        yield Finding("note", "", "Other devices", text)
