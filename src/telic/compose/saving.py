"""Where a run is saved and when, as a trainer or a loop was told."""

from dataclasses import dataclass, replace
from typing import Literal

from telic.checkpoints.config import Checkpoints, check_count

Resume = Literal["auto", "never", "must"]


@dataclass(frozen=True)
class Saving:
    """What a loop is told about checkpoints.

    Attributes:
      config: Where, and which stay.
      resume: "auto" continues when there is a checkpoint, "must" insists on one, "never" begins anew and sets those
        there are aside.
    """

    config: Checkpoints
    resume: Resume = "auto"

    def __post_init__(self) -> None:
        if self.resume not in ("auto", "never", "must"):
            raise ValueError(f"resume must be 'auto', 'never' or 'must', got {self.resume!r}")


def as_saving(checkpoints: Checkpoints | None, checkpoint_every: int | None, resume: str) -> Saving | None:
    """Give what a loop is told, from the options of a trainer.

    Raises:
      ValueError: `checkpoint_every` or `resume` asks for checkpoints and nothing says where they go.
      TypeError: `checkpoints` is none.
    """
    if checkpoints is None:
        if checkpoint_every is not None or resume == "must":
            asked = f"checkpoint_every={checkpoint_every}" if checkpoint_every is not None else "resume='must'"
            raise ValueError(f"{asked} needs a place: give Trainer(checkpoints=telic.Checkpoints('runs/name'))")
        if resume not in ("auto", "never"):
            raise ValueError(f"resume must be 'auto', 'never' or 'must', got {resume!r}")
        return None
    if not isinstance(checkpoints, Checkpoints):  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise TypeError(f"checkpoints takes telic.Checkpoints('runs/name'), got {checkpoints!r}")
    # Where it is now, also when the program changes its directory.
    checkpoints = replace(checkpoints, directory=checkpoints.directory.absolute())
    if checkpoint_every is not None:
        check_count("checkpoint_every", checkpoint_every, least=1)
        checkpoints = replace(checkpoints, every=checkpoint_every)
    return Saving(checkpoints, resume)  # pyright: ignore[reportArgumentType] checked there
