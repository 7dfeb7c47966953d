"""The losses of a recipe's first updates, and the program that records them.

``python -m tests.golden.recipes digits decoder`` trains these recipes for a hundred updates and writes their losses
into ``tests/golden/data/recipes.json``; without names it does all of them. A change of a recipe, or of anything that
trains, shows as a changed file; a refactoring leaves it as it is.
"""

import json
import platform
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from telic.config import open_recipe

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).parent / "data" / "recipes.json"
STEPS = 100

RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "digits": ("digits.toml", ()),
    "decoder": ("decoder.toml", ("data.max_bytes=300000",)),
    "contrastive": ("contrastive.py", ()),
    "addition_sft": ("addition_sft.py", ()),
    "addition_dpo": ("addition_dpo.py", ("sft_steps=20",)),
    "addition_grpo": ("addition_grpo.py", ("sft_steps=300",)),
    "diffusion": ("diffusion.py", ()),
    "jepa": ("jepa.py", ()),
    "lora": ("lora.py", ("pretraining_steps=20",)),
}
"""Recipes by name, with what is assigned: a shorter start for those that go on from another run.

The standard library differs between versions of Python, so decoder and lora belong to the one they were recorded with.
"""

PLACES = {"addition_dpo": "start", "addition_grpo": "start", "lora": "base"}
"""The setting that names a folder in which a recipe keeps what it goes on from."""


def losses(name: str, steps: int, folder: Path) -> list[float]:
    """Give the loss of each of a recipe's first updates.

    Args:
      name: The recipe.
      steps: How many.
      folder: Where it keeps what it goes on from.
    """
    file, assigned = RECIPES[name]
    place = [f"{PLACES[name]}={json.dumps(str(folder / PLACES[name]))}"] if name in PLACES else []
    recipe = open_recipe(ROOT / "recipes" / file)
    run = recipe.run(recipe.read([*assigned, *place]))
    found: list[float] = []
    loop = run.trainer.loop(log=0)
    loop.metric("last", "step_loss", reads=("loss",))
    loop.handle_event("iteration_completed", lambda state: found.append(float(state.metrics["step_loss"])))
    loop.run(run.data, steps=steps)
    return found


def main(names: list[str]) -> None:
    """Record the losses of some recipes."""
    document: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"cases": []}
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = {"python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    cases = {case["name"]: case for case in document["cases"]}
    for name in names or RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            measured = losses(name, STEPS, Path(folder))
        config = {"assigned": list(RECIPES[name][1]), "versions": versions, "device": jax.devices()[0].device_kind}
        cases[name] = {"name": name, "config": config, "in": {}, "out": {"losses": measured}}
        print(f"{name}: {measured[0]:.6f} -> {measured[-1]:.6f}", flush=True)
    document = {
        "topic": "recipes",
        "what": f"loss of each of the first {STEPS} updates of a recipe",
        "reference": "telic itself, when this file was written: python -m tests.golden.recipes",
        "tol": "tests/golden/test_recipes.py",
        "notes": "A loss here is no proof that it is right; it is what the recipe gave.",
        "cases": [cases[name] for name in RECIPES if name in cases],
    }
    FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
