"""The table of contents: every public name is there, loads, is documented, and is the same whoever touched it first."""

import ast
import importlib
import inspect
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import telic

NAMES = sorted(telic.__all__)
MODULES = sorted(telic._MODULES)


def test_all_is_dir() -> None:
    """Catches a name that completes but is not exported, or the reverse."""
    assert dir(telic) == sorted(telic.__all__)
    assert len(set(telic.__all__)) == len(telic.__all__)


def test_at_most_forty_names() -> None:
    """Catches a table of contents that nobody can read; modules are counted apart."""
    assert len(telic._HOMES) <= 40


def test_type_checkers_see_the_same_table() -> None:
    """Catches a name that works but is unknown to editors, or one they complete that does not exist."""
    tree = ast.parse(Path(str(telic.__file__)).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        # `x as x` is what makes a name public to a type checker.
        if alias.asname == alias.name
    }
    assert seen == telic._HOMES | dict.fromkeys(telic._MODULES, "telic")


@pytest.mark.parametrize("name", NAMES)
def test_name_resolves_and_is_documented(name: str) -> None:
    """Catches a name whose module moved, and a public name without a docstring of its own."""
    value = getattr(telic, name)
    text = inspect.getdoc(value)
    assert text
    # A dataclass without a docstring gets its signature for one.
    assert not text.startswith(f"{name}(")
    if not isinstance(value, ModuleType | type) and not inspect.isroutine(value):
        # A value is documented by its class, which must then be one of ours: str and int have docstrings as well.
        assert type(value).__module__.startswith("telic")


@pytest.mark.parametrize("name", MODULES)
def test_module_exports_what_it_lists(name: str) -> None:
    """Catches a public module whose __all__ names something it lacks, or a public function without a docstring."""
    module = getattr(telic, name)
    assert isinstance(module, ModuleType)
    assert module.__name__ == f"telic.{name}"
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    for public in getattr(module, "__all__", [key for key in own if not key.startswith("_")]):
        value = getattr(module, public)
        # A type alias or a constant has no place for a docstring of its own at run time.
        if isinstance(value, type) or inspect.isroutine(value):
            assert inspect.getdoc(value), f"telic.{name}.{public} has no docstring"


ORDERS = {
    "listed": list(telic.__all__),
    "backwards": list(reversed(telic.__all__)),
    # Modules first: a module telic.x imported before the function telic.x would take its name.
    "modules first": [*telic._MODULES, *telic._HOMES],
    "shuffled": random.Random(1).sample(telic.__all__, len(telic.__all__)),
}


@pytest.mark.parametrize("order", ORDERS)
def test_names_do_not_depend_on_the_order_of_touching(order: str) -> None:
    """Catches a module that takes the name of a public function once it is imported."""
    program = f"""
import importlib, json, pkgutil
import telic
names = {ORDERS[order]!r}
first = {{name: getattr(telic, name) for name in names}}
for info in pkgutil.iter_modules(telic.__path__):
    importlib.import_module("telic." + info.name)
changed = [name for name in names if getattr(telic, name) is not first[name]]
homes = telic._HOMES | {{name: "telic" for name in telic._MODULES}}
foreign = [name for name in names if first[name] is not getattr(importlib.import_module(homes[name]), name)]
kinds = {{name: type(value).__name__ for name, value in sorted(first.items())}}
print(json.dumps([changed, foreign, kinds]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    changed, foreign, kinds = json.loads(done.stdout.splitlines()[-1])
    assert changed == []
    assert foreign == []
    assert {name for name, kind in kinds.items() if kind == "module"} == set(MODULES)


def test_homes_are_telics_own() -> None:
    """Catches a public name that is only passed on from another package, and so changes with its version."""
    for name, home in telic._HOMES.items():
        value = getattr(importlib.import_module(home), name)
        if isinstance(value, type) or inspect.isroutine(value):
            assert value.__module__.startswith("telic"), name


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("Trainr", "Did you mean 'Trainer'?"), ("meanloss", "Did you mean 'mean_loss'?"), ("loss", "'losses'?")],
)
def test_unknown_name_is_an_error_with_the_nearest(wrong: str, hint: str) -> None:
    """Catches a misspelt name that says only that it is unknown, or that raises something `hasattr` does not catch."""
    with pytest.raises(AttributeError, match="module 'telic' has no attribute") as caught:
        getattr(telic, wrong)
    assert hint in str(caught.value)
    assert caught.value.name == wrong
    assert not hasattr(telic, wrong)


def test_private_names_get_no_hint() -> None:
    """Catches tools that probe for __wrapped__ and the like being told about a public name."""
    with pytest.raises(AttributeError, match=r"has no attribute '__wrapped__'\.$"):
        _ = telic.__wrapped__  # type: ignore[attr-defined]
