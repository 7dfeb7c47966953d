"""A folder of Hugging Face files as a decoder with its weights, and the way back."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from telic import tree
from telic.errors import PretrainedError
from telic.interop.huggingface.families import read_settings, write_settings
from telic.interop.huggingface.names import Piece, is_ignored, pieces_of, prefix_of
from telic.interop.huggingface.tensors import TensorFile, write_tensors
from telic.models.decoder import Decoder, stack_layers, unstack_layers
from telic.places import local
from telic.types import Variables

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\Z")
_SHARD = re.compile(r"[A-Za-z0-9][\w.+=-]*\.safetensors\Z")
_MOST_JSON_BYTES = 64 * 2**20


def load_huggingface(
    folder: str | os.PathLike[str], *, dtype: Any = None, **changes: Any
) -> tuple[Decoder, dict[str, Any]]:
    """Read a pretrained model: a decoder, and its variables ``{"params": ...}``.

    The families are Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral and GPT-2; files are ``config.json`` and
    safetensors, one or many. Neither torch nor transformers runs, and no code from the folder does. Give the variables
    to an objective (``variables=``): they reach the program as arguments, never as constants.

    Args:
      folder: Where ``config.json`` is.
      dtype: Dtype of the weights; None keeps each as stored.
      **changes: Fields of `DecoderConfig` that say how the model is run, such as ``scan=True`` or ``remat="full"``.
    Raises:
      PretrainedError: A file is corrupt or leads out of the folder, the family is unknown, or tensors are missing,
        extra or of another shape; each is named.
      FileNotFoundError: ``config.json`` or the weights are missing.
    Example:
      >>> import tempfile
      >>> import jax, numpy as np
      >>> from telic.models import DecoderConfig
      >>> made = Decoder(DecoderConfig(vocab_size=8, d_model=4, num_layers=1, num_heads=1, d_ff=8))
      >>> weights = made.init_variables(jax.random.key(0), np.zeros((1, 2), np.int32))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_huggingface(folder, made, weights)
      ...     decoder, variables = load_huggingface(folder, dtype="float32")
      >>> decoder.config.vocab_size
      8
    """
    path = Path(folder)
    family, config = read_settings(_read_json(path / "config.json"))
    config = config.replace(**changes)
    tensors = _Tensors.open(path, prefix_of(family.model_type))
    pieces = pieces_of(family.model_type, config)
    tensors.check(pieces)
    if config.tied:
        tensors.check_tied(pieces)
    params: dict[str, Any] = {}
    for piece in pieces:
        theirs = [tensors.read(name) for name, _ in piece.theirs]
        for name, array in zip(piece.ours, piece.gather(theirs), strict=True):
            _put(params, name, _as_array(name, array, dtype))
    variables = {"params": params}
    return Decoder(config), stack_layers(variables) if config.scan else variables


def save_huggingface(
    folder: str | os.PathLike[str],
    model: Decoder,
    variables: Variables,
    *,
    model_type: str | None = None,
    extra: Mapping[str, Any] | None = None,
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write a decoder as Hugging Face files: ``config.json`` and safetensors, bit for bit.

    Args:
      folder: Where to write; it is made.
      model: The decoder. One with adapters is merged first, see `telic.interop.lora`.
      variables: Its variables, of scanned or unrolled blocks; collections other than ``params`` are left out.
      model_type: The family to write; None takes the first that says the same architecture.
      extra: More keys for ``config.json``, such as those of a training recipe.
      shard_bytes: Most bytes of tensors in one file; a larger model gets several and an index.
      overwrite: Whether to replace a model that is there.
    Raises:
      PretrainedError: No family has this architecture, or the variables are not of this decoder; leaves are named.
      FileExistsError: A model is there.
    """
    path = local(folder)
    family, settings = write_settings(model.config, model_type)
    params = variables["params"]
    if model.config.experts is not None and model.config.experts.bias:
        raise PretrainedError("no Hugging Face family here has a router bias; it would be lost")
    leaves = tree.named_leaves(unstack_layers({"params": params})["params"] if model.config.scan else params)
    tensors = _named_tensors(pieces_of(family.model_type, model.config), leaves)
    dtype = tensors[next(iter(tensors))].dtype.name
    there = sorted(file.name for file in path.glob("model*") if _OWN.match(file.name))
    if there and not overwrite:
        raise FileExistsError(f"{path} holds {there[0]}; pass overwrite=True to replace the model")
    path.mkdir(parents=True, exist_ok=True)
    written = _write_shards(path, tensors, shard_bytes)
    _write_json(path / "config.json", {**settings, "dtype": dtype, "torch_dtype": dtype, **(extra or {})})
    for name in set(there) - written:
        (path / name).unlink()


def _named_tensors(pieces: list[Piece], leaves: dict[str, Any]) -> dict[str, np.ndarray]:
    wanted = {name for piece in pieces for name in piece.ours}
    if missing := sorted(wanted - leaves.keys()):
        raise PretrainedError(f"variables lack {_listed(missing)} of params")
    if extra := sorted(leaves.keys() - wanted):
        hint = "; merge adapters first: lora.merge(variables)" if any("_lora_" in name for name in extra) else ""
        raise PretrainedError(f"params hold {_listed(extra)}, which the files have no place for{hint}")
    tensors: dict[str, np.ndarray] = {}
    for piece in pieces:
        ours = [np.asarray(jax.device_get(leaves[name])) for name in piece.ours]
        for (name, shape), array in zip(piece.theirs, piece.scatter(ours), strict=True):
            if array.shape != shape:
                raise PretrainedError(
                    f"{' and '.join(piece.ours)} make {name} of shape {array.shape}, and the config says {shape}"
                )
            tensors[name] = array
    return tensors


def _write_shards(path: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int) -> set[str]:
    """Write the tensors and give the names of the files."""
    shards: list[dict[str, np.ndarray]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    if len(shards) == 1:
        write_tensors(path / _SINGLE, shards[0], metadata={"format": "pt"})
        return {_SINGLE}
    places: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(path / file, shard, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(path / _INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
    return {*places.values(), _INDEX}


class _Tensors:
    """The tensors of a folder by the name of the full model, whatever files they lie in."""

    def __init__(self, files: Mapping[str, TensorFile], prefix: str):
        self.files = files
        self.prefix = prefix
        self.shapes = {name: file.entries[self._stored(name)].shape for name, file in files.items()}

    @staticmethod
    def open(folder: Path, prefix: str) -> "_Tensors":
        found: dict[str, TensorFile] = {}
        for path, expected in _weight_files(folder):
            file = TensorFile.open(path)
            if expected is not None and (absent := sorted(expected - file.entries.keys())):
                raise PretrainedError(f"{path} lacks {_listed(absent)}, which {_INDEX} says it holds")
            for name in file.entries:
                if name in found:
                    raise PretrainedError(f"{name} is both in {found[name].path} and in {path}")
                found[name] = file
        found = {name: file for name, file in found.items() if not is_ignored(name)}
        if not any(name.startswith(prefix) for name in found):
            # Files of the bare model lack its word; the head has none in either.
            found = {name if name.startswith("lm_head.") else prefix + name: file for name, file in found.items()}
        return _Tensors(found, prefix)

    def _stored(self, name: str) -> str:
        entries = self.files[name].entries
        return name if name in entries else name.removeprefix(self.prefix)

    def read(self, name: str) -> np.ndarray:
        return self.files[name].read(self._stored(name))

    def check(self, pieces: list[Piece]) -> None:
        wanted = dict(pair for piece in pieces for pair in piece.theirs)
        problems: list[str] = []
        if missing := sorted(wanted.keys() - self.shapes.keys()):
            problems.append(f"missing are {_listed(missing)}")
        extra = self.shapes.keys() - wanted.keys() - {"lm_head.weight"}
        if "lm_head.weight" in self.shapes and "lm_head.weight" not in wanted:
            wanted["lm_head.weight"] = self.shapes["lm_head.weight"]
        if extra:
            problems.append(f"not of this model are {_listed(sorted(extra))}")
        shapes = [
            f"{name} {self.shapes[name]} where the config says {shape}"
            for name, shape in wanted.items()
            if name in self.shapes and self.shapes[name] != shape
        ]
        if shapes:
            problems.append(f"of another shape are {_listed(shapes)}")
        if problems:
            raise PretrainedError(f"the tensors are not those of config.json: {'; '.join(problems)}")
        for name in wanted.keys() & self.shapes.keys():
            stored = self.files[name].entries[self._stored(name)].dtype
            if not jnp.issubdtype(stored, jnp.floating):
                raise PretrainedError(f"{name} is {stored}: quantised weights are not supported")

    def check_tied(self, pieces: list[Piece]) -> None:
        """Check that a head stored beside a tied embedding is the same: one of them would be lost."""
        embedding = pieces[0].theirs[0][0]
        if "lm_head.weight" not in self.shapes:
            return
        one, other = self.read("lm_head.weight"), self.read(embedding)
        if one.shape != other.shape or one.dtype != other.dtype or one.tobytes() != other.tobytes():
            raise PretrainedError(
                f"config.json ties the head to the embedding, and lm_head.weight differs from {embedding}; set "
                "tie_word_embeddings to false to keep both"
            )


def _weight_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    """Give the files with weights, and what an index says each holds."""
    if (folder / _SINGLE).exists():
        return [(folder / _SINGLE, None)]
    if not (folder / _INDEX).exists():
        raise FileNotFoundError(
            f"{folder} has neither {_SINGLE} nor {_INDEX}; weights in other formats (such as pytorch_model.bin) are "
            "not read: convert them to safetensors"
        )
    places = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise PretrainedError(f"{folder / _INDEX} has no weight_map from tensors to files")
    held: dict[str, set[str]] = {}
    for name, file in places.items():  # pyright: ignore[reportUnknownVariableType]
        if not isinstance(file, str) or not _SHARD.match(file):
            raise PretrainedError(
                f"{folder / _INDEX} places {name!r} in {file!r}: only safetensors files beside it are read"
            )
        held.setdefault(file, set()).add(str(name))  # pyright: ignore[reportUnknownArgumentType]
    if absent := [file for file in sorted(held) if not (folder / file).exists()]:
        raise FileNotFoundError(f"{folder} lacks {_listed(absent)} of {len(held)} files that {_INDEX} names")
    return [(folder / file, names) for file, names in sorted(held.items())]


def _read_json(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > _MOST_JSON_BYTES:
        raise PretrainedError(f"{path} has {size} bytes, more than a file of this kind can need")
    try:
        value = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise PretrainedError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise PretrainedError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value  # pyright: ignore[reportUnknownVariableType]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(value, indent=2) + "\n")
    draft.replace(path)


def _as_array(name: str, array: np.ndarray, dtype: Any) -> jax.Array:
    made = jnp.asarray(np.ascontiguousarray(array) if dtype is None else np.asarray(array, jnp.dtype(dtype), order="C"))
    wanted = array.dtype if dtype is None else jnp.dtype(dtype)
    if made.dtype != wanted:
        raise PretrainedError(
            f"{name} is {wanted}, which JAX holds only with jax_enable_x64; load it with dtype='float32'"
        )
    return made


def _put(params: dict[str, Any], name: str, array: jax.Array) -> None:
    *path, last = name.split("/")
    for word in path:
        params = params.setdefault(word, {})
    params[last] = array


def _listed(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
