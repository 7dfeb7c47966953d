"""What a person sees while a run goes on, and what it leaves behind: lines, progress, records, curves.

`telic.Loop` attaches these: ``loop.log(50)``, ``loop.progress()``, ``loop.record("metrics.jsonl")`` and
``loop.curves("curves.png")``.
"""

from telic.display.curves import Curves, draw_curves
from telic.display.lines import MessageLog, MetricLog
from telic.display.progress import Progress
from telic.display.recorder import Recorder

__all__ = ["Curves", "MessageLog", "MetricLog", "Progress", "Recorder", "draw_curves"]
