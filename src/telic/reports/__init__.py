"""Runs as pages: what a run directory holds, read without JAX, explained in words and drawn.

``telic report``, ``telic watch`` and ``telic board`` stand on this; a run directory is what ``loop.record(directory)``
and runs with checkpoints leave.
"""

from telic.reports.log import Line, Log
from telic.reports.notable import Finding, findings
from telic.reports.pages import Fragment, fragment, page
from telic.reports.reading import Run, Shown, find_runs, read_run
from telic.reports.text import visible

__all__ = [
    "Finding",
    "Fragment",
    "Line",
    "Log",
    "Run",
    "Shown",
    "find_runs",
    "findings",
    "fragment",
    "page",
    "read_run",
    "visible",
]
