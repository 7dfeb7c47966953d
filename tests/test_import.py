"""Importing telic does nothing, and loading every name of it changes nothing outside."""

import json
import subprocess
import sys
from typing import Any

import telic


def run_fresh(program: str) -> Any:
    """Run a program in a fresh interpreter and give what it printed last, read as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_the_standard_library_alone() -> None:
    """Catches `import telic` becoming slow: JAX, NumPy or any other package loaded before a name is touched."""
    loaded = run_fresh(
        """
import sys
before = set(sys.modules)
import telic
import json
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    )
    roots = {name.split(".")[0] for name in loaded}
    assert roots - sys.stdlib_module_names == {"telic"}
    assert [name for name in loaded if name.startswith("telic")] == ["telic"]


def test_looking_at_the_contents_loads_nothing() -> None:
    """Catches completion in an editor, `dir` or a misspelt name costing an import of JAX."""
    loaded = run_fresh(
        """
import sys, json
import telic
dir(telic); telic.__all__; telic.__doc__; hasattr(telic, "no_such_name")
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    )
    assert "telic" in loaded
    assert not {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "grain", "rich", "matplotlib", "tyro"} & set(loaded)


def test_loading_every_name_has_no_effect_outside() -> None:
    """Catches set-up at import: JAX configuration, environment, logging handlers, warning filters, threads, devices."""
    before, after = run_fresh(
        """
import importlib, json, logging, os, threading, warnings

# What other packages do when they are imported is theirs; it is done before the first look.
import flax.linen, flax.nnx, jax, numpy, optax
import telic
from jax._src import xla_bridge


def look():
    return {
        "config": {k: repr(v) for k, v in sorted(jax.config.values.items())},
        "environment": dict(os.environ),
        "handlers": [repr(h) for h in logging.getLogger().handlers],
        "levels": [logging.getLogger().level, logging.getLogger("telic").level],
        "filters": [repr(f) for f in warnings.filters],
        "threads": sorted(t.name for t in threading.enumerate()),
        "devices": xla_bridge.backends_are_initialized(),
    }


before = look()
for name in telic.__all__:
    getattr(telic, name)
print(json.dumps([before, look()]))
"""
    )
    assert before == after
    assert after["devices"] is False


def test_the_package_is_typed() -> None:
    """Catches a wheel without its py.typed mark, which makes every annotation invisible to users."""
    from importlib.resources import files

    assert files(telic).joinpath("py.typed").is_file()
