"""The rooms of the house: who may import whom, checked on the syntax tree of every module.

The table is that of docs/decisions/0001-layers-and-engine.md. Imports inside functions and under TYPE_CHECKING count,
and so does `importlib.import_module`. Each rule has a test that plants a violation, so that a rule which stopped
looking is noticed.
"""

import ast
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS: dict[str, int] = {
    name: layer
    for layer, names in enumerate(
        [
            ["types", "errors"],
            ["tree", "mean", "artifacts", "jsonable", "places", "axes"],
            ["metrics", "losses", "advantages", "optimizers", "precision", "ema", "shard", "models"],
            ["contract"],
            ["train", "loop"],
            [
                *("driver", "placement", "objectives", "evaluate", "data", "handlers"),
                *("checkpoints", "trackers", "display", "interop", "profiling", "reports"),
            ],
            ["compose"],
            ["config"],
            ["cli", "testing"],
        ]
    )
    for name in names
}
"""Layer of each part of telic. A part imports from lower layers only; parts of one layer are strangers."""

FREE = {"testing": "test tools may look into every room; nothing imports them"}
"""Parts that may import any other."""

ADAPTERS: dict[str, tuple[str, ...]] = {
    "orbax": ("telic.checkpoints",),
    "grain": ("telic.data",),
    "matplotlib": ("telic.display", "telic.trackers"),
    "rich": ("telic.display", "telic.cli"),
    "altair": ("telic.display",),
    "IPython": ("telic.display",),
    "tyro": ("telic.config", "telic.cli"),
    "equinox": ("telic.models",),
    "qwix": ("telic.interop",),
    "torch": ("telic.data", "telic.interop"),
    "datasets": ("telic.data",),
    "tensorboardX": ("telic.trackers",),
    "tokenizers": ("telic.data",),
    "trackio": ("telic.trackers",),
    "wandb": ("telic.trackers",),
    "mlflow": ("telic.trackers",),
}
"""Packages known to one adapter alone. There they may be imported inside a function, because they are optional or slow
to import; everywhere else they may not be imported at all."""

EVERYWHERE = {"jax", "jaxlib", "numpy", "flax", "optax"}
"""Packages that any part may import, at the top of a module."""

COMPILERS = {
    "jax.jit",
    "jax.pmap",
    "jax.api.jit",
    "flax.nnx.jit",
    "flax.nnx.pmap",
    "flax.linen.jit",
    "equinox.filter_jit",
    "equinox.filter_pmap",
}
"""What compiles a program. A step compiled twice is a donation lost or a second program with other bits."""

MAY_COMPILE = {
    "telic.driver": "owns the compiled program of a run",
    "telic.evaluate": "owns the compiled program of an evaluation",
    "telic.models.sampling": "owns the compiled loop that continues texts",
}

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""{(module, what its violation names): reason}. Each entry must be needed."""


@dataclass(frozen=True)
class Violation:
    """One rule broken at one line."""

    rule: str
    module: str
    subject: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.rule}: {self.subject}"


@dataclass(frozen=True)
class Import:
    """One module named by one import statement, and the local name it makes, with what that name stands for."""

    target: str
    line: int
    in_function: bool
    binds: tuple[tuple[str, str], ...]
    dynamic: bool = False


def read_sources() -> dict[str, str]:
    """Give the text of every module of src/telic by dotted name; a package's ends in .__init__."""
    src = ROOT / "src"
    return {".".join(path.relative_to(src).with_suffix("").parts): path.read_text() for path in src.rglob("*.py")}


def _imports(tree: ast.Module, modules: frozenset[str]) -> Iterator[Import]:
    def visit(node: ast.AST, in_function: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    name, stands_for = (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
                    yield Import(alias.name, node.lineno, in_function, ((name, stands_for),))
            case ast.ImportFrom(level=level) if level > 0:
                yield Import("." * level + (node.module or ""), node.lineno, in_function, ())
            case ast.ImportFrom(module=str(source)):
                for alias in node.names:
                    full = f"{source}.{alias.name}"
                    # `from telic import tree` names a module, `from telic.tree import paths` a name inside one.
                    target = full if full in modules or source == "telic" else source
                    yield Import(target, node.lineno, in_function, ((alias.asname or alias.name, full),))
            case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module")):
                match node.args:
                    case [ast.Constant(value=str(target)), *_]:
                        yield Import(target, node.lineno, in_function, (), dynamic=True)
                    case [ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id="__name__")), dot, *_]), *_] if (
                        isinstance(dot, ast.Constant) and str(dot.value).startswith(".")
                    ):
                        pass  # a package that loads its own modules when they are first touched
                    case _:
                        yield Import("a computed name", node.lineno, in_function, (), dynamic=True)
            case _:
                pass
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(tree, False)


def _part(module: str) -> str:
    """Give the part of telic a module belongs to: telic.loop.ports -> loop."""
    return module.split(".")[1] if "." in module else ""


def _within(module: str, places: tuple[str, ...] | Mapping[str, str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """Give the full dotted name an expression stands for, when it is made of imported names."""
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=value, attr=attr):
            base = _dotted(value, names)
            return None if base is None else f"{base}.{attr}"
        case _:
            return None


def check(sources: Mapping[str, str]) -> list[Violation]:
    """Give every violation in a set of modules.

    Args:
      sources: Text of the modules by dotted name, packages as ``telic.loop.__init__``.
    """
    modules = frozenset(
        ".".join(words[: i + 1])
        for words in (name.removesuffix(".__init__").split(".") for name in sources)
        for i in range(len(words))
    )
    found: list[Violation] = []
    for name, text in sorted(sources.items()):
        module = name.removesuffix(".__init__")
        tree = ast.parse(text, filename=name)
        imports = list(_imports(tree, modules))
        if module == "telic":
            found += _check_contents(tree)
            continue
        if _part(module) not in LAYERS:
            found.append(Violation("give this part a layer", module, _part(module), 1))
            continue
        for item in imports:
            found += _check_import(module, item)
        found += _check_compilers(module, tree, imports)
        if name.endswith(".__init__"):
            found += _check_names(module, tree, modules)
    found += _check_names("telic", ast.parse(sources.get("telic.__init__", "")), modules)
    # One statement that imports several names breaks a rule once.
    return list(dict.fromkeys(found))


def _check_import(module: str, item: Import) -> Iterator[Violation]:
    def broken(rule: str, subject: str = item.target) -> Violation:
        return Violation(rule, module, subject, item.line)

    if item.target.startswith("."):
        yield broken("imports are absolute")
        return
    if item.target == "a computed name":
        yield broken("an import names its module")
        return
    root = item.target.split(".")[0]
    if root == "telic":
        yield from _check_inside(module, item, broken)
        if item.in_function or item.dynamic:
            yield broken("parts of telic are imported at the top of the module")
    elif root in ADAPTERS:
        if not _within(module, ADAPTERS[root]):
            yield broken(f"only {' and '.join(ADAPTERS[root])} may import this package")
    elif root in sys.stdlib_module_names or root in EVERYWHERE:
        if item.in_function or item.dynamic:
            yield broken("only an adapter imports inside a function")
    else:
        yield broken("this package is no dependency of telic: add it to pyproject.toml and to ADAPTERS")


def _check_inside(module: str, item: Import, make: Callable[[str], Violation]) -> Iterator[Violation]:
    own, other = _part(module), _part(item.target)
    if other not in LAYERS:
        yield make("import a public name from its own module, not from the table of contents")
        return
    if own == other:
        return
    if other == "testing":
        yield make("nothing imports testing")
    elif own in FREE:
        return
    elif LAYERS[other] > LAYERS[own]:
        yield make("imports go downward only")
    elif LAYERS[other] == LAYERS[own]:
        yield make(f"parts of layer {LAYERS[own]} do not import each other")
    elif other == "loop" and LAYERS[own] == LAYERS["driver"] and not _within(item.target, ("telic.loop.ports",)):
        yield make("layer 5 reaches the loop only through telic.loop.ports")


def _check_compilers(module: str, tree: ast.Module, imports: list[Import]) -> Iterator[Violation]:
    if _within(module, MAY_COMPILE) or _part(module) in FREE:
        return
    names = dict(bound for item in imports for bound in item.binds)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            full = _dotted(node, names)
            if full in COMPILERS:
                yield Violation(f"only {' and '.join(MAY_COMPILE)} compile", module, str(full), node.lineno)


def _check_contents(tree: ast.Module) -> Iterator[Violation]:
    """Check that importing telic imports the standard library alone."""
    for node in tree.body:
        statements = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.If() | ast.Try() | ast.With():
                statements = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            case _:
                pass
        for statement in statements:
            targets = (
                [alias.name for alias in statement.names]
                if isinstance(statement, ast.Import)
                else [statement.module or "."]
            )
            for target in targets:
                if target.split(".")[0] not in sys.stdlib_module_names:
                    yield Violation("the table of contents imports nothing", "telic", target, statement.lineno)


def _check_names(package: str, tree: ast.Module, modules: frozenset[str]) -> Iterator[Violation]:
    """Check that no public name of a package is also the name of a module in it.

    Importing such a module later rebinds the package's attribute: the function turns into a module.
    """
    bound: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound[name] = node.lineno
            case ast.Assign(targets=[ast.Name(id="_HOMES")], value=ast.Dict(keys=keys)):
                bound |= {str(key.value): key.lineno for key in keys if isinstance(key, ast.Constant)}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                bound[name] = node.lineno
            case ast.ImportFrom(module=str(source)):
                for alias in node.names:
                    if f"{source}.{alias.name}" not in modules:
                        bound[alias.asname or alias.name] = node.lineno
            case _:
                pass
    for name, line in bound.items():
        if f"{package}.{name}" in modules:
            yield Violation("a module bears the name of something else in its package", package, name, line)


def test_every_module_keeps_to_its_layer() -> None:
    """Catches the careless import that joins two rooms, also one hidden in a function."""
    found = [v for v in check(read_sources()) if (v.module, v.subject) not in EXCEPTIONS]
    assert not found, "\n" + "\n".join(map(str, found))


def test_exceptions_are_needed() -> None:
    """Catches an exception that outlived its reason."""
    used = {(v.module, v.subject) for v in check(read_sources())}
    assert set(EXCEPTIONS) <= used
    assert all(EXCEPTIONS.values())


def test_reads_the_real_package() -> None:
    """Catches a check that passes because it looks at an empty folder."""
    sources = read_sources()
    assert {"telic.__init__", "telic.contract", "telic.loop.ports"} <= set(sources)
    imports = list(_imports(ast.parse(sources["telic.contract"]), frozenset()))
    assert {"telic.mean", "telic.ema", "jax"} <= {item.target for item in imports}


def test_dependencies_are_declared() -> None:
    """Catches a package that the code may import but `pip install telic` does not bring, and the reverse."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    import_names = {"orbax-checkpoint": "orbax"}
    core = {_distribution(line) for line in project["dependencies"]}
    core = {import_names.get(name, name) for name in core}
    assert core <= EVERYWHERE | set(ADAPTERS)
    # jaxlib comes with jax.
    assert core >= EVERYWHERE - {"jaxlib"}


def _distribution(requirement: str) -> str:
    for i, char in enumerate(requirement):
        if char in "[<>=~!; ":
            return requirement[:i]
    return requirement


PLANTED = [
    ("imports go downward only", "telic.mean", "from telic.contract import Step"),
    ("imports go downward only", "telic.tree", "import telic.driver"),
    ("imports go downward only", "telic.tree", "from telic import driver"),
    ("imports go downward only", "telic.mean", "if TYPE_CHECKING:\n    from telic.contract import Step"),
    ("imports go downward only", "telic.objectives.lm", "def f():\n    from telic.compose import Trainer"),
    ("imports go downward only", "telic.tree", "import importlib\nimportlib.import_module('telic.driver')"),
    ("parts of layer 2 do not import each other", "telic.metrics.base", "from telic.losses import huber"),
    ("parts of layer 4 do not import each other", "telic.train.state", "from telic.loop.ports import View"),
    ("parts of layer 4 do not import each other", "telic.loop.plan", "from telic.train.state import TrainState"),
    ("parts of layer 5 do not import each other", "telic.data.grain", "from telic.driver import Driver"),
    ("layer 5 reaches the loop only through telic.loop.ports", "telic.display", "from telic.loop.state import State"),
    ("layer 5 reaches the loop only through telic.loop.ports", "telic.display", "from telic.loop import filters"),
    ("nothing imports testing", "telic.cli", "from telic.testing import chaos"),
    ("nothing imports testing", "telic.compose.loops", "import telic.testing.chaos"),
    (
        "import a public name from its own module, not from the table of contents",
        "telic.cli",
        "from telic import Trainer",
    ),
    ("imports are absolute", "telic.loop.plan", "from . import ports"),
    ("imports are absolute", "telic.loop.plan", "from .ports import View"),
    ("an import names its module", "telic.cli", "import importlib\ndef f(n):\n    importlib.import_module(n)"),
    ("only an adapter imports inside a function", "telic.mean", "def f():\n    import jax"),
    ("only an adapter imports inside a function", "telic.mean", "f = lambda: __import__('json')"),
    (
        "parts of telic are imported at the top of the module",
        "telic.driver",
        "def f():\n    from telic.tree import paths",
    ),
    ("only telic.checkpoints may import this package", "telic.driver", "import orbax.checkpoint as ocp"),
    (
        "only telic.display and telic.trackers may import this package",
        "telic.cli",
        "def f():\n    import matplotlib.pyplot",
    ),
    ("only telic.models may import this package", "telic.modelsmith", "import equinox"),
    (
        "this package is no dependency of telic: add it to pyproject.toml and to ADAPTERS",
        "telic.data",
        "def f():\n    import pandas",
    ),
    (
        "only telic.driver and telic.evaluate and telic.models.sampling compile",
        "telic.train.state",
        "import jax\nf = jax.jit(g)",
    ),
    (
        "only telic.driver and telic.evaluate and telic.models.sampling compile",
        "telic.losses",
        "import jax as j\n@j.jit\ndef f(): ...",
    ),
    (
        "only telic.driver and telic.evaluate and telic.models.sampling compile",
        "telic.losses",
        "from jax import jit as fast\nf = fast(g)",
    ),
    (
        "only telic.driver and telic.evaluate and telic.models.sampling compile",
        "telic.models.nnx",
        "from flax import nnx\nfrom functools import partial\nf = partial(nnx.jit, donate_argnums=0)",
    ),
    (
        "only telic.driver and telic.evaluate and telic.models.sampling compile",
        "telic.drivers",
        "import jax\nf = jax.pmap(g)",
    ),
    ("the table of contents imports nothing", "telic.__init__", "import jax"),
    ("the table of contents imports nothing", "telic.__init__", "from telic.mean import Mean"),
    ("the table of contents imports nothing", "telic.__init__", "try:\n    import rich\nexcept ImportError: ..."),
    ("give this part a layer", "telic.helpers", "import json"),
    (
        "a module bears the name of something else in its package",
        "telic.__init__",
        "_HOMES = {'loop': 'telic.compose'}",
    ),
    (
        "a module bears the name of something else in its package",
        "telic.loop.__init__",
        "from telic.loop.plan import ports",
    ),
    ("a module bears the name of something else in its package", "telic.loop.__init__", "def ports(): ..."),
    ("a module bears the name of something else in its package", "telic.loop.__init__", "ports: int = 1"),
]


@pytest.mark.parametrize(("rule", "module", "text"), PLANTED)
def test_a_planted_violation_is_caught(rule: str, module: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rule that no longer looks."""
    # Neighbours whose names begin alike must not share a permission.
    for neighbour in ("modelsmith", "drivers"):
        monkeypatch.setitem(LAYERS, neighbour, 5)
    sources = {
        "telic.driver": "",
        "telic.loop.ports": "",
        "telic.loop.plan": "",
        "telic.loop.filters": "",
        module: text,
    }
    assert rule in [v.rule for v in check(sources)]


ALLOWED = [
    ("telic.train.state", "import jax\nfrom telic.contract import Step\nfrom telic import tree"),
    ("telic.loop.__init__", "from telic.loop import ports\nfrom telic.loop.filters import every"),
    ("telic.driver", "import jax\nfrom telic.loop.ports import View\nfrom telic.train.state import T\nf = jax.jit(g)"),
    ("telic.data.grain", "def f():\n    import grain\n    import torch.utils.data"),
    (
        "telic.testing.chaos",
        "from telic.cli import main\nfrom telic.loop.state import State\nimport jax\njax.jit(main)",
    ),
    ("telic.data.__init__", "import importlib\ndef f(n):\n    return importlib.import_module(f'{__name__}.{n}')"),
    ("telic.losses", "import jax\nf = jax.jitter\ng = other.jit(f)"),
    ("telic.__init__", "import importlib\nif TYPE_CHECKING:\n    from telic.mean import Mean as Mean"),
]


@pytest.mark.parametrize(("module", "text"), ALLOWED)
def test_what_the_table_allows_is_no_violation(module: str, text: str) -> None:
    """Catches a rule that refuses everything."""
    sources = {"telic.loop.ports": "", "telic.loop.filters": "", "telic.train.state": "", "telic.tree": ""}
    assert check(sources | {module: text}) == []
