"""Settings: what a file or a command line gives becomes typed values, or an error that names the setting."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telic.config import Choice, register
from telic.config.settings import Text, assignments, changes, defaults, overlay, plain, read, table_of
from telic.config.tables import as_toml, read_table
from telic.errors import SettingsError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Outer:
    steps: int
    kind: Literal["one", "two"] = "one"
    limit: int | None = None
    every: int | Literal["epoch"] | None = None
    label: str = "a"
    flag: bool = False
    place: Path = Path("here")
    inner: Inner = Inner()
    pairs: tuple[int, str] = (1, "x")
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    callback: Any = None


@register("schedule", "settings_test_ramp")
def ramp(peak: float, *, warmup: int = 3) -> Any:
    return ("ramp", peak, warmup)


@register("optimizer", "settings_test_one")
def one(rate: float | Annotated[Choice, "schedule"] = 0.1, *, decay: float = 0.0, mask: Any = None) -> Any:
    return ("one", rate, decay, mask)


@register("optimizer", "settings_test_two")
def two(speed: float = 1.0) -> Any:
    return ("two", speed)


@dataclass(frozen=True)
class Chosen:
    optimizer: Annotated[Choice, "optimizer"]
    other: Annotated[Choice, "optimizer"] | None = None


def outer(assigned: str) -> Outer:
    return read(Outer, overlay(Outer, {**defaults(Outer), "steps": 1}, assignments([assigned])[0]))


@pytest.mark.parametrize(
    ("assigned", "name", "expected"),
    [
        ("kind=two", "kind", "two"),
        ("limit=7", "limit", 7),
        ("limit=none", "limit", None),
        ("every=epoch", "every", "epoch"),
        ("every=4", "every", 4),
        ("label=3", "label", "3"),
        ("label=true", "label", "true"),
        ("label= spaced text ", "label", "spaced text"),
        ('label="quoted"', "label", "quoted"),
        ("label=a=b", "label", "a=b"),
        ("flag=true", "flag", True),
        ("place=/a/b c", "place", Path("/a/b c")),
        ("inner.rate=1", "inner", Inner(rate=1.0)),
        ("inner.sizes=[3]", "inner", Inner(sizes=(3,))),
        ("inner={rate = 2, sizes = [4]}", "inner", Inner(2.0, (4,))),
        ('pairs=[2, "y"]', "pairs", (2, "y")),
        ("shares.left=1", "shares", {"left": 1.0}),
    ],
)
def test_texts_take_the_type_of_their_setting(assigned: str, name: str, expected: Any) -> None:
    """Catches a text that is typed by its looks: a label of 3 that becomes a number, a path with a space cut off."""
    value = getattr(outer(assigned), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        ("step=3", "unknown setting 'step'. Did you mean 'steps'?"),
        ("inner.rat=3", "unknown setting 'inner.rat'. Did you mean 'rate'?"),
        ("steps=x", "steps must be a whole number, got 'x'"),
        ("steps=1.5", "steps must be a whole number, got '1.5'"),
        ("steps=true", "steps must be a whole number, got 'true'"),
        ("flag=1", "flag must be true or false, got '1'"),
        ("kind=tow", "kind must be one of 'one', 'two', got 'tow'"),
        ("limit=x", "limit must be a whole number or none, got 'x'"),
        ("every=epoc", "every must be a whole number or 'epoch' or none, got 'epoc'"),
        ("inner=3", "inner must be a table of Inner, got '3'"),
        ("inner.sizes=[1, true]", "inner.sizes[1] must be a whole number, got True"),
        ("pairs=[1]", "pairs must be 2 values, got 1"),
        ("callback=1", "unknown setting 'callback'"),
        ("steps", "--set takes path=value"),
        ("=3", "--set takes path=value"),
        ("inner..rate=3", "--set takes path=value"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(assigned: str, message: str) -> None:
    """Catches a misspelt setting that is ignored, and an error that does not say which setting it is about."""
    with pytest.raises(SettingsError) as caught:
        outer(assigned)
    assert message in str(caught.value)


def test_a_setting_without_a_default_must_be_given() -> None:
    """Catches a missing setting that becomes a TypeError of a constructor."""
    with pytest.raises(SettingsError, match=r"must be given: steps \(a whole number\)"):
        read(Outer, defaults(Outer))


def test_a_value_the_class_refuses_is_an_error_of_settings() -> None:
    """Catches a check of __post_init__ that ends a command with a traceback."""

    @dataclass(frozen=True)
    class Checked:
        count: int = 1

        def __post_init__(self) -> None:
            if self.count < 1:
                raise ValueError(f"count must be at least 1, got {self.count}")

    with pytest.raises(SettingsError, match="count must be at least 1, got 0"):
        read(Checked, {"count": 0})


def chosen(*assigned: str, **table: Any) -> Chosen:
    found: Any = table
    for over in assignments(assigned):
        found = overlay(Chosen, found, over)
    return read(Chosen, found)


def test_a_name_brings_its_own_settings() -> None:
    """Catches settings that are not those of the chosen name, and a schedule that is not made before its optimizer."""
    assert chosen(optimizer="settings_test_one").optimizer.make() == ("one", 0.1, 0.0, None)
    assert chosen("optimizer.decay=1", optimizer="settings_test_one").optimizer.make() == ("one", 0.1, 1.0, None)
    scheduled = chosen("optimizer.rate.name=settings_test_ramp", "optimizer.rate.peak=2", optimizer="settings_test_one")
    assert scheduled.optimizer.make() == ("one", ("ramp", 2.0, 3), 0.0, None)
    assert chosen("other=settings_test_two", optimizer="settings_test_one").other is not None


def test_another_name_starts_from_its_own_defaults() -> None:
    """Catches settings of the old name that are handed to the new one, whatever the order on the command line."""
    table = {"name": "settings_test_one", "decay": 0.3}
    found = chosen("optimizer.speed=4", "optimizer.name=settings_test_two", optimizer=table)
    assert found.optimizer.make() == ("two", 4.0)
    # The same name again keeps what was said of it.
    same = chosen("optimizer.name=settings_test_one", optimizer=table)
    assert same.optimizer.make() == ("one", 0.1, 0.3, None)


@pytest.mark.parametrize(
    ("assigned", "message"),
    [
        ("optimizer=settings_test_on", "optimizer: unknown optimizer 'settings_test_on'. Did you mean"),
        ("optimizer.dekay=1", "unknown setting 'optimizer.dekay'. Did you mean 'decay'?"),
        ("optimizer.mask=1", "unknown setting 'optimizer.mask'"),
        ("optimizer.rate=x", "optimizer.rate: unknown schedule 'x'"),
        ("optimizer.rate.name=settings_test_ramp", "must be given: optimizer.rate.peak (a number)"),
        ("other.decay=1", "other must be the name of a registered optimizer"),
    ],
)
def test_a_wrong_name_is_an_error_with_the_nearest(assigned: str, message: str) -> None:
    """Catches a name that is looked up by importing it, and one that is unknown without a word of the nearest."""
    with pytest.raises(SettingsError) as caught:
        chosen(assigned, optimizer={"name": "settings_test_one"})
    assert message in str(caught.value)


def test_changes_name_every_setting_once() -> None:
    """Catches a change that a continued run does not tell of."""
    before = {"steps": 1, "inner": {"rate": 0.5, "gone": 1}, "same": [1]}
    now = {"steps": 2, "inner": {"rate": 0.5, "new": "x"}, "same": [1]}
    assert changes(before, now) == [
        "steps was 1, is 2 from here on",
        "inner.gone was 1, and is gone",
        "inner.new is new: 'x'",
    ]


outers = st.builds(
    Outer,
    steps=st.integers(-(2**62), 2**62),
    kind=st.sampled_from(["one", "two"]),
    limit=st.none() | st.integers(0, 9),
    every=st.none() | st.integers(0, 9) | st.just("epoch"),
    label=st.text(st.characters(blacklist_categories=["Cs"])),
    flag=st.booleans(),
    place=st.sampled_from([Path("a"), Path("/b c/ü.txt")]),
    inner=st.builds(Inner, rate=st.floats(allow_nan=False), sizes=st.lists(st.integers(0, 3)).map(tuple)),
    pairs=st.tuples(st.integers(0, 3), st.sampled_from(["", "a\\b", 'c"d', "\x7f\n"])),
    shares=st.dictionaries(st.text(st.characters(blacklist_categories=["Cs"])), st.floats(allow_nan=False), max_size=2),
)


@given(outers)
def test_settings_survive_a_file(tmp_path_factory: pytest.TempPathFactory, settings: Outer) -> None:
    """Catches a value that comes back from TOML as another one: quotes, control characters, infinities, None."""
    path = tmp_path_factory.mktemp("toml") / "run.toml"
    path.write_text(as_toml(table_of(settings)), encoding="utf-8")
    assert read(Outer, read_table(path)) == settings


@pytest.mark.parametrize("content", [b"steps = ", b"\xff\xfe", b"a = [" * 2000, b"x = 1\nx = 2"])
def test_a_file_that_is_no_toml_is_named(content: bytes, tmp_path: Path) -> None:
    """Catches a parser's traceback."""
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"run\.toml is no TOML"):
        read_table(path)


def test_none_is_written_and_read_back() -> None:
    """Catches a None that TOML cannot hold."""
    assert plain(None) == "none"
    assert read(int | None, "none") is None
    assert read(str | None, Text("none")) is None
