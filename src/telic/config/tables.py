"""Tables as TOML: what a run was asked, in a file that people read and a command takes back."""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from telic.errors import SettingsError

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_MOST_BYTES = 4 * 2**20


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
      SettingsError: It is no TOML, or far too large for settings.
      OSError: It cannot be read.
    """
    with path.open("rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise SettingsError(f"{path} has more than {_MOST_BYTES:,} bytes: it is no file of settings")
    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{path} is no TOML: {error}") from error


def as_toml(table: Mapping[str, Any]) -> str:
    """Give a table as TOML: its own values first, then the tables below it.

    Example:
      >>> print(as_toml({"steps": 3, "optimizer": {"name": "adam"}}), end="")
      steps = 3
      <BLANKLINE>
      [optimizer]
      name = "adam"
    """
    return "\n".join(_lines(table, ())).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    own = {name: value for name, value in table.items() if not isinstance(value, Mapping)}
    lines = ["", f"[{'.'.join(map(_key, path))}]"] if path and (own or not table) else []
    lines += [f"{_key(name)} = {_value(value)}" for name, value in own.items()]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += _lines(cast(Mapping[str, Any], value), (*path, name))
    return lines


def _key(name: str) -> str:
    return name if _BARE.match(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[str, Any], value).items()
        return "{" + ", ".join(f"{_key(name)} = {_value(item)}" for name, item in items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, cast(Sequence[Any], value))) + "]"
    raise SettingsError(f"a file of settings cannot hold {value!r} ({type(value).__name__})")


def _text(value: str) -> str:
    # JSON's strings are TOML's, but for one control character and lone surrogates.
    return json.dumps(value.encode(errors="replace").decode(), ensure_ascii=False).replace("\x7f", "\\u007F")
