"""The errors a caller may want to catch, and the one way to say "no such name" and "not with these arguments"."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class TelicError(Exception):
    """Base of every error class of Telic's own."""


class ContractError(TelicError, ValueError):
    """An objective, model, step or handler returned something its contract does not allow."""


class ShapeError(TelicError, ValueError):
    """Array shapes that would broadcast or compile into something nobody asked for."""


class DataError(TelicError, ValueError):
    """Data that is empty, exhausted, or not what the objective reads."""


class SettingsError(TelicError, ValueError):
    """A setting of a run that is unknown, missing, or not of its type; the text has its path."""


class PretrainedError(TelicError, ValueError):
    """Files of a pretrained model that are corrupt, or that describe no model Telic has."""


class CaptureError(TelicError, ValueError):
    """A program holds arrays as constants that should be arguments."""


class NonFiniteError(TelicError, RuntimeError):
    """Training stopped: the loss, the gradient or the optimizer is not finite.

    Attributes:
      leaves: Names of the leaves that were not finite in the last rejected attempt.
      attempt: Index of that attempt, counted from 0 over the whole run: the position of its batch.
      state: The training state at the stop. Its parameters are finite.
      batch: The microbatch of that attempt as NumPy arrays; None where it was too large to keep until it was noticed,
        and outside of a loop. A run with a directory saves it there as ``nonfinite_batch.npz``.
    """

    def __init__(
        self,
        message: str,
        *,
        leaves: tuple[str, ...] = (),
        attempt: int = -1,
        state: object = None,
        batch: object = None,
    ):
        super().__init__(message)
        self.leaves = leaves
        self.attempt = attempt
        self.state = state
        self.batch = batch


class CheckpointError(TelicError, RuntimeError):
    """A checkpoint could not be written or read, or none of those there are is whole."""


class MismatchError(CheckpointError, ValueError):
    """A checkpoint belongs to another model, optimizer, window or data source than the run that would continue it.

    Attributes:
      lines: The differences, one a line.
    """

    def __init__(self, message: str, *, lines: tuple[str, ...] = ()):
        super().__init__(message)
        self.lines = lines


class BusyError(CheckpointError):
    """Another run writes to this directory."""


class Interrupted(KeyboardInterrupt, SystemExit):
    """The run was stopped by Ctrl-C (SIGINT), after its state was saved. A program that does not catch it exits 130.

    Attributes:
      state: The LoopState that was reached.
    """

    def __init__(self, state: object = None):
        super().__init__(130)
        self.code = 130
        self.state = state


class Preempted(SystemExit):
    """The run was stopped by SIGTERM, after its state was saved where it has checkpoints.

    A program that does not catch it exits 143.

    Attributes:
      state: The LoopState that was reached.
    """

    def __init__(self, state: object = None):
        super().__init__(143)
        self.state = state


class ProcessError(TelicError, RuntimeError):
    """The processes of a run do not agree, or one of them did not come."""


class VariablesWarning(UserWarning):
    """Given weights that do not cover the model, or that the model does not have."""


class ReplayWarning(UserWarning):
    """A loss whose windows are exact only by running each microbatch twice."""


class ShapeWarning(UserWarning):
    """Shapes that a loss may broadcast into something nobody asked for."""


class RejectedWarning(UserWarning):
    """A run ended, and not one of its attempts was accepted."""


class CaptureWarning(UserWarning):
    """A large array is compiled into the program as a constant."""


def closest(name: str, known: Iterable[str]) -> str:
    """Give " Did you mean 'x'?" for the nearest known name, or "" when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """Build the error for a name that is not in a table, with the nearest one that is."""
    names = sorted(known)
    hint = closest(name, names) if isinstance(name, str) else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")


def check_call(what: str, fn: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise TypeError for a function that cannot be called with these arguments, by their names."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        # Not every callable has one that can be read.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(f"{what} is called with ({', '.join(arguments)}), got {name}{signature}") from error
