"""``telic verify-resume``: one program run once through and once with kills, and what the two leave, compared."""

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from telic.checkpoints import files
from telic.checkpoints.comparison import compare
from telic.cli.programs import Program, ProgramError, newest, run_directories, shown
from telic.compose.rehearsal import Rehearsal

UNTIMED = ("seconds", "speed")
"""Fields of a metric log that tell how long something took."""

TIMES = ("goodput.jsonl",)
"""Logs that tell nothing else."""


@dataclass
class Verdict:
    """What a test found.

    Attributes:
      lines: Sentences about each run and log, for the person who asked.
      is_same: Whether every run and log of the program ended the same.
    """

    lines: list[str] = field(default_factory=list[str])
    is_same: bool = True

    def say(self, line: str, *, fine: bool = True) -> None:
        """Add a line; one that is not fine decides."""
        self.lines.append(line)
        self.is_same = self.is_same and fine


def verify_resume(program: Program, at: tuple[int, ...], root: Path, say: Callable[[str], None]) -> Verdict:
    """Run a program once through, and once killed after these updates; compare what they leave.

    Raises:
      ProgramError: It failed, ended before an update, or saves nothing.
    """
    whole, killed = Rehearsal(root / "once"), Rehearsal(root / "killed")
    log = root / "once" / "output.txt"
    say(f"{program.path}: once through")
    if code := program.run(whole, log):
        raise program.failed(code, log)
    runs = run_directories(whole.root / "files")
    if not any(newest(run) for run in runs):
        raise ProgramError(
            f"{program.path} saves no checkpoint, so it cannot be continued: give it "
            "telic.Trainer(..., checkpoints=telic.Checkpoints('runs/name'))"
        )
    continued = False
    for number, update in enumerate(at, 1):
        log = root / "killed" / f"output-{number}.txt"
        code = program.run(Rehearsal(killed.root, kill_after=update), log)
        if code == 0:
            raise ProgramError(f"{program.path} ended before update {update}: give --at updates that it reaches")
        if code != -signal.SIGKILL:
            raise program.failed(code, log)
        saved = _saved(killed)
        continued = continued or saved is not None
        there = "nothing was saved yet" if saved is None else f"the newest checkpoint is that of update {saved}"
        say(f"{program.path}: killed after update {update}; {there}")
    if not continued:
        raise ProgramError(
            f"no kill of {program.path} came after a checkpoint, so nothing is proved: kill later (--at), or save "
            "more often"
        )
    log = root / "killed" / f"output-{len(at) + 1}.txt"
    if code := program.run(killed, log):
        raise program.failed(code, log)
    say(f"{program.path}: started again, to its end")
    verdict = Verdict()
    for run in runs:
        _compare_runs(run, whole.root, killed.root, verdict)
    logs = (path for path in (whole.root / "files").rglob("*.jsonl") if path.name not in TIMES)
    for path in sorted(logs):
        _compare_logs(path, whole.root, killed.root, verdict)
    return verdict


def _saved(rehearsal: Rehearsal) -> str | None:
    """Name the checkpoint that the next process will find, or those of several runs; None where there is none."""
    found = [newest(run) for run in run_directories(rehearsal.root / "files")]
    return ", ".join(path.name for path in found if path is not None) or None


def _compare_runs(run: Path, whole: Path, killed: Path, verdict: Verdict) -> None:
    name = shown(run, whole)
    other = killed / run.relative_to(whole)
    first, second = newest(run), newest(other)
    if (other / files.EARLIER).exists():
        verdict.say(f"{name}: begins anew each time, so it never continues: it says resume='never'", fine=False)
        return
    if first is None or second is None:
        verdict.say(f"{name}: the {'killed' if second is None else 'whole'} run left no checkpoint", fine=False)
        return
    result = compare(first, second)
    updates = first.name
    if result.is_same:
        verdict.say(
            f"{name}: the same bits in checkpoint {updates}: {result.arrays} arrays, and all that the host keeps"
        )
        return
    verdict.say(f"{name}: not the same in checkpoint {updates}", fine=False)
    verdict.lines += [f"  {line}" for line in result.lines()]


def _compare_logs(path: Path, whole: Path, killed: Path, verdict: Verdict) -> None:
    name = shown(path, whole)
    other = killed / path.relative_to(whole)
    if not other.exists():
        verdict.say(f"{name}: the killed run wrote none", fine=False)
        return
    ours, theirs = _lines(path), _lines(other)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        if a != b:
            verdict.say(f"{name}: line {number} differs", fine=False)
            verdict.lines += [f"  once:   {json.dumps(a)}", f"  killed: {json.dumps(b)}"]
            return
    if len(ours) != len(theirs):
        verdict.say(f"{name}: {len(ours)} lines, and {len(theirs)} of the killed run", fine=False)
        return
    verdict.say(f"{name}: {len(ours)} lines, the same")


def _lines(path: Path) -> list[Any]:
    """Give the lines of a log without what tells how long it took."""
    found: list[Any] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record: Any = json.loads(line)
        except ValueError:
            record = line
        if isinstance(record, dict):
            record = {name: value for name, value in record.items() if name not in UNTIMED}  # pyright: ignore[reportUnknownVariableType] JSON
        found.append(record)
    return found
