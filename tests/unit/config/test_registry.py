"""The registry: names for what code makes, with settings that are the function's own."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from telic import optimizers
from telic.config import names, register
from telic.config.registry import entry_of, settable
from telic.config.settings import defaults, fields, read, table_of
from telic.errors import SettingsError
from telic.models import DecoderConfig


def test_settings_are_the_functions_keywords() -> None:
    """Catches a second list of settings, which would rot: types and defaults come from the signature."""

    @register("data", "registry_test_rows")
    def rows(*, count: int, kind: Literal["a", "b"] = "a", sizes: list[int] = [1], hook: Any = None) -> Any:  # noqa: B006
        return (count, kind, sizes, hook)

    kind = entry_of("data", "registry_test_rows").settings
    assert list(fields(kind)) == ["count", "kind", "sizes"]
    assert defaults(kind) == {"kind": "a", "sizes": [1]}
    made = read(kind, {"count": 2})
    assert made.sizes == (1,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.count = 3
    assert rows(count=1)[0] == 1


def test_a_taken_name_is_refused_and_a_file_read_twice_is_not() -> None:
    """Catches a second function that silently takes a name over."""

    def make() -> Any:
        @register("model", "registry_test_model")
        def one(width: int = 1) -> Any:
            return width

        return one

    make()
    make()
    with pytest.raises(ValueError, match="there is a model named 'registry_test_model' already"):
        register("model", "registry_test_model")(lambda: None)


def test_a_parameter_that_no_file_can_hold_needs_a_default() -> None:
    """Catches a name that can never be made from a file."""

    def bad(hook: Any, width: int = 1) -> Any:
        return hook, width

    with pytest.raises(ValueError, match=r"hook has no default and no type that a file can hold"):
        register("model", "registry_test_bad")(bad)
    register("model", "registry_test_given", given=("hook",))(bad)
    assert list(fields(entry_of("model", "registry_test_given").settings)) == ["width"]


@pytest.mark.parametrize("name", ["", "a b", "a.b", "../x"])
def test_a_name_is_a_word(name: str) -> None:
    """Catches a name that a path of settings cannot address."""
    with pytest.raises(ValueError, match="a registered name is a word"):
        register("model", name or None)(lambda: None)


def test_an_unknown_kind_and_an_unknown_name_are_errors() -> None:
    """Catches a typo that registers into nowhere."""
    with pytest.raises(ValueError, match="unknown kind 'optimiser'"):
        register("optimiser")(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"unknown optimizer 'adm'.*telic.config.register\('optimizer'\)"):
        entry_of("optimizer", "adm")


def test_every_optimizer_by_name_can_be_made_with_its_defaults() -> None:
    """Catches an optimizer whose settings cannot be read, and one that is missing from the registry."""
    assert set(optimizers.NAMES) <= set(names("optimizer"))
    for name in optimizers.NAMES:
        entry = entry_of("optimizer", name)
        settings = read(entry.settings, defaults(entry.settings))
        assert read(entry.settings, table_of(settings)) == settings
        assert "learning_rate" in fields(entry.settings), name


def test_a_whole_dataclass_of_settings_reaches_its_class() -> None:
    """Catches a decoder whose configuration is listed twice."""
    entry = entry_of("model", "decoder")
    assert entry.settings is DecoderConfig
    assert "attention" in fields(DecoderConfig)
    assert settable(DecoderConfig) is DecoderConfig


@pytest.mark.parametrize(
    ("hint", "kept"),
    [(Any, None), (float | Any, float), (list[int], tuple[int, ...]), (list[Any], None), (dict[int, str], None)],
)
def test_types_that_no_file_can_hold_are_left_out(hint: Any, kept: Any) -> None:
    """Catches a setting of a type that cannot be checked."""
    assert settable(hint) == kept


def test_flax_fields_are_no_settings() -> None:
    """Catches `parent` and `name` of every Flax module as settings."""
    assert list(fields(entry_of("model", "convnet").settings)) == ["outputs", "features", "hidden", "dropout"]


@dataclass
class Loose:
    width: int = 1


def test_settings_must_be_a_frozen_dataclass() -> None:
    """Catches settings that somebody changes after they were recorded."""
    for kind in (int, Loose):
        with pytest.raises(ValueError, match="must be a frozen dataclass"):
            register("model", "registry_test_loose", settings=kind)(lambda settings: None)
