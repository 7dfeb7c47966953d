"""The errors a caller may want to catch, and the one way to say "no such name"."""

import difflib
from collections.abc import Iterable


class TelicError(Exception):
    """Base of every error class of Telic's own."""


class ContractError(TelicError, ValueError):
    """An objective, model, step or handler returned something its contract does not allow."""


class ShapeError(TelicError, ValueError):
    """Array shapes that would broadcast or compile into something nobody asked for."""


class DataError(TelicError, ValueError):
    """Data that is empty, exhausted, or not what the objective reads."""


class CaptureError(TelicError, ValueError):
    """A program holds arrays as constants that should be arguments."""


class NonFiniteError(TelicError, RuntimeError):
    """Training stopped: the loss, the gradient or the optimizer is not finite.

    Attributes:
      leaves: Names of the leaves that were not finite in the last rejected attempt.
      attempt: Index of that attempt, counted from 0 over the whole run: the position of its batch.
      state: The training state at the stop. Its parameters are finite.
    """

    def __init__(self, message: str, *, leaves: tuple[str, ...] = (), attempt: int = -1, state: object = None):
        super().__init__(message)
        self.leaves = leaves
        self.attempt = attempt
        self.state = state


class VariablesWarning(UserWarning):
    """Given weights that do not cover the model, or that the model does not have."""


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
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}.")
