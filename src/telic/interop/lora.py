"""Low-rank adapters for Linen and NNX models, through qwix (``pip install "telic[lora]"``)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from telic import models, tree
from telic.errors import ContractError
from telic.types import Key, Variables

_A, _B = "_lora_a", "_lora_b"

ADAPTERS: tuple[str, ...] = (f"params/**/*{_A}", f"params/**/*{_B}")
"""Filter that selects the adapters: what `Lora.trainable` gives."""


@dataclass(frozen=True, eq=False)
class Lora:
    """A model with low-rank adapters beside its weights; make it with `add_lora`.

    Attributes:
      model: The model with adapters: train it with ``trainable=lora.trainable``.
      base: The model as it was.
      rank: Rank of the adapters.
      alpha: An adapter adds ``alpha / rank · A B`` to its weight.
    """

    model: Any
    base: Any
    rank: int
    alpha: float

    @property
    def trainable(self) -> tuple[str, ...]:
        """The filter for ``Trainer(trainable=...)``: the adapters and nothing else."""
        return ADAPTERS

    def init(self, key: Key, inputs: Any, weights: Variables | None = None) -> dict[str, Any]:
        """Give the complete variables: the base model's weights, and adapters that change nothing yet.

        Args:
          key: PRNG key of the adapters, and of base weights that are not given.
          inputs: One batch of inputs; gives shapes only.
          weights: The base model's variables, by collection; None initialises them (an NNX model has its own).
        Raises:
          ValueError: A weight has another shape, or the model lacks it.
        """
        start = models.adapt(self.model).init(key, inputs)
        if weights is None:
            return start
        made, _, unknown = tree.overlay(start, tree.as_plain(weights), what="weights")
        if unknown:
            raise ValueError(f"weights holds leaves the model lacks: {', '.join(unknown)}")
        return made

    def adapters(self, variables: Variables) -> dict[str, Any]:
        """Give the adapters alone, ``{"params": ...}``: a small tree to save, and to lay over with ``variables=``.

        Raises:
          ContractError: There are none.
        """
        found = {n: x for n, x in tree.named_leaves(variables["params"]).items() if n.endswith((_A, _B))}
        if not found:
            raise ContractError(
                "these variables hold no adapter: modules= of add_lora names no layer with a weight; params has "
                f"{', '.join(tree.leaf_names(variables['params']))}"
            )
        return {"params": _nested(found)}

    def merge(self, variables: Variables, *, inputs: Any = None) -> dict[str, Any]:
        """Give variables of the base model: each adapter added into its weight, and taken out.

        Args:
          variables: Those of the model with adapters, such as ``state.variables``.
          inputs: A batch to compare both models on, which proves the merge for layers of your own.
        Raises:
          ContractError: An adapter's shapes do not say how it acts on its weight (an einsum), or the two models differ
            on `inputs`.
        """
        self.adapters(variables)
        leaves = tree.named_leaves(variables["params"])
        merged = {
            name: self._merged(name, leaf, leaves) for name, leaf in leaves.items() if not name.endswith((_A, _B))
        }
        made = {**tree.as_plain(variables), "params": _nested(merged)}
        if inputs is not None:
            self._check_same(variables, made, inputs)
        return made

    def _merged(self, name: str, weight: Any, leaves: dict[str, Any]) -> Any:
        a, b = leaves.get(name + _A), leaves.get(name + _B)
        if a is None or b is None:
            return weight
        shape = jnp.shape(weight)
        splits = (math.prod(shape[:i]) == a.shape[0] and math.prod(shape[i:]) == b.shape[-1] for i in range(len(shape)))
        is_dense = a.ndim == b.ndim == 2 and any(splits)
        is_convolution = b.ndim == 2 and (*a.shape[:-1], b.shape[-1]) == shape
        # Scanned layers: one pair of adapters for each, all stacked.
        is_stacked = a.ndim == b.ndim == weight.ndim == 3 and (*a.shape[:-1], b.shape[-1]) == shape
        if not (is_dense or is_convolution or is_stacked):
            raise ContractError(
                f"{name} has shape {shape} and adapters of shapes {a.shape} and {b.shape}, which do not say how they "
                "act on it: keep the model with adapters, or leave this layer out of modules="
            )
        dtype = jnp.promote_types(weight.dtype, jnp.float32)
        added = jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest").reshape(shape)
        return (weight.astype(dtype) + added * (self.alpha / self.rank)).astype(weight.dtype)

    def _check_same(self, variables: Variables, merged: Variables, inputs: Any) -> None:
        with_adapters = models.adapt(self.model).forward(variables, inputs, train=False).prediction
        without = models.adapt(self.base).forward(merged, inputs, train=False).prediction
        for x, y in zip(jax.tree.leaves(with_adapters), jax.tree.leaves(without), strict=True):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            worst, size = float(np.abs(x - y).max(initial=0)), float(np.abs(x).max(initial=0))
            if not worst <= 1e-2 * size:
                raise ContractError(
                    f"the merged model differs from the one with adapters by up to {worst:.3g} of {size:.3g}: a layer "
                    "uses its weight in a way that a merge does not know; keep the model with adapters"
                )


def add_lora(
    model: Any,
    *,
    rank: int,
    alpha: float | None = None,
    modules: str | Sequence[str] = "**",
    inputs: Any = None,
    key: Key | int = 0,
) -> Lora:
    """Give a model with low-rank adapters beside the weights of some of its layers.

    The model itself stays as it is. Adapters start as zero, so that the first prediction is the base model's.

    Args:
      model: A Linen or NNX module.
      rank: Rank of the adapters, ≥ 1.
      alpha: An adapter adds ``alpha / rank · A B``. Default: the rank, which adds the product itself.
      modules: Globs over the names of layers, such as ``encoder/*/query``; ``**`` is every layer with a weight.
      inputs: One batch of inputs. Needed for an NNX module, whose adapters are made by one pass.
      key: Seed or PRNG key of an NNX module's adapters; those of a Linen module come from `Lora.init`.
    Raises:
      ImportError: qwix is not installed.
      TypeError: The model is of another library.
      ValueError: rank is less than 1, or `inputs` is missing.
      ContractError: `modules` names no layer of an NNX module.
    Example:
      >>> lora = add_lora(nn.Dense(2), rank=1, modules="**")
      >>> start = lora.init(jax.random.key(0), jnp.ones((1, 3)))
      >>> sorted(start["params"])
      ['bias', 'kernel', 'kernel_lora_a', 'kernel_lora_b']
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:  # pyright: ignore[reportUnnecessaryIsInstance] users' input
        raise ValueError(f"rank must be a whole number of at least 1, got {rank!r}")
    if not isinstance(model, nn.Module | nnx.Module):
        raise TypeError(f"adapters are added to Flax Linen and NNX modules, got {type(model).__name__}")
    qwix = _qwix()
    scale = float(rank if alpha is None else alpha)
    provider = qwix.LoraProvider(module_path=_pattern(modules), rank=rank, alpha=scale)
    if isinstance(model, nn.Module):
        return Lora(qwix.apply_lora_to_model(model, provider), model, rank, scale)
    if inputs is None:
        raise ValueError("an NNX module's adapters are made by one pass over a batch: give inputs=")
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    made = qwix.apply_lora_to_model(model, provider, *arguments, rngs=nnx.Rngs(key))
    lora = Lora(made, model, rank, scale)
    lora.adapters(models.adapt(made).init(jax.random.key(0), inputs))
    return lora


def _qwix() -> Any:
    try:
        import qwix
    except ImportError as error:
        raise ImportError('adapters need qwix: pip install "telic[lora]"') from error
    return qwix


def _pattern(modules: str | Sequence[str]) -> str:
    """Give the regular expression of globs over names: ``*`` stays inside one word, ``**`` spans any number."""
    globs = [modules] if isinstance(modules, str) else list(modules)
    if not globs:
        raise ValueError("modules= is empty: name at least one layer, such as '**'")
    words = {"**/": "(?:.*/)?", "/**": "(?:/.*)?", "**": ".*", "*": "[^/]*"}
    parts = [re.split(r"(\*\*/|/\*\*|\*\*|\*)", glob) for glob in globs]
    return "|".join("".join(words.get(part, re.escape(part)) for part in glob) for glob in parts)


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        inner = out
        for word in path:
            inner = inner.setdefault(word, {})
        inner[last] = leaf
    return out


__all__ = ["ADAPTERS", "Lora", "add_lora"]
