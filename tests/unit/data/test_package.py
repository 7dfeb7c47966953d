"""The table of contents of `telic.data`."""

import subprocess
import sys

import pytest

import telic.data


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing() -> None:
    """Catches a second of JAX, Grain or torch paid by `import telic.data`, and by reading the digits."""
    heavy = "[m for m in ('jax', 'grain', 'torch', 'datasets') if m in sys.modules]"
    assert run(f"import sys, telic.data; telic.data.digits(); print({heavy})") == "[]"


def test_adapters_do_not_load_grain() -> None:
    """Catches an optional library imported to ask whether a list is one of its loaders."""
    program = (
        "import sys, numpy, telic.data as d; d.as_source([numpy.zeros(2)]); d.as_validation([numpy.zeros(2)])\n"
        "print([m for m in ('grain', 'torch', 'datasets') if m in sys.modules])"
    )
    assert run(program) == "[]"


@pytest.mark.parametrize("order", [sorted(telic.data.__all__), sorted(telic.data.__all__, reverse=True)])
def test_names_are_functions_in_any_order(order: list[str]) -> None:
    """Catches a module that takes the name of a function once it is imported."""
    program = (
        f"import importlib, pkgutil, telic.data as d\nfirst = {{n: getattr(d, n) for n in {order!r}}}\n"
        "for info in pkgutil.iter_modules(d.__path__): importlib.import_module('telic.data.' + info.name)\n"
        "print(all(callable(v) and getattr(d, n) is v for n, v in first.items()))"
    )
    assert run(program) == "True"


def test_all_is_what_is_there() -> None:
    """Catches a name that is listed and not found, or found and not documented."""
    assert set(telic.data.__all__) == set(telic.data._HOMES)
    assert all(getattr(telic.data, name).__doc__ for name in telic.data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'column'"):
        _ = telic.data.column  # type: ignore[attr-defined]
