"""Settings as values: frozen dataclasses, read from tables and from ``path=value``, and given back as tables.

Every error names the setting by its path, says what was expected and what came, and for an unknown name the nearest.
"""

import dataclasses
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from telic.config.registry import Choice, entry_of, names, settable
from telic.errors import SettingsError, closest

NONE = "none"
"""How a file or a command line writes None."""


@dataclass(frozen=True)
class Text:
    """A value as it was typed on a command line; the setting's type says what it is.

    Attributes:
      value: The text.
    """

    value: str


def read(kind: Any, value: Any, where: str = "") -> Any:
    """Give a value of a type from what a file or a command line holds.

    Args:
      kind: The type: a plain one, or a frozen dataclass.
      value: What came; tables are mappings.
      where: The setting's path, for errors.
    Raises:
      SettingsError: It is unknown, missing, or of another type.
    Example:
      >>> read(int | None, Text("12"), "steps")
      12
    """
    if isinstance(value, Text):
        return _typed(kind, value.value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _choice(arguments[1], value, where)
    if origin in (Union, types.UnionType):
        return _first_of(kind, arguments, value, where)
    if kind is type(None):
        if value is None or value == NONE:
            return None
    elif origin is Literal:
        if any(value == option and type(value) is type(option) for option in arguments):
            return value
        if isinstance(value, str):
            raise SettingsError(
                f"{where} must be {expected(kind)}, got {value!r}.{closest(value, map(str, arguments))}"
            )
    elif kind is bool or kind is str:
        if type(value) is kind:
            return value
    elif kind is int:
        if type(value) is int:
            return value
    elif kind is float:
        if type(value) in (int, float):
            return float(value)
    elif kind is Path:
        if isinstance(value, str | Path):
            return Path(value)
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return _items(arguments, cast(Sequence[Any], value), where, kind)
    elif origin is dict:
        if isinstance(value, Mapping):
            table = cast(Mapping[str, Any], value)
            return {name: read(arguments[1], item, _below(where, name)) for name, item in table.items()}
    elif dataclasses.is_dataclass(kind):
        if isinstance(value, kind):  # pyright: ignore[reportArgumentType] a class of a dataclass
            return value
        if isinstance(value, Mapping):
            return _dataclass(cast(type, kind), cast(Mapping[str, Any], value), where)
    raise SettingsError(f"{where or 'settings'} must be {expected(kind)}, got {_shown(value)}")


def fields(kind: type) -> dict[str, Any]:
    """Give the settings of a frozen dataclass by name with their types; those that no file can hold are left out."""
    hints = get_type_hints(kind, include_extras=True)
    found = {f.name: settable(hints[f.name]) for f in dataclasses.fields(kind) if f.init}
    return {name: hint for name, hint in found.items() if hint is not None and hint is not type(None)}


def table_of(settings: Any) -> dict[str, Any]:
    """Give settings as a table of plain values, which `read` turns back; None is written as "none"."""
    if isinstance(settings, Choice):
        return {"name": settings.name, **table_of(settings.settings)}
    return {name: plain(getattr(settings, name)) for name in fields(type(settings))}


def defaults(kind: type) -> dict[str, Any]:
    """Give the table of a dataclass's defaults; settings that must be given are absent."""
    found: dict[str, Any] = {}
    known = fields(kind)
    for field in dataclasses.fields(kind):
        if field.name in known and field.default is not MISSING:
            found[field.name] = plain(field.default)
        elif field.name in known and field.default_factory is not MISSING:
            found[field.name] = plain(field.default_factory())
    return found


def plain(value: Any) -> Any:
    """Give a value as a file holds it."""
    if isinstance(value, Choice) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return table_of(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(Sequence[Any], value)]
    if isinstance(value, Path):
        return str(value)
    return NONE if value is None else value


def assignments(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Give ``path=value`` texts as tables to lay over settings, those that change a name first.

    Raises:
      SettingsError: A text has another form.
    """
    found: list[tuple[bool, dict[str, Any]]] = []
    for text in texts:
        path, equals, value = text.partition("=")
        words = path.strip().split(".")
        if not equals or not all(words):
            raise SettingsError(f"--set takes path=value, such as optimizer.learning_rate=3e-4, got {text!r}")
        table: Any = Text(value.strip())
        for word in reversed(words):
            table = {word: table}
        found.append((words[-1] != "name", table))
    return [table for _, table in sorted(found, key=lambda pair: pair[0])]


def overlay(kind: Any, base: Any, over: Any) -> Any:
    """Lay one table over another; a registered name that changes starts from its own defaults.

    Args:
      kind: The type they are read as.
      base: What is there, as a table or a value.
      over: What goes above it.
    """
    chosen = _choice_kind(kind)
    if chosen is not None and isinstance(over, Mapping):
        base = {"name": base} if isinstance(base, str) and base != NONE else base
        above = cast(Mapping[str, Any], over)
        name = above.get("name")
        name = name.value if isinstance(name, Text) else name
        if not isinstance(base, Mapping) or (name is not None and name != cast(Mapping[str, Any], base).get("name")):
            return dict(above)
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    below = cast(Mapping[str, Any], base)
    hints = _hints(kind, below)
    merged = dict(below)
    for name, value in cast(Mapping[str, Any], over).items():
        merged[name] = overlay(hints.get(name, Any), below[name], value) if name in below else value
    return merged


def changes(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """Say how two tables of settings differ, one line a setting."""
    lines: list[str] = []
    for name in dict.fromkeys((*before, *now)):
        path = _below(where, name)
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += changes(cast(Mapping[str, Any], old), cast(Mapping[str, Any], new), path)
        elif name not in before:
            lines.append(f"{path} is new: {_shown(new)}")
        elif name not in now:
            lines.append(f"{path} was {_shown(old)}, and is gone")
        elif old != new:
            lines.append(f"{path} was {_shown(old)}, is {_shown(new)} from here on")
    return lines


def expected(kind: Any) -> str:
    """Give a type in words, for errors and lists of settings."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"the name of a registered {arguments[1]}"
    if origin in (Union, types.UnionType):
        return " or ".join(expected(part) for part in arguments)
    if origin is Literal:
        options = ", ".join(map(repr, arguments))
        return f"one of {options}" if len(arguments) > 1 else options
    if origin is tuple:
        inner = [expected(part) for part in arguments if part is not Ellipsis]
        return f"a list ({', '.join(inner)})"
    if origin is dict:
        return f"a table ({expected(arguments[1])})"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    if kind is type(None):
        return NONE
    return words.get(kind) or f"a table of {kind.__name__}"


def _typed(kind: Any, text: str, where: str) -> Any:
    """Read a text as the type says: as TOML where that fits, else as it stands."""
    parsed = _parsed(text)
    if isinstance(parsed, Mapping | list):
        return read(kind, parsed, where)
    for candidate in (text,) if parsed is None else (parsed, text):
        try:
            return read(kind, candidate, where)
        except SettingsError:
            if _choice_kind(kind) is not None and candidate == text:
                raise
    raise SettingsError(f"{where} must be {expected(kind)}, got {text!r}")


def _parsed(text: str) -> Any:
    if "\n" in text:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _first_of(kind: Any, arguments: Sequence[Any], value: Any, where: str) -> Any:
    """Read a value as the first part of a union that it fits."""
    if type(None) in arguments and (value is None or value == NONE):
        return None
    told: SettingsError | None = None
    for part in arguments:
        # 1 is a whole number before it is a number, whatever the order of the two.
        if part is float and type(value) is int and int in arguments:
            continue
        try:
            return read(part, value, where)
        except SettingsError as error:
            # A table, or a name, says more of what is wrong than that it is no number.
            is_about = isinstance(value, Mapping) and (_choice_kind(part) or dataclasses.is_dataclass(part))
            told = error if is_about or (isinstance(value, str) and _choice_kind(part)) else told
    if told is not None and len(set(arguments) - {type(None)}) == 1:
        raise told
    if told is not None:
        raise SettingsError(f"{where} must be {expected(kind)}; {told}") from told
    raise SettingsError(f"{where} must be {expected(kind)}, got {_shown(value)}")


def _items(arguments: Sequence[Any], value: Sequence[Any], where: str, kind: Any) -> tuple[Any, ...]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(arguments):
        raise SettingsError(f"{where} must be {len(arguments)} values, got {len(value)}")
    return tuple(read(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(zip(arguments, value, strict=True)))


def _choice(kind: Any, value: Any, where: str) -> Choice:
    if isinstance(value, Choice):
        return value
    table: Mapping[str, Any] = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping) or "name" not in table:  # pyright: ignore[reportUnnecessaryIsInstance] a file's
        known = ", ".join(names(kind))
        raise SettingsError(f"{where} must be the name of a registered {kind} ({known}), got {_shown(value)}")
    name = table["name"].value if isinstance(table["name"], Text) else table["name"]
    if not isinstance(name, str):
        raise SettingsError(f"{where}.name must be text, got {_shown(name)}")
    entry = entry_of(kind, name, where)
    rest = {n: v for n, v in table.items() if n != "name"}
    return Choice(kind, name, _dataclass(entry.settings, rest, where))


def _dataclass(kind: type, table: Mapping[str, Any], where: str) -> Any:
    known = fields(kind)
    for name in table:
        if name not in known:
            listed = f" Known: {', '.join(known)}." if known else " It has no settings."
            raise SettingsError(f"unknown setting {_below(where, name)!r}.{closest(name, known)}{listed}")
    needed = {f.name for f in dataclasses.fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    missing = [_below(where, name) for name in known if name in needed and name not in table]
    if missing:
        kinds = ", ".join(f"{path} ({expected(known[path.rpartition('.')[2]])})" for path in missing)
        raise SettingsError(f"these settings must be given: {kinds}")
    values = {name: read(known[name], value, _below(where, name)) for name, value in table.items()}
    try:
        return kind(**values)
    except SettingsError:
        raise
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{where or 'settings'}: {error}") from error


def _choice_kind(kind: Any) -> Any:
    """Give what kind of name a type holds, or None."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[1]
    if get_origin(kind) in (Union, types.UnionType):
        return next((found for found in map(_choice_kind, get_args(kind)) if found is not None), None)
    return None


def _hints(kind: Any, base: Mapping[str, Any]) -> dict[str, Any]:
    """Give the types of a table's settings, as far as they are known before it is read."""
    chosen = _choice_kind(kind)
    if chosen is not None:
        name = base.get("name")
        name = name.value if isinstance(name, Text) else name
        return fields(entry_of(chosen, name).settings) if isinstance(name, str) and name in names(chosen) else {}
    if get_origin(kind) in (Union, types.UnionType):
        kind = next((part for part in get_args(kind) if dataclasses.is_dataclass(part)), Any)
    return fields(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(value: Any) -> str:
    return repr(value.value) if isinstance(value, Text) else repr(value)
