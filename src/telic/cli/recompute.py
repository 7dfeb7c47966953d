"""``telic replay``: what lies between two checkpoints of a run, computed again and compared."""

import shutil
from collections.abc import Callable
from pathlib import Path

from telic.checkpoints import files, inspect
from telic.checkpoints.comparison import compare
from telic.checkpoints.directory import versions
from telic.cli.asked import UsageError
from telic.cli.kill_test import Verdict
from telic.cli.programs import Program, ProgramError, newest, run_directories, shown
from telic.compose.rehearsal import End, Rehearsal

PREEMPTED = 143
"""How a process ends that was told to end at an iteration: as by SIGTERM."""


def replay(program: Program, run: Path, step: int, root: Path, say: Callable[[str], None]) -> Verdict:
    """Compute a checkpoint again from the one before it, and compare the two bit by bit; the run is only read.

    Args:
      program: The program that made the run.
      run: The run's directory.
      step: Updates of the checkpoint to compute again.
      root: Where the program's files go.
      say: Takes lines for the person who waits.
    Raises:
      UsageError: The run keeps no such checkpoint.
      ProgramError: The program failed, or is not that of the run.
      CheckpointError: A checkpoint is damaged.
    """
    orders, _ = files.listing(run)
    at = [i for i, (updates, _) in enumerate(orders) if updates == step]
    if not at:
        kept = ", ".join(map(files.name_of, orders)) or "none"
        raise UsageError(f"--step takes the updates of a checkpoint that {run} keeps: {kept}; got {step}")
    target = run / files.name_of(orders[at[0]])
    base = run / files.name_of(orders[at[0] - 1]) if at[0] else None
    found = inspect(target)
    loop = found.loop
    rehearsal = Rehearsal(root)
    there = rehearsal.place(run)
    if base is not None:
        shutil.copytree(base, there / base.name)
    end = End(there, loop["total_iterations"], loop["status"] is None and loop["iteration"] == 0)
    rehearsal = Rehearsal(root, end=end)
    say(f"{program.path}: computing {target.name} again from {'the beginning' if base is None else base.name}")
    log = root / "output.txt"
    code = program.run(rehearsal, log)
    if code not in (0, PREEMPTED):
        raise program.failed(code, log)
    made = newest(there)
    if made is None or made == (None if base is None else there / base.name):
        others = [shown(path, root) for path in run_directories(root / "files") if path != there]
        raise ProgramError(
            f"{program.path} did not continue {run}: its runs are {', '.join(others) or 'none'}; start it where it was "
            "started, with its arguments after --"
        )
    # A run that has ended differs from one that goes on in what the host keeps, not in its arrays.
    result = compare(target, made, host=inspect(made).loop["status"] == loop["status"])
    verdict = Verdict()
    before = found.body.get("versions", {})
    changed = [f"{name} {before[name]} -> {v}" for name, v in versions().items() if before.get(name, v) != v]
    if changed:
        verdict.say(f"other versions compute other bits: {', '.join(changed)}")
    shares = found.body.get("shares", 1)
    if shares != 1:
        verdict.say(f"{shares} processes computed it, and one computes it again: sums may be rounded otherwise")
    if result.is_same:
        verdict.say(f"checkpoint {target.name} is computed again with the same bits: {result.arrays} arrays")
        return verdict
    verdict.say(f"checkpoint {target.name} differs from what is computed now; first in {result.first}", fine=False)
    verdict.lines += [f"  {line}" for line in result.lines()]
    return verdict
