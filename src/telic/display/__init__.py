"""What a person sees while a run goes on, and what it leaves behind: lines, progress, plots, records, pictures.

`telic.Loop` attaches these: ``loop.log(50)``, ``loop.progress()``, ``loop.plot("loss")``,
``loop.record("metrics.jsonl")``, ``loop.curves("curves.png")``, ``loop.confusion("confusion.png")``, and the previews
of ``loop.validate(data, preview="previews")``. The functions here draw the same by hand.
"""

from telic.display.curves import Curves, draw_curves
from telic.display.figures import draw_confusion, draw_features, draw_images, save_figure
from telic.display.lines import MessageLog, MetricLog
from telic.display.plots import Plot
from telic.display.previews import PreviewFolder
from telic.display.progress import Progress
from telic.display.recorder import Recorder

__all__ = [
    "Curves",
    "MessageLog",
    "MetricLog",
    "Plot",
    "PreviewFolder",
    "Progress",
    "Recorder",
    "draw_confusion",
    "draw_curves",
    "draw_features",
    "draw_images",
    "save_figure",
]
