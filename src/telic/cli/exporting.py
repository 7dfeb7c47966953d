"""``telic export``: the weights of a checkpoint in files that other programs read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from telic import tree
from telic.checkpoints import load_variables
from telic.cli.asked import UsageError
from telic.cli.recipes import usage_errors
from telic.config.recipes import open_recipe
from telic.config.running import recorded
from telic.errors import PretrainedError
from telic.interop import save_huggingface
from telic.interop.huggingface.tensors import DTYPES, write_tensors
from telic.models import Decoder


def export(
    run: Path, to: Path, *, recipe: Path | None, load: Sequence[Path], averaged: bool, only: Sequence[str]
) -> str:
    """Write weights and say what was written.

    Args:
      run: A run's directory, or a checkpoint.
      to: A file ``.safetensors`` or ``.npz``, or a folder.
      recipe: What the run was trained from; for a folder of Hugging Face files.
      load: Programs to run first.
      averaged: Write the averaged weights.
      only: Globs over names; none keeps all.
    Raises:
      UsageError: The format is none, the place is taken, or the model is no decoder.
      CheckpointError: None is whole.
    """
    if to.suffix and to.suffix not in (".safetensors", ".npz"):
        raise UsageError(f"{to} must end in .safetensors or .npz, or be a folder for Hugging Face files")
    if to.suffix and to.exists():
        raise UsageError(f"{to} is there already: remove it, or give another name")
    decoder = None if to.suffix else _decoder(run, recipe, load, only)
    try:
        variables = load_variables(run, averaged=averaged, select=list(only) or None)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if decoder is not None:
        try:
            save_huggingface(to, decoder, variables)
        except (PretrainedError, FileExistsError) as error:
            raise UsageError(str(error)) from error
        return f"{to}: config.json and safetensors of a decoder with {_count(variables):,} parameters"
    leaves = {name: np.asarray(leaf) for name, leaf in tree.named_leaves(variables).items()}
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.suffix == ".safetensors":
        strange = [f"{name} ({leaf.dtype})" for name, leaf in leaves.items() if leaf.dtype not in DTYPES.values()]
        if strange:
            raise UsageError(f"safetensors has no place for {', '.join(strange)}: leave them out with --only")
        write_tensors(to, leaves)
    else:
        _write_npz(to, leaves)
    return f"{to}: {len(leaves)} arrays, {_count(variables):,} numbers"


def _decoder(run: Path, recipe: Path | None, load: Sequence[Path], only: Sequence[str]) -> Decoder:
    if recipe is None:
        raise UsageError("a folder of Hugging Face files needs --recipe FILE, what the run was trained from")
    if only:
        raise UsageError("Hugging Face files hold the whole model: leave --only out")
    with usage_errors():
        made = open_recipe(recipe, load)
        built = made.run(made.read((), recorded(run) if made.settings is not None else None))
    language: Any = getattr(built.trainer.objective, "language", None)
    if not isinstance(language, Decoder):
        raise UsageError(
            f"Hugging Face files are written of a telic.models.Decoder, and {recipe} trains "
            f"{type(built.trainer.objective).__name__}: give a file that ends in .safetensors or .npz"
        )
    return language


def _count(variables: Any) -> int:
    return sum(int(np.size(leaf)) for leaf in tree.named_leaves(variables).values())


def _write_npz(path: Path, leaves: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write arrays that numpy reads without pickle; dtypes of JAX's own, such as bfloat16, become float32."""
    plain = {n: x.astype(np.float32) if x.dtype.kind == "V" and x.dtype.names is None else x for n, x in leaves.items()}
    draft = path.with_name(f".{path.name}.unfinished")
    with draft.open("wb") as file:
        np.savez(file, **plain)  # pyright: ignore[reportArgumentType] names with slashes are keywords here
    draft.replace(path)
