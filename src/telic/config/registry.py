"""What a file may name: data, models, objectives, optimizers and schedules, registered in code.

A file of settings says ``name = "adam"``; it never says which module to import. What a name takes is read from the
registered function itself: each keyword with a plain type is a setting of that name, type and default.
"""

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from telic.errors import SettingsError, unknown_name
from telic.optimizers.schedules import Schedule

Kind = Literal["data", "model", "objective", "optimizer", "schedule"]
"""What can be named."""

KINDS: tuple[Kind, ...] = get_args(Kind)

F = TypeVar("F", bound=Callable[..., Any])

_PLAIN: tuple[Any, ...] = (bool, int, float, str, Path, type(None))
_NOT_SETTINGS = ("self", "name", "parent")
"""``name`` and ``parent`` are fields of every Flax Linen module, and ``name`` says which entry is meant."""


@dataclass(frozen=True)
class Entry:
    """A registered name.

    Attributes:
      kind: What it is one of.
      name: The name.
      factory: What makes it.
      settings: Frozen dataclass of what a file can say about it.
      whole: The factory takes the settings as one value, not as keywords.
      given: Its first parameters, which come from the run and not from a file: ``model`` for most objectives.
    """

    kind: Kind
    name: str
    factory: Callable[..., Any]
    settings: type
    whole: bool
    given: tuple[str, ...]


@dataclass(frozen=True)
class Choice:
    """A registered name with its settings: what ``[optimizer]`` of a file becomes.

    Attributes:
      kind: What it is one of.
      name: The name.
      settings: Its settings.
    """

    kind: Kind
    name: str
    settings: Any

    def make(self, *given: Any) -> Any:
        """Make what is named.

        Args:
          *given: What the run gives, such as the model of an objective.
        """
        entry = entry_of(self.kind, self.name)
        if entry.whole:
            return entry.factory(*given, self.settings)
        values = {f.name: getattr(self.settings, f.name) for f in dataclasses.fields(self.settings)}
        made = {name: value.make() if isinstance(value, Choice) else value for name, value in values.items()}
        return entry.factory(*given, **made)


_ENTRIES: dict[tuple[Kind, str], Entry] = {}


def register(
    kind: Kind, name: str | None = None, *, settings: type | None = None, given: Sequence[str] = ()
) -> Callable[[F], F]:
    """Give a name to a function, so that a file of settings can ask for what it makes.

    Args:
      kind: "data", "model", "objective", "optimizer" or "schedule".
      name: What files call it; by default the function's own name.
      settings: A frozen dataclass that the function takes as one value. By default the settings are the function's
        keywords that have plain types.
      given: Further parameters that the run gives; ``model`` is always given by the run.
    Raises:
      ValueError: The name is taken, or a parameter without a default has a type that no file can hold.
    Example:
      >>> @register("model", "example_line")
      ... def line(width: int = 1):
      ...     return (lambda key, x: {"w": 0.0}, lambda params, x: params["w"] * x)
      >>> "example_line" in names("model")
      True
    """
    if kind not in KINDS:
        raise unknown_name("kind", kind, KINDS)

    def remember(factory: F) -> F:
        label = name or getattr(factory, "__name__", "")
        if not label or not label.replace("_", "a").replace("-", "a").isalnum():
            raise ValueError(f"a registered name is a word such as 'my_model', got {label!r}: give name=")
        before = _ENTRIES.get((kind, label))
        if before is not None and not _is_same(before.factory, factory):
            raise ValueError(
                f"there is a {kind} named {label!r} already ({_where(before.factory)}): give another name="
            )
        taken = ("model", *given)
        found = _parameters(factory)
        if settings is None:
            derived = _derived(label, factory, found, taken)
        elif is_frozen(settings):
            derived = settings
        else:
            raise ValueError(f"settings of {kind} {label!r} must be a frozen dataclass, got {settings!r}")
        by_run = tuple(n for n in found if n in taken)
        _ENTRIES[kind, label] = Entry(kind, label, factory, derived, settings is not None, by_run)
        return factory

    return remember


def names(kind: Kind) -> tuple[str, ...]:
    """Give the names registered for a kind, sorted."""
    return tuple(sorted(name for of, name in _ENTRIES if of == kind))


def entry_of(kind: Kind, name: str, where: str = "") -> Entry:
    """Give a registered entry.

    Raises:
      SettingsError: No such name; the nearest is named.
    """
    found = _ENTRIES.get((kind, name))
    if found is None:
        hint = unknown_name(kind, name, names(kind))
        more = f"a program that has telic.config.register({kind!r}) is run first by --load FILE.py"
        raise SettingsError(f"{where + ': ' if where else ''}{str(hint).removesuffix('.')}; {more}")
    return found


def is_frozen(kind: Any) -> bool:
    """Say whether a class is a frozen dataclass."""
    params = getattr(kind, "__dataclass_params__", None)
    return isinstance(kind, type) and params is not None and bool(params.frozen)


def settable(hint: Any) -> Any:
    """Give the part of a type that a file can hold, or None where there is none.

    Of ``float | Array | Schedule`` that is a number, or the name of a schedule.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is None:
        return type(None)
    if origin is Annotated:
        return hint if arguments[0] is Choice else settable(arguments[0])
    if hint == Schedule:
        return Annotated[Choice, "schedule"]
    if hint in _PLAIN or origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        kept = [part for part in map(settable, arguments) if part is not None]
        return reduce(or_, kept) if any(part is not type(None) for part in kept) else None
    if origin is tuple and (len(arguments) != 2 or arguments[1] is not Ellipsis):
        parts = [settable(part) for part in arguments]
        return tuple[tuple(parts)] if parts and all(part is not None for part in parts) else None  # type: ignore[misc]
    if origin in (tuple, list, Sequence):
        part = settable(arguments[0])
        return None if part is None else tuple[part, ...]
    if origin in (dict, Mapping) and arguments[0] is str:
        part = settable(arguments[1])
        return None if part is None else dict[str, part]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    return None


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    # A class that chooses among classes in __new__ says what it takes in __init__.
    read = factory.__init__ if isinstance(factory, type) else factory
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {n: p for n, p in inspect.signature(read).parameters.items() if p.kind not in kinds}


def _derived(
    label: str, factory: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], taken: Sequence[str]
) -> type:
    """Give the dataclass of a function's settings."""
    hints = get_type_hints(factory.__init__ if isinstance(factory, type) else factory, include_extras=True)
    fields: list[Any] = []
    for name, parameter in parameters.items():
        if name in taken or name in _NOT_SETTINGS:
            continue
        kept = settable(hints.get(name))
        is_needed = parameter.default is inspect.Parameter.empty
        if name not in hints or kept is None or kept is type(None):
            if is_needed:
                raise ValueError(
                    f"{_where(factory)}: {name} has no default and no type that a file can hold: annotate it with int, "
                    "float, str, bool, a Literal, a tuple or a frozen dataclass, give a default, or name it in given="
                )
            continue
        default = parameter.default
        fields.append((name, kept) if is_needed else (name, kept, dataclasses.field(default=_frozen(default))))
    return dataclasses.make_dataclass(f"{label}_settings", fields, frozen=True, kw_only=True)


def _frozen(default: Any) -> Any:
    if isinstance(default, list):
        return tuple(cast(list[Any], default))
    return default


def _is_same(a: Any, b: Any) -> bool:
    """Say whether two functions are one that was read twice, as when a file is loaded again."""
    return a is b or (_where(a) == _where(b) and a.__module__ == b.__module__)


def _where(factory: Any) -> str:
    return f"{getattr(factory, '__module__', '?')}.{getattr(factory, '__qualname__', factory)}"
